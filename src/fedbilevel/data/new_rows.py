"""Rows that have no label yet, read as a stored encoding needs them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.data.cells import shown
from fedbilevel.data.encoding import Encoding, check_features
from fedbilevel.data.folders import entries, is_picture, picture_names
from fedbilevel.data.inputs import feature_file, open_inputs
from fedbilevel.data.kinds import Cells
from fedbilevel.errors import FedbilevelError

AT_ONCE = 10_000
"""Rows that are encoded at once."""


class NewRows(NamedTuple):
    """What rows are called, and their inputs, some rows at a time."""

    ids: Sequence[str]
    blocks: Iterator[np.ndarray]


def new_rows(encoding: Encoding, source: Any, id: str | None = None) -> NewRows:
    """Read rows without labels.

    Args:
        encoding: stored with a model.
        source: a table that has the columns of the encoding; an array, or an .npy file, for a model of features; a
            folder of pictures, or a table that names them, for a model of pictures.
        id: the column with the names of the rows. Without it, their lines name them.
    """
    if encoding.source == "features":
        features, name = feature_file(source)
        check_features(features, name)
        blocks = (encoding.of_features(features[at], name) for at in _pieces(len(features)))
        return NewRows([str(row) for row in range(len(features))], blocks)
    if encoding.source == "pictures":
        files, ids = _pictures(source)
        return NewRows(ids, (encoding.of_pictures(files[at]) for at in _pieces(len(files))))
    opened = open_inputs(source, None, None)
    if len(opened.tables) > 1 or opened.features is not None:
        raise FedbilevelError("this model was trained on a table: give one table with the same columns.")
    table = opened.tables[0]
    cells = {}
    for column in encoding.columns:
        table.need(column.name, ", which the model needs")
        cells[column.name] = Cells(table, column.name, table.arrow(column.name, table.read([column.name])[column.name]))
    ids = [str(row + table.first) for row in range(len(table))]
    if id is not None:
        table.need(id, " (the id)")
        ids = [str(cell) for cell in table.cells([id])[id]]
    elif opened.called is not None:
        ids = [str(name) for name in opened.called]
    if not len(table):
        raise FedbilevelError(f"{table.source} has no rows.")
    return NewRows(ids, (encoding.of_columns(cells, at) for at in _pieces(len(table))))


def _pieces(rows: int) -> list[slice]:
    return [slice(first, min(first + AT_ONCE, rows)) for first in range(0, rows, AT_ONCE)]


def _pictures(source: Any) -> tuple[list[Path], list[str]]:
    """The pictures of a folder, or those that a table names."""
    if isinstance(source, str | Path) and Path(source).is_dir():
        folder = Path(source)
        entries(folder)  # says why it cannot be read
        files = sorted(file for file in folder.rglob("*") if is_picture(file) and not file.name.startswith("."))
        if not files:
            raise FedbilevelError(f"{folder} has no pictures.")
        return files, [str(file.relative_to(folder)) for file in files]
    opened = open_inputs(source, None, None)
    if opened.pictures[0] is None:
        raise FedbilevelError(f"this model was trained on pictures, but {shown(opened.tables[0].source)} names none.")
    return opened.pictures[0], picture_names(opened.tables[0])
