"""``fedbilevel federation ...``: the commands of coordinators and sites."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import project
from fedbilevel.runs.interrupts import Terminated

app = typer.Typer(no_args_is_help=True, help="Run a federation between real parties, with mutual TLS, on NVIDIA FLARE.")
console = Console()

Which = Annotated[
    Path | None, typer.Option("--federation", help="Folder of the federation. Default: the only one here.")
]


@app.callback()
def _needs_flare() -> None:
    if "--help" not in sys.argv:
        project.needs_flare()


def _say(text: str) -> None:
    console.print(f"{datetime.now():%H:%M:%S}  {escape(text)}", soft_wrap=True, highlight=False)


@app.command()
def create(
    file: Annotated[Path, typer.Argument(help="TOML file with the parties, the server's address and the experiment.")],
    out: Annotated[Path | None, typer.Option(help="Folder to create. Default: the name of the federation.")] = None,
) -> None:
    """Create the certificates and a start-up kit for every party."""
    from fedbilevel.federation.study import Study

    wanted = project.read(file)
    folder = out or Path(wanted.name)
    given = Study.of(wanted.experiment, "the experiment")
    given.quorum(len(wanted.sites))
    given.build()
    kits = project.create(wanted, folder)
    console.print(f"[bold]{wanted.name}[/bold]: everything is in {folder}, readable by you only.", highlight=False)
    table = Table("kit", "send it to", "they then run")
    for kit, (name, role) in zip(kits, wanted.parties.items(), strict=True):
        typed = f"fedbilevel federation join {kit.name} --data FILE" if role == "site" else "(an administrator's kit)"
        table.add_row(str(kit), name, typed)
    console.print(table)
    console.print(
        f"Each kit contains a private key: send it to its party only, over a channel you trust, not by plain e-mail.\n"
        f"{folder} contains the key of the certificate authority: back it up, and do not share it.\n"
        f"The sites must be able to reach {wanted.host}, port {wanted.port} (TCP); they need no open port themselves.\n"
        f"Next: fedbilevel federation start {folder}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def start(folder: Annotated[Path, typer.Argument(help="Folder of the federation.")]) -> None:
    """Start the server and continue its unfinished runs. Ctrl-C stops it."""
    from fedbilevel.federation.coordinator import Coordinator

    project.load(folder)
    try:
        Coordinator(folder, _say).serve()
    except KeyboardInterrupt:
        _say("stopped. Runs continue when the server is started again.")


@app.command()
def run(
    experiment: Annotated[Path | None, typer.Argument(help="Experiment file. Default: the federation's own.")] = None,
    federation: Which = None,
    resume: Annotated[bool, typer.Option("--resume", help="Follow the last run again, or continue it.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: date and time.")] = None,
) -> None:
    """Start a run and follow its progress. Ctrl-C stops following; the run continues."""
    from fedbilevel.federation import coordinator
    from fedbilevel.storage.run_folder import RunFolder

    folder = project.find(federation)
    if coordinator.pid(folder) is None:
        raise FedbilevelError(f"the server is not running: start it with 'fedbilevel federation start {folder}'.")
    if resume:
        named = [run for run in coordinator.runs(folder) if name in (None, run.name)]
        if not named:
            raise FedbilevelError(f"{folder} has no run to continue.")
        place = named[-1]
        RunFolder(place).want_again()
    else:
        path = experiment
        if path is None:
            path = folder / "experiment.toml"
            path.write_text(project.load(folder).experiment)
        if not path.is_file():
            raise FedbilevelError(f"there is no experiment file {path}.")
        place = coordinator.want(folder, path, name or f"{datetime.now():%Y%m%d-%H%M%S}")
    try:
        follow(place)
    except KeyboardInterrupt as interrupt:
        console.print(
            "The run continues on the server. Follow it again: "
            f"fedbilevel federation run --resume --federation {folder}",
            soft_wrap=True,
            highlight=False,
        )
        raise SystemExit(143 if isinstance(interrupt, Terminated) else 130) from None


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
    names = [n for n in last if all(f"{n}_{site}" in last for site in sites)]
    for name in names or known.get("headline", {}):
        table.add_column(known.get("headline", {}).get(name, name), justify="right")
    number = lambda value: "-" if value is None else f"{value:.4f}"
    if names:
        for site in sites:
            table.add_row(site, *(number(last[f"{n}_{site}"]) for n in names))
        table.add_section()
    table.add_row("all, mean" if names else "all", *(number(last.get(n)) for n in names or known.get("headline", {})))
    console.print(table)
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


def missing(place: Path) -> dict[str, tuple[int, str]]:
    """How many exchanges of a run each site missed, and the most recent reason."""
    from fedbilevel.federation.server import EXCHANGES
    from fedbilevel.storage.files import json_lines

    found: dict[str, tuple[int, str]] = {}
    for line in json_lines(place / EXCHANGES):
        for name, reason in line["failed"].items():
            found[name] = (found.get(name, (0, ""))[0] + 1, reason)
    return found


@app.command("status")
def show_status(federation: Which = None) -> None:
    """Show which parties are connected, and the state of all runs."""
    from fedbilevel.federation import coordinator
    from fedbilevel.storage.run_folder import RunFolder

    folder = project.find(federation)
    known = project.load(folder)
    alive = coordinator.pid(folder)
    connected = coordinator.state(folder).get("connected", []) if alive else []
    word = f"is running (process {alive})" if alive else "is not running"
    console.print(f"{known.name}: the server on {known.host}:{known.port} {word}.", highlight=False)
    table = Table("party", "role", "")
    for name, role in known.parties.items():
        here = "revoked" if name in known.revoked else "connected" if name in connected else "offline"
        table.add_row(name, role, here if role == "site" or here == "revoked" else "")
    console.print(table)
    runs = Table("run", "task", "algorithm", "status", "round", "")
    for place in coordinator.runs(folder):
        run = RunFolder(place).info()
        goal = f"{run.get('round', 0)}/{run['rounds']}" if "rounds" in run else "-"
        more = run.get("failure") or run.get("waits") or ""
        runs.add_row(place.name, run.get("task", ""), run.get("title", ""), run.get("status", ""), goal, escape(more))
    if runs.row_count:
        console.print(runs)


@app.command()
def stop(
    federation: Which = None,
    only_run: Annotated[str | None, typer.Option("--run", help="Stop only this run; the server keeps running.")] = None,
) -> None:
    """Stop the server, or one run. Nothing is lost: 'start' or 'run --resume' continues."""
    from fedbilevel.federation import coordinator
    from fedbilevel.federation.consent import check_run_name
    from fedbilevel.storage.run_folder import RunFolder

    folder = project.find(federation)
    if only_run is not None:
        check_run_name(only_run)
        run = RunFolder(folder / "runs" / only_run)
        if not run.info():
            raise FedbilevelError(f"there is no run {only_run} in {folder}.")
        if not run.enter("stopped"):
            raise FedbilevelError(f"{only_run} cannot be stopped: it is already {run.info()['status']}.")
        console.print(f"{only_run} will stop after its current round.", highlight=False)
        return
    was = coordinator.stop(folder)
    console.print("The server has stopped." if was else "The server was not running.")


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the party.")],
    role: Annotated[str, typer.Option(help="'site' or 'coordinator'.")] = "site",
    federation: Which = None,
) -> None:
    """Add a party: create its start-up kit. Runs that have already started continue without it."""
    made = project.add(project.find(federation), name, role)
    console.print(f"Send {made} to {name} over a channel you trust.", highlight=False)


@app.command()
def revoke(name: Annotated[str, typer.Argument(help="Name of the party.")], federation: Which = None) -> None:
    """Exclude a party for good, for instance because its key was lost."""
    folder = project.find(federation)
    project.revoke(folder, name)
    console.print(
        f"{name} can no longer connect. To let the same people in again, add them under another name.",
        highlight=False,
    )


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="Start-up kit from the coordinator.")],
    data: Annotated[
        str,
        typer.Option(
            help="A .csv, .parquet or .npz file, a folder of images, package.module:function, or 'builtin' for an "
            "experiment on the task's own data."
        ),
    ],
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=YOURS", help="Your name for a column of the experiment. May be repeated."),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of this site. Default: the kit's name.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the data and show what would be sent, but send nothing.")
    ] = False,
    approve: Annotated[
        bool, typer.Option("--approve", help="Take part in the kit's study without being asked.")
    ] = False,
    study: Annotated[
        list[Path] | None, typer.Option(help="Also take part in the study of this file. May be repeated.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="Also take part in every study that keeps the rules of this file.")
    ] = None,
    largest_upload: Annotated[float, typer.Option(help="Largest message to send, in megabytes.")] = 100.0,
    algorithm: Annotated[list[str] | None, typer.Option(help="Run only this algorithm. May be repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Take part only in this task. May be repeated.")] = None,
    min_clients: Annotated[int, typer.Option(help="Fewest parties that the federation must have.")] = 2,
    min_rows: Annotated[int, typer.Option(help="Fewest rows that any number sent may be computed from.")] = 10,
) -> None:
    """Take part with this site's data, which stay here, in studies that you approve. Ctrl-C leaves."""
    from fedbilevel.federation import join as joining
    from fedbilevel.federation.consent import Consent, Limits, Rules, digest
    from fedbilevel.federation.preview import preview

    if not kit.is_file():
        raise FedbilevelError(f"there is no start-up kit {kit}.")
    columns: dict[str, str] = {}
    for pair in column or []:
        name, equals, own = pair.partition("=")
        if not equals or not name or not own:
            raise FedbilevelError(f"--column needs NAME=YOURS, for instance --column age=Alter, not '{pair}'.")
        columns[name] = own
    limits = Limits(largest_upload, tuple(algorithm or ()), tuple(task or ()), min_clients, min_rows)
    allowed = None if rules is None else Rules.read(rules)
    place, settings = joining.unpack(kit, folder, data, columns)
    settings = replace(settings, consent=Consent((), allowed, limits))
    about = joining.about(place)
    texts = {"the kit's study": (about["experiment"], approve)}
    texts |= {str(path): (joining.text_of(path), True) for path in study or []}
    approved = []
    for what, (text, agreed) in texts.items():
        preview(place, settings, text, console)
        if agreed or (not dry_run and allowed is None and not study and _asked(what)):
            approved.append(digest(text))
    if dry_run:
        console.print("Dry run: nothing was sent.")
        return
    if not approved and allowed is None:
        raise FedbilevelError("this site takes part in no study: approve the kit's with --approve, or give --rules.")
    settings = replace(settings, consent=replace(settings.consent, approved=tuple(approved)))
    _say(f"connecting to {about['host']}:{about['port']} as {about['party']} ...")
    try:
        joining.Joined(place, settings, _say).serve()
    except KeyboardInterrupt:
        _say("left the federation. Run the same command to join again and continue.")


def _asked(what: str) -> bool:
    """Whether the user wants to take part; nobody is asked where nobody can answer."""
    return sys.stdin.isatty() and typer.confirm(f"Take part in {what}?", default=False)


@app.command()
def log(
    folder: Annotated[Path, typer.Argument(help="Folder of a site.")],
    last: Annotated[int, typer.Option(help="Also show the last N messages one by one.")] = 0,
) -> None:
    """Show what a site has sent: how often, how many bytes, and which arrays."""
    from fedbilevel.federation.preview import ledger

    ledger(folder, console, last)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for everything. Default: a new one.")] = None,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 60,
) -> None:
    """Run a server and four sites as real processes on this machine, with mutual TLS."""
    from fedbilevel.federation.demo import run as run_demo

    run_demo(out, rounds, console)
