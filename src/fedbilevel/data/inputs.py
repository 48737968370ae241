"""Opens what people read: files, folders of pictures, data frames and arrays, as tables and what belongs to them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.data.columns import Table, check_file, unreadable
from fedbilevel.data.encoding import check_features
from fedbilevel.data.folders import picture_table, pictures_of
from fedbilevel.data.table_files import frame_table, is_function, read_table
from fedbilevel.errors import FedbilevelError

_NPY = b"\x93NUMPY"


class Opened(NamedTuple):
    """The inputs: their tables, names, and pictures or features if they have some. Features are looked at in place of
    pictures, which are then shown only.
    """

    tables: list[Table]
    names: list[str]
    pictures: Sequence[list[Path] | None]
    features: np.ndarray | None
    called: Sequence[Any] | None = None  # the rows of a data frame
    looked_at: str = ""  # where the inputs of models come from

    @property
    def are_pictures(self) -> bool:
        """Whether models look at pictures."""
        return self.features is None and self.pictures[0] is not None


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
    elif isinstance(source, np.ndarray) or (isinstance(source, list | tuple) and not are_paths(source)):
        if features is not None:
            raise FedbilevelError("give either an array of features, or a table and features=, not both.")
        features = _array(source, "the array")
        check_features(features, "the array")
        tables, names, pictures = [_numbered(len(features))], ["the array"], [None]
    elif not isinstance(source, str | Path | list | tuple):
        raise FedbilevelError(
            f"rows come from a file, a folder, a data frame or an array, not from a {type(source).__name__}."
        )
    else:
        paths = _paths(source)
        tables, names, pictures = [], [], []
        for path in paths:
            opened, files = _open_path(path, client_from == "folder", features is not None)
            tables.append(opened)
            names.append(Path(path).stem)
            pictures.append(files)
        if len({files is None for files in pictures}) > 1:
            if features is None:
                raise FedbilevelError("some of the inputs name pictures and others do not: read them one by one.")
            pictures = [None] * len(tables)
    if client_from == "folder" and pictures[0] is None:
        raise FedbilevelError(
            "clients can come from folders for pictures only: use --client COLUMN, or a file for each client."
        )
    looked_at = tables[0].source
    if features is not None:
        features, named = _features(features, sum(len(part) for part in tables), tables)
        looked_at = named if tables[0].names else looked_at
    return Opened(tables, names, pictures, features, index, looked_at)


def are_paths(source: Any) -> bool:
    """Whether a source is the path of a file or a folder, or several."""
    if isinstance(source, list | tuple):
        return all(isinstance(each, str | Path) for each in source)
    return isinstance(source, str | Path)


def _paths(source: str | Path | Sequence[str | Path]) -> list[str]:
    """The paths of what is to be read; refuses one that is there twice, since its rows would judge themselves."""
    paths = [str(path) for path in ([source] if isinstance(source, str | Path) else source)]
    if not paths or not all(paths):
        raise FedbilevelError("there is nothing to read: give a file or a folder.")
    known: set[str] = set()
    for path in paths:
        place = path if is_function(path) else os.path.realpath(path)
        if place in known:
            raise FedbilevelError(f"{path} is given twice: give every file once.")
        known.add(place)
    return paths


def _open_path(path: str, clients: bool, with_features: bool) -> tuple[Table, list[Path] | None]:
    if not is_function(path) and Path(path).is_dir():
        opened = picture_table(Path(path), clients)
        files = pictures_of(opened, Path(path), with_features)
        if files is None and not with_features:
            raise FedbilevelError(f"{opened.source} names no pictures: it needs a column called file, path or image.")
        return opened, files
    opened = read_table(path)
    return opened, None if is_function(path) else pictures_of(opened, Path(path).parent, with_features)


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
        with open(given, "rb") as file:
            known = file.read(len(_NPY)) == _NPY
        array = np.load(given, mmap_mode="r", allow_pickle=False) if known else None
    except Exception as error:  # whatever a damaged file makes numpy do
        raise unreadable(str(given), error) from None
    if array is None:
        raise FedbilevelError(f"{given} is not an .npy file: save an array of features with numpy.save.")
    return array, str(given)


def _features(given: Any, rows: int, tables: Sequence[Table]) -> tuple[np.ndarray, str]:
    """An array of features, with a row for each row of the tables, and what messages call it."""
    array, source = feature_file(given)
    check_features(array, source)
    if len(array) != rows:
        told = tables[0].source if len(tables) == 1 else "the tables"
        raise FedbilevelError(
            f"{source} has {len(array):,} rows, but {told} has {rows:,}: they must belong together, row by row."
        )
    return array.reshape(rows, -1), source
