"""A lower level with many minima and a known solution: what methods do where g is not convex in y.

x is one number and y has n. Client m has::

    g_m(x, y) = sum_i w_m,i sin(x + y_i - c) + b_m . y          the means of w_m and b_m are 1 and 0
    f_m(x, y) = (x - a_m)^2 + |y - a_m - c|^2                   the mean of a_m is a

so that the mean of g has its minima where every x + y_i - c is one of the numbers C_k = -pi/2 + 2 pi k. All of them are
equally deep, and f decides between them. With C the C_k next to 2a, the optimum over x and all minimisers y is::

    x* = ((1 - n) a + n C) / (1 + n),    y* = C + c - x*,    f = n (C - 2a)^2 / (1 + n) + a constant

(The problem is that of Liu and others, "Moreau Envelope for Nonconvex Bi-Level Optimization", 2024, made federated.)
A method that only follows a minimum of g may end in a valley that is not the best, and where g is not convex its linear
system for the adjoint has no minimum.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Problem
from fedbilevel.core.presentation import Presentation, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError
from fedbilevel.tasks.weighted_quadratics import scattered


def _lower(x: Any, y: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.sin(x + y - batch["c"]) * batch["w"] + batch["b"] * y, axis=0).sum()


def _upper(x: Any, y: Any, batch: Any) -> jax.Array:
    a = batch["a"]  # one column
    return jnp.mean((x - a) ** 2 + jnp.sum((y - a - batch["c"]) ** 2, axis=1, keepdims=True))


@cache  # so that problems of the same shape and start share their compiled code
def _problem(n: int, x: float, y: float) -> Problem:
    return Problem(_upper, _lower, lambda key: (np.full(1, x), np.full(n, y)))


def nonconvex(
    clients: int = 4,
    n: int = 4,
    heterogeneity: float = 0.3,
    noise: float = 0.0,
    rows: int = 100,
    batch_size: int = 1,
    copies: int = 1,
    start_x: float = 0.0,
    start_y: float = -5.0,
    seed: int = 0,
) -> Task:
    """A lower level that is not convex, with a known solution: y may end in a valley of g that is not the best.

    Args:
        clients: number of clients.
        n: numbers in y.
        heterogeneity: how much clients differ in w_m, b_m and a_m; their means stay as they are. 0: not at all.
        noise: standard deviation of the noise in w_m, b_m and a_m of a row. 0: a client has one row, without noise.
        rows: rows of a client, a multiple of 4. Their mean is free of noise, and so is the solution.
        batch_size: rows per batch; 0 is all.
        copies: how often every client is there.
        start_x, start_y: where x, and every number of y, starts. (0, -5) is two valleys away from the best one.
        seed: of the clients.
    """
    if min(clients, n, copies) < 1 or not (heterogeneity >= 0 and noise >= 0) or min(batch_size, seed) < 0:
        raise FedbilevelError(
            "nonconvex: clients, n and copies must be at least 1, heterogeneity, noise, batch_size and seed not "
            "negative."
        )
    if noise and (rows < 4 or rows % 4):
        raise FedbilevelError(f"nonconvex: with noise, rows must be a multiple of 4, but is {rows}.")
    if not np.isfinite([start_x, start_y]).all():
        raise FedbilevelError("nonconvex: start_x and start_y must be finite.")
    a = c = 2.0
    rng = np.random.default_rng(seed)

    def differing(*shape: int) -> np.ndarray:
        each = rng.normal(size=(clients, *shape))
        return heterogeneity * (each - each.mean(axis=0))

    of = {"w": 1 + differing(n), "b": differing(n), "a": a + differing(1)}
    count = rows if noise else 1
    scatter = lambda name, m: scattered(of[name][m], count, noise, rng)
    constant = np.full((count, 1), c)
    data = [
        {
            "train": {"w": scatter("w", m), "b": scatter("b", m), "c": constant},
            "val": {"a": scatter("a", m), "c": constant},
        }
        for m in range(clients)
    ]
    best = -np.pi / 2 + 2 * np.pi * np.round((2 * a + np.pi / 2) / (2 * np.pi))
    x_star = ((1 - n) * a + n * best) / (1 + n)
    least = n * (best - 2 * a) ** 2 / (1 + n)

    def metrics(x: Any, y: Any) -> dict[str, float]:
        x, y = float(np.asarray(x)[0]), np.asarray(y, float)
        with np.errstate(over="ignore", invalid="ignore"):  # a diverging run has large numbers
            return {
                "error": float(np.hypot(x - x_star, np.linalg.norm(y - (best + c - x_star)))),
                "upper_gap": float((x - a) ** 2 + np.sum((y - a - c) ** 2) - least),
                "lower_gap": float(np.sum(np.sin(x + y - c)) + n),
            }

    options = {"clients": clients, "n": n, "heterogeneity": heterogeneity, "noise": noise, "rows": rows}
    options |= {"batch_size": batch_size, "copies": copies, "start_x": start_x, "start_y": start_y, "seed": seed}
    return Task(
        _problem(n, start_x, start_y),
        data * copies,
        batch_size=(batch_size or None) if noise else None,
        metrics=metrics,
        name="nonconvex",
        options=options,
        shown=Presentation(
            headline={"error": "|(x, y) - (x*, y*)|", "upper_gap": "f - f*", "lower_gap": "g - min g"},
            compare_by=["error"],
        ),
        suggested=Suggestion(
            algorithm="mefbo",
            rounds=2000,
            hyper={
                "*": {"lr_upper": 0.02, "lr_lower": 0.1, "lr_adjoint": 0.1, "local_steps": 1},
                "mefbo": {
                    "lr_upper": 0.1,
                    "lr_lower": 0.1,
                    "lr_prox": 0.1,
                    "prox": 0.4,
                    "penalty": "power(0.2, 0.7)",
                },
            },
        ),
    )
