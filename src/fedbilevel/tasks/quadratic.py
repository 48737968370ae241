"""Quadratic bilevel problems with closed-form solutions: what algorithms are checked against.

Client m has::

    g_m(x, y) = 1/2 y' A_m y - y' (B_m x + b_m)
    f_m(x, y) = 1/2 (y - s_m)' P_m (y - s_m) + 1/2 (x - t_m)' R_m (x - t_m)

so that, with bars for weighted means, y*(x) = Abar^-1 (Bbar x + bbar), u* = Abar^-1 mean P_m (y* - s_m) and grad h =
mean R_m (x - t_m) + Bbar' u*. With a local lower level every client has its own y_m*(x) and u_m*.

With noise, a client has many rows, each with noise in every coefficient. Their mean has exactly the derivatives of g_m
and f_m, so that batches are random and the closed forms stay exact (f_m grows by a constant). Copies of clients draw
batches of their own, and change no mean.
"""

from collections.abc import Mapping
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
from fedbilevel.tasks.weighted_quadratics import WeightedQuadratics, scattered

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

    def task(
        self,
        batch_size: int | None = None,
        noise: float = 0.0,
        rows: int = 1,
        copies: int = 1,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> Task:
        """The task: one row of matrices per client, or, with noise, many; and so many copies of each client."""
        rng = np.random.default_rng((seed, 1))
        scatter = lambda names, m: {k: scattered(getattr(self, k)[m], rows, noise, rng) for k in names}
        clients = [{"train": scatter("ABb", m), "val": scatter("PsRt", m)} for m in range(len(self.A))]
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
            clients * copies,
            np.tile(self.weights, copies),
            batch_size,
            metrics=metrics,
            name="quadratic",
            options=options or {},
            shown=Presentation(
                headline={"error": "|x - x*|", "hypergradient": "|grad h|", "lower_gap": "|y - y*(x)|"},
                compare_by=["hypergradient"],
            ),
            suggested=Suggestion(
                hyper={
                    "*": {"lr_upper": 0.1, "lr_lower": 0.2, "lr_adjoint": 0.2, "local_steps": 1},
                    # Their y and theta are coupled by the proximal term.
                    **{name: {"lr_upper": 0.1} for name in ("mefbo", "mefbo-storm", "meha")},
                }
            ),
        )


def quadratic(
    variant: str = "T1",
    clients: int = 5,
    p: int = 4,
    d: int = 6,
    heterogeneity: float = 1.0,
    noise: float = 0.0,
    rows: int = 100,
    batch_size: int = 1,
    copies: int = 1,
    seed: int = 0,
) -> Task:
    """A quadratic problem with known solution, with exact or noisy gradients.

    Args:
        variant: T1 random heterogeneous clients, T2 the scalar example of bias, T3 identical clients, T4 is T1 with a
            local lower level, T5 clients to be weighted.
        clients: number of clients (not for T2).
        p: dimension of x (not for T2 and T5).
        d: dimension of y (not for T2).
        heterogeneity: how much clients differ (T1, T4).
        noise: standard deviation of the noise in every coefficient of a row. 0: a client has one row, without noise,
            and the next two options do not matter.
        rows: rows of a client, a multiple of 4. Their mean is free of noise, and so is the solution.
        batch_size: rows per batch; 0 is all.
        copies: how often every client is there. Copies leave the problem as it is, but average over more batches (not
            for T5).
        seed: of the random matrices.
    """
    if variant not in ("T1", "T2", "T3", "T4", "T5"):
        raise FedbilevelError(f"quadratic: variant is T1, T2, T3, T4 or T5, not '{variant}'.")
    if min(clients, p, d, copies) < 1 or not (heterogeneity >= 0 and noise >= 0) or min(batch_size, seed) < 0:
        raise FedbilevelError(
            "quadratic: clients, p, d and copies must be at least 1, heterogeneity, noise, batch_size and seed not "
            "negative."
        )
    if noise and (rows < 4 or rows % 4):
        raise FedbilevelError(f"quadratic: with noise, rows must be a multiple of 4, but is {rows}.")
    if variant == "T5" and copies > 1:
        raise FedbilevelError("quadratic: T5 has no copies of clients, as each would have a weight of its own.")
    options = {"variant": variant, "clients": clients, "p": p, "d": d, "heterogeneity": heterogeneity, "seed": seed}
    options |= {"noise": noise, "rows": rows, "batch_size": batch_size, "copies": copies}
    noisy: dict[str, Any] = {"noise": noise, "rows": rows if noise else 1, "seed": seed, "options": options}
    batch = batch_size or None if noise else None
    if variant == "T5":
        return WeightedQuadratics.random(clients, d, seed).task(batch, **noisy)
    if variant == "T2":
        made = Quadratic.scalar()
    else:
        made = Quadratic.random(clients, p, d, 0.0 if variant == "T3" else heterogeneity, seed)
    made = made.local() if variant == "T4" else made
    return made.task(batch, **noisy, copies=copies)
