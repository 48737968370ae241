"""Checks of what a user gives to a task: the clients' rows, and the losses on a few of them."""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.core.data import Held, Layout
from fedbilevel.core.problem import Problem
from fedbilevel.core.rows import columns, take
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
        if kind != first:
            raise FedbilevelError(
                f"{holder}: the '{split}' arrays have the row shapes {kind[1]}, but those of client 0 have {first[1]}."
            )


def check_losses(problem: Problem, layout: Layout, train: Tree, val: Tree) -> None:
    """Refuse losses that fail on the first rows, do not return one number, or are not means over rows where they must
    be. Only the last check evaluates them; the others need shapes only.
    """
    x, y = jax.eval_shape(problem.start, jax.random.key(0))
    for level, loss, rows, number in (("lower", problem.lower_on, train, 0), ("upper", problem.upper_on, val, 1)):
        batch = jax.tree.map(np.asarray, take(rows, slice(3)))
        try:
            value = jax.eval_shape(loss, x.tree, y.tree, batch)
        except FedbilevelError:
            raise
        except Exception as error:
            raise FedbilevelError(
                f"{level}(x, y, batch) fails on the first rows of client 0: {_reason(error)}"
            ) from error
        if value.shape != ():
            raise FedbilevelError(
                f"{level}(x, y, batch) must return one number, but returned an array of shape {value.shape}."
            )
        if layout.batch_sizes[number] is None and layout.ragged[number] and not _is_mean(problem, loss, batch):
            raise FedbilevelError(
                f"{level}(x, y, batch) is not a mean over the rows of its batch, which batch_size=None needs when "
                "clients differ in size: use a mean, or give a batch_size."
            )


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
