"""Quadratic bilevel problems with closed-form solutions: what algorithms are checked against.

Client m has::

    g_m(x, y) = 1/2 y' A_m y - y' (B_m x + b_m)
    f_m(x, y) = 1/2 (y - s_m)' P_m (y - s_m) + 1/2 (x - t_m)' R_m (x - t_m)

so that, with bars for weighted means, y*(x) = Abar^-1 (Bbar x + bbar), u* = Abar^-1 mean P_m (y* - s_m) and grad h =
mean R_m (x - t_m) + Bbar' u*. With a local lower level every client has its own y_m*(x) and u_m*.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Problem
from fedbilevel.core.presentation import Presentation, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError
from fedbilevel.tasks.weighted_quadratics import WeightedQuadratics

Array = np.ndarray
LowerLevel = Literal["global", "local"]


def _lower(x: Any, y: Any, batch: Any) -> jax.Array:
    each = lambda r: 0.5 * y @ r["A"] @ y - y @ (r["B"] @ x + r["b"])
    return jnp.mean(jax.vmap(each)(batch))


def _upper(x: Any, y: Any, batch: Any) -> jax.Array:
    each = lambda r: 0.5 * (y - r["s"]) @ r["P"] @ (y - r["s"]) + 0.5 * (x - r["t"]) @ r["R"] @ (x - r["t"])
    return jnp.mean(jax.vmap(each)(batch))


@cache  # so that quadratics of the same shape share their compiled code
def _problem(p: int, d: int, lower_level: LowerLevel) -> Problem:
    return Problem(_upper, _lower, lambda key: (np.zeros(p), np.zeros(d)), lower_level=lower_level)


@dataclass(frozen=True, eq=False)
class Quadratic:
    """The matrices, with a leading axis of clients, and everything that follows from them.

    >>> T2 = Quadratic.scalar()
    >>> T2.solution().tolist(), T2.lower(T2.solution()).tolist(), T2.local().solution().tolist()
    ([4.0], [2.0], [0.5])
    """

    A: Array
    B: Array
    b: Array
    P: Array
    s: Array
    R: Array
    t: Array
    weights: Array = field(default_factory=lambda: np.array([]))
    lower_level: LowerLevel = "global"

    def __post_init__(self) -> None:
        weights = self.weights if len(self.weights) else np.ones(len(self.A))
        object.__setattr__(self, "weights", weights / weights.sum())

    @classmethod
    def random(cls, clients: int = 5, p: int = 4, d: int = 6, heterogeneity: float = 1.0, seed: int = 0) -> "Quadratic":
        """T1: random clients around a common one; heterogeneity 0 makes them identical (T3)."""
        rng = np.random.default_rng(seed)

        def near(*shape: int) -> Array:
            common = rng.normal(size=shape)
            return (common + heterogeneity * rng.normal(size=(clients, *shape))) / np.sqrt(1 + heterogeneity**2)

        def positive(size: int, least: float) -> Array:
            root = near(size, size)
            return least * np.eye(size) + root @ root.swapaxes(-1, -2) / size

        return cls(
            A=positive(d, 0.5), B=near(d, p) / np.sqrt(4 * p), b=near(d),
            P=positive(d, 0.1), s=near(d), R=positive(p, 0.1), t=near(p),
        )  # fmt: skip

    @classmethod
    def scalar(cls) -> "Quadratic":
        """T2: two clients, x and y numbers. The solution is 4; the mean of local hypergradients leads to 2, the
        local lower level to 0.5.
        """
        column = lambda *values: np.array(values, float).reshape(2, 1)
        matrix = lambda *values: np.array(values, float).reshape(2, 1, 1)
        return cls(
            A=matrix(1, 3),
            B=matrix(2, 0),
            b=column(0, 0),
            P=matrix(1, 1),
            s=column(1, 3),
            R=matrix(0, 0),
            t=column(0, 0),
        )

    def local(self) -> "Quadratic":
        """T4: the same data with a local lower level."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Quadratic(**{**fields, "lower_level": "local"})

    def mean(self, values: Array) -> Array:
        """The weighted mean over clients."""
        return np.tensordot(self.weights, values, 1)

    def lower(self, x: Array) -> Array:
        """y*(x); with a local lower level, one row per client."""
        if self.lower_level == "local":
            return np.linalg.solve(self.A, (self.B @ x + self.b)[..., None])[..., 0]
        return np.linalg.solve(self.mean(self.A), self.mean(self.B) @ x + self.mean(self.b))

    def adjoint(self, x: Array, y: Array | None = None) -> Array:
        """u*(x, y), by default at y = y*(x)."""
        y = self.lower(x) if y is None else y
        pull = np.einsum("mij,mj->mi", self.P, y - self.s)
        if self.lower_level == "local":
            return np.linalg.solve(self.A, pull[..., None])[..., 0]
        return np.linalg.solve(self.mean(self.A), self.mean(pull))

    def hypergradient(self, x: Array) -> Array:
        """grad h(x)."""
        direct = np.einsum("mij,mj->mi", self.R, x - self.t)
        u = np.broadcast_to(self.adjoint(x), self.b.shape)
        if self.lower_level == "local":
            return self.mean(direct + np.einsum("mji,mj->mi", self.B, u))
        return self.mean(direct) + self.mean(self.B).T @ self.adjoint(x)

    def solution(self) -> Array:
        """x*: grad h is affine in x, so two evaluations per coordinate give it."""
        p = self.B.shape[-1]
        offset = self.hypergradient(np.zeros(p))
        slope = np.stack([self.hypergradient(e) - offset for e in np.eye(p)], axis=1)
        return np.linalg.solve(slope, -offset)

    def task(self, batch_size: int | None = None, **options: Any) -> Task:
        """The task, one row of matrices per client."""
        clients = [
            {
                "train": {k: getattr(self, k)[m : m + 1] for k in ("A", "B", "b")},
                "val": {k: getattr(self, k)[m : m + 1] for k in ("P", "s", "R", "t")},
            }
            for m in range(len(self.A))
        ]
        x_star = self.solution()

        def metrics(x: Any, y: Any) -> dict[str, float]:
            x, y = np.asarray(x, float), np.asarray(y, float)
            with np.errstate(over="ignore", invalid="ignore"):  # a diverging run has large numbers
                return {
                    "error": float(np.linalg.norm(x - x_star)),
                    "hypergradient": float(np.linalg.norm(self.hypergradient(x))),
                    "lower_gap": float(np.linalg.norm(y - self.lower(x))),
                }

        return Task(
            _problem(self.B.shape[-1], self.B.shape[-2], self.lower_level),
            clients,
            self.weights,
            batch_size,
            metrics=metrics,
            name="quadratic",
            options=options,
            shown=Presentation(
                headline={"error": "|x - x*|", "hypergradient": "|grad h|", "lower_gap": "|y - y*(x)|"},
                compare_by=["hypergradient"],
            ),
            suggested=Suggestion(
                hyper={
                    "*": {"lr_upper": 0.1, "lr_lower": 0.2, "lr_adjoint": 0.2, "local_steps": 1},
                    "mefbo": {"lr_upper": 0.1},  # its y and theta are coupled by the proximal term
                }
            ),
        )


def quadratic(
    variant: str = "T1", clients: int = 5, p: int = 4, d: int = 6, heterogeneity: float = 1.0, seed: int = 0
) -> Task:
    """A quadratic problem with known solution.

    Args:
        variant: T1 random heterogeneous clients, T2 the scalar example of bias, T3 identical clients, T4 is T1 with a
            local lower level, T5 clients to be weighted.
        clients: number of clients (not for T2).
        p: dimension of x (not for T2 and T5).
        d: dimension of y (not for T2).
        heterogeneity: how much clients differ (T1, T4).
        seed: of the random matrices.
    """
    if variant not in ("T1", "T2", "T3", "T4", "T5"):
        raise FedbilevelError(f"quadratic: variant is T1, T2, T3, T4 or T5, not '{variant}'.")
    if min(clients, p, d) < 1 or not heterogeneity >= 0 or seed < 0:
        raise FedbilevelError("quadratic: clients, p and d must be at least 1, heterogeneity and seed not negative.")
    options = {"variant": variant, "clients": clients, "p": p, "d": d, "heterogeneity": heterogeneity, "seed": seed}
    if variant == "T2":
        return Quadratic.scalar().task(**options)
    if variant == "T5":
        return WeightedQuadratics.random(clients, d, seed).task(**options)
    made = Quadratic.random(clients, p, d, 0.0 if variant == "T3" else heterogeneity, seed)
    return (made.local() if variant == "T4" else made).task(**options)
