"""What the rows of every site must look like, and how to read them: CSV, Parquet, NPZ, a folder of images, a function.

A schema is part of an experiment file::

    [schema]
    label = { column = "disease", values = [0, 1] }

    [schema.features]
    age = { least = 18, most = 110 }                # a number; may be missing
    pain = { values = [1, 2, 3, 4] }                # one of these: becomes a column of 0 and 1 for each
    thal = { values = [3, 6, 7], needed = true }    # may not be missing

or, for images, ``image = { shape = [28, 28] }`` instead of the features. Errors name the site's own columns and rows.
"""

import csv
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.errors import FedbilevelError, UnknownName, needs
from fedbilevel.tasks.sites import Examples

MISSING = frozenset(["", "?", "na", "n/a", "nan", "null", "none"])
PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Feature:
    """A feature: a number between bounds, or one of some values."""

    least: float = -math.inf
    most: float = math.inf
    values: tuple[Any, ...] = ()
    needed: bool = False


@dataclass(frozen=True)
class Schema:
    """What every site must have: features or images, a label, and optionally a column with the part of each row."""

    label: str
    classes: tuple[Any, ...]
    features: Mapping[str, Feature] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    part: str = ""  # the column with "train", "val" or "test"; none: a row's part is drawn

    @property
    def names(self) -> list[str]:
        """The columns of the inputs."""
        names: list[str] = []
        for name, column in self.features.items():
            names += [f"{name}: {value}" for value in column.values] if len(column.values) > 2 else [name]
        return names


def read(table: Mapping[str, Any]) -> Schema:
    """The schema of an experiment file."""
    kinds = {"label": dict, "features": dict, "image": dict, "part": str}
    for key, value in table.items():
        if key not in kinds:
            raise UnknownName("entry of [schema]", key, kinds)
        if not isinstance(value, kinds[key]):
            raise FedbilevelError(f"[schema]: {key} must be {'a table' if kinds[key] is dict else 'text'}.")
    label = table.get("label", {})
    values = label.get("values")
    if not isinstance(label.get("column"), str) or not isinstance(values, list) or len(values) < 2:
        raise FedbilevelError('[schema] needs label = { column = "NAME", values = [0, 1] }.')
    if ("features" in table) == ("image" in table):
        raise FedbilevelError("[schema] needs either [schema.features] or image = { shape = [28, 28] }.")
    features: dict[str, Feature] = {}
    for name, entry in table.get("features", {}).items():
        for key in entry if isinstance(entry, dict) else ["?"]:
            if key not in Feature.__dataclass_fields__:
                raise UnknownName(f"entry of the feature {name}", key, Feature.__dataclass_fields__)
        types = {"least": (int, float), "most": (int, float), "values": list, "needed": bool}
        for key, value in entry.items():
            if not isinstance(value, types[key]):
                raise FedbilevelError(f"[schema.features]: {name} has {key} = {value!r}, which has the wrong type.")
        entries: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        features[name] = Feature(**entries)
    shape = tuple(table.get("image", {}).get("shape", ()))
    if "image" in table and len(shape) not in (2, 3):
        raise FedbilevelError("[schema]: image needs shape = [height, width] or [height, width, 3].")
    return Schema(label["column"], tuple(label["values"]), features, shape, table.get("part", ""))


def blank(schema: Schema) -> Examples:
    """Blank rows with the shapes of real ones, for the server, which has none."""
    count = 200 * len(schema.classes)
    shape = (*schema.shape, 1)[:3] if schema.shape else (len(schema.names),)
    dtype = np.uint8 if schema.shape else np.float64
    return Examples(np.zeros((count, *shape), dtype), np.arange(count) % len(schema.classes), None, len(schema.classes))


def load(source: str, schema: Schema, mapping: Mapping[str, str], site: str) -> Examples:
    """The rows of a site.

    Args:
        source: a .csv, .parquet or .npz file, a folder of images, or a function as "package.module:function".
        schema: what is expected.
        mapping: the site's own names of the schema's columns, where they differ.
        site: the name that the draw of training, validation and test rows depends on.
    """
    if schema.shape:
        inputs, labels, parts = _images(source, schema)
        return Examples(inputs, labels, parts, len(schema.classes), site)
    columns, first = _columns(source, schema)
    table = _Table(source, columns, mapping, first)
    wanted = [table.feature(name, column) for name, column in schema.features.items()]
    labels = table.codes(schema.label, schema.classes, needed=True)
    parts = table.codes(schema.part, PARTS, needed=True) if schema.part else None
    if not len(labels):
        raise FedbilevelError(f"{source} has no rows.")
    return Examples(np.concatenate(wanted, 1), labels, parts, len(schema.classes), site)


class _Table:
    """Columns of raw values, and where to find them for messages."""

    def __init__(
        self, source: str, columns: Mapping[str, Sequence[Any]], mapping: Mapping[str, str], first: int
    ) -> None:
        self.source, self.columns, self.mapping, self.first = source, columns, mapping, first

    def raw(self, name: str) -> tuple[str, Sequence[Any]]:
        own = self.mapping.get(name, name)
        if own not in self.columns:
            raise FedbilevelError(
                f"{self.source} has no column '{own}'"
                + (f" (the experiment's '{name}')" if own != name else "")
                + f": it has {', '.join(map(str, self.columns))}. If yours has another name, "
                f"use --column {name}=YOUR_NAME."
            )
        return own, self.columns[own]

    def wrong(self, own: str, row: int, said: str) -> FedbilevelError:
        return FedbilevelError(f"{self.source}, row {row + self.first}, column '{own}': {said}.")

    def codes(self, name: str, values: Sequence[Any], needed: bool) -> np.ndarray:
        """Which of the values each row has; -1 where it is missing."""
        own, column = self.raw(name)
        numbers = {_word(value): number for number, value in enumerate(values)}
        codes = np.full(len(column), -1)
        for row, value in enumerate(column):
            word = _word(value)
            if word in numbers:
                codes[row] = numbers[word]
            elif word not in MISSING or needed:
                said = "nothing" if word in MISSING else f"'{value}'"
                raise self.wrong(own, row, f"expected one of {', '.join(map(str, values))}, but found {said}")
        return codes

    def feature(self, name: str, column: Feature) -> np.ndarray:
        if column.values:
            codes = self.codes(name, column.values, column.needed)
            if len(column.values) == 2:
                return np.where(codes < 0, np.nan, codes)[:, None]
            return (codes[:, None] == np.arange(len(column.values))).astype(float)
        own, raw = self.raw(name)
        read = np.full((len(raw), 1), np.nan)
        for row, value in enumerate(raw):
            if _word(value) in MISSING:
                if column.needed:
                    raise self.wrong(own, row, "expected a number, but found nothing")
                continue
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise self.wrong(own, row, f"'{value}' is not a number") from None
            if math.isinf(number) or not column.least <= number <= column.most:
                raise self.wrong(own, row, f"{number:g} is not between {column.least:g} and {column.most:g}")
            read[row] = number
        return read


def _word(value: Any) -> str:
    """A value as text; 1, 1.0, "1" and "1.0" are the same."""
    text = str(value).strip()
    try:
        number = float(text)
    except ValueError:
        return text.lower() if text.lower() in MISSING else text
    return "nan" if math.isnan(number) else f"{number:g}"


def _columns(source: str, schema: Schema) -> tuple[Mapping[str, Sequence[Any]], int]:
    """The columns of a table, and the number of its first row as users count it."""
    path = Path(source)
    if ":" in source and not path.exists():
        return _called(source), 0
    if not path.is_file():
        raise FedbilevelError(f"there is no file {source}.")
    if path.suffix == ".csv":
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = list(csv.reader(file))
        except UnicodeDecodeError:
            raise FedbilevelError(f"{source} is not UTF-8 text: save it as 'CSV UTF-8'.") from None
        except (OSError, csv.Error) as error:
            raise FedbilevelError(f"{source} cannot be read: {error}.") from None
        if not rows:
            raise FedbilevelError(f"{source} is empty.")
        head = [name.strip() for name in rows[0]]
        for number, row in enumerate(rows[1:], 2):
            if len(row) != len(head):
                raise FedbilevelError(
                    f"{source}, row {number} has {len(row)} values, but there are {len(head)} columns."
                )
        return {name: [row[n] for row in rows[1:]] for n, name in enumerate(head)}, 2  # as a spreadsheet counts
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError) as error:
            raise FedbilevelError(f"{source} cannot be read: {error}.") from None
        return _same_length(source, columns), 0
    if path.suffix == ".parquet":
        parquet = needs("pyarrow.parquet", "federation", "Parquet files need pyarrow")
        try:
            table = parquet.read_table(path)
        except Exception as error:
            raise FedbilevelError(f"{source} cannot be read: {error}.") from None
        return {name: ["" if v is None else v for v in table[name].to_pylist()] for name in table.column_names}, 0
    raise FedbilevelError(f"{source} is not a table: give a .csv, .parquet or .npz file, or package.module:function.")


def _called(source: str) -> Mapping[str, Sequence[Any]]:
    """The columns by name that a function of an installed package, or of a file next to it, returns."""
    module, _, name = source.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FedbilevelError(f"there is no function {source}: {error}.") from None
    columns = function()
    if not isinstance(columns, Mapping):
        raise FedbilevelError(f"{source} must return columns by name, not {type(columns).__name__}.")
    return _same_length(source, columns)


def _same_length(source: str, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, values in columns.items():
        if np.ndim(values) == 0:
            raise FedbilevelError(f"{source}: '{name}' is a single value, not a column.")
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise FedbilevelError(f"{source}: the columns differ in length: {lengths}.")
    return columns


def _images(source: str, schema: Schema) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Images and labels: a folder with a folder for each class, or with labels.csv (file, label), or an .npz file."""
    path = Path(source)
    if path.suffix == ".npz" or (":" in source and not path.exists()):
        columns = _called(source) if ":" in source and not path.exists() else _columns(source, schema)[0]
        for name in ("images", schema.label):
            if name not in columns:
                raise FedbilevelError(f"{source} has no array '{name}': it has {', '.join(columns)}.")
        pictures = np.asarray(columns["images"])
        if pictures.shape[1:] != schema.shape or pictures.dtype != np.uint8:
            raise FedbilevelError(
                f"{source}: the images are {pictures.dtype}{list(pictures.shape[1:])}, but should be "
                f"uint8{list(schema.shape)}."
            )
        table = _Table(source, columns, {}, 0)
        labels = table.codes(schema.label, schema.classes, needed=True)
        parts = table.codes(schema.part, PARTS, needed=True) if schema.part else None
        return _channels(pictures), labels, parts
    if not path.is_dir():
        raise FedbilevelError(f"there is no folder {source}.")
    if (path / "labels.csv").exists():
        columns, first = _columns(str(path / "labels.csv"), schema)
        table = _Table(str(path / "labels.csv"), columns, {}, first)
        files = [path / str(name) for name in table.raw("file")[1]]
        labels = table.codes(schema.label, schema.classes, needed=True)
        parts = table.codes(schema.part, PARTS, needed=True) if schema.part else None
    else:
        if schema.part:
            raise FedbilevelError(f"{source} needs a labels.csv: the experiment requires a column '{schema.part}'.")
        files, codes = [], []
        for number, value in enumerate(schema.classes):
            if Path(str(value)).name != str(value):  # the experiment comes from elsewhere
                raise FedbilevelError(f"'{value}' cannot be the name of a folder of images: use a labels.csv.")
            of_class = sorted(file for file in (path / str(value)).glob("*") if file.is_file())
            files += of_class
            codes += [number] * len(of_class)
        labels, parts = np.array(codes, int), None
        if not files:
            raise FedbilevelError(
                f"{source} has no images: put them into folders called {', '.join(map(str, schema.classes))}, or add "
                "a labels.csv with the columns file and label."
            )
    if not files:
        raise FedbilevelError(f"{source}/labels.csv has no rows.")
    return _channels(np.stack(list(_opened(files, schema)))), labels, parts


def _channels(pictures: np.ndarray) -> np.ndarray:
    return pictures if pictures.ndim == 4 else pictures[..., None]


def _opened(files: Iterable[Path], schema: Schema) -> Iterable[np.ndarray]:
    from PIL import Image, UnidentifiedImageError

    for file in files:
        try:
            with Image.open(file) as image:
                pixels = np.asarray(image.convert("RGB" if len(schema.shape) == 3 else "L"))
        except (OSError, UnidentifiedImageError) as error:
            raise FedbilevelError(f"{file} is not an image: {error}.") from None
        if pixels.shape != schema.shape:
            raise FedbilevelError(f"{file} has {pixels.shape[:2]} pixels, but {schema.shape[:2]} were expected.")
        yield pixels
