"""Hyper-parameters: fields of a frozen dataclass with bounds, a help text and a search range."""

import dataclasses
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from fedbilevel.core.schedules import Schedule, parse, scale_of
from fedbilevel.errors import FedbilevelError


def parameter(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    least: float | None = None,
    tune: tuple[float, float] | None = None,
    choices: tuple[str, ...] = (),
    whole: bool = False,
    static: bool = False,
) -> Any:
    """A hyper-parameter: a dataclass field with a help text, a lower bound (strict or not), a range worth searching
    (on a log scale), or the words to choose from. A tuple holds one number for each client, ``whole`` numbers or not.

    Floats and schedules are arguments of the compiled program, so that another step size compiles nothing. A float that
    decides *what* is computed (``if self.momentum > 0``) is ``static``: another value is another program.

    Every other float may be given as a schedule of rounds, ``lr_upper="power(0.5, -0.5)"``, and an algorithm need not
    know: in each round it sees the number of this round (:meth:`Algorithm.at`). A field of the *type* ``Schedule`` is a
    function that the algorithm itself calls with a time of its own, for instance of local steps.
    """
    known = {"help": help, "above": above, "least": least, "tune": tune, "choices": choices, "whole": whole}
    return dataclasses.field(default=default, metadata={**known, "static": static})


def is_argument(field: "dataclasses.Field[Any]", value: Any) -> bool:
    """Whether a hyper-parameter is an argument of the compiled program. Whole numbers (which set shapes and lengths of
    loops), words, and infinite bounds (which switch something off) are part of the program itself.
    """
    if field.metadata.get("static"):
        return False
    infinite = isinstance(value, float) and math.isinf(value)
    return not infinite and not isinstance(value, bool | int | str | tuple | None)


def may_change(field: "dataclasses.Field[Any]") -> bool:
    """Whether a hyper-parameter is a number that may be a schedule of rounds instead."""
    number = field.type is float or field.type == "float"
    return number and isinstance(field.default, float | Schedule) and not field.metadata.get("static")


def _of_rounds(owner: str, name: str, value: Schedule) -> float | Schedule:
    """A schedule that is finite in the first round, t = 0; a constant one as its number."""
    if value.exponent == 0:
        return value.scale
    if not value.offset > 0:
        raise FedbilevelError(
            f"{owner}: {name} counts rounds from t = 0, so the offset of its schedule must be greater than 0, not "
            f"{value.offset}."
        )
    return value


def check_fields(owner: Any) -> None:
    """Convert every hyper-parameter of a frozen dataclass to its field's type, and refuse what is out of bounds."""
    name = type(owner).__name__
    for field in dataclasses.fields(owner):
        value, known = getattr(owner, field.name), field.metadata
        if field.type is Schedule or field.type == "Schedule":
            value = value if isinstance(value, Schedule) else _schedule(name, field.name, value)
            object.__setattr__(owner, field.name, value)
            value = value.scale
        elif may_change(field):
            value = _schedule(name, field.name, value) if isinstance(value, str) else value
            given = isinstance(value, Schedule)
            value = _of_rounds(name, field.name, value) if given else _number(name, field.name, value, 0.0)
            object.__setattr__(owner, field.name, value)
            value = scale_of(value)
        elif isinstance(field.default, int | float):
            value = _number(name, field.name, value, field.default)
            object.__setattr__(owner, field.name, value)
        elif isinstance(field.default, tuple):
            value = _numbers(name, field.name, value, known)
            object.__setattr__(owner, field.name, value)
        elif known.get("choices") and value not in known["choices"]:
            raise FedbilevelError(f"{name}: {field.name} must be {' or '.join(known['choices'])}, not {value!r}.")
        if isinstance(value, int | float) and not isinstance(value, bool):
            _bound(name, field.name, value, known)


def _schedule(owner: str, name: str, value: Any) -> Schedule:
    """The schedule of a text or a number."""
    try:
        return parse(value)
    except FedbilevelError as error:
        raise FedbilevelError(f"{owner}: {name}: {error}") from None


def _number(owner: str, name: str, value: Any, like: float) -> float:
    """The value with the type of the field: true or false, a whole number, or a number."""
    kind = type(like)
    if isinstance(value, Integral if kind is int else Real) and isinstance(value, bool) == (kind is bool):
        return kind(value)
    if kind is bool and isinstance(value, bool):
        return value
    what = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
    raise FedbilevelError(f"{owner}: {name} must be {what}, not {value!r}.")


def _numbers(owner: str, name: str, value: Any, known: Mapping[str, Any]) -> tuple[float, ...]:
    """The value as a tuple of numbers, one for each client."""
    values = value if isinstance(value, tuple | list) else (value,)
    like = 0 if known.get("whole") else 0.0
    numbers = tuple(_number(owner, name, each, like) for each in values)
    for number in numbers:
        _bound(owner, name, number, known)
    return numbers


def _bound(owner: str, name: str, value: float, known: Mapping[str, Any]) -> None:
    above, least = known.get("above"), known.get("least")
    if above is not None and not value > above:
        raise FedbilevelError(f"{owner}: {name} must be greater than {above}, not {value}.")
    if isinstance(value, int) and value >= 2**31:
        raise FedbilevelError(f"{owner}: {name} must be below 2^31, not {value}.")
    if least is not None and not value >= least:
        raise FedbilevelError(f"{owner}: {name} must be at least {least}, not {value}.")
