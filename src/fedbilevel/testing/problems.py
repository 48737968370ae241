"""Small problems that every algorithm can be tried on, and how two results are compared."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np

from fedbilevel.core import Algorithm
from fedbilevel.core.task import Task
from fedbilevel.tasks import Quadratic, WeightedQuadratics


def largest_difference(a: Any, b: Any) -> float:
    """Over all arrays of two trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(p, float) - np.asarray(q, float)), initial=0)) for p, q in pairs)


def identical(a: Any, b: Any) -> bool:
    """Bit for bit."""
    return all(np.array_equal(p, q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def problem_of(kind: Algorithm | type[Algorithm], quadratic: Quadratic) -> Quadratic:
    """The same quadratic with the lower level that an algorithm is for."""
    return quadratic.local() if kind.lower_level == "local" else quadratic


@cache
def noisy(lower_level: str, weighting: bool, dtype: Any = np.float64) -> Task:
    """Four clients with two rows of matrices each, in batches of one row; different weights where they are free."""
    if weighting:
        w = WeightedQuadratics.random(clients=8, d=4)
        made = replace(w, H=w.H[:4], c=w.c[:4]).task()
        clients = [{"train": {"H": w.H[2 * m : 2 * m + 2], "c": w.c[2 * m : 2 * m + 2]}} for m in range(4)]
        rows = {"H": w.H[:2], "c": w.c[:2]}
        task = Task(made.problem, clients, batch_size=1, server=rows)
    else:
        q = Quadratic.random(clients=8, p=3, d=4)
        q = q.local() if lower_level == "local" else q
        rows = lambda names, m: {k: getattr(q, k)[2 * m : 2 * m + 2] for k in names}
        data = [{"train": rows(("A", "B", "b"), m), "val": rows(("P", "s", "R", "t"), m)} for m in range(4)]
        task = Task(q.task().problem, data, weights=[1, 2, 3, 4], batch_size=1)
    if dtype == np.float64:
        return task
    cast = lambda tree: jax.tree.map(lambda a: np.asarray(a, dtype), tree)
    start: Callable[..., Any] = task.problem.init
    problem = replace(task.problem, init=lambda key: cast(start(key)))
    return replace(task, problem=problem, clients=cast(task.clients), server=cast(task.server))
