"""Step sizes and penalties that change with time: ``scale * (offset + t) ** exponent``.

Every schedule of the papers has this form, so there is one class and a few names for its uses. A schedule prints as
the expression that makes it, and :func:`parse` reads that expression, so that it survives a TOML file and a command
line.
"""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fedbilevel.errors import FedbilevelError


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Schedule:
    """``scale * (offset + t) ** exponent``; call it with the time t. The exponent says what kind of schedule it is; the
    other two are numbers that a compiled program takes as arguments.

    >>> cube_root(30.0, 10000.0)
    cube_root(30.0, 10000.0)
    >>> round(float(cube_root(30.0, 10000.0)(1)), 3)
    1.392
    >>> constant(0.5)(7)
    0.5
    """

    scale: float
    exponent: float = 0.0
    offset: float = 1.0

    def __post_init__(self) -> None:
        if self.exponent != 0 and not self.offset > -1:
            raise FedbilevelError(f"the offset of a schedule must be greater than -1, not {self.offset}.")

    def tree_flatten(self) -> tuple[tuple[float, float], float]:
        return (self.scale, self.offset), self.exponent

    @classmethod
    def tree_unflatten(cls, exponent: float, numbers: tuple[float, float]) -> "Schedule":
        schedule = object.__new__(cls)  # in a compiled program the numbers are not known, and cannot be checked
        for name, value in zip(("scale", "offset", "exponent"), (*numbers, exponent), strict=True):
            object.__setattr__(schedule, name, value)
        return schedule

    def __call__(self, t: int | jax.Array) -> float | jax.Array:
        if self.exponent == 0:
            return self.scale
        return self.scale * (self.offset + jnp.asarray(t)) ** self.exponent

    def largest(self) -> float:
        """The largest value from t = 1 on (infinite for growing schedules)."""
        return float("inf") if self.exponent > 0 else float(self.scale * (self.offset + 1) ** self.exponent)

    def __repr__(self) -> str:
        if self.exponent == 0:
            return f"constant({self.scale})"
        if self.exponent == -1 / 3:
            return f"cube_root({self.scale}, {self.offset})"
        return f"power({self.scale}, {self.exponent}, {self.offset})"


def constant(value: float) -> Schedule:
    """The same value at all times."""
    return Schedule(value)


def cube_root(delta: float, offset: float) -> Schedule:
    """alpha_t = delta / (offset + t)^(1/3), the rate of FedBiOAcc (the paper calls the offset u)."""
    return Schedule(delta, -1 / 3, offset)


def power(scale: float, exponent: float, offset: float = 1.0) -> Schedule:
    """c_t = scale * (offset + t)^exponent, for instance the growing penalty of MeFBO."""
    return Schedule(scale, exponent, offset)


def largest(value: float | Schedule) -> float:
    """A number, or the largest value of a schedule of rounds, which are counted from 0."""
    if not isinstance(value, Schedule):
        return value
    return float("inf") if value.exponent > 0 else float(value.scale * value.offset**value.exponent)


def scale_of(value: float | Schedule) -> float:
    """A number, or the scale of a schedule: the value that tuning searches for."""
    return value.scale if isinstance(value, Schedule) else value


def parse(text: str | float) -> Schedule:
    """Read a number or an expression such as ``cube_root(30, 10000)``.

    >>> parse("0.1"), parse("power(2.7, 0.001)")
    (constant(0.1), power(2.7, 0.001, 1.0))
    """
    makers = {"constant": constant, "cube_root": cube_root, "power": power}
    match = re.fullmatch(r"\s*([a-z_-]+)\s*\(([^()]*)\)\s*", str(text))
    try:
        if match is None:
            return constant(float(text))
        return makers[match[1].replace("-", "_")](*(float(part) for part in match[2].split(",")))
    except (ValueError, KeyError, TypeError):
        raise FedbilevelError(
            f"'{text}' is not a schedule: write a number, constant(value), cube_root(delta, offset) "
            "or power(scale, exponent, offset)."
        ) from None
