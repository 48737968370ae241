"""Checks of what a user gives to a task: the clients' rows, and the losses on a few of them.

The rows are looked at once, on the host, and nothing is compiled: what the losses do is found in their traces.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.data import SPLITS, Held, Layout
from fedbilevel.core.indices import Use, depends, uses
from fedbilevel.core.problem import Problem
from fedbilevel.core.rows import Lookup, columns, take
from fedbilevel.core.types import Tree
from fedbilevel.errors import FedbilevelError


def check_rows(split: str, parts: Sequence[Held]) -> None:
    """Refuse a split whose arrays have no rows, or rows of another shape than those of the first holder."""
    first: Any = None
    for holder, rows in parts:
        leaves, structure = columns(rows)
        if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
            raise FedbilevelError(f"{holder}: '{split}' must contain arrays with a leading axis of rows.")
        lengths = {len(leaf) for leaf in leaves}
        if len(lengths) > 1:
            raise FedbilevelError(f"{holder}: the '{split}' arrays have different numbers of rows: {sorted(lengths)}.")
        if lengths == {0}:
            raise FedbilevelError(f"{holder} has no '{split}' rows: leave this client out or give it data.")
        kind = (structure, [np.shape(leaf)[1:] for leaf in leaves])
        first = kind if first is None else first
        if structure != first[0]:
            raise FedbilevelError(
                f"{holder}: the '{split}' arrays are {_names(structure)}, but those of client 0 are {_names(first[0])}."
            )
        if kind != first:
            raise FedbilevelError(
                f"{holder}: the '{split}' arrays have the row shapes {kind[1]}, but those of client 0 have {first[1]}."
            )


def _names(structure: Any) -> str:
    """The arrays of a structure by their names, or the structure."""
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))[0]
    return ", ".join(repr(jax.tree_util.keystr(path, simple=True, separator=".")) for path, _ in paths)


def check_start(problem: Problem) -> None:
    """Refuse an ``init`` that fails, or does not give real x and y."""
    try:
        start = jax.eval_shape(problem.init, jax.random.key(0))
    except FedbilevelError:
        raise
    except Exception as error:
        raise FedbilevelError(f"init(key), which gives the first x and y, fails: {_reason(error)}.") from error
    if not isinstance(start, tuple | list) or len(start) != 2:
        raise FedbilevelError(f"init(key) must return the pair (x, y), but returned {type(start).__name__}.")
    for name, tree in zip("xy", start, strict=True):
        if any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in jax.tree.leaves(tree)):
            raise FedbilevelError(f"init(key) gives a complex {name}: use its real and imaginary parts, as two arrays.")
    if sum(leaf.size for leaf in jax.tree.leaves(start[1])) == 0:
        raise FedbilevelError("init(key) gives a y without numbers: is the model one without parameters?")


def not_finite_at_start(problem: Problem, held: Mapping[str, Sequence[Held]]) -> str:
    """What is NaN or infinite before anything was trained, in a sentence; "" if nothing is."""
    x, y = problem.start(jax.random.key(0))
    for name, vector in (("x", x), ("y", y)):
        if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(vector)):
            return f"init(key) gives an {name} that is NaN or infinite."
    for level, loss, split in (("lower", problem.lower_on, "train"), ("upper", problem.upper_on, "val")):
        batch = jax.tree.map(np.asarray, take(held[split][0].rows, slice(3)))
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(x.tree, y.tree, batch)
        if not np.isfinite(value):
            return f"{level}(x, y, batch) is {value} at the start, on the first rows of client 0: no step can help."
        if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients)):
            return (
                f"the gradient of {level}(x, y, batch) is NaN or infinite at the start, on the first rows of client 0."
            )
    return ""


def measured(metrics: Callable[[Tree, Tree], Any], x: Tree, y: Tree) -> Mapping[str, Any]:
    """The metrics of a solution; refuses what is no dictionary of numbers."""
    found = metrics(x, y)
    if not isinstance(found, Mapping):
        raise FedbilevelError(
            f"metrics(x, y) must return a dictionary such as {{'accuracy': 0.9}}, but returned {type(found).__name__}."
        )
    for name, value in found.items():
        kind = getattr(value, "dtype", np.asarray(value).dtype)
        if not isinstance(name, str) or np.size(value) != 1 or np.ndim(value) > 0 or kind.kind not in "biuf":
            raise FedbilevelError(f"metrics(x, y) must give numbers by name, but {name!r} is {str(value)[:40]}.")
    return found


def check_values(split: str, parts: Sequence[Held], seen: set[int]) -> None:
    """Refuse rows with NaN or infinity, of objects or text, or that look up rows which are not there. ``seen`` holds
    the tables that were looked at; each is looked at once.
    """
    for holder, rows in parts:
        for place, leaf in enumerate(columns(rows)[0]):
            array = leaf
            if isinstance(leaf, Lookup):
                index, array = np.asarray(leaf.index), leaf.table
                if index.size and (index.min() < 0 or index.max() >= len(array)):
                    wrong = index.max() if index.max() >= len(array) else index.min()
                    raise _bad(holder, split, rows, place, f"looks up row {wrong} of a table with {len(array)} rows")
                if id(array) in seen:
                    continue
                seen.add(id(array))
            kind = array.dtype if hasattr(array, "dtype") else np.asarray(array).dtype
            if kind.kind in "fc":
                values = np.asarray(array)
                with np.errstate(over="ignore"):
                    used = values.astype(jax.dtypes.canonicalize_dtype(kind), copy=False)
                if not (finite := np.isfinite(used)).all():
                    row = np.argwhere(~finite)[0]
                    value = values[tuple(row)]
                    large = ", which is infinite in single precision" if np.isfinite(value) else ""
                    said = f"contains {value} in row {row[0]}{large}: fill it in, or leave the row out"
                    raise _bad(holder, split, rows, place, said)
            elif kind.kind in "OUSMm":
                said = {"U": "text", "S": "text", "O": "objects"}.get(kind.kind, "dates")
                raise _bad(holder, split, rows, place, f"contains {said}: give numbers, for instance float32")


def _bad(holder: str, split: str, rows: Tree, place: int, said: str) -> FedbilevelError:
    """An error about one array of rows, by its place among all of them."""
    path = jax.tree.flatten_with_path(rows, is_leaf=lambda part: isinstance(part, Lookup))[0][place][0]
    name = f" '{jax.tree_util.keystr(path, simple=True, separator='.')}'" if path else ""
    return FedbilevelError(f"{holder}: the '{split}' array{name} {said}.")


def check_indices(split: str, parts: Sequence[Held], found: set[Use]) -> None:
    """Refuse rows whose labels, or other whole numbers, are out of the range that a loss looks them up in."""
    for place, entries, one_hot in sorted(found):
        least = -1 if one_hot else 0  # the class -1 of a one-hot row is none, which some use
        for holder, rows in parts:
            values = np.asarray(columns(rows)[0][place][:])
            if values.size and (values.min() < least or values.max() >= entries):
                row = np.argwhere((values < least) | (values >= entries))[0]
                raise _bad(
                    holder, split, rows, place, f"contains {values[tuple(row)]} in row {row[0]}, but the loss looks it "
                    f"up among {entries} entries: use 0 to {entries - 1}",
                )  # fmt: skip


def check_losses(problem: Problem, layout: Layout, held: Mapping[str, Sequence[Held]]) -> None:
    """Refuse losses that fail on the first rows, do not return one number, have no gradient, look up what is not there,
    or are not means over rows where they must be. Only the last check evaluates them; the others need shapes only.
    """
    train, val = (held[split][0].rows for split in SPLITS)
    depend: dict[str, list[bool]] = {}
    x, y = jax.eval_shape(problem.start, jax.random.key(0))
    for level, loss, rows, number in (("lower", problem.lower_on, train, 0), ("upper", problem.upper_on, val, 1)):
        batch = jax.tree.map(np.asarray, take(rows, slice(3)))
        try:
            traced, value = jax.make_jaxpr(loss, return_shape=True)(x.tree, y.tree, batch)
        except FedbilevelError:
            raise
        except Exception as error:
            raise FedbilevelError(
                f"{level}(x, y, batch) fails on the first rows of client 0: {_reason(error)}"
            ) from error
        if not isinstance(value, jax.ShapeDtypeStruct):
            raise FedbilevelError(f"{level}(x, y, batch) must return one number, but returned {_kind(value)}.")
        if value.shape != ():
            raise FedbilevelError(
                f"{level}(x, y, batch) must return one number, but returned an array of shape {value.shape}."
            )
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise FedbilevelError(
                f"{level}(x, y, batch) returned {value.dtype}, which has no gradient: return a float."
            )
        try:
            depend[level] = depends(lambda x, y, loss=loss, batch=batch: loss(x, y, batch), value.dtype, x.tree, y.tree)
        except Exception as error:
            raise FedbilevelError(f"{level}(x, y, batch) has no gradient: {_reason(error)}") from error
        check_indices(SPLITS[number], held[SPLITS[number]], uses(traced.jaxpr, len(jax.tree.leaves(batch))))
        if layout.batch_sizes[number] is None and layout.ragged[number] and not _is_mean(problem, loss, batch):
            raise FedbilevelError(
                f"{level}(x, y, batch) is not a mean over the rows of its batch, which batch_size=None needs when "
                "clients differ in size: use a mean, or give a batch_size."
            )
    none = "has no gradient in {}: it does not depend on it, or only by rounding, comparing or argmax."
    if not depend["lower"][1]:
        raise FedbilevelError(f"lower(x, y, batch) {none.format('y')}")
    if not any(depend["upper"]):
        raise FedbilevelError(f"upper(x, y, batch) {none.format('x and y')}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _reason(error: Exception) -> str:
    """The type of an error, the first line of its message if it has one, and the line of the user's file."""
    lines = str(error).strip().splitlines()
    reason = type(error).__name__ + (f": {lines[0]}" if lines else "")
    not_the_users = (Path(__file__).parent, Path(jax.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in not_the_users)
    ]
    if not frames:
        return reason
    # The first of these is the loss; what it calls in its own file says more.
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    code = f": {last.line}" if last.line else ""
    return f"{reason} ({Path(last.filename).name}, line {last.lineno}{code})"


def _is_mean(problem: Problem, loss: Callable[..., jax.Array], batch: Tree) -> bool:
    # Near the start, not at it: there many losses are 0, and 0 is both a sum and a mean.
    away = lambda a: a + 0.1 * np.random.default_rng(0).normal(size=a.shape).astype(a.dtype)
    x, y = jax.tree.map(away, problem.start(jax.random.key(0)))
    size = len(jax.tree.leaves(batch)[0])
    each = [loss(x.tree, y.tree, jax.tree.map(lambda a, i=i: a[i : i + 1], batch)) for i in range(size)]
    doubled = loss(x.tree, y.tree, jax.tree.map(lambda a: np.concatenate([a, a]), batch))
    return bool(np.allclose(np.mean(each), doubled, rtol=1e-3, atol=1e-6, equal_nan=True))
