"""SOBA and SABA against numpy, on rows whose batches and blocks the same keys name."""

from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.core.sampling import draw
from fedbilevel.engines.program import round_keys
from fedbilevel.tasks import Quadratic
from fedbilevel.testing import largest_difference

CLIENTS, ROWS = 2, 5
Q = Quadratic.random(clients=CLIENTS * ROWS, p=2, d=3, heterogeneity=0.5)
LOWER, UPPER = ("A", "B", "b"), ("P", "s", "R", "t")


def task(batch_size: int | None = 2) -> fb.Task:
    """Every client has five of the ten clients' matrices as its rows."""
    rows = lambda names, m: {k: getattr(Q, k)[m * ROWS : (m + 1) * ROWS] for k in names}
    clients = [{"train": rows(LOWER, m), "val": rows(UPPER, m)} for m in range(CLIENTS)]
    return fb.Task(Q.task().problem, clients, batch_size=batch_size)


def f_terms(client: int, rows: Any, z: Any) -> np.ndarray:
    """The directions of x, y and u that f gives, on these rows (a mean)."""
    P, s, R, t = (getattr(Q, k)[client * ROWS + np.asarray(rows)] for k in UPPER)
    x, y, _ = z
    fx, fy = np.einsum("nij,nj->i", R, x - t), np.einsum("nij,nj->i", P, y - s)
    return np.concatenate([fx, 0 * y, -fy]) / len(rows)


def g_terms(client: int, rows: Any, z: Any) -> np.ndarray:
    A, B, b = (getattr(Q, k)[client * ROWS + np.asarray(rows)] for k in LOWER)
    x, y, u = z
    cross, gy = np.einsum("nji,j->i", B, u), np.einsum("nij,j->i", A, y) - np.einsum("nij,j->i", B, x) - b.sum(0)
    return np.concatenate([cross, gy, np.einsum("nij,j->i", A, u)]) / len(rows)


def parts(z: np.ndarray) -> Any:
    return z[:2], z[2:5], z[5:]


def keys(seed: int, round: int) -> list[Any]:
    """The key of each client in the one exchange of a round."""
    first = jax.random.fold_in(round_keys(jax.random.key(seed), round)[1], 0)
    return [jax.random.fold_in(first, m) for m in range(CLIENTS)]


def test_soba_is_the_listing() -> None:
    z = np.zeros(8)
    for t in range(6):
        d = np.zeros(8)
        for m, key in enumerate(keys(4, t)):
            of_f, of_g = (np.asarray(draw(k, 2, ROWS, "replacement")) for k in jax.random.split(key))
            d += (f_terms(m, of_f, parts(z)) + g_terms(m, of_g, parts(z))) / CLIENTS
        z = z - np.repeat([0.1, 0.5, 0.5], [2, 3, 3]) / np.sqrt(t + 1) * d
    found = fb.solve(task(), fb.SOBA(), rounds=6, seed=4)
    assert largest_difference((found.x, found.y), (z[:2], z[2:5])) < 1e-12


def test_saba_is_the_listing() -> None:
    blocks = [range(0, 1), range(1, 3), range(3, 5)]  # of 5 rows, in 3 blocks: a row counts the same in each
    z, step = np.zeros(8), np.repeat([0.1, 0.3, 0.3], [2, 3, 3])
    remembered = np.zeros((CLIENTS, 2, 3, 8))
    for t in range(8):
        d = np.zeros(8)
        for m, key in enumerate(keys(4, t)):
            i, j = (int(jax.random.randint(k, (), 0, 3)) for k in jax.random.split(key))
            for kind, terms, block in ((0, f_terms, j), (1, g_terms, i)):
                table = remembered[m, kind]
                new = terms(m, blocks[block], parts(z)) * len(blocks[block]) * 3 / ROWS
                d += (new - table[block] + table.mean(0)) / CLIENTS
                table[block] = new
        z = z - step * d
    found = fb.solve(task(), fb.SABA(blocks=3), rounds=8, seed=4)
    assert largest_difference((found.x, found.y), (z[:2], z[2:5])) < 1e-12


def test_a_round_of_saba_sees_a_block() -> None:
    """Four oracles, one of two blocks of the one row that every client has."""
    assert fb.plan(Q.task(), fb.SABA(blocks=2)).samples == 2


def test_saba_has_no_noise_at_the_solution() -> None:
    """With mini-batches and constant steps, where SOBA has a floor; with 1 / sqrt(t), that floor falls."""
    exact = Q.solution()
    error = lambda algorithm, rounds: np.linalg.norm(
        np.asarray(fb.solve(task(1), algorithm, rounds=rounds, every=rounds).x) - exact
    )
    assert error(fb.SABA(0.05, 0.1, 0.1, blocks=5), 4000) < 1e-6
    floor = error(fb.SOBA(0.05, 0.1, 0.1), 4000)
    assert floor > 0.02
    falling = fb.SOBA("power(0.5, -0.5)", "power(1, -0.5)", "power(1, -0.5)")  # pyright: ignore[reportArgumentType]
    assert error(falling, 8000) < 0.7 * floor


def test_soba_with_constant_steps_is_fedbio_and_simfbo() -> None:
    full = [
        fb.solve(task(None), kind(0.1, 0.2, 0.2, **more), rounds=5).x
        for kind, more in ((fb.SOBA, {}), (fb.FedBiO, {"local_steps": 1}), (fb.SimFBO, {}))
    ]
    assert largest_difference(full[0], full[1]) < 1e-12
    assert largest_difference(full[0], full[2]) < 1e-12
