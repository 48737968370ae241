"""Opens what people read: files, folders of pictures, data frames and arrays, as tables and what belongs to them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.data.columns import Table, check_file, unreadable
from fedbilevel.data.encoding import check_features
from fedbilevel.data.folders import picture_table, pictures_of
from fedbilevel.data.table_files import frame_table, is_function, read_table
from fedbilevel.errors import FedbilevelError


class Opened(NamedTuple):
    """The inputs: their tables, names, and pictures or features if they have some."""

    tables: list[Table]
    names: list[str]
    pictures: Sequence[list[Path] | None]
    features: np.ndarray | None
    called: Sequence[Any] | None = None  # the rows of a data frame


def open_inputs(source: Any, client_from: str | None, features: Any) -> Opened:
    """The tables of a source, and the pictures or features of their rows, if they have some."""
    if client_from not in (None, "", "folder"):
        raise FedbilevelError(
            f"clients can come from a column, or from the 'folder' of a picture, not from {client_from!r}."
        )
    index = None
    if hasattr(source, "iloc") and hasattr(source, "columns"):
        tables, names, pictures = [frame_table(source)], ["the data frame"], [None]
        index = list(source.index)
    elif isinstance(source, np.ndarray) or (isinstance(source, list | tuple) and not _are_paths(source)):
        if features is not None:
            raise FedbilevelError("give either an array of features, or a table and features=, not both.")
        features = _array(source, "the array")
        check_features(features, "the array")
        tables, names, pictures = [_numbered(len(features))], ["the array"], [None]
    else:
        paths = [source] if isinstance(source, str | Path) else list(source)
        if not paths:
            raise FedbilevelError("there is nothing to read: give a file or a folder.")
        tables, names, pictures = [], [], []
        for path in paths:
            opened, files = _open_path(str(path), client_from == "folder")
            tables.append(opened)
            names.append(Path(path).stem)
            pictures.append(files)
        if len({files is None for files in pictures}) > 1:
            raise FedbilevelError("some of the inputs name pictures and others do not: read them one by one.")
    if client_from == "folder" and pictures[0] is None:
        raise FedbilevelError(
            "clients can come from folders for pictures only: use --client COLUMN, or a file for each client."
        )
    if features is not None:
        features = _features(features, sum(len(part) for part in tables), tables)
        pictures = [None] * len(tables)
    return Opened(tables, names, pictures, features, index)


def _are_paths(source: Sequence[Any]) -> bool:
    return all(isinstance(each, str | Path) for each in source)


def _open_path(path: str, clients: bool) -> tuple[Table, list[Path] | None]:
    if not is_function(path) and Path(path).is_dir():
        opened = picture_table(Path(path), clients)
        files = pictures_of(opened, Path(path))
        if files is None:
            raise FedbilevelError(f"{opened.source} names no pictures: it needs a column called file.")
        return opened, files
    opened = read_table(path)
    return opened, None if is_function(path) else pictures_of(opened, Path(path).parent)


def _numbered(rows: int) -> Table:
    """A table without columns."""
    return Table("the array", (), 0, lambda names: {}, rows)


def _array(given: Any, source: str) -> np.ndarray:
    try:
        return np.asarray(given)
    except Exception as error:  # rows of several lengths, for instance
        raise unreadable(source, error) from None


def feature_file(given: Any) -> tuple[np.ndarray, str]:
    """An array, perhaps of an .npy file, and what messages call it."""
    if not isinstance(given, str | Path):
        return _array(given, "features"), "features"
    check_file(Path(given))
    try:
        array = np.load(given, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # whatever a damaged file makes numpy do
        raise unreadable(str(given), error) from None
    if not isinstance(array, np.ndarray):
        raise FedbilevelError(f"{given} has several arrays: save the features alone, with numpy.save.")
    return array, str(given)


def _features(given: Any, rows: int, tables: Sequence[Table]) -> np.ndarray:
    """An array of features, with a row for each row of the tables."""
    array, source = feature_file(given)
    check_features(array, source)
    if len(array) != rows:
        told = tables[0].source if len(tables) == 1 else "the tables"
        raise FedbilevelError(
            f"{source} has {len(array):,} rows, but {told} has {rows:,}: they must belong together, row by row."
        )
    return array.reshape(rows, -1)
