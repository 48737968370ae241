"""The constants of a task against the matrices of quadratics, and what follows for steps."""

from itertools import combinations
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.diagnostics.constants import Constants, lanczos
from fedbilevel.diagnostics.theorems import bounds, words
from fedbilevel.tasks import Quadratic
from helpers import sample_weights

Q = Quadratic.random(clients=4, p=3, d=5)
FOUND = Constants(2.0, 4.0, 4.0, 0.5, 1.0, 0.0, 0.0, 3.0, 1.0, 1.0, 1.0, 1.0, 0.5, 4)
norm = lambda matrices: max(np.linalg.norm(m, 2) for m in matrices)


def joint(q: Quadratic, m: int) -> tuple[np.ndarray, np.ndarray]:
    """The Hessians of f_m and g_m in (x, y)."""
    p, d = q.B.shape[2], q.B.shape[1]
    f = np.block([[q.R[m], np.zeros((p, d))], [np.zeros((d, p)), q.P[m]]])
    return f, np.block([[np.zeros((p, p)), -q.B[m].T], [-q.B[m], q.A[m]]])


def test_constants_of_a_quadratic() -> None:
    """All agree with the matrices to 5 %, as far as they do not depend on the point; the gradients at the start are a
    lower bound of what does."""
    c = fb.measure_constants(Q.task())
    f, g = zip(*(joint(Q, m) for m in range(4)), strict=True)
    pairs = list(combinations(range(4), 2))
    expected = {
        "f_smooth": norm(f),
        "g_smooth": norm(g),
        "y_smooth": norm(Q.A),
        "convex": np.linalg.eigvalsh(Q.A).min(),
        "cross": norm(Q.B),
        "hessian_differ": norm([Q.A[a] - Q.A[b] for a, b in pairs]),
        "cross_differ": norm([Q.B[a] - Q.B[b] for a, b in pairs]),
    }
    for name, value in expected.items():
        assert getattr(c, name) == pytest.approx(value, rel=0.05), name
    assert (c.hessian_change, c.cross_change, c.noise, c.clients) == (0, 0, 0, 4)
    at_start = [np.concatenate([Q.R[m] @ Q.t[m], Q.P[m] @ Q.s[m]]) for m in range(4)]
    assert c.gradient >= 0.999 * max(np.linalg.norm(v) for v in at_start)
    assert c.f_differ >= 0.999 * max(np.linalg.norm(at_start[a] - at_start[b]) for a, b in pairs)
    assert c.g_differ >= 0.999 * max(np.linalg.norm(Q.b[a] - Q.b[b]) for a, b in pairs)


def test_the_noise_of_batches() -> None:
    """One of two rows: the distance from their mean is half of that of the rows."""
    two = lambda names: {k: np.stack([getattr(Q, k)[0], getattr(Q, k)[1]]) for k in names}
    data = [{"train": two(("A", "B", "b")), "val": two(("P", "s", "R", "t"))}]
    c = fb.measure_constants(fb.Task(Q.task().problem, data, batch_size=1), x=np.zeros(3), y=np.zeros(5))
    f = np.linalg.norm(np.concatenate([Q.R[0] @ Q.t[0] - Q.R[1] @ Q.t[1], Q.P[0] @ Q.s[0] - Q.P[1] @ Q.s[1]]) / 2)
    assert c.noise >= 0.999 * f  # every draw is this far away, at the start


def test_changes_of_the_curvature() -> None:
    """g = cosh(y - 1): between the start and where y has descended, d2yy g changes as the secant of cosh says."""
    lower = lambda x, y, batch: jnp.sum(jnp.cosh(y - 1)) + 0 * jnp.mean(batch) * jnp.sum(x)
    upper = lambda x, y, batch: jnp.sum((y - x) ** 2) + 0 * jnp.mean(batch)
    problem = fb.Problem(upper, lower, lambda key: (np.zeros(1), np.array([3.0])))
    c = fb.measure_constants(fb.Task(problem, [{"train": np.ones(2), "val": np.ones(2)}], batch_size=None))
    assert c.y_smooth == pytest.approx(np.cosh(2.0))
    assert 1 <= c.convex < 1.2
    y = 1 + np.arccosh(c.convex)
    assert c.hessian_change == pytest.approx((np.cosh(2.0) - c.convex) / (3 - y), rel=1e-6)


def test_lanczos_of_a_known_matrix() -> None:
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.normal(size=(200, 200)))
    values = np.concatenate([[-3.0], np.linspace(0.1, 5, 198), [8.0]])
    matrix = jnp.asarray(basis * values @ basis.T)
    low, high = jax.jit(lambda v: lanczos(lambda w: matrix @ w, v, 30))(jnp.asarray(rng.normal(size=200)))
    assert float(low) == pytest.approx(-3, rel=1e-3)
    assert float(high) == pytest.approx(8, rel=1e-3)
    one = lanczos(lambda w: 2 * w, jnp.ones(7), 30)  # exhausted at once
    assert np.allclose(one, 2)


def by_name(name: str, **options: Any) -> dict[str, float]:
    return {bound.name: bound.value for bound in bounds(FOUND, **options)[name]}


def test_what_the_theorems_ask() -> None:
    """L = 4, mu = 1/2, kappa = 8, C_f = 3, sigma = 1/2, no change of curvature: the formulas by hand."""
    fedbio = by_name("fedbio", local_steps=2)
    tau = min(1 / (128 * 2 * 4), 1 / (144 * 8 * 4))
    gamma = min(1 / 64, tau / (36 * 8 * 4), 1 / 16)
    assert fedbio == pytest.approx(
        {"lr_adjoint": tau, "lr_lower": gamma, "lr_upper": 0.5 * gamma / (36 * 8 * 4), "radius": 6.0}
    )
    acc = by_name("fedbioacc", local_steps=2, batch=4, clients=5)
    assert acc["c_upper"] == pytest.approx(64 / 180 + 2 / 1200)
    assert acc["c_lower"] == acc["c_adjoint"] == pytest.approx(48**2 / 5 + 2 / 1200)
    assert acc["lr_lower"] == pytest.approx(1 / (8 * sqrt(1 / 64 + 81 * 64 / 32 + 9 * 16)))
    assert acc["delta of the rate"] == pytest.approx((20 * 0.5) ** (2 / 3) / 64 ** (1 / 3))
    assert acc["u0 of the rate"] == pytest.approx(100 * max(256 * 8 * 16, acc["c_lower"] ** 1.5))
    mefbo = by_name("mefbo", local_steps=2, prox=0.05)
    assert mefbo["prox"] == pytest.approx(1 / 8)
    assert mefbo["lr_prox"] == pytest.approx(4 / 5 / (20 - 4))
    assert mefbo["local_lr_upper"] == pytest.approx(min(1 / (18 * 416 * 2 * 0.05), 0.05 / (6 * sqrt(2 * 0.05))))
    assert by_name("simfbo")["lr_lower"] == pytest.approx(0.5)
    assert by_name("fednest")["lr_adjoint"] == pytest.approx(0.25)


def test_without_strong_convexity() -> None:
    flat = FOUND._replace(convex=-0.1)
    assert not bounds(flat)["fedbio"]
    assert bounds(flat)["mefbo"]  # it does not need convexity
    assert "not strongly convex" in words(flat)[1]
    assert "kappa = L / mu = 8" in words(FOUND)[1]


def test_a_private_x() -> None:
    c = fb.measure_constants(sample_weights(clients=2))
    assert c.convex >= 0.19  # its weight decay, 0.1 |y|^2
