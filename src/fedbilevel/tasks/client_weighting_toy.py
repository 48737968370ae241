"""The toy problem of the primal-dual paper on client weighting: least squares plus a cosine.

Client i has, and the server likewise with i = 0::

    f_i(w) = 1/2 |A_i w - B_i|^2 + cos(a_i . w - b_i)

with Gaussian entries of variance 1 / sqrt(features) in A and a, 1 / sqrt(rows) in B and 1 in b, drawn again until
A'A - a a' has no eigenvalue below 0.1, which makes f_i 0.1-strongly convex. The server looks for the weights x of the
clients for which the minimiser w*(x) of sum_i x_i f_i has the least f_0.

Noise, if there is some, is in the data: every row of a client holds the same loss plus ``s (xi . v + 1/2 v' E v)``
with v = w - (w held constant), which is 0 with gradient s xi and Hessian s E. xi and the symmetric E are Gaussian,
drawn from a seed in the row, and every seed has a row with s = noise and one with s = -noise. So one row is a noisy
estimate, all rows are exact.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedbilevel.core import Problem
from fedbilevel.core.presentation import Presentation, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError
from fedbilevel.tasks.weighted_quadratics import project

Array = np.ndarray
SEEDS = 256  # of noise, for every loss: enough for a covariance close to that of white noise
# For the primal-dual method with K = 1, 5 or 10 inner steps. Without noise, lr_upper = 0.03 then comes within 1e-4 of
# the least f_0 in 200 rounds, for K = 5 and 10 as fast as exact gradient steps; K = 1 cycles from lr_upper = 0.1 on,
# where 5 and 10 still converge. With noise 0.5 and half of the clients, a tenth of it comes within 2 % in 500 rounds.
STEPS = {"lr_lower": 0.02, "lr_adjoint": 0.05, "augmentation": 2.0}


def _exact(y: Any, row: Any) -> jax.Array:
    return 0.5 * jnp.sum((row["A"] @ y - row["B"]) ** 2) + jnp.cos(row["a"] @ y - row["b"])


def _noise(y: Any, row: Any) -> jax.Array:
    first, second = jax.random.split(jax.random.key(row["seed"]))
    xi = jax.random.normal(first, y.shape, y.dtype)
    E = jnp.triu(jax.random.normal(second, 2 * y.shape, y.dtype))
    v = y - lax.stop_gradient(y)
    # v'(triu + triu' without the diagonal)v: all entries of E have the same deviation, on the diagonal, too.
    return row["scale"] * (xi @ v + v @ E @ v - 0.5 * jnp.diagonal(E) @ v**2)


def _loss(x: Any, y: Any, batch: Any) -> jax.Array:
    each = lambda row: _exact(y, row) + (_noise(y, row) if "seed" in row else 0)
    return jnp.mean(jax.vmap(each)(batch))


@cache  # so that problems of the same shape share their compiled code
def _problem(clients: int, features: int) -> Problem:
    start = lambda key: (np.full(clients, 1 / clients), np.zeros(features))
    return Problem(_loss, _loss, start, weighting=True)


@dataclass(frozen=True, eq=False)
class Toy:
    """The losses, with a leading axis: the server's first, then the clients'; and what follows from them, in double
    precision.
    """

    A: Array
    B: Array
    a: Array
    b: Array

    @classmethod
    def random(cls, clients: int, rows: int, features: int, rng: np.random.Generator) -> "Toy":
        """Drawn until all losses are 0.1-strongly convex."""
        convex: list[tuple[Array, ...]] = []
        for _ in range(1000):
            many = 100
            A = rng.normal(size=(many, rows, features)) * features**-0.25
            B = rng.normal(size=(many, rows)) * rows**-0.25
            a = rng.normal(size=(many, features)) * features**-0.25
            b = rng.normal(size=many)
            least = np.linalg.eigvalsh(A.swapaxes(1, 2) @ A - a[:, :, None] * a[:, None, :])[:, 0]
            convex += [(A[n], B[n], a[n], b[n]) for n in np.flatnonzero(least >= 0.1)]
            if len(convex) > clients:
                break
        else:
            raise FedbilevelError(
                f"client-weighting-toy: with {rows} rows and {features} features hardly any loss is 0.1-strongly "
                "convex: give more rows than features."
            )
        return cls(*(np.stack(parts) for parts in zip(*convex[: clients + 1], strict=True)))

    def gradients(self, w: Array) -> Array:
        """The gradients of all losses, one per row."""
        slope = np.sin(self.a @ w - self.b)
        return np.einsum("irj,ir->ij", self.A, self.A @ w - self.B) - slope[:, None] * self.a

    def hessian(self, x: Array, w: Array) -> Array:
        """Of the clients' losses with the weights x."""
        bend = x * np.cos(self.a[1:] @ w - self.b[1:])
        roots = np.sqrt(x)[:, None, None] * self.A[1:]
        roots = roots.reshape(-1, roots.shape[-1])
        return roots.T @ roots - (self.a[1:].T * bend) @ self.a[1:]

    def lower(self, x: Array) -> Array:
        """w*(x): Newton's method; a step is halved until the gradient gets shorter."""
        w = np.zeros(self.a.shape[1])
        gradient = x @ self.gradients(w)[1:]
        for _ in range(100):
            direction = np.linalg.solve(self.hessian(x, w), gradient)
            for length in 0.5 ** np.arange(30):
                new = w - length * direction
                shorter = x @ self.gradients(new)[1:]
                if np.linalg.norm(shorter) < np.linalg.norm(gradient):
                    break
            else:
                break  # nothing but rounding is left
            w, gradient = new, shorter
        return w

    def gradient(self, x: Array, w: Array | None = None) -> Array:
        """The gradient of f_0(w*(x)) in x."""
        w = self.lower(x) if w is None else w
        server, *clients = self.gradients(w)
        return -np.stack(clients) @ np.linalg.solve(self.hessian(x, w), server)

    def value(self, w: Array) -> float:
        """f_0(w)."""
        return float(0.5 * np.sum((self.A[0] @ w - self.B[0]) ** 2) + np.cos(self.a[0] @ w - self.b[0]))

    def metrics(self, x: Any, y: Any) -> dict[str, float]:
        """f_0(w*(x)), how far x is from stationary, and how far y is from w*(x)."""
        x, y = np.asarray(x, float), np.asarray(y, float)
        w = self.lower(x)
        stationarity = np.linalg.norm(x - project(x - 0.001 * self.gradient(x, w)))
        return {
            "value": self.value(w),
            "stationarity": float(stationarity),
            "lower_gap": float(np.linalg.norm(y - w)),
        }

    def rows(self, number: int, noise: float, rng: np.random.Generator) -> dict[str, Array]:
        """The rows of one loss: one if there is no noise, else two for every seed."""
        many = 2 * SEEDS if noise else 1
        repeated = lambda value: np.broadcast_to(value, (many, *np.shape(value)))
        made = {name: repeated(getattr(self, name)[number]) for name in ("A", "B", "a", "b")}
        if noise:
            made["seed"] = np.repeat(rng.integers(2**32, size=SEEDS, dtype=np.uint32), 2)
            made["scale"] = np.tile([noise, -noise], SEEDS)
        return made


def client_weighting_toy(
    clients: int = 15, rows: int = 30, features: int = 20, noise: float = 0.0, seed: int = 0
) -> Task:
    """Least squares plus a cosine on every client and on the server; the clients' weights minimise the server's loss.

    Args:
        clients: number of clients.
        rows: length of B, the right-hand side of the least squares.
        features: dimension of the model.
        noise: standard deviation of the white noise in every gradient entry and Hessian entry; the paper has 0.5.
        seed: of the losses and of the noise.
    """
    if min(clients, rows, features) < 1 or not 0 <= noise < np.inf or seed < 0:
        raise FedbilevelError(
            "client-weighting-toy: clients, rows and features must be at least 1, noise and seed not negative."
        )
    rng = np.random.default_rng(seed)
    toy = Toy.random(clients, rows, features, rng)
    server, *others = (toy.rows(number, noise, rng) for number in range(clients + 1))
    return Task(
        _problem(clients, features),
        [{"train": one} for one in others],
        batch_size=1 if noise else None,
        metrics=toy.metrics,
        choice=lambda x, y: toy.value(toy.lower(np.asarray(x, float))),  # the objective itself, as it is known
        name="client-weighting-toy",
        options={"clients": clients, "rows": rows, "features": features, "noise": noise, "seed": seed},
        server=server,
        shown=Presentation(
            headline={"value": "f_0(w*(x))", "stationarity": "|x - Proj(x - 0.001 grad)|"},
        ),
        suggested=Suggestion(
            hyper={
                "primal-dual": {"lr_upper": 0.003 if noise else 0.03, **STEPS},
                "*": {"lr_upper": 0.003 if noise else 0.01, "lr_lower": 0.02, "lr_adjoint": 0.02, "local_steps": 1},
            },
        ),
    )
