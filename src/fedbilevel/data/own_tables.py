"""People's own tables and pictures: who has which rows, what they are labelled, and what of them becomes inputs.

    table = fb.data.table("patients.csv", label="outcome", client="hospital", trusted="checked")
    print(table)
    table.inputs, table.labels, table.client, table.trusted

``reading.py`` reads them. Every defect is one sentence with the file, the column and the row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.data.columns import Table
from fedbilevel.data.encoding import Encoding
from fedbilevel.data.folders import picture_names
from fedbilevel.data.kinds import Cells, Index
from fedbilevel.errors import readable


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one input that have a label.

    Args:
        table: with all of its columns.
        name: of the input: a file without its folder and ending.
        rows: the numbers of the rows in the table, from 0.
        cells: of the columns that become inputs, by name.
        pictures: the files, of all rows of the table, if these are pictures.
        features: of all rows of the table, if they have features of their own.
    """

    table: Table
    name: str
    rows: np.ndarray
    cells: dict[str, Cells] = field(default_factory=dict, repr=False)
    pictures: Sequence[Path] | None = field(default=None, repr=False)
    features: np.ndarray | None = field(default=None, repr=False)

    @property
    def index(self) -> Index:
        """The rows, to select them with."""
        whole = (
            len(self.rows) and len(self.rows) == self.rows[-1] + 1
        )  # without gaps; rows after them may have no label
        return slice(0, len(self.rows)) if whole else self.rows


@dataclass(frozen=True, eq=False)
class OwnTable:
    """Labelled rows of several clients. Arrays have an entry for each row that has a label, in the order of the inputs.

    Args:
        source: where it comes from, in words.
        parts: the inputs, one after the other.
        label: what the column of labels is called.
        classes: the names of the labels, as most rows write them.
        labels: int32, as numbers of ``classes``.
        clients: the names of the clients.
        client: int32, the client of each row, as numbers of ``clients``.
        trusted: whether the label of each row was checked; None if nobody says.
        encoding: how rows become inputs, learned from sums over the clients' rows.
        understood: of every column, how it was understood, in words: (column, kind, what becomes of it).
        notes: what the user should know, in sentences; they were told as warnings, too.
        names: what the owner calls each row; None where it is called by its line or its picture, see ``ids``.
        group, groups: a number for each row, and their names, where there is a column of groups.
        pixels: the pictures, uint8, brought to one shape; None of other rows.
    """

    source: str
    parts: tuple[Part, ...]
    label: str
    classes: tuple[str, ...]
    labels: np.ndarray = field(repr=False)
    clients: tuple[str, ...]
    client: np.ndarray = field(repr=False)
    trusted: np.ndarray | None = field(repr=False)
    encoding: Encoding = field(repr=False)
    understood: tuple[tuple[str, str, str], ...] = field(repr=False)
    notes: tuple[str, ...] = ()
    names: Sequence[Any] | None = field(default=None, repr=False)
    group: np.ndarray | None = field(default=None, repr=False)
    groups: tuple[str, ...] = ()
    pixels: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def inputs(self) -> np.ndarray:
        """The encoded rows, float32, one after the other; pictures are flat."""
        if self.pixels is not None:
            return self.encoding.of_pixels(self.pixels)
        made = []
        for part in self.parts:
            if part.features is not None:
                made.append(self.encoding.of_features(part.features[part.index]))
            else:
                made.append(self.encoding.of_columns(part.cells, part.index))
        return made[0] if len(made) == 1 else np.concatenate(made)

    @property
    def pictures(self) -> list[Path]:
        """The file of every picture, in the order of the rows; none of other rows."""
        return [part.pictures[row] for part in self.parts if part.pictures is not None for row in part.rows]

    @cached_property
    def ids(self) -> list[str]:
        """What each row is called: its id, the name of its picture, or its line in the file."""
        if self.names is not None:
            return [str(name) for name in self.names]
        called: list[str] = []
        for part in self.parts:
            before = f"{part.name}:" if len(self.parts) > 1 and len(self.parts) != len(self.clients) else ""
            if part.pictures is not None:
                names = picture_names(part.table)
                called += [f"{before}{names[row]}" for row in part.rows]
            else:
                called += [f"{before}{row + part.table.first}" for row in part.rows]
        return called

    @cached_property
    def part(self) -> np.ndarray:
        """Which of the inputs each row is in."""
        return np.repeat(np.arange(len(self.parts)), [len(part.rows) for part in self.parts])

    @cached_property
    def row(self) -> np.ndarray:
        """The number of each row in its input, from 0, rows without a label included."""
        return np.concatenate([part.rows for part in self.parts])

    def rows_of(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every client's name, and the numbers of its rows in the arrays."""
        order = np.argsort(self.client, kind="stable")
        ends = np.cumsum(np.bincount(self.client, minlength=len(self.clients)))[:-1]
        yield from zip(self.clients, np.split(order, ends), strict=True)

    def __str__(self) -> str:
        """A short table of what was understood."""
        clients = f"{len(self.clients):,} client{'s' * (len(self.clients) != 1)}"
        head = f"{self.source}: {len(self):,} rows, {clients}, {len(self.classes):,} classes"
        rows = [(" ".join(name.split()), kind, said) for name, kind, said in self.understood]
        wide = max((len(name) for name, _, _ in rows), default=0)
        lines = (f"  {name:{wide}}  {kind}{f': {said}' if said else ''}" for name, kind, said in rows)
        return readable("\n".join([head, *lines]), 10**6)
