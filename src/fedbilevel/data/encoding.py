"""How rows become the inputs of a model: learned from sums over the clients' rows, stored with the model.

    encoding = fit(columns, clients)
    inputs = encoding.transform("new.csv")

Numbers, dates and booleans are standardised; a missing one is the mean, and has a column of 0 and 1 that says so. A
category becomes a column of 0 and 1 for each of its frequent values, and one for all others. Pictures are standardised
as a whole. What clients tell for this are the sums of ``kinds.py``, and nothing else.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.data.cells import shown
from fedbilevel.data.columns import Table
from fedbilevel.data.image_files import read_resized
from fedbilevel.data.kinds import KIND_WORDS, Cells, Counts, Index, Kind, Moments, Profile
from fedbilevel.errors import FedbilevelError

LARGEST = 10.0
"""Standardised numbers are between minus this and this: no typing error outweighs everything else."""
RARE = 5
"""A value of a category that fewer rows have is one of the others."""
MOST_VALUES = 50
"""Values of a category that have a column of their own."""


@dataclass(frozen=True)
class Column:
    """How one column of a table becomes inputs.

    Args:
        name: of the column.
        kind: what its cells are.
        mean, deviation: of its numbers.
        values: of a category, those with a column of their own.
        others: whether there is a column for the others.
        gaps: whether there is a column that says where the value is missing.
        declared: whether cells of another kind are errors; otherwise they are missing.
    """

    name: str
    kind: Kind
    mean: float = 0.0
    deviation: float = 1.0
    values: tuple[str, ...] = ()
    others: bool = False
    gaps: bool = False
    declared: bool = True

    @property
    def titles(self) -> list[str]:
        """The names of the inputs that it becomes."""
        own = [f"{self.name}: {value}" for value in self.values] if self.kind == "category" else [self.name]
        return own + self.others * [f"{self.name}: other"] + self.gaps * [f"{self.name}: missing"]

    def write(self, cells: Cells, rows: Index, out: np.ndarray) -> None:
        """Write the inputs of some rows, which are 0, into their columns."""
        if self.kind == "category":
            codes, words, _ = cells.words
            place = {value: n for n, value in enumerate(self.values)}
            places = np.array([*(place.get(word, len(place) if self.others else -1) for word in words), -1])[codes][
                rows
            ]
            known = np.flatnonzero(places >= 0)
            out[known, places[known]] = 1
            missing = codes[rows] < 0
        else:
            cells.check(self.kind, self.declared, rows)
            standard = (cells.values(self.kind)[rows] - self.mean) / self.deviation
            missing = np.isnan(standard)
            out[:, 0] = np.clip(np.where(missing, 0, standard), -LARGEST, LARGEST)
        if self.gaps:
            out[:, -1] = missing


@dataclass(frozen=True)
class Encoding:
    """How rows become inputs; it can be stored as JSON.

    Args:
        columns: of a table; or of an array of features, whose columns are called "0", "1" and so on.
        source: what the rows are: "table", "features" or "pictures".
        shape: of a picture, all are brought to it: (height, width) or (height, width, 3).
        mean, deviation: of the pixels of all pictures, as numbers from 0 to 1.
    """

    columns: tuple[Column, ...] = ()
    source: str = "table"
    shape: tuple[int, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    @property
    def titles(self) -> tuple[str, ...]:
        """The names of the inputs."""
        if self.shape:
            return tuple(f"pixel {n}" for n in range(int(np.prod(self.shape))))
        return tuple(title for column in self.columns for title in column.titles)

    @property
    def width(self) -> int:
        """How many inputs a row has."""
        return len(self.titles)

    def of_table(self, table: Table, rows: Index = slice(None)) -> np.ndarray:
        """The inputs of some rows of a table, float32."""
        raw = table.read([column.name for column in self.columns])
        return self.of_columns(
            {name: Cells(table, name, table.arrow(name, cells)) for name, cells in raw.items()}, rows
        )

    def of_columns(self, cells: Mapping[str, Cells], rows: Index = slice(None)) -> np.ndarray:
        """The inputs of some rows, given the cells of all columns by name."""
        size = len(np.arange(len(next(iter(cells.values()))))[rows]) if cells else 0
        out, first = np.zeros((size, self.width), np.float32), 0
        for column in self.columns:
            last = first + len(column.titles)
            column.write(cells[column.name], rows, out[:, first:last])
            first = last
        return out

    def of_features(self, features: np.ndarray, source: str = "the features") -> np.ndarray:
        """The inputs of an array with a row for each sample, float32."""
        check_features(features, source)
        flat = features.reshape(len(features), -1)
        names = [int(column.name) for column in self.columns]
        if (flat.shape[1] < max(names, default=-1) + 1) or self.source != "features":
            raise FedbilevelError(f"{source} has {flat.shape[1]} columns, but the model needs others.")
        out, first = np.zeros((len(flat), self.width), np.float32), 0
        for column, name in zip(self.columns, names, strict=True):
            values = flat[:, name].astype(float)
            missing = np.isnan(values)
            standard = (values - column.mean) / column.deviation
            out[:, first] = np.clip(np.where(missing, 0, standard), -LARGEST, LARGEST)
            if column.gaps:
                out[:, first + 1] = missing
            first += len(column.titles)
        return out

    def of_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """The inputs of pictures of the right shape, float32, a row for each."""
        rows = pixels.reshape(len(pixels), -1).astype(np.float32)
        return (rows / np.float32(255) - np.float32(self.mean)) / np.float32(self.deviation)

    def of_pictures(self, files: Sequence[Path]) -> np.ndarray:
        """The inputs of pictures, read from their files."""
        return self.of_pixels(read_resized(files, self.shape))

    def plain(self) -> dict[str, Any]:
        """As JSON knows it; see :meth:`restore`."""
        return asdict(self)

    def check(self) -> None:
        """Raise a ValueError if it is not one that this version made."""
        ways = {"table": not self.shape, "features": not self.shape, "pictures": len(self.shape) in (2, 3)}
        fine = [ways[self.source], _is_scale(self.mean, self.deviation)]
        fine += [type(size) is int and 0 < size <= 10_000 for size in self.shape]
        for each in self.columns:
            fine += [isinstance(text, str) for text in (each.name, *each.values)]
            fine += [each.kind in KIND_WORDS or each.kind == "category", _is_scale(each.mean, each.deviation)]
            fine += [type(flag) is bool for flag in (each.others, each.gaps, each.declared)]
            fine += [self.source != "features" or (each.name.isdecimal() and len(each.name) < 10)]
        if not all(fine):
            raise ValueError

    @classmethod
    def restore(cls, plain: Any) -> "Encoding":
        """The encoding of what :meth:`plain` gave.

        >>> encoding = Encoding((Column("age", "number", 40.0, 12.5, gaps=True),))
        >>> Encoding.restore(encoding.plain()) == encoding
        True
        """
        try:
            columns = tuple(Column(**{**each, "values": tuple(each["values"])}) for each in plain["columns"])
            made = cls(**{**plain, "columns": columns, "shape": tuple(plain["shape"])})
            made.check()
            return made
        except (TypeError, KeyError, ValueError, AttributeError):
            raise FedbilevelError(
                "the stored encoding cannot be read: it is damaged, or another version wrote it."
            ) from None


def _is_scale(mean: Any, deviation: Any) -> bool:
    numbers = all(isinstance(each, int | float) for each in (mean, deviation))
    return numbers and abs(mean) <= 1e15 and 0 < deviation <= 1e30


def fit(
    columns: Mapping[str, Sequence[tuple[Cells, Sequence[Index]]]],
    declared: Mapping[str, Kind],
    least: int = 1,
) -> tuple[Encoding, dict[str, str]]:
    """The encoding of the rows of clients, from their sums; and why columns are left out, by name.

    Args:
        columns: by name, the cells of every table, and which of its rows each client has.
        declared: the kinds of columns that are not to be inferred.
        least: clients do not tell of values that fewer of their rows have.
    """
    made: list[Column] = []
    left_out: dict[str, str] = {}
    for name, parts in columns.items():
        each = [(cells, rows) for cells, clients in parts for rows in clients]
        profile = reduce(add, (cells.profile(rows) for cells, rows in each), Profile())
        kind = declared.get(name, profile.kind)
        strange = sum(cells.check(kind, name in declared, rows) for cells, rows in each)
        if kind == "empty":
            left_out[name] = "it is empty"
        elif kind == "category":
            counts = Counts.together(cells.counts(rows, least) for cells, rows in each)
            of_category(name, counts, profile, made, left_out)
        else:
            moments = reduce(add, (cells.moments(kind, rows) for cells, rows in each))
            of_numbers(name, kind, moments, profile.rows, name in declared or not strange, made, left_out)
    return Encoding(tuple(made)), left_out


def of_category(name: str, counts: Counts, profile: Profile, made: list[Column], left_out: dict[str, str]) -> None:
    """Add the column of a category, given how often all clients have its values."""
    often = sorted(
        ((often, value) for value, often in counts.values.items() if often >= RARE), key=lambda e: (-e[0], e[1])
    )
    values = tuple(sorted(value for _, value in often[:MOST_VALUES]))
    rest = profile.known - sum(counts.values[value] for value in values)
    if not values:
        left_out[name] = f"no value occurs in {RARE} rows"
    elif len(values) == 1 and not rest and profile.known == profile.rows:
        left_out[name] = "all rows have the same value"
    else:
        made.append(Column(name, "category", values=values, others=rest > 0, gaps=profile.known < profile.rows))


def of_numbers(
    name: str, kind: Kind, moments: Moments, rows: int, declared: bool, made: list[Column], left_out: dict[str, str]
) -> None:
    """Add the column of numbers, given the sums of all clients."""
    gaps = moments.number < rows
    if not moments.number:
        left_out[name] = "it is empty"
    elif moments.deviation == 0 and not gaps:
        left_out[name] = "all rows have the same value"
    else:
        made.append(Column(name, kind, moments.mean, moments.deviation or 1.0, gaps=gaps, declared=declared))


def fit_features(parts: Sequence[tuple[np.ndarray, Index]]) -> tuple[Encoding, dict[str, str]]:
    """The encoding of arrays of features, from the sums of clients over their rows of an array."""
    made: list[Column] = []
    left_out: dict[str, str] = {}
    for n in range(parts[0][0].shape[1]):
        columns = [features[:, n][rows].astype(float) for features, rows in parts]
        moments = reduce(add, map(Moments.of, columns))
        of_numbers(str(n), "number", moments, sum(map(len, columns)), True, made, left_out)
    return Encoding(tuple(made), "features"), left_out


def fit_pixels(pixels: np.ndarray, clients: Sequence[Index]) -> Encoding:
    """The encoding of pictures, from the sums of clients over all of their pixels."""
    levels = sum(np.bincount(pixels[rows].ravel(), minlength=256) for rows in clients)
    light, count = np.arange(256) / 255, np.sum(levels)
    mean = float(levels @ light / count)
    deviation = float(np.sqrt(levels @ (light - mean) ** 2 / count))
    return Encoding((), "pictures", tuple(pixels.shape[1:]), mean, deviation or 1.0)


def check_features(features: np.ndarray, source: str) -> None:
    """Refuse an array that is not a row of numbers for each sample."""
    if features.ndim < 2 or features.dtype.kind not in "biuf" or not features.size:
        raise FedbilevelError(
            f"{source} must be an array of numbers with a row for each sample, not "
            f"{features.dtype}{list(features.shape)}."
        )
    flat = features.reshape(len(features), -1)
    for start in range(0, len(flat), 10_000):  # little memory, also where the array is a file
        piece = flat[start : start + 10_000]
        if piece.dtype.kind == "f" and len(bad := np.argwhere(np.abs(piece) > 1e15)):
            row, column = bad[0]
            what = "infinite" if np.isinf(piece[row, column]) else "larger than 1e+15"
            raise FedbilevelError(
                f"{source}, row {start + row}, column {column}: {shown(float(piece[row, column]))} is {what}."
            )


def check_declared(names: Collection[str], tables: Sequence[Table], option: str) -> None:
    """Refuse names that are not columns of all tables."""
    for table in tables:
        for name in names:
            table.need(name, f" ({option})")
