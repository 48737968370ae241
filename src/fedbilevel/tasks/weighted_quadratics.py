"""Client weighting with closed-form gradients: quadratic losses, whose minimiser moves with the clients' weights.

Client i has f_i(w) = 1/2 (w - c_i)' H_i (w - c_i), the server f_0 likewise. With A(x) = sum_i x_i H_i::

    w*(x) = A^-1 sum_i x_i H_i c_i,   u*(x) = A^-1 H_0 (w* - c_0),   d/dx_i f_0(w*(x)) = - u*' H_i (w* - c_i)

With noise, clients and server have many rows. Their means have exactly the derivatives of f_i and f_0, and are larger
by constants.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Problem
from fedbilevel.core.presentation import Presentation, Suggestion
from fedbilevel.core.task import Task

Array = np.ndarray


def _loss(x: Any, y: Any, batch: Any) -> jax.Array:
    each = lambda r: 0.5 * (y - r["c"]) @ r["H"] @ (y - r["c"])
    return jnp.mean(jax.vmap(each)(batch))


@cache  # so that problems of the same shape share their compiled code
def _problem(clients: int, d: int) -> Problem:
    start = lambda key: (np.full(clients, 1 / clients), np.zeros(d))
    return Problem(_loss, _loss, start, weighting=True)


def project(x: Array) -> Array:
    """The nearest point of the probability simplex, in double precision."""
    falling = np.sort(x)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(x) + 1)
    return np.maximum(x - excess[np.sum(falling > excess) - 1], 0)


def scattered(value: Array, rows: int, noise: float, rng: np.random.Generator) -> Array:
    """Rows of a coefficient, with noise of this standard deviation; that of a matrix is divided by the root of its
    size, and symmetric where the matrix is. With every matrix E there is -E, and both are there with e and with -e for
    every vector: the means of E, of e and of E e are 0.
    """
    if rows == 1:
        return value[None]
    if value.ndim == 1:
        each = rng.normal(size=(rows // 2, *value.shape))
        return value + noise * np.concatenate([each, -each])
    each = rng.normal(size=(rows // 4, *value.shape)) / np.sqrt(value.shape[-1])
    if np.array_equal(value, value.T):
        each = (each + each.swapaxes(1, 2)) / np.sqrt(2)
    return value + noise * np.concatenate([each, -each, each, -each])


@dataclass(frozen=True, eq=False)
class WeightedQuadratics:
    """The matrices of the clients (with a leading axis) and of the server, and everything that follows from them.

    >>> T7 = WeightedQuadratics.line(0.0, 1.0, 4.0)
    >>> T7.lower(np.array([0.5, 0.0, 0.5])).tolist()
    [2.0]
    """

    H: Array
    c: Array
    H0: Array
    c0: Array

    @classmethod
    def random(cls, clients: int = 3, d: int = 4, seed: int = 0) -> "WeightedQuadratics":
        """T5: random clients; the server's minimum lies between those of the clients."""
        rng = np.random.default_rng(seed)

        def positive(*lead: int) -> Array:
            root = rng.normal(size=(*lead, d, d))
            return 0.5 * np.eye(d) + root @ root.swapaxes(-1, -2) / d

        centres = rng.normal(size=(clients, d))
        shares = rng.dirichlet(np.full(clients, 2.0))
        return cls(positive(clients), centres, positive(), shares @ centres + 0.1 * rng.normal(size=d))

    @classmethod
    def line(cls, *centres: float, server: float = 0.0) -> "WeightedQuadratics":
        """T7: f_i = 1/2 (w - c_i)^2 with w a number."""
        c = np.array(centres, float).reshape(-1, 1)
        return cls(np.ones((len(c), 1, 1)), c, np.ones((1, 1)), np.array([server]))

    def lower(self, x: Array) -> Array:
        """w*(x)."""
        return np.linalg.solve(np.tensordot(x, self.H, 1), np.einsum("i,ijk,ik->j", x, self.H, self.c))

    def adjoint(self, x: Array) -> Array:
        """u*(x) = A(x)^-1 grad f_0(w*(x)); the multiplier of the primal-dual method is its negative."""
        return np.linalg.solve(np.tensordot(x, self.H, 1), self.H0 @ (self.lower(x) - self.c0))

    def gradient(self, x: Array) -> Array:
        """The gradient of f_0(w*(x)) in x."""
        return -np.einsum("ijk,ik,j->i", self.H, self.lower(x) - self.c, self.adjoint(x))

    def value(self, x: Array) -> float:
        """f_0(w*(x))."""
        away = self.lower(x) - self.c0
        return float(0.5 * away @ self.H0 @ away)

    def stationarity(self, x: Array, step: float = 0.001) -> float:
        """|x - Proj(x - step grad)|: 0 where no feasible direction descends."""
        return float(np.linalg.norm(x - project(x - step * self.gradient(x))))

    def solution(self) -> Array:
        """A stationary x."""
        return self._solution

    @cached_property
    def _solution(self) -> Array:
        """A stationary x, by projected gradient steps from equal weights: the longest steps that lead there."""
        start = np.full(len(self.H), 1 / len(self.H))
        candidates = [start]
        for step in (3.0, 1.0, 0.3, 0.1, 0.03, 0.01):
            x = start
            for _ in range(2_000):
                x = project(x - step * self.gradient(x))
            candidates.append(x)
        return min(candidates, key=self.stationarity)

    def task(
        self,
        batch_size: int | None = None,
        noise: float = 0.0,
        rows: int = 1,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> Task:
        """The task: the server holds f_0. One row of matrices for each holder or, with noise, a multiple of 4."""
        rng = np.random.default_rng((seed, 1))
        scatter = lambda H, c: {"H": scattered(H, rows, noise, rng), "c": scattered(c, rows, noise, rng)}
        clients = [{"train": scatter(*each)} for each in zip(self.H, self.c, strict=True)]
        x_star = self.solution()

        def metrics(x: Any, y: Any) -> dict[str, float]:
            x, y = np.asarray(x, float), np.asarray(y, float)
            return {
                "error": float(np.linalg.norm(x - x_star)),
                "stationarity": self.stationarity(x),
                "value": self.value(x),
                "lower_gap": float(np.linalg.norm(y - self.lower(x))),
            }

        return Task(
            _problem(*self.c.shape),
            clients,
            batch_size=batch_size,
            metrics=metrics,
            name="quadratic",
            options=options or {},
            server=scatter(self.H0, self.c0),
            shown=Presentation(
                headline={"error": "|x - x*|", "stationarity": "stationarity", "lower_gap": "|w - w*(x)|"},
                compare_by=["stationarity"],
            ),
            suggested=Suggestion(
                hyper={"*": {"lr_upper": 0.02, "lr_lower": 0.2, "lr_adjoint": 0.2, "local_steps": 1}},
            ),
        )
