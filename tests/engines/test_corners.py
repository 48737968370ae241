"""Corners of the engines: loops of any length, memory in loops and views, types, lost messages, odd starts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core import Client, Clients, Key
from fedbilevel.core.vectors import Vector, norm
from fedbilevel.engines.accounting import traffic
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.participation import Everyone, Independent, Uniform
from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks import Quadratic
from fedbilevel.testing import largest_difference
from helpers import assert_same_counts, sample_weights

TASK = Quadratic.random(clients=4, p=3, d=2).task()
ENGINES = [Simulation, Local]


class State(NamedTuple):
    x: Vector
    y: Vector
    seen: Any


@dataclass(frozen=True)
class Loop(fb.Algorithm):
    """Rounds of one loop of exchanges, its length fixed or drawn, and one exchange after it."""

    times: int = 3
    random: bool = False
    remembers: ClassVar[Literal["nothing", "round", "run"]] = "round"

    def init(self, clients: Clients, x: Vector, y: Vector) -> State:
        return State(x, y, jnp.zeros(()))

    def round(self, clients: Clients, server: State) -> State:
        x, y, _ = server
        times = jax.random.randint(clients.next_key(), (), 0, self.times) if self.random else self.times
        y = clients.repeat(times, lambda c, y: y + c.run(self.descend, x, y).mean(), y)
        seen = clients.run(self.look, x, y).mean()
        return State(x, y, seen)

    def descend(self, client: Client, memory: Any, key: Key, x: Vector, y: Vector) -> tuple[Any, Vector]:
        step = -0.1 * client.g.dy(x, y, key)
        return step, step

    def look(self, client: Client, memory: Any, key: Key, x: Vector, y: Vector) -> tuple[Any, jax.Array]:
        return memory, 0 * norm(y) if memory is None else norm(memory)

    def solution(self, server: State, memory: Any) -> tuple[Vector, Vector]:
        return server.x, server.y


def run(engine: Callable[..., Any], task: fb.Task, algorithm: fb.Algorithm, cohort: Any = None, rounds: int = 3) -> Any:
    made = engine(task, algorithm, cohort)
    state = made.advance(made.start(seed=1), rounds)
    return made, state, made.solution(state)


@pytest.mark.parametrize("algorithm", [Loop(0), Loop(1), Loop(4), Loop(3, random=True)], ids=str)
def test_loops_of_any_length_agree_and_are_counted(algorithm: Loop) -> None:
    (sim, a, xy), (_, b, zw) = (run(engine, TASK, algorithm) for engine in ENGINES)
    assert largest_difference((xy, a.server.seen), (zw, b.server.seen)) < 1e-12
    assert_same_counts(a.served, b.served)
    assert_same_counts(a.calls, b.calls)
    if not algorithm.random:
        assert sim.plan.exchanges == algorithm.times + 1
        # x never changes; of the y's, the first is held from the last round, all others are sent once
        assert sim.plan.down == 2 * algorithm.times


def test_bytes_of_loops_are_those_really_sent() -> None:
    task = Quadratic.random(clients=3, p=200, d=300).task()
    local, state, _ = run(Local, task, Loop(4))
    planned = traffic(local.plan, state)
    assert 1 <= local.post.bytes_down / 1e6 / planned["megabytes_down"] < 1.4  # headers of small messages


def test_a_loop_of_random_length_has_a_plan_for_every_length() -> None:
    cost = fb.plan(TASK, Loop(3, random=True))
    assert [cost.at(n).exchanges for n in (0, 1, 5)] == [1, 2, 6]
    assert [cost.at(n).oracles["Gg"] for n in (0, 1, 5)] == [0, 1, 5]


@dataclass(frozen=True)
class Views(Loop):
    """Memory of a round, written through one view of some clients and read through another."""

    def round(self, clients: Clients, server: State) -> State:
        x, y, _ = server
        few = clients.sample(2)
        y = y + few.weighted(jnp.arange(1.0, 5.0)).run(self.descend, x, y).mean()
        return State(x, y, few.run(self.look, x, y).mean())


def test_views_of_the_same_clients_share_their_memory() -> None:
    (_, a, xy), (_, b, zw) = (run(engine, TASK, Views()) for engine in ENGINES)
    assert largest_difference((xy, a.server.seen), (zw, b.server.seen)) < 1e-12


@dataclass(frozen=True)
class Counts(Loop):
    """Uploads whole numbers, broadcasts plain numbers, and looks at who replied."""

    remembers: ClassVar[Literal["nothing", "round", "run"]] = "nothing"

    def init(self, clients: Clients, x: Vector, y: Vector) -> State:
        return State(x, y, (jnp.zeros(()), jnp.zeros(4), jnp.zeros(4, bool)))

    def round(self, clients: Clients, server: State) -> State:
        replies = clients.run(self.number, server.x, server.y, 0.25, 3)
        stacked = clients.sample(2).run(self.value, server.x, server.y).stack()
        return State(server.x, server.y, (replies.mean(), stacked, replies.replied()))

    def number(self, client: Client, memory: None, key: Key, x: Vector, y: Vector, a: Any, b: Any) -> Any:
        return memory, jnp.asarray(998, int) + b + jnp.asarray(4 * a, int) - 1

    def value(self, client: Client, memory: None, key: Key, x: Vector, y: Vector) -> tuple[None, jax.Array]:
        return memory, 1.0 + client.f.value(x, y, key)


@pytest.mark.parametrize("cohort", [Everyone(), Uniform(3), Independent(0.4)], ids=str)
@pytest.mark.parametrize("batching", ["scan", "vmap"])
def test_whole_numbers_plain_numbers_and_who_replied(cohort: Any, batching: Any) -> None:
    simulation = lambda *options: Simulation(*options, batching=batching)
    (_, a, _), (_, b, _) = (run(engine, TASK, Counts(), cohort) for engine in (simulation, Local))
    assert float(a.server.seen[0]) == pytest.approx(1001, abs=1e-9)
    assert largest_difference(a.server.seen, b.server.seen) < 1e-12
    assert np.count_nonzero(a.server.seen[1]) <= min(2, int(np.sum(a.server.seen[2])))


def test_sub_cohorts_larger_than_the_cohort_are_refused() -> None:
    with pytest.raises(fb.FedbilevelError, match="cannot ask 2 clients in one exchange of a round with 1 clients"):
        Simulation(TASK, Counts(), Uniform(1))


@pytest.mark.parametrize("kind", [jnp.float16, jnp.float32])
def test_low_precision_stays_low_in_both_engines(kind: Any) -> None:
    start = lambda key: (jnp.zeros(3, kind), jnp.zeros(2, kind))
    clients = jax.tree.map(lambda a: a.astype(kind), list(TASK.clients))
    task = fb.Task(replace(TASK.problem, init=start), clients, batch_size=None)
    for engine in ENGINES:
        _, _, solution = run(engine, task, fb.FedBiO(0.1, 0.1, 0.1), rounds=2)
        assert {leaf.dtype for leaf in jax.tree.leaves(solution)} == {jnp.dtype(kind)}


def test_a_lost_message_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that did not get a message must not be thought to hold what was in it."""
    engine = Local(TASK, fb.FedAvg())
    state = engine.start(seed=0)
    party = engine.parties[2]
    with monkeypatch.context() as lost:
        lost.setattr(party, "handle", lambda message: b"")
        state = engine.advance(state, 1)
    assert {(failure.round, failure.client) for failure in engine.failures} == {(1, 2)}
    assert "not a message" in engine.failures[0].reason
    state = engine.advance(state, 3)
    assert len(engine.failures) == 1


@pytest.mark.parametrize("engine", ["simulation", "local"])
def test_infinite_private_blocks_are_noticed(engine: Any) -> None:
    algorithm = fb.FedBiO(lr_upper=1e200, lr_lower=0.1, lr_adjoint=0.1, local_steps=1)
    problem = replace(sample_weights().problem, upper=lambda x, y, b: 1e150 * x.sum() + (y @ y))
    with pytest.raises(fb.Diverged, match="became NaN or infinite") as caught:
        fb.solve(replace(sample_weights(), problem=problem), algorithm, rounds=20, every=1, engine=engine)
    assert np.isfinite(caught.value.result.x).all()


@pytest.mark.parametrize("engine", ["simulation", "local"])
def test_an_infeasible_start_is_projected(engine: Any) -> None:
    problem = replace(TASK.problem, project_x=fb.vectors.box(0.1, 2.0), project_y=fb.vectors.ball(0.5))
    result = fb.solve(replace(TASK, problem=problem), fb.FedBiO(), rounds=0, y=np.ones(2), engine=engine)
    np.testing.assert_allclose(result.x, 0.1)
    np.testing.assert_allclose(np.linalg.norm(result.y), 0.5)


def test_clients_of_weight_zero_move_nothing() -> None:
    task = replace(TASK, weights=[0, 0, 0, 1])
    result = fb.solve(task, fb.FedBiO(0.1, 0.1, 0.1), rounds=30, sample=1)
    assert np.isfinite(result.x).all()
    alone = fb.solve(task, fb.FedBiO(0.1, 0.1, 0.1), rounds=3, sample=[0, 1])
    np.testing.assert_array_equal(alone.x, 0)


def test_estimates_are_unbiased_where_means_are_not() -> None:
    """With unequal weights, the mean over a cohort is biased, the estimate is not."""

    @dataclass(frozen=True)
    class Both(Counts):
        def init(self, clients: Clients, x: Vector, y: Vector) -> State:
            return State(x, y, (jnp.zeros(()), jnp.zeros(())))

        def round(self, clients: Clients, server: State) -> State:
            replies = clients.run(self.value, server.x, server.y)
            return State(server.x, server.y, (replies.mean(), replies.estimate()))

    task = replace(TASK, weights=[1, 2, 3, 10])
    engine = Simulation(task, Both(), Uniform(2))
    state, seen = engine.start(seed=0), []
    for _ in range(1500):
        state = engine.advance(state, 1)
        seen.append([float(v) for v in state.server.seen])
    everyone = Simulation(task, Both())
    truth = float(everyone.advance(everyone.start(seed=0), 1).server.seen[0])
    mean, error = np.mean(seen, axis=0), np.std(seen, axis=0) / np.sqrt(len(seen))
    assert abs(mean[1] - truth) < 4 * error[1]
    assert abs(mean[0] - truth) > 6 * error[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"every": 0}, "every must be a whole number"),
        ({"rounds": 2.5}, "rounds must be a whole number"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"batching": "foo"}, "no batching called 'foo'"),
        ({"sample": {1, 2}}, "sample must be a number of clients"),
        ({"sample": [0.7, 1.2]}, "sample must be a number of clients"),
        ({"algorithm": fb.FedBiO}, "for instance FedBiO"),
    ],
)
def test_wrong_arguments_of_solve(options: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        fb.solve(TASK, **{"algorithm": fb.FedBiO(0.1, 0.1, 0.1), **options})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fb.FedBiO(lr_upper=[0.1]), r"lr_upper must be a number, not \[0.1\]"),
        (lambda: fb.FedBiO(lr_upper="fast"), "FedBiO: lr_upper: 'fast' is not a schedule: write a number"),
        (lambda: fb.FedBiO(lr_upper=np.float32(-0.1)), "lr_upper must be greater than 0"),
        (lambda: fb.FedBiO(local_steps=2.5), "local_steps must be a whole number"),
        (lambda: fb.FedBiO(local_steps=10**12), "local_steps must be below"),
        (lambda: fb.FedBiO(shared_batch=3), "shared_batch must be true or false"),
        (lambda: fb.FedBiOAcc(rate="cube_root(1, -2)"), "offset of a schedule must be greater than -1"),
        (lambda: fb.tasks.quadratic(p=0), "must be at least 1"),
        (lambda: fb.tasks.data_cleaning(hidden=-1), "hidden, l2 and seed must not be negative"),
    ],
)
def test_wrong_types_of_hyper_parameters(make: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        make()


def test_numpy_numbers_are_numbers() -> None:
    assert fb.FedBiO(lr_upper=np.float32(0.5), local_steps=np.int64(2)) == fb.FedBiO(lr_upper=0.5, local_steps=2)


def test_a_sum_that_is_zero_at_the_start_is_still_no_mean() -> None:
    problem = fb.Problem(
        lambda x, y, b: (y**2).sum() + b.mean(),
        lambda x, y, b: (0.5 * y**2 - y * b * (1 + x)).sum(),
        lambda key: (np.zeros(1), np.zeros(1)),
    )
    clients = [{"train": np.ones(n), "val": np.ones(2)} for n in (2, 5)]
    with pytest.raises(fb.FedbilevelError, match="not a mean over the rows"):
        fb.Task(problem, clients, batch_size=None)


def test_hypergradient_of_a_local_lower_level_with_private_x() -> None:
    """min over x_m of 1/2 (y_m - a_m)^2 with y_m = x_m: the gradient of block m is w_m (x_m - a_m)."""
    problem = fb.Problem(
        lambda x, y, b: 0.5 * ((y - b) ** 2).mean(),
        lambda x, y, b: 0.5 * ((y - x) ** 2).sum() + 0 * b.mean(),
        lambda key: (np.zeros(1), np.zeros(1)),
        lower_level="local",
        private_x=True,
    )
    clients = [{"train": np.ones(1), "val": np.array([float(a)])} for a in (-1, 0, 1)]
    task = fb.Task(problem, clients, weights=[1, 1, 2], batch_size=None)
    found = fb.diagnostics.hypergradient(task, np.zeros((3, 1)))
    np.testing.assert_allclose(found, np.array([[0.25], [0.0], [-0.5]]), atol=1e-9)
