"""The Python way: what goes in and what comes out."""

import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fedbilevel as fb
from fedbilevel import diagnostics
from fedbilevel.core.schedules import power
from fedbilevel.engines.simulation import Simulation
from fedbilevel.runs import interrupts
from fedbilevel.tasks import Quadratic
from fedbilevel.tasks.weighted_quadratics import WeightedQuadratics
from fedbilevel.testing import identical
from helpers import sample_weights


def my_task(**options: Any) -> fb.Task:
    """A user's own problem: x and y are trees of their own."""

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return ((batch["a"] @ y["w"] + y["c"] - batch["b"]) ** 2).mean()

    def lower(x: Any, y: Any, batch: Any) -> Any:
        fit = ((batch["a"] @ y["w"] + y["c"] - batch["b"]) ** 2).mean()
        return fit + jnp.exp(x["decay"]) * (y["w"] @ y["w"]) + jnp.exp(x["shift"][0]) * y["c"] ** 2

    def init(key: Any) -> Any:
        return {"decay": 0.0, "shift": [0.0]}, {"w": jax.random.normal(key, (3,)), "c": 0.0}

    rng = np.random.default_rng(0)
    rows = lambda n: {"a": rng.normal(size=(n, 3)), "b": rng.normal(size=n)}
    clients = [{"train": rows(9 + m), "val": rows(6)} for m in range(4)]
    return fb.Task(fb.Problem(upper, lower, init), clients, **options)


QUICK = fb.FedBiOAcc(0.1, 0.1, 0.1, local_steps=2, shared_batch=True)
"""It compiles in half the time."""


def test_solutions_have_the_users_structure() -> None:
    result = fb.solve(my_task(), fb.FedBiO(lr_upper=0.1, lr_lower=0.2, lr_adjoint=0.2, local_steps=1), rounds=5)
    assert set(result.x) == {"decay", "shift"}
    assert result.x["shift"][0].shape == ()
    assert result.y["w"].shape == (3,)


def test_history_is_a_table() -> None:
    task = my_task(metrics=lambda x, y: {"decay": x["decay"], "size": jnp.sum(y["w"] ** 2)})
    result = fb.solve(task, QUICK, rounds=10, every=4, seed=1, sample=2)
    table = pd.DataFrame(result.history)
    assert table["round"].tolist() == [0, 4, 8, 10]
    assert {"exchanges", "megabytes", "seconds", "Gf", "H", "decay", "size"} <= set(table.columns)
    assert table["exchanges"].tolist() == [2, 10, 18, 22]
    assert table["megabytes"].is_monotonic_increasing
    assert result.metrics == result.history[-1]


def test_tables_by_name() -> None:
    assert fb.ALGORITHMS["fedbio"] is fb.FedBiO
    assert fb.TASKS["quadratic"] is fb.tasks.quadratic
    with pytest.raises(fb.FedbilevelError, match="no algorithm called 'fedbia': did you mean 'fedbio'"):
        fb.ALGORITHMS["fedbia"]


def test_a_diverging_run_says_where_and_keeps_what_it_had() -> None:
    task = Quadratic.random().task()
    with pytest.raises(
        fb.Diverged, match=r"round \d+: .*x.* became NaN or infinite: try a smaller lr_upper \(now 50\)"
    ) as caught:
        fb.solve(task, fb.FedBiO(lr_upper=50.0, lr_lower=0.2, lr_adjoint=0.2), rounds=1000, every=10)
    assert isinstance(caught.value, fb.Stopped)
    before = caught.value.result
    assert int(before.state.round) < caught.value.round <= int(before.state.round) + 10
    assert np.isfinite(before.x).all()


def test_a_loss_that_is_nan_is_said() -> None:
    """Before the run where the first client shows it, and in the first round where another one does."""
    problem = fb.Problem(
        lambda x, y, b: (y**2).sum() + x.sum(),
        lambda x, y, b: jnp.log(b.mean()) * (y**2).sum() + x.sum(),
        lambda k: (np.ones(1), np.ones(2)),
    )
    good, bad = ({"train": sign * np.full(2, 3.0), "val": np.ones(2)} for sign in (1, -1))
    with pytest.raises(fb.FedbilevelError, match=r"lower\(x, y, batch\) is nan at the start, .*client 0"):
        fb.solve(fb.Task(problem, [bad, good]), fb.FedBiO(), rounds=5)
    with pytest.raises(fb.Diverged, match=r"round 1: .*y.*check that the losses are finite") as caught:
        fb.solve(fb.Task(problem, [good, bad]), fb.FedBiO(), rounds=5)
    assert int(caught.value.result.state.round) == 0


def test_an_interrupted_run_keeps_what_it_had() -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fb.solve(my_task(), fb.FedBiO(0.1, 0.1, 0.1), rounds=10, every=2, callbacks=[interrupt])
    assert isinstance(caught.value, fb.Interrupted)
    assert isinstance(caught.value, fb.Stopped)
    assert int(caught.value.result.state.round) == 4


def test_an_interrupt_that_was_swallowed_is_not_lost() -> None:
    """As in a finalizer, where Python forgets it."""

    def swallow(row: dict[str, Any]) -> None:
        if row["round"] == 4:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        interrupts.listen()
        with pytest.raises(interrupts.Terminated):
            fb.solve(my_task(), fb.FedBiO(0.1, 0.1, 0.1), rounds=10, every=2, callbacks=[swallow])
        fb.solve(my_task(), fb.FedBiO(0.1, 0.1, 0.1), rounds=10, every=2)  # it was seen to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_interrupt_in_a_finalizer_comes_a_moment_later() -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)  # raised here, it would be printed and forgotten
            ended.append(self)

    def wait_after(made: Interrupted) -> None:
        del made
        time.sleep(30)

    ended: list[Any] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        interrupts.listen()
        with pytest.raises(interrupts.Terminated):
            wait_after(Interrupted())
        assert ended
    finally:
        interrupts.seen()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_given_starting_points_are_used_and_checked() -> None:
    task, algorithm = Quadratic.random().task(), fb.FedBiO(0.1, 0.2, 0.2)
    result = fb.solve(task, algorithm, rounds=0, x=np.arange(4), y=np.ones(6))
    assert result.x.tolist() == [0, 1, 2, 3]
    assert result.y.tolist() == [1] * 6
    with pytest.raises(fb.FedbilevelError, match=r"the given x has the shape \(3,\), but this problem needs \(4,\)"):
        fb.solve(task, algorithm, x=np.ones(3))


@pytest.mark.parametrize("engine", ["simulation", "local"])
def test_a_given_private_start_reaches_its_owners(engine: Any) -> None:
    task = fb.tasks.data_cleaning(hidden=0, clients=3)
    x = np.random.default_rng(0).normal(size=(3, task.layout.longest[0]))
    result = fb.solve(task, fb.FedAvg(), rounds=1, x=x, engine=engine)
    np.testing.assert_allclose(result.x, x)


@pytest.mark.slow
def test_single_precision_stays_single() -> None:
    task = fb.tasks.data_cleaning(hidden=0, clients=3)
    double = task.problem
    single = lambda key: jax.tree.map(lambda a: a.astype(jnp.float32), double.init(key))
    task = fb.Task(fb.Problem(double.upper, double.lower, single, private_x=True), task.clients, batch_size=8)
    for kind in (fb.FedBiO, fb.FedBiOAcc):
        result = fb.solve(task, kind(), rounds=3)
        assert {leaf.dtype for leaf in jax.tree.leaves((result.x, result.y))} == {jnp.dtype(jnp.float32)}


def test_the_wrong_class_of_problem_is_refused() -> None:
    with pytest.raises(fb.FedbilevelError, match="FedBiO is for problems with a global lower level"):
        fb.solve(Quadratic.random().local().task(), fb.FedBiO())


def test_both_engines_through_solve() -> None:
    a, b = (fb.solve(my_task(), fb.FedBiO(0.1, 0.1, 0.1), rounds=3, engine=e) for e in ("simulation", "local"))
    assert max(abs(a.x["decay"] - b.x["decay"]), float(np.max(np.abs(a.y["w"] - b.y["w"])))) < 1e-12
    assert a.metrics["megabytes"] == b.metrics["megabytes"]
    with pytest.raises(fb.FedbilevelError, match="no engine called 'locl': did you mean 'local'"):
        fb.solve(my_task(), fb.FedBiO(), engine="locl")  # pyright: ignore[reportArgumentType]


def test_a_run_can_go_on_from_its_state() -> None:
    engine = Simulation(my_task(), QUICK)
    whole = engine.advance(engine.start(seed=5), 9)
    parts = engine.advance(engine.advance(engine.start(seed=5), 4), 5)
    assert identical(whole.server, parts.server)


# Diagnostics in the history.

T1 = Quadratic.random()
ALL = ["hypergradient", "lower_gap", "objective", "stationarity"]


def test_diagnostics_are_columns_of_the_history() -> None:
    task, algorithm = T1.task(), fb.FedBiOAcc(0.1, 0.2, 0.2, local_steps=2, shared_batch=True)
    names = [*ALL, "adjoint_gap", "client_drift", "lyapunov"]
    plain = fb.solve(task, algorithm, rounds=4, every=2)
    result = fb.solve(task, algorithm, rounds=4, every=2, diagnostics=names)
    x, y = np.asarray(result.x), np.asarray(result.y)
    last, engine = result.metrics, Simulation(task, algorithm)
    assert last["hypergradient"] == pytest.approx(np.linalg.norm(T1.hypergradient(x)))
    assert last["stationarity"] == pytest.approx(np.linalg.norm(T1.hypergradient(x)))
    assert last["lower_gap"] == pytest.approx(np.linalg.norm(y - T1.lower(x)))
    assert last["objective"] == pytest.approx(diagnostics.objective(task, x))
    u = np.asarray(result.state.server.z.u.tree)
    assert last["adjoint_gap"] == pytest.approx(np.linalg.norm(u - T1.adjoint(x, y)))
    assert last["lyapunov"] == pytest.approx(diagnostics.lyapunov(engine, result.state))
    drift = diagnostics.client_drift(engine, result.state)
    assert {name: last[f"client_drift_{name}"] for name in drift} == pytest.approx(drift)
    assert len({tuple(row) for row in result.history}) == 1
    for before, after in zip(plain.history, result.history, strict=True):  # nothing else changes
        assert {k: v for k, v in before.items() if k not in ("seconds", *names)}.items() <= after.items()


def test_functions_are_diagnostics_too() -> None:
    def size(task: fb.Task, x: Any, y: Any) -> float:
        return float(np.sum(x**2)) + len(task.clients)

    both = lambda task, x, y: {"a": x[0], "b": y[0]}
    undefined = lambda task, x, y: {"c": diagnostics.mefbo_residual(task, x, y, 1.0, 1.0).residual}
    result = fb.solve(T1.task(), fb.FedBiO(0.1, 0.2, 0.2), rounds=2, diagnostics=[size, both, undefined])
    assert result.metrics["size"] == pytest.approx(np.sum(result.x**2) + 5)
    assert (result.metrics["a"], result.metrics["b"]) == (result.x[0], result.y[0])
    assert result.metrics["c"] > 0
    for wrong, message in ((lambda task, x, y: 1.0, "must return {name: number}"), (3, r"f\(task, x, y\), not 3")):
        with pytest.raises(fb.FedbilevelError, match=message):
            fb.solve(T1.task(), fb.FedBiO(), rounds=2, diagnostics=[wrong])  # pyright: ignore[reportArgumentType]


def test_the_residual_of_mefbo_has_the_penalty_that_led_there() -> None:
    task, algorithm = T1.task(), fb.MeFBO(penalty=power(2.0, 0.5), prox=0.5, lr_upper=0.05)
    result = fb.solve(task, algorithm, rounds=3, every=1, diagnostics=["mefbo_residual"])
    expected = diagnostics.mefbo_residual(task, result.x, result.y, 2 * 3**0.5, 0.5)  # c_t at t = 2, the third round
    assert result.metrics["mefbo_residual"] == pytest.approx(expected.residual)
    assert result.metrics["mefbo_hypergradient"] == pytest.approx(expected.hypergradient)
    assert result.metrics["mefbo_lower_gap"] == pytest.approx(expected.lower_gap)
    first = diagnostics.mefbo_residual(task, np.zeros(4), np.zeros(6), 2.0, 0.5)
    assert result.history[0]["mefbo_residual"] == pytest.approx(first.residual)


def test_diagnostics_of_a_local_lower_level() -> None:
    problem = T1.local()
    result = fb.solve(problem.task(), fb.FedBiOLocal(0.05, 0.1, local_steps=1), rounds=3, diagnostics=ALL)
    x, y = np.asarray(result.x), np.asarray(result.y)
    assert result.metrics["hypergradient"] == pytest.approx(np.linalg.norm(problem.hypergradient(x)))
    gaps = np.linalg.norm(y - problem.lower(x), axis=1)
    assert result.metrics["lower_gap"] == pytest.approx(problem.mean(gaps))
    assert result.metrics["objective"] == pytest.approx(diagnostics.objective(problem.task(), x))


def test_diagnostics_of_a_private_x_in_both_engines() -> None:
    task, names = sample_weights(), [*ALL, "adjoint_gap"]
    algorithm = fb.FedBiO(0.1, 0.1, 0.1, local_steps=2)
    a, b = (
        fb.solve(task, algorithm, rounds=2, engine=engine, diagnostics=names).metrics
        for engine in ("simulation", "local")
    )
    assert {name: a[name] for name in names} == pytest.approx({name: b[name] for name in names})
    assert a["hypergradient"] == pytest.approx(a["stationarity"])


def test_diagnostics_of_client_weights() -> None:
    problem = WeightedQuadratics.random()
    names = ["weighting_stationarity", "weighting_value"]
    result = fb.solve(problem.task(), fb.FedBiO(0.1, 0.2, 0.2, local_steps=1), rounds=3, diagnostics=names)
    x = np.asarray(result.x)
    assert result.metrics["weighting_stationarity"] == pytest.approx(problem.stationarity(x))
    assert result.metrics["weighting_value"] == pytest.approx(problem.value(x))


@pytest.mark.parametrize(
    ("name", "algorithm", "options", "message"),
    [
        ("hypergradent", fb.FedBiO(), {}, "no diagnostic called 'hypergradent': did you mean 'hypergradient'"),
        ("adjoint_gap", fb.FedNest(), {}, "adjoint_gap is for algorithms that keep the adjoint u, such as FedBiO"),
        ("mefbo_residual", fb.FedBiO(), {}, "mefbo_residual is for MeFBO"),
        ("mefbo_residual", fb.F2SA(), {}, "mefbo_residual is for MeFBO"),
        ("lyapunov", fb.FedMSA(), {}, "lyapunov is for FedBiOAcc"),
        ("weighting_value", fb.FedBiO(), {}, "weighting_value is for problems with weighting=True"),
        ("client_drift", fb.FedBiO(), {"engine": "local"}, "client_drift is for engine='simulation'"),
    ],
)
def test_what_does_not_apply_is_refused_before_the_run(name: str, algorithm: Any, options: Any, message: str) -> None:
    rows: list[Any] = []
    with pytest.raises(fb.FedbilevelError, match=message):
        fb.solve(T1.task(), algorithm, rounds=2, diagnostics=[name], callbacks=[rows.append], **options)
    assert rows == []


def bowl_and_saddle() -> tuple[fb.Task, list[str]]:
    """The lower loss is convex where x > 0 only; and a list that grows whenever the losses are traced."""
    calls: list[str] = []

    def lower(x: Any, y: Any, batch: Any) -> Any:
        calls.append("lower")
        return 0.5 * x[0] * y[0] ** 2 + 0.5 * y[1] ** 2 + (batch * y).mean()

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return x[0] + 0.5 * (y**2).sum() + 0 * batch.mean()

    problem = fb.Problem(upper, lower, lambda key: (np.array([0.15]), np.ones(2)))
    return fb.Task(problem, [{"train": np.ones((2, 2)), "val": np.ones((2, 2))}], batch_size=None), calls


def test_what_is_not_defined_is_nan_and_does_not_end_the_run() -> None:
    task, _ = bowl_and_saddle()
    algorithm = fb.FedBiO(0.1, 0.1, 0.1, local_steps=1)
    history = fb.solve(task, algorithm, rounds=4, every=1, diagnostics=[*ALL, "adjoint_gap"]).history
    assert [row["round"] for row in history] == [0, 1, 2, 3, 4]
    for name in (*ALL, "adjoint_gap"):
        assert np.isfinite(history[0][name])
        assert np.isnan(history[-1][name])


def test_diagnostics_are_compiled_once() -> None:
    task, calls = bowl_and_saddle()
    traced: list[int] = []
    names = [*ALL, "mefbo_residual"]
    algorithm = fb.MeFBO(0.001, penalty=power(2.0, 0.5))
    fb.solve(task, algorithm, rounds=8, every=2, diagnostics=names, callbacks=[lambda row: traced.append(len(calls))])
    assert traced[1] > 0
    assert set(traced[1:]) == {traced[1]}
    engine = Simulation(task, fb.FedBiOAcc(0.01, 0.1, 0.1, local_steps=1))
    state, traced = engine.start(seed=0), []
    for _ in range(3):
        state = engine.advance(state, 1)
        for name in ("adjoint_gap", "client_drift", "lyapunov"):
            diagnostics.DIAGNOSTICS[name].columns(diagnostics.Snapshot(engine, state))
        traced.append(len(calls))
    assert len(set(traced)) == 1


def test_the_seconds_do_not_include_diagnostics() -> None:
    def slow(task: fb.Task, x: Any, y: Any) -> float:
        time.sleep(0.3)
        return 0.0

    history = fb.solve(T1.task(), fb.FedBiO(0.1, 0.2, 0.2), rounds=12, every=2, diagnostics=[slow]).history
    assert history[-1]["seconds"] - history[2]["seconds"] < 0.9  # of 1.2 s that were slept
