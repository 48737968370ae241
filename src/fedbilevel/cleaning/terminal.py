"""What a person sees of a search in a terminal: what was understood before it, and what was found after it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from fedbilevel.cleaning.found import Found
from fedbilevel.cleaning.words import cell, percent, probable
from fedbilevel.data.own_tables import OwnTable

MOST_CLIENTS, MOST_ROWS = 20, 15


def text(value: Any, most: int = 40) -> Text:
    """A value of somebody's table: nothing in it is a command, for a terminal or for rich."""
    return Text(cell(value, most))


def understood(data: OwnTable) -> Table:
    """What was understood of the columns of a table, those of a kind together."""
    rows, clients, classes = len(data), len(data.clients), len(data.classes)
    sizes = f"{rows:,} rows, {clients:,} client{'s' * (clients != 1)}, {classes:,} classes"
    shown = Table(title=Text(f"{cell(data.source, 200)}: {sizes}"), title_justify="left", title_style="italic")
    for heading in ("", "columns", "what they are"):
        shown.add_column(heading)
    trusted = 0 if data.trusted is None else int(data.trusted.sum())
    roles = {"label": listed(data.classes), "client": listed(data.clients), "trusted": f"{trusted:,} rows"}
    kinds: dict[str, list[tuple[str, str]]] = {}
    for name, kind, said in data.understood:
        kinds.setdefault(kind, []).append((name, said))
    for kind, columns in kinds.items():
        names = listed([name for name, _ in columns])
        said = roles.get(kind, columns[0][1] if len(columns) == 1 else _together([said for _, said in columns]))
        shown.add_row(
            kind if len(columns) == 1 else f"{len(columns)} x {kind}",
            Text(names),
            Text(cell(said, 100) if said else ""),
        )
    return shown


def listed(names: Sequence[Any], most: int = 6) -> str:
    """The first names of some.

    >>> listed(["a", "b"]), listed(list("abcdefgh"), 2)
    ('a, b', 'a, b and 6 more')
    """
    some = ", ".join(cell(name, 30) for name in names[:most])
    return some if len(names) <= most else f"{some} and {len(names) - most:,} more"


def _together(said: Sequence[str]) -> str:
    """What is said of several columns."""
    missing = sum("missing" in each for each in said)
    same = said[0] if len(set(said)) == 1 else ""
    return same or (f"values missing in {missing}" if missing else "")


def per_client(found: Found) -> Table:
    """How many labels of each client are probably wrong."""
    noise = found.noise
    order = (
        np.argsort(-noise["noise"].to_numpy(float), kind="stable") if len(noise) > MOST_CLIENTS else range(len(noise))
    )
    left = len(noise) - MOST_CLIENTS
    title = "Labels that are probably wrong" + (
        f" (the {MOST_CLIENTS} clients with the largest shares)" if left > 0 else ""
    )
    shown = Table(title=title, title_justify="left")
    for heading in ("client", "rows", "trusted", "label issues", "wrong", "95 % interval"):
        shown.add_column(heading, justify="left" if heading == "client" else "right")
    for _, row in noise.iloc[list(order)[:MOST_CLIENTS]].iterrows():
        open_ = row["rows"] > row["trusted"]
        interval = f"{percent(row['low'])} to {percent(row['high'])}" if open_ else "-"
        counts = (f"{row[name]:,}" for name in ("rows", "trusted", "label_issues"))
        shown.add_row(text(row["client"]), *counts, percent(row["noise"]) if open_ else "-", interval)
    return shown


def worst(found: Found) -> Table:
    """The most suspicious rows."""
    rows = found.suspects[~found.suspects["trusted"]].head(MOST_ROWS)
    several: Sequence[str] = ["client"] if len(found.clients) > 1 else []
    shown = Table(title="The most suspicious rows", title_justify="left")
    for heading in ("row", *several, "given label", "likely label"):
        shown.add_column(heading)
    shown.add_column("wrong", justify="right")
    for _, row in rows.iterrows():
        names = (row[name] for name in ("row", *several, "given_label", "predicted_label"))
        shown.add_row(*map(text, names), probable(float(row.at["probability_wrong"])))
    return shown
