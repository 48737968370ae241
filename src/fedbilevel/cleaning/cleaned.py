"""The data without their label issues, or with the likely labels: as people gave them, and as files."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel.cleaning.suspects import named
from fedbilevel.data.cells import written
from fedbilevel.data.columns import is_arrow
from fedbilevel.data.folders import picture_column
from fedbilevel.data.own_tables import Part
from fedbilevel.storage.csv_files import CsvWriter

if TYPE_CHECKING:
    from fedbilevel.cleaning.found import Found

AT_ONCE = 10_000
"""Rows that are written at a time."""


def without(found: "Found") -> Any:
    """See ``Found.cleaned``."""
    import pandas as pd

    given = found.given
    if given is None:
        frames = {name: _frame(columns) for name, _, columns in _inputs(found)}
        return next(iter(frames.values())) if len(frames) == 1 else frames
    keep, labels = _kept(found, 0, len(found.data.parts[0].table))
    if isinstance(given, pd.DataFrame):
        cleaned = given.loc[keep].copy() if not keep.all() else given.copy()
        names = [str(name) for name in cleaned.columns]
        if found.relabel and found.data.label in names:
            place = names.index(found.data.label)
            for row, label in labels.items():
                cleaned.iloc[row, place] = label
        return cleaned
    features, column = (np.asarray(values) for values in given)
    column = column.copy()
    for row, label in labels.items():
        column[row] = label
    return features[keep], column[keep]


def write(found: "Found", folder: Path) -> list[Path]:
    """Write the cleaned data of every input into a folder, in the format of the input; return the files."""
    written = []
    parts = found.data.parts
    for number, (name, part, columns) in enumerate(_inputs(found, folder)):
        stem = "labels" if part.pictures is not None else "cleaned"
        stem += "" if len(parts) == 1 else f"-{name}"
        suffix = Path(part.table.source).suffix.lower() if part.pictures is None else ".csv"
        path = folder / f"{stem}{suffix if suffix in _WRITERS else '.csv'}"
        _WRITERS[path.suffix](path, columns)
        written.append(path)
        if part.features is not None:
            keep, _ = _kept(found, number, len(part.table))
            written.append(path.with_name(f"{path.stem}-features.npy"))
            np.save(written[-1], np.asarray(part.features)[keep])
    return written


def _inputs(found: "Found", folder: Path | None = None) -> Iterator[tuple[str, Part, dict[str, Any]]]:
    """Of every input its name, which no other has, and its cleaned columns."""
    names: set[str] = set()
    for number, part in enumerate(found.data.parts):
        name = next(n for n in (part.name, *(f"{part.name}-{k}" for k in range(2, 10**6))) if n not in names)
        names.add(name)
        keep, labels = _kept(found, number, len(part.table))
        columns: dict[str, Any] = part.table.read(part.table.names)
        columns = columns or {"label": named(found.classes, found.data.labels)}
        for column in columns:
            if column == found.data.label and labels:
                columns[column] = _replaced(columns[column], labels)
            if part.pictures is not None and folder is not None and column == picture_column(part.table):
                columns[column] = [os.path.relpath(path, folder) for path in part.pictures]
        yield name, part, {column: _filtered(values, keep) for column, values in columns.items()}


def _kept(found: "Found", number: int, rows: int) -> tuple[np.ndarray, dict[int, Any]]:
    """Which rows of an input are kept, and the new labels of some by their number."""
    own = np.flatnonzero(found.data.part == number)
    own = own[found.findings.issue[own]]
    keep = np.ones(rows, bool)
    if not found.relabel:
        keep[found.data.row[own]] = False
        return keep, {}
    return keep, {int(found.data.row[n]): found.classes[int(found.findings.predicted[n])] for n in own}


def _replaced(column: Any, labels: Mapping[int, Any]) -> Any:
    """A column with some other cells, of the same type."""
    if is_arrow(column):
        return _replaced_in_arrow(column, labels)
    cells = list(column)
    known = {written(cell): cell for cell in cells}
    for row, label in labels.items():
        cells[row] = known.get(written(label), label)
    if not isinstance(column, np.ndarray):
        return cells
    return np.array(cells) if column.dtype.kind in "US" else np.array(cells).astype(column.dtype)


def _replaced_in_arrow(column: Any, labels: Mapping[int, Any]) -> Any:
    """The same for a column of Arrow. Labels are text, which says exactly what the cells say."""
    import pyarrow

    cells = column.to_pylist()
    categories = pyarrow.types.is_dictionary(column.type)
    kind = column.type.value_type if categories else column.type
    typed = {label: pyarrow.scalar(label).cast(kind).as_py() for label in set(labels.values())}
    for row, label in labels.items():
        cells[row] = typed[label]
    made = pyarrow.array(cells, kind)
    return made.dictionary_encode().cast(column.type) if categories else made


def _filtered(column: Any, keep: np.ndarray) -> Any:
    if is_arrow(column):
        import pyarrow

        return column.filter(pyarrow.array(keep))
    return column[keep] if isinstance(column, np.ndarray) else [c for c, kept in zip(column, keep, strict=True) if kept]


def _frame(columns: Mapping[str, Any]) -> Any:
    import pandas as pd

    return pd.DataFrame({n: c.to_pandas() if is_arrow(c) else c for n, c in columns.items()})


def _write_text(path: Path, columns: Mapping[str, Any]) -> None:
    rows = len(next(iter(columns.values())))
    with path.open("w", newline="", encoding="utf-8") as file:
        table = CsvWriter(file, "\t" if path.suffix == ".tsv" else ",")
        table.rows([list(columns)])
        for first in range(0, rows, AT_ONCE):
            some = slice(first, first + AT_ONCE)
            cells = [c[some].to_pylist() if is_arrow(c) else c[some] for c in columns.values()]
            table.rows(zip(*cells, strict=True))


def _write_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(dict(columns)), path)


def _write_npz(path: Path, columns: Mapping[str, Any]) -> None:
    np.savez_compressed(path, **{name: np.asarray(column) for name, column in columns.items()})  # pyright: ignore


_WRITERS = {".csv": _write_text, ".tsv": _write_text, ".parquet": _write_parquet, ".npz": _write_npz}
