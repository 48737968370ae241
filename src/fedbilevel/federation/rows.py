"""The rows of a site, read as the schema of an experiment asks: tables and images. Errors name the site's own file,
columns and rows, and stay at the site.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.data.cells import Choices, is_missing, number, shown
from fedbilevel.data.columns import Table, listed, unreadable
from fedbilevel.data.folders import entries
from fedbilevel.data.image_files import read_image_files
from fedbilevel.data.table_files import is_function, read_table
from fedbilevel.errors import FedbilevelError
from fedbilevel.federation.schema import PARTS, Feature, Schema
from fedbilevel.tasks.sites import Examples


def load(source: str, schema: Schema, mapping: Mapping[str, str], site: str, least: int = 1) -> Examples:
    """The rows of a site.

    Args:
        source: a .csv, .parquet or .npz file, a folder of images, or a function as "package.module:function".
        schema: what is expected.
        mapping: the site's own names of the schema's columns, where they differ.
        site: the name that the draw of training, validation and test rows depends on.
        least: the fewest rows that a number which the site sends may be about.
    """
    try:
        if schema.shape and not is_function(source) and Path(source).suffix.lower() != ".npz":
            inputs, columns = _image_folder(Path(source), schema, mapping)
        else:
            columns = _Columns(read_table(source), schema, mapping, ["images"] if schema.shape else [])
            inputs = columns.images() if schema.shape else columns.features()
        labels = columns.codes(schema.label, Choices(schema.classes, "the label"))
        if not len(labels):
            raise FedbilevelError(f"{source} has no rows.")
        parts = columns.codes(schema.part, PARTS) if schema.part else None
        groups = columns.codes(schema.group, Choices(schema.groups, "the group")) if schema.group else None
        trusted = None
        if schema.trusted and columns.has(schema.trusted):
            trusted = columns.codes(schema.trusted, Choices(schema.trusts, schema.trusted), needed=False) == 1
    except MemoryError as error:
        raise unreadable(source, error) from None
    widths = tuple(feature.width for feature in schema.features.values())
    return Examples(inputs, labels, parts, len(schema.classes), site, groups, least, widths, trusted)


def names(source: str, schema: Schema, column: str = "") -> list[str]:
    """What the people of a site call its rows: a column of theirs, or the numbers of the rows as in messages about
    them; of images, their files. The rows are in the order of :func:`load`. Nothing that is computed has these names.
    """
    path = Path(source)
    if schema.shape and not is_function(source) and path.suffix.lower() != ".npz":
        listing = path / "labels.csv"
        if not listing.is_file():
            if column:
                raise FedbilevelError(f"{path} has no labels.csv with a column {shown(column)} that names its rows.")
            files = _Folders(path, [entry for entry in entries(path) if entry.is_dir()], schema).files
            return [str(file.relative_to(path)) for file in files]
        table, column = read_table(str(listing)), column or "file"
    else:
        table = read_table(source)
    if column:
        return ["" if cell is None else str(cell) for cell in table.cells([column])[column]]
    return [str(row + table.first) for row in range(len(table))]


class _Columns:
    """The columns of a table that a schema asks for, by the schema's names."""

    def __init__(self, table: Table, schema: Schema, mapping: Mapping[str, str], more: Sequence[str] = ()) -> None:
        self.table, self.schema = table, schema
        self.own = {name: mapping.get(name, name) for name in [*more, *schema.columns]}
        if schema.trusted not in mapping and schema.trusted not in table.names:
            self.own.pop(schema.trusted, None)  # a site need not have it
        for name, own in self.own.items():
            if twin := next((n for n, its in self.own.items() if its == own and n != name), None):
                raise FedbilevelError(
                    f"the experiment's columns {shown(name)} and {shown(twin)} are both {shown(own)} at this site: "
                    "give each a column of its own with --column."
                )
            if own not in table.names:
                raise FedbilevelError(
                    f"{table.source} has no column {shown(own)}"
                    + (f" (the experiment's {shown(name)})" if own != name else "")
                    + f": it has {listed(table.names)}. If yours has another name, use --column {name}=YOUR_NAME."
                )
        self.raw = table.read(list(self.own.values()))

    def has(self, name: str) -> bool:
        return name in self.own

    def cells(self, name: str) -> list[Any]:
        return self.table.listed(self.own[name], self.raw[self.own[name]])

    def wrong(self, name: str, row: int, said: str) -> FedbilevelError:
        return self.table.wrong(self.own[name], row, said)

    def codes(self, name: str, choices: Choices, needed: bool = True) -> np.ndarray:
        """Which of the values each row has; -1 where it is missing."""
        cells = self.cells(name)
        codes = np.full(len(cells), -1)
        known: dict[Any, int] = {}  # a column has few different cells
        for row, cell in enumerate(cells):
            key = (type(cell), cell)
            if key not in known:
                found, missing = choices.find(cell), choices.missing(cell)
                if found is None and (needed or not missing):
                    said = "nothing" if missing else shown(cell)
                    raise self.wrong(name, row, f"expected one of {choices}, but found {said}")
                known[key] = -1 if found is None else found
            codes[row] = known[key]
        return codes

    def features(self) -> np.ndarray:
        """The inputs; NaN where a number is missing."""
        return np.concatenate([self._feature(name, column) for name, column in self.schema.features.items()], 1)

    def _feature(self, name: str, column: Feature) -> np.ndarray:
        if column.values:
            codes = self.codes(name, Choices(column.values, name), column.needed)
            if column.width == 1:
                return np.where(codes < 0, np.nan, codes)[:, None]
            return (codes[:, None] == np.arange(column.width)).astype(float)
        cells = self.cells(name)
        read = np.full((len(cells), 1), np.nan)
        least, most = Decimal(str(column.least)), Decimal(str(column.most))
        for row, cell in enumerate(cells):
            if is_missing(cell):
                if column.needed:
                    raise self.wrong(name, row, "expected a number, but found nothing")
            elif (value := number(cell)) is None:
                raise self.wrong(name, row, f"{shown(cell)} is not a number")
            elif not least <= value <= most:
                raise self.wrong(name, row, f"{value:.10g} is not between {column.least:.10g} and {column.most:.10g}")
            else:
                read[row] = float(value)
        return read

    def images(self) -> np.ndarray:
        """The array with the images, with an axis of colours."""
        source, own, shape = self.table.source, self.own["images"], self.schema.shape
        pictures = np.asarray(self.raw[own])
        if pictures.shape[1:] != shape or pictures.dtype != np.uint8:
            raise FedbilevelError(
                f"{source}: the images are {pictures.dtype}{list(pictures.shape[1:])}, but should be "
                f"uint8{list(shape)}."
            )
        return _channels(pictures)


def _image_folder(path: Path, schema: Schema, mapping: Mapping[str, str]) -> tuple[np.ndarray, Any]:
    """Images of a folder that has a labels.csv (file, label, ...), or a folder of images for each class."""
    inside = entries(path)
    if (path / "labels.csv") in inside:
        columns = _Columns(read_table(str(path / "labels.csv")), schema, mapping, ["file"])
        files = []
        for row, name in enumerate(columns.cells("file")):
            if is_missing(name):
                raise columns.wrong("file", row, "expected the name of an image, but found nothing")
            files.append(path / str(name))
    else:
        for role, name in (("part", schema.part), ("group", schema.group)):
            if name:
                raise FedbilevelError(
                    f"{path} needs a labels.csv: the experiment requires a column {shown(name)} with the {role}."
                )
        columns = _Folders(path, [entry for entry in inside if entry.is_dir()], schema)
        files = columns.files
        if not files:
            raise FedbilevelError(
                f"{path} has no images: put them into folders called {listed([str(v) for v in schema.classes])}, or "
                "add a labels.csv with the columns file and label."
            )
    return _channels(read_image_files(files, schema.shape)), columns


class _Folders:
    """Images in a folder for each class."""

    def __init__(self, path: Path, folders: Sequence[Path], schema: Schema) -> None:
        classes = Choices(schema.classes, "the label")
        found: list[tuple[int, Path]] = []
        for folder in folders:
            code = classes.find(folder.name)
            if code is None:
                raise FedbilevelError(f"{path} has a folder {shown(folder.name)}, but the classes are {classes}.")
            found += [(code, file) for file in entries(folder)]
        found.sort()
        self.files, self._labels = [file for _, file in found], np.array([code for code, _ in found], int)

    def has(self, name: str) -> bool:
        """Nothing but the class is known of an image."""
        return False

    def codes(self, name: str, choices: Choices, needed: bool = True) -> np.ndarray:
        """The class of each image."""
        return self._labels


def _channels(pictures: np.ndarray) -> np.ndarray:
    return pictures if pictures.ndim == 4 else pictures[..., None]
