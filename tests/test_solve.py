"""The Python way: what goes in and what comes out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fedbilevel as fb
from fedbilevel.tasks import Quadratic
from helpers import identical


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


def test_solutions_have_the_users_structure() -> None:
    result = fb.solve(my_task(), fb.FedBiO(lr_upper=0.1, lr_lower=0.2, lr_adjoint=0.2, local_steps=1), rounds=5)
    assert set(result.x) == {"decay", "shift"}
    assert result.x["shift"][0].shape == ()
    assert result.y["w"].shape == (3,)


def test_history_is_a_table() -> None:
    task = my_task(metrics=lambda x, y: {"decay": x["decay"], "size": jnp.sum(y["w"] ** 2)})
    result = fb.solve(task, fb.FedBiOAcc(0.1, 0.1, 0.1), rounds=10, every=4, seed=1, sample=2)
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
    before = caught.value.__cause__
    assert isinstance(before, fb.Stopped)
    assert int(before.result.state.round) < caught.value.round <= int(before.result.state.round) + 10
    assert np.isfinite(before.result.x).all()


def test_a_loss_that_is_nan_is_said() -> None:
    problem = fb.Problem(
        lambda x, y, b: (y**2).sum(),
        lambda x, y, b: jnp.log(x[0]) * (y**2).sum() + b.mean(),
        lambda k: (-np.ones(1), np.ones(2)),
    )
    task = fb.Task(problem, [{"train": np.ones(2), "val": np.ones(2)}])
    with pytest.raises(fb.Diverged, match=r"round 1: .*y.*check that the losses are finite"):
        fb.solve(task, fb.FedBiO(), rounds=5)


def test_an_interrupted_run_keeps_what_it_had() -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fb.solve(my_task(), fb.FedBiO(0.1, 0.1, 0.1), rounds=10, every=2, on_row=interrupt)
    assert isinstance(caught.value.__cause__, fb.Stopped)
    assert int(caught.value.__cause__.result.state.round) == 4


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
    from fedbilevel.engines.simulation import Simulation

    engine = Simulation(my_task(), fb.FedBiOAcc(0.1, 0.1, 0.1))
    whole = engine.advance(engine.start(seed=5), 9)
    parts = engine.advance(engine.advance(engine.start(seed=5), 4), 5)
    assert identical(whole.server, parts.server)
