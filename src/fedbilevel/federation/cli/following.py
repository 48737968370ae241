"""A run on the terminal: its progress, its result, who missed what."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation.cli.app import console


def follow(place: Path, check: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Show the progress of a run until it ends; ``check`` is called now and then, and may raise."""
    from fedbilevel.storage.run_folder import RunFolder

    run = RunFolder(place)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[seen]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        bar = bars.add_task("waiting", total=None, seen="")
        while True:
            known = run.info()
            word = known.get("status", "wanted")
            rows = run.rows()
            seen = known.get("waits") or ""
            if rows:
                shown = [k for k in known.get("headline", {}) if k in rows[-1]]
                seen = ", ".join(f"{k} {rows[-1][k]:.4g}" for k in shown if rows[-1][k] is not None)
            done = rows[-1]["round"] if rows else 0
            bars.update(bar, description=word, total=known.get("rounds"), completed=done, seen=seen)
            if word in ("finished", "failed", "stopped"):
                break
            check()
            time.sleep(0.3)
    for name, reason in known.get("refused", {}).items():
        console.print(f"{name}: {escape(reason)}", highlight=False, soft_wrap=True)
    if known["status"] != "finished":
        raise FedbilevelError(f"the run {place.name} {known['status']}: {known.get('failure', '')}")
    show(place)
    return known


def show(place: Path) -> None:
    """Print the result of a run."""
    from fedbilevel.storage.run_folder import RunFolder

    known, rows = RunFolder(place).info(), RunFolder(place).rows()
    last = rows[-1]
    table = Table(title=f"{known['task']}, {known['title']}, round {last['round']}", title_justify="left")
    table.add_column("")
    sites = known["sites"]
    headline: dict[str, str] = known.get("headline", {})
    names = [n for n in [*headline, *(last.keys() - headline)] if all(f"{n}_{site}" in last for site in sites)]
    for name in names or headline:  # of one site, nothing is a mean over sites
        words = headline.get(name, name)
        table.add_column(words.removeprefix("mean ") if names else words, justify="right")
    number = lambda value: "-" if value is None else f"{value:.4f}"
    if names:
        for site in sites:
            table.add_row(site, *(number(last[f"{n}_{site}"]) for n in names))
        table.add_section()
    table.add_row("all, mean" if names else "all", *(number(last.get(n)) for n in names or headline))
    console.print(table)
    if known.get("suspects"):
        console.print(suspects_of(known["suspects"], sites))
    for name, (missed, reason) in missing(place).items():
        console.print(
            f"{name} missed {missed} exchanges, most recently because: {escape(reason)}",
            highlight=False,
            soft_wrap=True,
        )
    sent = known["summary"]
    console.print(
        f"{sent['bytes_down'] / 1e6:.2f} MB to the sites, {sent['bytes_up'] / 1e6:.2f} MB from them. "
        f"Results in [bold]{place}[/bold]",
        highlight=False,
        soft_wrap=True,
    )


def suspects_of(counts: Mapping[str, Mapping[str, int]], sites: Sequence[str]) -> Table:
    """How many labels of each class are suspicious at each site, as far as the sites tell."""
    classes = sorted({label for numbers in counts.values() for label in numbers})
    table = Table(title="Suspicious labels (-: too few, or not told)", title_justify="left")
    for heading in ("site", *(f"given label {label}" for label in classes)):
        table.add_column(escape(heading), justify="left" if heading == "site" else "right")
    for site in sites:
        table.add_row(site, *(str(counts.get(site, {}).get(label, "-")) for label in classes))
    return table


def missing(place: Path) -> dict[str, tuple[int, str]]:
    """How many exchanges of a run each site missed, and the most recent reason."""
    from fedbilevel.federation.ledger import EXCHANGES, lines

    found: dict[str, tuple[int, str]] = {}
    for line in lines(place / EXCHANGES):
        for name, reason in line["failed"].items():
            found[name] = (found.get(name, (0, ""))[0] + 1, reason)
    return found
