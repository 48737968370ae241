"""The simulator and the message engine: the same numbers, participation, memory, failures."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.accounting import traffic
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.messaging.server import Blocks
from fedbilevel.engines.participation import Everyone, Fixed, Independent, Uniform, participation
from fedbilevel.engines.simulation import Simulation, compiled_advance
from fedbilevel.storage import arrays as messages
from fedbilevel.tasks import Quadratic
from fedbilevel.testing import largest_difference
from helpers import UsesEverything, assert_same_counts, sample_weights

QUADRATIC = Quadratic.random().task()
PRIVATE = sample_weights()
COHORTS = [Everyone(), Uniform(3), Independent(0.5), Fixed((1, 3))]


def both(task: fb.Task, algorithm: fb.Algorithm, cohort: Any = None, rounds: int = 4) -> tuple[Any, Any, Local]:
    """The state and solution of both engines after a few rounds."""
    simulation, local = Simulation(task, algorithm, cohort), Local(task, algorithm, cohort)
    a, b = (e.advance(e.start(seed=3), rounds) for e in (simulation, local))
    return (a, simulation.solution(a)), (b, local.solution(b)), local


@pytest.mark.parametrize("cohort", COHORTS, ids=str)
@pytest.mark.parametrize("kind", [fb.FedBiO])
@pytest.mark.parametrize("task", [QUADRATIC, PRIVATE], ids=["quadratic", "private"])
def test_engines_give_the_same_numbers(task: fb.Task, kind: Any, cohort: Any) -> None:
    steps = {"lr_lower": 0.2, "local_steps": 2} | ({} if kind is fb.FedAvg else {"lr_upper": 0.5, "lr_adjoint": 0.2})
    (a, solved_a), (b, solved_b), local = both(task, kind(**steps), cohort, rounds=3)
    assert largest_difference(solved_a, solved_b) < 1e-12
    assert not local.failures
    assert_same_counts(a.served, b.served)
    assert_same_counts(a.calls, b.calls)


@pytest.mark.parametrize("cohort", [Everyone(), Uniform(4)], ids=str)
def test_engines_agree_on_every_word_of_the_vocabulary(cohort: Any) -> None:
    """Run-long memory, sub-cohorts, other weights, loops of random length, stacked replies."""
    task = replace(QUADRATIC, batch_size=1)
    (a, solved_a), (b, solved_b), _ = both(task, UsesEverything(), cohort, rounds=6)
    assert largest_difference((solved_a, a.server.losses), (solved_b, b.server.losses)) < 1e-12
    assert_same_counts(a.served, b.served)


@pytest.mark.slow
def test_projections_of_private_blocks_are_the_same_in_both_engines() -> None:
    problem = replace(PRIVATE.problem, project_x=fb.vectors.box(-0.01, 0.02), project_y=fb.vectors.ball(1.0))
    algorithm = fb.FedBiOAcc(lr_upper=2.0, local_steps=2)
    (_, a), (_, b), _ = both(replace(PRIVATE, problem=problem), algorithm, Uniform(3), rounds=3)
    assert largest_difference(a, b) < 1e-12
    assert np.max(a[0]) == 0.02


def test_private_blocks_never_leave_their_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message in either direction holds an array of the size of a block, except the answer to 'reveal'."""
    assert PRIVATE.layout.longest[0] == 6
    sizes: list[tuple[str, list[int]]] = []
    engine = Local(PRIVATE, fb.FedBiOAcc(local_steps=2))
    block = PRIVATE.layout.longest[0]
    for party in engine.parties:
        handle = party.handle

        def spy(message: bytes, handle: Any = handle) -> bytes:
            answer = handle(message)
            action = messages.decode(message)[0]["action"]
            sizes.extend((action, [a.size for a in messages.decode(m)[1].values()]) for m in (message, answer))
            return answer

        monkeypatch.setattr(party, "handle", spy)
    state = engine.advance(engine.start(seed=0), 2)
    assert all(block not in each for _, each in sizes)
    assert isinstance(state.server.z.x, Blocks)
    engine.solution(state)
    assert any(block in each for action, each in sizes if action == "reveal")


@pytest.mark.parametrize("cohort", [Everyone(), Uniform(3)], ids=str)
@pytest.mark.slow
def test_bytes_really_sent_agree_with_the_plan(cohort: Any) -> None:
    task = fb.tasks.data_cleaning(hidden=32, clients=5)
    local = Local(task, fb.FedBiOAcc(local_steps=1), cohort)
    state = local.advance(local.start(seed=0), 6)
    planned = traffic(local.plan, state)
    for real, expected in (
        (local.post.bytes_down, planned["megabytes_down"]),
        (local.post.bytes_up, planned["megabytes_up"]),
    ):
        assert 1 <= real / 1e6 / expected < 1.15  # headers and commits


def test_a_failure_costs_a_reply_not_the_run() -> None:
    """One party's data are broken: the others go on with renormalised weights, as if it had not been asked."""
    algorithm = fb.FedBiO(0.1, 0.2, 0.2, local_steps=1)
    engine = Local(QUADRATIC, algorithm)
    state = engine.start(seed=0)
    engine.parties[2].data = jax.tree.map(lambda a: a[..., None], engine.parties[2].data)
    state = engine.advance(state, 3)
    assert {(f.client, f.method) for f in engine.failures} == {(2, "descend")}
    assert engine.failures[0].reason
    without = fb.solve(QUADRATIC, algorithm, rounds=3, sample=[0, 1, 3, 4])
    assert largest_difference(engine.solution(state), (without.x, without.y)) < 1e-12


def test_when_nobody_answers_the_reason_is_said() -> None:
    engine = Local(QUADRATIC, fb.FedBiO(0.1, 0.2, 0.2))
    state = engine.start(seed=0)
    for party in engine.parties:
        party.data = jax.tree.map(lambda a: a[..., None], party.data)
    with pytest.raises(fb.FedbilevelError, match="no client answered 'descend'; client 4: "):
        engine.advance(state, 1)


def test_a_party_refuses_what_is_no_message() -> None:
    party = Local(QUADRATIC, fb.FedBiO()).parties[0]
    for nonsense in (b"", b"nonsense", messages.encode({"action": "delete"}, {}), messages.encode({}, {})):
        assert "error" in messages.decode(party.handle(nonsense))[0]


def test_messages_of_the_wrong_shape_are_refused() -> None:
    shapes = {"y": jax.ShapeDtypeStruct((3,), jnp.float64)}
    with pytest.raises(fb.FedbilevelError, match=r"'y' is float64\[2\], but should be float64\[3\]"):
        messages.rebuild(shapes, {"y": np.zeros(2)})
    with pytest.raises(fb.FedbilevelError, match="lacks the array 'y'"):
        messages.rebuild(shapes, {})


def draws(cohort: Any, clients: int, times: int = 4000) -> np.ndarray:
    """How often each client was drawn, each time."""
    keys = jax.random.split(jax.random.key(0), times)
    ids, times_drawn = jax.vmap(lambda k: cohort.draw(k, clients))(keys)
    taken = np.zeros((times, clients), int)
    rows = np.repeat(np.arange(times), ids.shape[1]).reshape(ids.shape)
    mask = np.ones(ids.shape, bool) if times_drawn is None else np.asarray(times_drawn) > 0
    np.add.at(taken, (rows[mask], np.asarray(ids)[mask]), 1)
    return taken


def test_uniform_cohorts_are_uniform_and_without_replacement() -> None:
    taken = draws(Uniform(3), 7)
    assert taken.max() == 1
    assert (taken.sum(1) == 3).all()
    each, expected = taken.mean(0), 3 / 7
    assert np.abs(each - expected).max() < 4 * np.sqrt(expected * (1 - expected) / len(taken))
    pairs = (taken.T @ taken) / len(taken)
    together = 3 * 2 / (7 * 6)
    off = pairs[~np.eye(7, dtype=bool)]
    assert np.abs(off - together).max() < 4.5 * np.sqrt(together / len(taken))


def test_independent_cohorts_have_the_right_probability_and_are_never_empty() -> None:
    taken = draws(Independent(0.3), 9)
    assert taken.sum(1).min() >= 1
    empty = 0.7**9
    expected = 0.3 + empty / 9
    assert np.abs(taken.mean(0) - expected).max() < 4 * np.sqrt(0.21 / len(taken))
    assert np.var(taken.sum(1)) == pytest.approx(9 * 0.21, rel=0.15)


@pytest.mark.parametrize("sample", [0, 6, -1, [0, 0], [7], [], 0.5, "3", True, Independent(0.0), Independent(1.5)])
def test_impossible_samples_are_refused(sample: Any) -> None:
    with pytest.raises(fb.FedbilevelError, match="sample"):
        participation(sample, 5)


def test_memory_changes_only_for_those_who_took_part() -> None:
    engine = Simulation(QUADRATIC, UsesEverything(), Uniform(4))
    state = engine.start(seed=0)
    for _ in range(3):
        new = engine.advance(state, 1)
        times = np.asarray(new.memory.times - state.memory.times)
        unchanged = np.all(np.asarray(new.memory.last.tree) == np.asarray(state.memory.last.tree), axis=1)
        assert (times > 0).sum() == 4
        assert unchanged[times == 0].all()
        state = new


@pytest.mark.slow
def test_memory_of_a_round_does_not_depend_on_clients_that_do_not_take_part() -> None:
    """The compiled round allocates the same for 100 and for 2000 clients."""

    def temporaries(clients: int) -> int:
        one = {"a": np.ones((2, 50))}
        problem = fb.Problem(
            lambda x, y, b: ((y - b["a"].mean(0)) ** 2).mean() + (x**2).sum(),
            lambda x, y, b: ((y * jnp.exp(x) - b["a"].mean(0)) ** 2).mean(),
            lambda key: (jnp.zeros(()), jnp.zeros(50)),
        )
        engine = Simulation(fb.Task(problem, [{"train": one, "val": one}] * clients), fb.FedBiOAcc(), Uniform(10))
        state = engine.start(seed=0)
        lowered = compiled_advance.lower(engine.program, engine.task.data, state, jnp.asarray(1))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2000) <= 1.01 * temporaries(100)


def test_uploads_are_not_stacked_unless_asked_for() -> None:
    """A mean over 300 clients of vectors of 10,000 entries needs room for a few of them, not for 300."""
    one = {"a": np.ones((2, 1))}
    problem = fb.Problem(
        lambda x, y, b: ((y - b["a"].mean()) ** 2).mean() + (x**2).sum(),
        lambda x, y, b: ((y * jnp.exp(x) - b["a"].mean()) ** 2).mean(),
        lambda key: (jnp.zeros(()), jnp.zeros(10_000)),
    )
    engine = Simulation(fb.Task(problem, [{"train": one, "val": one}] * 300), fb.FedBiO())
    lowered = compiled_advance.lower(engine.program, engine.task.data, engine.start(seed=0), jnp.asarray(1))
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 30 * 10_000 * 8


RESAMPLED = [Uniform(3, resample=True), Independent(0.5, resample=True), Uniform(3, replacement=True)]


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [*RESAMPLED, Uniform(6, replacement=True, resample=True)], ids=str)
def test_engines_agree_on_new_cohorts_and_on_replacement(cohort: Any) -> None:
    """Clients drawn twice count twice and are asked once."""
    algorithm = fb.FedNest(0.1, 0.2, 0.2, local_steps=2, terms=3)
    (a, solved_a), (b, solved_b), _ = both(QUADRATIC, algorithm, cohort, rounds=3)
    assert largest_difference(solved_a, solved_b) < 1e-12
    assert_same_counts(a.served, b.served)
    assert_same_counts(a.calls, b.calls)


def test_new_cohorts_are_new_and_hold_nothing() -> None:
    algorithm = fb.FedNest(0.1, 0.2, 0.2, terms=2, full_series=True)
    kept, fresh = (fb.plan(QUADRATIC, algorithm, Uniform(2, resample=again)) for again in (False, True))
    assert kept.exchanges == fresh.exchanges == 6
    p, d = 4, 6
    # x and y with every exchange, and what each needs besides: q for y, p for the product, p for h, h for x.
    assert fresh.down == 6 * (p + d) + d + d + d + p
    assert kept.down < fresh.down
    engine = Local(QUADRATIC, algorithm, Uniform(2, resample=True))
    asked: list[int] = []
    for party in engine.parties:

        def spy(message: bytes, handle: Any = party.handle, id: int = party.id) -> bytes:
            if messages.decode(message)[0]["action"] == "run":
                asked.append(id)
            return handle(message)

        party.handle = spy  # type: ignore[method-assign]
    engine.advance(engine.start(seed=0), 1)
    cohorts = {tuple(sorted(asked[i : i + 2])) for i in range(0, len(asked), 2)}
    assert len(asked) == 12
    assert len(cohorts) > 1


def test_the_estimate_with_replacement_is_unbiased() -> None:
    """n / |C| sum over draws: the mean over all pairs of draws is the round with everybody."""
    task = replace(Quadratic.random(clients=2, p=1, d=1).task(), weights=[0.2, 0.8])
    start = {"x": np.ones(1), "y": np.ones(1)}
    moved = {}
    for seed in range(40):
        result = fb.solve(task, fb.SimFBO(), rounds=1, sample=Uniform(2, replacement=True), seed=seed, **start)
        moved.setdefault(float(result.y[0]), 0)
    full = fb.solve(task, fb.SimFBO(), rounds=1, **start)
    low, middle, high = sorted(moved)  # 0 twice, 1 twice, or one of each
    assert middle == pytest.approx(float(full.y[0]))
    assert (low + high) / 2 == pytest.approx(float(full.y[0]))


@pytest.mark.parametrize("cohort", [Uniform(3, resample=True), Uniform(3, replacement=True)], ids=str)
def test_clients_with_memory_must_stay(cohort: Any) -> None:
    for task, algorithm in ((QUADRATIC, fb.FedMSA()), (PRIVATE, fb.FedBiO())):
        with pytest.raises(fb.FedbilevelError, match="must be the same for all exchanges"):
            fb.plan(task, algorithm, cohort)


def test_server_rows_are_kept_from_clients_unless_the_algorithm_needs_them_there() -> None:
    task = fb.tasks.quadratic("T5", clients=3)
    rows = np.asarray(task.data.val.arrays["H"])
    knows = Local(task, fb.FedBiO(0.01, 0.2, 0.2)).parties[0].data.val.arrays["H"]
    np.testing.assert_array_equal(knows, rows)
    hidden = Local(task, fb.PrimalDual()).parties[0].data.val.arrays["H"]
    assert not np.any(hidden)


def test_what_does_not_fit_is_refused() -> None:
    weighted = fb.tasks.quadratic("T5", clients=3)
    with pytest.raises(fb.FedbilevelError, match="needs a problem with weighting=True"):
        fb.plan(QUADRATIC, fb.PrimalDual())
    with pytest.raises(fb.FedbilevelError, match="leave out weights="):
        replace(weighted, weights=[1, 2, 3])
    with pytest.raises(fb.FedbilevelError, match="a weight for each of the 2 clients"):
        fb.plan(replace(weighted, clients=weighted.clients[:2]), fb.PrimalDual())
    with pytest.raises(fb.FedbilevelError, match="sample a fixed number of clients"):
        fb.plan(QUADRATIC, fb.FedMBO(), Independent(0.5))
    with pytest.raises(fb.FedbilevelError, match="give the clients 'val'"):
        replace(PRIVATE, server={"a": np.ones((2, 3)), "b": np.ones(2), "weight": np.zeros(2, np.int32)})
