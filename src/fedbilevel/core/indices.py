"""Where a loss uses whole numbers of its rows to look something up: found in its trace, without running it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

_SAME = frozenset(
    [
        "convert_element_type",
        "reshape",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "transpose",
        "copy",
        "stop_gradient",
    ]
)
"""Operations that move values, and do not change them."""


class Use(NamedTuple):
    """An array of the rows, by its number among all of them, is an index into this many entries."""

    leaf: int
    entries: int
    one_hot: bool


class _Origin(NamedTuple):
    """Values that are those of an array of the rows, plus a constant; or, without a leaf, 0 to ``shift`` - 1."""

    leaf: int | None
    shift: int = 0


_Known = dict[Any, _Origin | list[_Origin | None]]
"""By variable; a list has one origin for each entry of the last axis."""


def uses(jaxpr: Any, arrays: int) -> set[Use]:
    """What a traced function looks up with its last arguments, the arrays of rows."""
    inputs = jaxpr.invars[len(jaxpr.invars) - arrays :]
    return set(_walk(jaxpr, {variable: _Origin(leaf) for leaf, variable in enumerate(inputs)}))


def _walk(jaxpr: Any, known: _Known) -> Iterator[Use]:
    for equation in jaxpr.eqns:
        name, out = equation.primitive.name, equation.outvars[0]
        given = [None if isinstance(v, Literal) else known.get(v) for v in equation.invars]
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if inner is not None and name not in ("scan", "while", "cond"):
            inner = getattr(inner, "jaxpr", inner)
            if len(inner.invars) == len(given):
                mine: _Known = {v: origin for v, origin in zip(inner.invars, given, strict=True) if origin is not None}
                yield from _walk(inner, mine)
                for v, of_inner in zip(equation.outvars, inner.outvars, strict=True):
                    if not isinstance(of_inner, Literal) and of_inner in mine:
                        known[v] = mine[of_inner]
        elif name == "gather":
            yield from _gathered(equation, given[1])
        elif name == "eq":
            yield from _compared(given)
        elif name == "iota":
            known[out] = _Origin(None, out.aval.shape[equation.params["dimension"]])
        elif name in _SAME and given[0] is not None:
            known[out] = given[0]
        elif name == "concatenate" and equation.params["dimension"] == out.aval.ndim - 1:
            parts: list[_Origin | None] = []
            for v, origin in zip(equation.invars, given, strict=True):
                parts += [origin if isinstance(origin, _Origin) else None] * v.aval.shape[-1]
            known[out] = parts
        elif name == "add" and (sum_ := _shifted(equation, given)) is not None:
            known[out] = sum_
        elif name == "select_n":
            # A negative index counts from the end: then one of two is the same with a shift.
            cases = [origin for origin in given[1:] if isinstance(origin, _Origin)]
            if len(cases) == len(given) - 1 and len({origin.leaf for origin in cases}) == 1:
                known[out] = min(cases, key=lambda origin: abs(origin.shift))


def _shifted(equation: Any, given: list[Any]) -> _Origin | None:
    for v, origin in zip(reversed(equation.invars), given, strict=True):
        if isinstance(origin, _Origin) and origin.leaf is not None and isinstance(v, Literal) and np.ndim(v.val) == 0:
            return _Origin(origin.leaf, origin.shift + int(v.val))
    return None


def _gathered(equation: Any, indices: Any) -> Iterator[Use]:
    operand, index = (v.aval for v in equation.invars[:2])
    axes = equation.params["dimension_numbers"].start_index_map
    origins = indices if isinstance(indices, list) else [indices] if index.shape[-1] == 1 else []
    for axis, origin in zip(axes, origins, strict=False):
        if isinstance(origin, _Origin) and origin.leaf is not None and origin.shift == 0:
            yield Use(origin.leaf, int(operand.shape[axis] - equation.params["slice_sizes"][axis]) + 1, False)


def _compared(given: list[Any]) -> Iterator[Use]:
    for one, other in (given, given[::-1]):
        if isinstance(one, _Origin) and isinstance(other, _Origin) and one.leaf is not None and other.leaf is None:
            yield Use(one.leaf, other.shift, True)


def depends(function: Callable[..., Any], dtype: Any, *arguments: Any) -> list[bool]:
    """In which of its arguments a function, which returns one number, has a derivative that is not always 0: found in
    a trace of its gradient, in which what has none does not occur.
    """

    def gradients(scale: Any, *arguments: Any) -> Any:
        return jax.vjp(function, *arguments)[1](scale)

    scale = jax.ShapeDtypeStruct((), dtype)
    traced, shapes = jax.make_jaxpr(gradients, return_shape=True)(scale, *arguments)
    reached = {traced.jaxpr.invars[0]}
    for equation in traced.jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in reached for v in equation.invars):
            reached |= set(equation.outvars)
    outputs = iter(traced.jaxpr.outvars)
    found = []
    for shape in shapes:
        leaves = [next(outputs) for _ in jax.tree.leaves(shape)]
        found.append(any(not isinstance(v, Literal) and v in reached for v in leaves))
    return found
