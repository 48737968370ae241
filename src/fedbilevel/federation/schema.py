"""What the rows of every site must look like. ``rows.py`` reads them.

A schema is part of an experiment file::

    [schema]
    label = { column = "disease", values = [0, 1] }

    [schema.features]
    age = { least = 18, most = 110 }                # a number; may be missing
    pain = { values = [1, 2, 3, 4] }                # one of these: becomes a column of 0 and 1 for each
    thal = { values = [3, 6, 7], needed = true }    # may not be missing

or, for images, ``image = { shape = [28, 28] }`` instead of the features. ``part = "NAME"`` is a column that says
whether a row is for training, validation or test. ``group = { column = "sex", values = ["f", "m"] }`` is a column with
groups of people, for tasks about groups. ``trusted = { column = "checked", values = ["no", "yes"] }`` is a column that
says whether somebody has checked the label, for tasks that find wrong labels; the second value means yes, an empty cell
no. A site without this column has no trusted rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbilevel.data.cells import BLANKS, Choices, Value, shown
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.tasks.sites import Columns, Examples

PARTS = Choices(("train", "val", "test"), "the column with the part of a row")
LARGEST_NUMBER = 1e9
"""A feature without bounds lies between minus this and this; so sums over rows have bounds, too."""
LARGEST_BOUND = 1e15
MOST_COLUMNS, MOST_VALUES, MOST_PIXELS = 100_000, 10_000, 10**8
MOST_BLANK = 1 << 30
"""Bytes of a row for every part, label and group."""


@dataclass(frozen=True)
class Feature:
    """A feature: a number between bounds, or one of some values."""

    least: float = -LARGEST_NUMBER
    most: float = LARGEST_NUMBER
    values: tuple[Value, ...] = ()
    needed: bool = False

    @property
    def width(self) -> int:
        """How many columns of inputs it becomes."""
        return len(self.values) if len(self.values) > 2 else 1


@dataclass(frozen=True)
class Schema:
    """What every site must have: features or images, a label, and optionally the group and the part of each row."""

    label: str
    classes: tuple[Value, ...]
    features: Mapping[str, Feature] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    part: str = ""  # the column with "train", "val" or "test"; none: a row's part is drawn
    group: str = ""
    groups: tuple[Value, ...] = ()
    trusted: str = ""  # a site need not have it
    trusts: tuple[Value, ...] = ()  # no, yes

    @property
    def columns(self) -> list[str]:
        """The columns of a site's table that are read, by the schema's names."""
        return [*self.features, *self.roles.values()]

    @property
    def roles(self) -> dict[str, str]:
        """The columns that are no features, by what they are for."""
        known = {"label": self.label, "part": self.part, "group": self.group, "trusted": self.trusted}
        return {role: name for role, name in known.items() if name}

    @property
    def names(self) -> list[str]:
        """The columns of the inputs."""
        names: list[str] = []
        for name, column in self.features.items():
            names += [f"{name}: {value}" for value in column.values] if column.width > 1 else [name]
        return names

    @property
    def bounds(self) -> Columns:
        """The least and the largest value of every column of the inputs; of images, of a pixel."""
        if self.shape:
            return Columns(np.asarray(0.0), np.asarray(1.0), math.prod(self.shape))
        each = [
            column.width * [(0.0, 1.0) if column.values else (float(column.least), float(column.most))]
            for column in self.features.values()
        ]
        least, most = np.array([bounds for column in each for bounds in column]).T
        return Columns(least, most)


def read(table: Mapping[str, Any]) -> Schema:
    """The schema of an experiment file."""
    kinds = {"label": dict, "features": dict, "image": dict, "part": str, "group": dict, "trusted": dict}
    for key, value in table.items():
        if key not in kinds:
            raise UnknownName("entry of [schema]", key, kinds)
        if not isinstance(value, kinds[key]):
            raise FedbilevelError(f"[schema]: {key} must be {'a table' if kinds[key] is dict else 'text'}.")
    label, classes = _choice("label", table.get("label", {}))
    if ("features" in table) == ("image" in table):
        raise FedbilevelError("[schema] needs either [schema.features] or image = { shape = [28, 28] }.")
    features = {name: _feature(name, entry) for name, entry in table.get("features", {}).items()}
    if "features" in table and not features:
        raise FedbilevelError("[schema.features] must name at least one feature.")
    if sum(feature.width for feature in features.values()) > MOST_COLUMNS:
        raise FedbilevelError(f"[schema.features]: the features become more than {MOST_COLUMNS} columns.")
    shape = _shape(table["image"]) if "image" in table else ()
    group, groups = _choice("group", table["group"]) if "group" in table else ("", ())
    trusted, trusts = _choice("trusted", table["trusted"]) if "trusted" in table else ("", ())
    if len(trusts) > 2:
        raise FedbilevelError("[schema]: trusted has two values, first the one that means no: for instance [0, 1].")
    part = table.get("part", "")
    if "part" in table:
        _check_name("part", part)
    schema = Schema(label, classes, features, shape, part, group, groups, trusted, trusts)
    for role, name in schema.roles.items():
        twice = [f"the {other}" for other, its in schema.roles.items() if other != role and its == name]
        if (name in features and role != "group") or twice:
            also = "a feature" if name in features else twice[0]
            raise FedbilevelError(f"[schema]: the column {shown(name)} is both the {role} and {also}: use two columns.")
    row = 24 + (math.prod(shape) if shape else 8 * sum(feature.width for feature in features.values()))
    if row * 3 * max(1, len(groups)) * len(classes) > MOST_BLANK:
        raise FedbilevelError(
            f"[schema] is too large: a row of each of its {len(classes)} labels and {len(groups)} groups would not fit "
            "into memory."
        )
    return schema


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not name or name != name.strip(BLANKS):
        raise FedbilevelError(f"[schema]: {what} must name a column, without blanks around it, not {name!r:.60}.")


def _choice(role: str, entry: Mapping[str, Any]) -> tuple[str, tuple[Value, ...]]:
    """The column and the values of a label, a group, or of what says whether a label is trusted."""
    known = ("column", "values")
    for key in entry:
        if key not in known:
            raise UnknownName(f"entry of {role} in [schema]", key, known)
    if not isinstance(entry.get("column"), str) or not isinstance(entry.get("values"), list):
        raise FedbilevelError(f'[schema] needs {role} = {{ column = "NAME", values = [0, 1] }}.')
    _check_name(f"the {role}", entry["column"])
    return entry["column"], _values(f"[schema]: the {role}", entry["values"])


def _values(what: str, values: list[Any]) -> tuple[Value, ...]:
    if len(values) > MOST_VALUES:
        raise FedbilevelError(f"{what} has more than {MOST_VALUES} values.")
    return Choices(values, what).values


def _feature(name: str, entry: Any) -> Feature:
    place = f"[schema.features]: {name!r:.60}"
    _check_name("every feature", name)
    if not isinstance(entry, dict):
        raise FedbilevelError(f"{place} must be a table, for instance {{ least = 0, most = 1 }} or {{}}.")
    types = {"least": (int, float), "most": (int, float), "values": list, "needed": bool}
    for key, value in entry.items():
        if key not in types:
            raise UnknownName(f"entry of the feature {name}", key, types)
        if not isinstance(value, types[key]) or (isinstance(value, bool) and key != "needed"):
            raise FedbilevelError(f"{place} has {key} = {shown(value)}, which has the wrong type.")
    given: dict[str, Any] = dict(entry)
    if "values" in entry:
        if "least" in entry or "most" in entry:
            raise FedbilevelError(f"{place} has values, and least or most: use one of the two.")
        given["values"] = _values(place, entry["values"])
    feature = Feature(**given)
    for bound in (feature.least, feature.most):
        if not abs(bound) <= LARGEST_BOUND:
            raise FedbilevelError(f"{place}: bounds must lie between {-LARGEST_BOUND:g} and {LARGEST_BOUND:g}.")
    if not feature.least <= feature.most:
        raise FedbilevelError(f"{place} has least = {feature.least:g} above most = {feature.most:g}.")
    return feature


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    for key in entry:
        if key != "shape":
            raise UnknownName("entry of image in [schema]", key, ["shape"])
    shape = entry.get("shape")
    if not isinstance(shape, list) or len(shape) not in (2, 3) or shape[2:] not in ([], [3]):
        raise FedbilevelError("[schema]: image needs shape = [height, width] or [height, width, 3].")
    if not all(type(size) is int and size >= 1 for size in shape) or math.prod(shape) > MOST_PIXELS:
        raise FedbilevelError(
            f"[schema]: the shape of an image has whole numbers above 0, at most {MOST_PIXELS} in all."
        )
    return tuple(shape)


def blank(schema: Schema) -> Examples:
    """Blank rows with the shapes of real ones, for the server, which has none: of every part, label and group."""
    parts, groups, labels = np.indices((3, max(1, len(schema.groups)), len(schema.classes))).reshape(3, -1)
    shape = (*schema.shape, 1)[:3] if schema.shape else (len(schema.names),)
    inputs = np.zeros((len(labels), *shape), np.uint8 if schema.shape else np.float64)
    return Examples(inputs, labels, parts, len(schema.classes), groups=groups if schema.group else None)
