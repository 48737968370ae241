"""Algorithms that use every client's own hypergradient, and compressed ones: limits, costs, engines.

Expected numbers are derived from the problem, never from a run.
"""

import dataclasses
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from derivations import mean_of_own, own_hypergradients, own_inverses, restarted
from fedbilevel.algorithms.commfedbio import CommFedBiO
from fedbilevel.algorithms.fedbio_local import DistBiO, FedBiOLocal
from fedbilevel.algorithms.fedbioacc_local import DistBiOAcc, FedBiOAccLocal
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM
from fedbilevel.core import Tally
from fedbilevel.core.vectors import Vector
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.participation import Uniform
from fedbilevel.engines.simulation import Simulation
from fedbilevel.mathematics.compression import top_k
from fedbilevel.mathematics.hypergradient import Pair
from fedbilevel.mathematics.neumann import neumann_hypergradient
from fedbilevel.storage import arrays as messages
from fedbilevel.tasks import Quadratic
from fedbilevel.testing import identical

T1 = Quadratic.random(clients=5, p=4, d=6)
T2 = Quadratic.scalar()
TAU = 0.3  # below 1 / L on all of them: the largest eigenvalue of T1 is below 2.9, that of T2 is 3
NO_FORGETTING = {"c_upper": 0.0, "c_lower": 0.0}
KINDS = [FedBiOLocal, FedBiOAccLocal, LocalBSGVRM, CommFedBiO]


# The Neumann series


def merged(q: Quadratic, batch_size: int | None) -> fb.Client:
    """One client whose rows are the clients of a quadratic."""
    made = q.task()
    rows = jax.tree.map(lambda *parts: np.concatenate(parts), *made.clients)
    task = fb.Task(made.problem, [rows], batch_size=batch_size)
    return task.layout.client(task.problem, task.data, 0, jnp.asarray(1.0))


def somewhere(p: int = 3, d: int = 4, seed: int = 2) -> Pair:
    rng = np.random.default_rng(seed)
    return Pair(Vector(jnp.asarray(rng.normal(size=p)), "x"), Vector(jnp.asarray(rng.normal(size=d)), "y"))


@pytest.mark.parametrize("products", [0, 1, 7])
def test_the_series_has_one_term_more_than_products(products: int) -> None:
    q = Quadratic.random(clients=1, p=3, d=4, seed=1)
    client, z = merged(q, batch_size=None), somewhere()
    found = neumann_hypergradient(client, z, jax.random.key(0), TAU, products)
    expected = own_hypergradients(q, np.asarray(z.x.tree), np.asarray(z.y.tree), own_inverses(q, TAU, products + 1))[0]
    np.testing.assert_allclose(found.tree, expected, atol=1e-13)
    counted = replace(client, tally=Tally())
    neumann_hypergradient(counted, z, jax.random.key(0), TAU, products)
    assert {k: v for k, v in counted.tally.items() if v} == {"Gf": 1, "J": 1} | ({"H": products} if products else {})


def test_the_truncated_bias_is_below_the_bound_of_the_paper() -> None:
    z = somewhere(4, 6)
    x, y = np.asarray(z.x.tree), np.asarray(z.y.tree)
    mu = np.linalg.eigvalsh(T1.A).min(axis=1)
    force = np.linalg.norm(np.einsum("mij,mj->mi", T1.P, y - T1.s), axis=1) * np.linalg.norm(T1.B, 2, axis=(1, 2))
    for products in (1, 5, 20):
        exact, cut = (own_hypergradients(T1, x, y, own_inverses(T1, TAU, n)) for n in (None, products + 1))
        assert np.all(np.linalg.norm(exact - cut, axis=1) <= force / mu * (1 - TAU * mu) ** (products + 1) + 1e-14)


def test_sampled_hessians_are_independent() -> None:
    """Then the mean of the estimate is the series with the mean Hessian; one Hessian used again would show."""
    column, matrix = np.array([[-5.0], [-5.0]]), np.ones((2, 1, 1))
    q = Quadratic(np.array([[[0.2]], [[3.0]]]), matrix, 0 * column, matrix, column, 0 * matrix, 0 * column)
    client = merged(q, batch_size=1)
    z, products = Pair(Vector(jnp.zeros(1), "x"), Vector(jnp.zeros(1), "y")), 4
    keys = jax.random.split(jax.random.key(5), 4000)
    estimate = jax.jit(jax.vmap(lambda k: neumann_hypergradient(client, z, k, TAU, products).tree))
    estimates = np.asarray(estimate(keys))
    error = estimates.std() / np.sqrt(len(keys))
    series = lambda A: 5 * TAU * sum((1 - TAU * A) ** k for k in range(products + 1))  # 5 is grad_y f
    assert abs(estimates.mean() - series(1.6)) < 4 * error
    assert abs(estimates.mean() - (series(0.2) + series(3.0)) / 2) > 20 * error


def test_the_same_key_names_the_same_batches_at_two_points() -> None:
    """On given rows of a quadratic the estimate is affine in the point."""
    client = merged(Quadratic.random(clients=3, p=3, d=4, seed=1), batch_size=1)
    a, b = somewhere(seed=3), somewhere(seed=4)
    middle = Pair(0.5 * (a.x + b.x), 0.5 * (a.y + b.y))
    estimate = jax.jit(lambda z, key: neumann_hypergradient(client, z, key, TAU, 3).tree)
    for seed in range(5):
        at = [estimate(z, jax.random.key(seed)) for z in (a, b, middle)]
        np.testing.assert_allclose(0.5 * (at[0] + at[1]), at[2], atol=1e-13)


# Limits


def test_the_error_of_compressed_adjoints_is_proportional_to_their_step() -> None:
    """Held alpha n_u, so that every run of the subroutine is as long. The iterates go round, so errors are averaged."""
    goal = T1.adjoint(T1.solution())

    def error(alpha: float) -> float:
        engine = Simulation(T1.task(), CommFedBiO(0.3, 0.3, alpha, 1, round(5 / alpha), entries=2))
        state = engine.advance(engine.start(seed=0), 100)
        errors = []
        for _ in range(30):
            state = engine.advance(state, 1)
            errors.append(np.linalg.norm(np.asarray(state.server.u.tree) - goal))
        return float(np.mean(errors))

    whole, half = error(0.1), error(0.05)
    assert half > 1e-3
    assert 1.5 < whole / half < 2.6


def test_what_top_k_leaves_is_the_rest() -> None:
    v = Vector({"a": jnp.array([[1.0, -5.0], [0.5, 2.0]]), "b": jnp.array([-3.0])}, "y")
    values, indices, rest = top_k(v, 2)
    assert (values.tolist(), indices.tolist()) == ([-5.0, -3.0], [1, 4])
    np.testing.assert_array_equal(rest.flat().at[indices].add(values), v.flat())
    assert float(jnp.abs(top_k(v, 9)[2].flat()).max()) == 0


def test_constraints_hold_for_local_variables() -> None:
    """The projection of the gradient step stands still, and every client's y is feasible."""
    task = T1.local().task()
    problem = replace(task.problem, project_x=fb.vectors.box(-0.05, 0.05), project_y=fb.vectors.box(-1.0, 1.0))
    for kind in (DistBiO, DistBiOAcc):
        result = fb.solve(replace(task, problem=problem), kind(0.1, 0.2, TAU, 5), rounds=400, every=400)
        x, y = np.asarray(result.x), np.asarray(result.y)
        assert np.max(np.abs(x)) <= 0.05
        assert np.max(np.abs(y)) == 1
        slope = np.einsum("mij,mj->mi", T1.A, y) - T1.B @ x - T1.b
        np.testing.assert_allclose(y, np.clip(y - 0.2 * slope, -1, 1), atol=1e-9)
        hyper = T1.mean(own_hypergradients(T1, x, y, own_inverses(T1, TAU, 6)))
        np.testing.assert_allclose(x, np.clip(x - 0.1 * hyper, -0.05, 0.05), atol=1e-9)


def test_many_steps_from_the_start_are_as_good_as_steps_that_go_on() -> None:
    """Where a y that starts again comes to rest is what the contract derives; many steps lead to y* itself."""
    few, many = restarted(T1.local(), 0.2, 4, TAU, 6), restarted(T1.local(), 0.2, 400, TAU, 6)
    exact = mean_of_own(T1.local(), TAU, 6)
    np.testing.assert_allclose(many, exact, atol=1e-9)
    assert np.linalg.norm(few - exact) > 0.01


def test_one_key_names_the_same_rows_of_both_losses() -> None:
    """With a shared batch the row numbers of f and g agree: both losses see the same task."""
    rows = {"row": jnp.arange(7.0)}
    problem = fb.Problem(
        upper=lambda x, y, batch: y * batch["row"].mean(),
        lower=lambda x, y, batch: 0.5 * y**2 - x * y * batch["row"].mean(),
        init=lambda key: (0.0, 0.0),
        lower_level="local",
    )
    task = fb.Task(problem, [{"train": rows, "val": rows}], batch_size=1)
    client = task.layout.client(task.problem, task.data, 0, jnp.asarray(1.0))
    z = Pair(Vector(jnp.zeros(()), "x"), Vector(jnp.zeros(()), "y"))
    for seed in range(9):  # the hypergradient is row of f times row of g: a square
        found = neumann_hypergradient(client, z, jax.random.key(seed), 1.0, 0, shared_batch=True)
        assert float(found.tree) ** 0.5 % 1 == 0


# Engines, seeds, clients

ALGORITHMS = [
    FedBiOLocal(0.1, 0.2, 0.2, 3, local_steps=2),
    FedBiOAccLocal(0.1, 0.2, 0.2, 3, local_steps=2, rate="cube_root(1, 1)"),
    LocalBSGVRM(0.1, 0.2, 0.2, 3, local_steps=2),
    CommFedBiO(0.1, 0.2, 0.2, 2, 3, entries=2),
]
name = lambda algorithm: type(algorithm).__name__


@pytest.mark.parametrize("steps", [1, 3])
def test_clients_that_were_away_start_their_momentum_again(steps: int) -> None:
    """Without forgetting and with all the data, omega is the gradient at the client's own point, however long it was
    away; a momentum kept from an old x would be wrong for ever."""
    algorithm = FedBiOAccLocal(0.1, 0.2, TAU, 3, local_steps=steps, **NO_FORGETTING)
    engine = Simulation(T1.local().task(), algorithm, Uniform(2))
    state = engine.advance(engine.start(seed=0), 9)
    (x, y), omega, t = (np.asarray(v.tree) for v in state.memory.z), state.memory.d.y.tree, np.asarray(state.memory.t)
    slope = np.einsum("mij,mj->mi", T1.A, y) - np.einsum("mij,mj->mi", T1.B, x) - T1.b
    assert len(set(t.tolist())) > 1  # some were away
    assert np.all(t > 0)  # and all have been there
    np.testing.assert_allclose(omega, slope, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS[:2], ids=name)
def test_local_variables_never_leave_their_client(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No message holds an array of the size of y, except the answer to 'reveal'."""
    sizes: list[tuple[str, list[int]]] = []
    engine = Local(T1.local().task(), algorithm)
    for party in engine.parties:

        def spy(message: bytes, handle: Any = party.handle) -> bytes:
            answer = handle(message)
            action = messages.decode(message)[0]["action"]
            sizes.extend((action, [a.size for a in messages.decode(m)[1].values()]) for m in (message, answer))
            return answer

        monkeypatch.setattr(party, "handle", spy)
    state = engine.advance(engine.start(seed=0), 2)
    assert all(6 not in each for _, each in sizes)
    engine.solution(state)
    assert any(6 in each for action, each in sizes if action == "reveal")


@pytest.mark.parametrize(("dist", "fed"), [(DistBiO, FedBiOLocal), (DistBiOAcc, FedBiOAccLocal)])
def test_distributed_variants_average_after_every_step(dist: Any, fed: Any) -> None:
    steps = {"lr_upper": 0.1, "lr_lower": 0.2, "lr_adjoint": 0.2}
    a, b = (fb.solve(T1.local().task(), each, rounds=5) for each in (dist(**steps), fed(**steps, local_steps=1)))
    assert identical((a.x, a.y), (b.x, b.y))
    assert "local_steps" not in {field.name for field in dataclasses.fields(dist)}
    assert dist() == dist()
    assert hash(dist()) == hash(dist())
    with pytest.raises(fb.FedbilevelError, match="local_steps"):
        dist(local_steps=2)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (FedBiOLocal, {"lr_upper": 0.0}, "FedBiOLocal: lr_upper must be greater than 0, not 0.0."),
        (FedBiOLocal, {"neumann_steps": -1}, "FedBiOLocal: neumann_steps must be at least 0, not -1."),
        (FedBiOAccLocal, {"c_upper": 2.0}, "FedBiOAccLocal: c_upper * rate^2 must be at most 1, not 2"),
        (DistBiOAcc, {"rate": 3.0}, "DistBiOAcc: c_upper * rate^2 must be at most 1, not 1.8"),
        (FedBiOLocal, {"restart": True}, "FedBiOLocal: restart trains y for one batch, so it needs shared_batch"),
        (DistBiOAcc, {"restart": True}, "DistBiOAcc: restart trains y for one batch, so it needs shared_batch"),
        (FedBiOLocal, {"lower_steps": 0}, "FedBiOLocal: lower_steps must be at least 1, not 0."),
        (FedBiOAccLocal, {"local_steps": 0}, "FedBiOAccLocal: local_steps must be at least 1, not 0."),
        (LocalBSGVRM, {"c_lower": 1.5}, "LocalBSGVRM: c_lower * rate^2 must be at most 1, not 1.5"),
        (
            fb.LocalBSGM,
            {"c_lower": 1.5},
            "LocalBSGM: c_lower * rate must be at most 1, not 1.5: lower c_lower or rate.",
        ),
        (LocalBSGVRM, {"lr_adjoint": -1.0}, "LocalBSGVRM: lr_adjoint must be greater than 0, not -1.0."),
        (CommFedBiO, {"entries": 0}, "CommFedBiO: entries must be at least 1, not 0."),
        (CommFedBiO, {"adjoint_steps": 0}, "CommFedBiO: adjoint_steps must be at least 1, not 0."),
    ],
)
def test_bad_hyper_parameters_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(fb.FedbilevelError) as refused:
        kind(**options)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("kind", KINDS)
def test_the_wrong_lower_level_is_refused(kind: Any) -> None:
    wrong = T1.task() if kind.lower_level == "local" else T1.local().task()
    with pytest.raises(fb.FedbilevelError, match="lower level"):
        fb.plan(wrong, kind())
