"""Settings by name: how a key such as "task.clients" or "lr_upper" is read, and what its value becomes.

This is the only place that takes keys apart, whether they come from the command line, an experiment file, a comparison,
a search or a study of a federation.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.core import schedules
from fedbilevel.errors import FedbilevelError, UnknownName


class Setting(NamedTuple):
    """A key, taken apart. ``table`` is "task", "algorithm" or "run", in a comparison also the name of an algorithm; ""
    means whichever has a setting of this name.

    >>> Setting.parse("task.clients"), Setting.parse("lr_upper")
    (Setting(table='task', name='clients'), Setting(table='', name='lr_upper'))
    """

    table: str
    name: str

    @classmethod
    def parse(cls, key: str) -> "Setting":
        """The setting that a key names."""
        table, _, name = key.rpartition(".")
        return cls(table, name)

    @property
    def key(self) -> str:
        """As it is written."""
        return f"{self.table}.{self.name}" if self.table else self.name

    def is_for(self, table: str) -> bool:
        """Whether it may be meant for this table."""
        return self.table in ("", table)


class Settings(dict[str, Any]):
    """Values, or text, by key."""

    @classmethod
    def of_tables(cls, tables: Mapping[str, Mapping[str, Any]]) -> "Settings":
        """The settings of the tables of an experiment file.

        >>> Settings.of_tables({"task": {"clients": 3}, "run": {"rounds": 50}})
        {'task.clients': 3, 'run.rounds': 50}
        """
        return cls({Setting(table, name).key: v for table, values in tables.items() for name, v in values.items()})

    def put(self, key: str, value: Any) -> None:
        """Set a value; it replaces an earlier one for the same setting, however that was written."""
        setting = Setting.parse(key)
        self.pop(setting.name, None)
        self.pop(Setting("task" if setting.table == "task" else "algorithm", setting.name).key, None)
        self[key] = value

    def values_for(self, table: str, defaults: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
        """The values by name of what is meant for a table and has a default there, each as what its default is.

        Args:
            table: "task" or "algorithm".
            defaults: by name.
            places: where each key was written, for messages.
        """
        values: dict[str, Any] = {}
        for key, value in self.items():
            setting = Setting.parse(key)
            if setting.is_for(table) and setting.name in defaults:
                default = defaults[setting.name]
                if table == "algorithm" and isinstance(default, float) and "(" in str(value):
                    default = schedules.constant(default)  # a number that changes with the rounds
                values[setting.name] = convert(key, value, default, places.get(key, ""))
        return values

    def check(
        self, owners: Mapping[str, tuple[str, Collection[str]]], others: Collection[str], places: Mapping[str, str]
    ) -> None:
        """Refuse settings that are unknown or ambiguous.

        Args:
            owners: by table, whose settings these are and the names of all of them.
            others: more names to suggest where the key does not say a table.
            places: where each key was written.
        """
        for key in self:
            setting = Setting.parse(key)
            having = [table for table, (_, names) in owners.items() if setting.is_for(table) and setting.name in names]
            if not having and setting.table in owners:
                who, names = owners[setting.table]
                raise UnknownName(f"setting of {who}", setting.name, names, places.get(key, ""))
            if not having:
                who = " or ".join(owner for owner, _ in owners.values())
                every = [*(name for _, names in owners.values() for name in names), *others]
                raise UnknownName(f"setting of {who}", key, every, places.get(key, ""))
            if len(having) > 1:
                who = " and ".join(owners[table][0] for table in having)
                keys = " or ".join(Setting(table, setting.name).key for table in having)
                raise FedbilevelError(f"'{setting.name}' is an option of both {who}: write {keys}.")


class Unset(NamedTuple):
    """In place of a default that is absent or None: the type of the argument, if its annotation says one."""

    kind: type | None = None
    needed: bool = False


def options_of(make: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function by name, with their defaults.

    >>> def make(width: int, depth: int = 2, *, name=None): ...
    >>> options_of(make)
    {'width': Unset(kind=<class 'int'>, needed=True), 'depth': 2, 'name': Unset(kind=None, needed=False)}
    """
    options: dict[str, Any] = {}
    try:
        signature = inspect.signature(make, eval_str=True)
    except NameError:  # an annotation that is there for readers only
        signature = inspect.signature(make)
    for name, p in signature.parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.kind is p.POSITIONAL_ONLY:
            raise FedbilevelError(f"the function of the task has an argument without a name ({name}): remove the '/'.")
        said = [k for k in (bool, int, float, str) if k is p.annotation or k in getattr(p.annotation, "__args__", ())]
        needed = p.default is p.empty
        options[name] = Unset(said[0] if said else None, needed) if needed or p.default is None else p.default
    return options


class NameList(tuple[str, ...]):
    """A setting that is several names, such as those of files or columns."""


VALUE_KINDS = {
    NameList: "names such as a,b",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "numbers such as 1,3",
    str: "text",
}


def convert(name: str, value: Any, default: Any, place: str = "") -> Any:
    """Convert a setting, a value or text, to the type of its default."""
    if isinstance(default, Unset):
        return _guessed(value) if default.kind is None else convert(name, value, default.kind(), place)
    try:
        if isinstance(default, bool):
            words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            return value if isinstance(value, bool) else words[value.lower()]
        if isinstance(value, bool):
            raise ValueError
        if isinstance(default, int):
            if isinstance(value, float):
                raise ValueError
            return int(value)
        if isinstance(default, float):
            number = float(value)
            if math.isnan(number):
                raise ValueError
            return number
        if isinstance(default, schedules.Schedule):
            return schedules.parse(value)
        if isinstance(default, NameList):
            parts = value.split(",") if isinstance(value, str) else value
            return NameList(part.strip() for part in parts if part.strip())
        if isinstance(default, tuple):
            number = lambda part: int(part) if str(part).strip().lstrip("-").isdigit() else float(part)
            parts = (
                value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
            )
            return tuple(number(part) for part in parts if str(part).strip())
        if not isinstance(value, str):
            raise ValueError
    except FedbilevelError as error:
        raise FedbilevelError(f"{place}{name}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        kind = VALUE_KINDS.get(type(default), f"like {default!r}")
        raise FedbilevelError(f"{place}{name} must be {kind}, not {value!r}.") from None
    return value


def _guessed(value: Any) -> Any:
    """Text as what it looks like: a number, true or false, or itself."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return value


def convert_run(key: str, value: Any, place: str = "") -> Any:
    """Convert a setting of [run] to the type of its field in an experiment."""
    name = Setting.parse(key).name
    if name in ("diagnostics", "trackers"):
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise FedbilevelError(f"{place}{key} must be a list of names, not {value!r}.")
        return tuple(part.strip() for part in parts if part.strip())
    if name == "sample":
        parts = value if isinstance(value, list) else [value]
        if isinstance(value, bool) or not all(isinstance(part, str | int | float) for part in parts):
            raise FedbilevelError(f"{place}{key} must be a number, a list of clients or text, not {value!r}.")
        return ",".join(str(part) for part in parts) + ("," if isinstance(value, list) and len(value) == 1 else "")
    like = {"rounds": 0, "every": 0, "seed": 0, "checkpoints": 0, "references": True, "checkpoint_seconds": 0.0}
    return convert(key, value, like.get(name, ""), place)


def plain(value: Any) -> Any:
    """A value as TOML knows it."""
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, bool | int | float | str) else repr(value)
