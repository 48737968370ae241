"""What a person sees of a search in a terminal: what was understood before it, and what was found after it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from fedbilevel.cleaning.found import Found
from fedbilevel.cleaning.words import cell, percent
from fedbilevel.data.own_tables import OwnTable

MOST_COLUMNS, MOST_CLIENTS, MOST_ROWS = 30, 20, 15


def text(value: Any, most: int = 40) -> Text:
    """A value of somebody's table: nothing in it is a command, for a terminal or for rich."""
    return Text(cell(value, most))


def understood(data: OwnTable) -> Table:
    """How the columns of a table were understood."""
    rows = data.understood
    sizes = f"{len(data):,} rows, {len(data.clients):,} client{'s' * (len(data.clients) != 1)}, {len(data.classes):,} classes"
    trusted = 0 if data.trusted is None else int(data.trusted.sum())
    title = f"{cell(data.source, 200)}: {sizes}, {trusted:,} trusted rows"
    shown = Table(title=Text(title, style="italic"), title_justify="left")
    for heading in ("column", "understood as", "what becomes of it"):
        shown.add_column(heading)
    for name, kind, said in rows[:MOST_COLUMNS]:
        shown.add_row(text(name), text(kind), text(said, 80))
    if len(rows) > MOST_COLUMNS:
        shown.add_row("...", f"{len(rows) - MOST_COLUMNS:,} more", "")
    return shown


def per_client(found: Found) -> Table:
    """How many labels of each client are probably wrong."""
    noise = found.noise
    order = np.argsort(-noise["noise"].to_numpy(float), kind="stable") if len(noise) > MOST_CLIENTS else range(len(noise))
    left = len(noise) - MOST_CLIENTS
    title = "Labels that are probably wrong" + (f" (the {MOST_CLIENTS} clients with the largest shares)" if left > 0 else "")
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
        shown.add_row(*map(text, names), percent(row["probability_wrong"]))
    return shown
