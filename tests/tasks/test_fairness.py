"""Fair federated learning: the losses and the gap against numpy, the partition, and a run."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.report import terminal as report
from fedbilevel.runs.execute import run
from fedbilevel.runs.experiment import Experiment
from fedbilevel.tasks import fairness
from helpers import real


@pytest.fixture(scope="module")
def task() -> fb.Task:
    return fairness(penalty=3.0, clients=3)


def model(task: fb.Task) -> tuple[np.ndarray, Any]:
    """Some weights of the logistic regression, the bias last, and the same as y."""
    w = 0.3 * np.random.default_rng(0).normal(size=task.clients[0]["train"]["features"].shape[1] + 1)
    return w, [{"w": w[:-1, None], "b": w[-1:]}]


def probability(w: np.ndarray, rows: Any) -> np.ndarray:
    return 1 / (1 + np.exp(-(rows["features"].astype(float) @ w[:-1] + w[-1])))


def cross_entropy(w: np.ndarray, rows: Any) -> np.ndarray:
    p = probability(w, rows)
    return -np.log(np.where(rows["group"] % 2, p, 1 - p))


@real
def test_lower_loss_weighs_the_groups(task: fb.Task) -> None:
    w, y = model(task)
    rows = jax.tree.map(lambda a: a[:50], task.clients[0]["train"])
    x = np.array([0.1, 1.0, -0.5, 0.3])
    weight = 4 * np.exp(x) / np.exp(x).sum()
    expected = np.mean(weight[rows["group"]] * cross_entropy(w, rows)) + 1e-3 / 2 * w @ w
    assert float(task.problem.lower({"groups": x, "gap": 0.0}, y, rows)) == pytest.approx(expected)
    equal = {"groups": np.zeros(4), "gap": 0.0}
    assert float(task.problem.lower(equal, y, rows)) == pytest.approx(cross_entropy(w, rows).mean() + 1e-3 / 2 * w @ w)


@real
def test_at_t_equal_gap_the_mean_over_clients_is_the_global_objective(task: fb.Task) -> None:
    """Value, derivative in y and the turned derivative in t, against the gap of everybody's rows together."""
    w, y = model(task)
    together = {name: np.concatenate([c["val"][name] for c in task.clients]) for name in ("features", "group")}
    sizes = np.array([len(client["val"]["group"]) for client in task.clients])
    weight = np.repeat(task.normalised_weights / sizes, sizes)
    p = probability(w, together)

    def rate(group: int) -> tuple[float, np.ndarray]:
        """A weighted true-positive rate and its derivative in the logits."""
        chosen = weight * (together["group"] == group) / weight[together["group"] == group].sum()
        return float(chosen @ p), chosen * p * (1 - p)

    (men, of_men), (women, of_women) = rate(3), rate(1)
    gap = men - women
    objective = weight @ cross_entropy(w, together) + 3.0 * gap**2
    slope = weight * (p - together["group"] % 2) + 6.0 * gap * (of_men - of_women)

    slopes = jax.jit(jax.value_and_grad(task.problem.upper, argnums=(0, 1)))

    def mean(t: float) -> tuple[float, Any, Any]:
        x = {"groups": np.zeros(4), "gap": np.array(t)}
        each = [jax.tree.map(np.asarray, slopes(x, y, client["val"])) for client in task.clients]
        weights = task.normalised_weights
        value, (dx, dy) = jax.tree.map(lambda *parts: sum(w * a for w, a in zip(weights, parts, strict=True)), *each)
        return value, dx, dy

    value, dx, dy = mean(gap)
    assert float(value) == pytest.approx(objective, abs=1e-6)
    np.testing.assert_allclose(dy[0]["w"][:, 0], slope @ together["features"], atol=1e-6)
    assert float(dx["gap"]) == pytest.approx(0, abs=1e-6)
    value, dx, _ = mean(gap + 0.1)
    assert float(value) < objective  # t maximises
    assert float(dx["gap"]) == pytest.approx(2.0 * 0.1, abs=1e-5)  # and descent brings it back


@real
def test_partition(task: fb.Task) -> None:
    assert sum(len(client[part]["group"]) for client in task.clients for part in ("train", "val")) == 32561
    for client in task.clients:
        size = len(client["train"]["group"]) + len(client["val"]["group"])
        assert size >= 100
        assert len(client["val"]["group"]) == round(0.2 * size)
    shares = [np.bincount(client["train"]["group"], minlength=4) for client in task.clients]
    assert np.ptp([share[1] / share.sum() for share in shares]) > 0.05  # clients differ
    equal = fairness(alpha=0.0, clients=4)
    assert np.ptp([len(client["train"]["group"]) for client in equal.clients]) <= 1
    # All rows of both tasks are the same people.
    groups = [np.bincount(np.concatenate([c[p]["group"] for c in t.clients for p in ("train", "val")]))
              for t in (task, equal)]  # fmt: skip
    assert groups[0].tolist() == groups[1].tolist() == [9592, 1179, 15128, 6662]


@real
def test_metrics(task: fb.Task) -> None:
    _, y = model(task)
    test = fb.data.adult().test
    assert test is not None
    assert task.metrics is not None
    nobody = jax.tree.map(np.zeros_like, y)
    seen = task.metrics({"groups": np.zeros(4), "gap": 0.25}, nobody)
    assert seen["gap"] == seen["tpr_men"] == seen["tpr_women"] == 0
    assert seen["accuracy"] == pytest.approx(np.mean(test.labels == 0))
    assert seen["t"] == 0.25


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": "adults"}, "did you mean 'adult'"),
        ({"clients": 0}, "at least 1"),
        ({"penalty": -1.0}, "not negative"),
        ({"validation": 1.0}, "share between 0 and 1"),
    ],
)
def test_impossible_options_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        fairness(**options)


@real
def test_run_folder(tmp_path: Path) -> None:
    settings = {"clients": "3", "batch_size": "32", "hidden": "4"}
    finished = run(Experiment("fairness", rounds=2, settings=settings), out=tmp_path / "run")
    report.pictures(finished)
    assert report.table(finished).row_count == 2
    assert report.details(finished).row_count == 4
    assert {"picture.png", "curves.png", "details.csv"} <= {path.name for path in finished.folder.iterdir()}


@real
@pytest.mark.slow
def test_the_gap_closes_at_little_cost(tmp_path: Path) -> None:
    finished = run(Experiment("fairness"), out=tmp_path / "run")
    weighted, unweighted = finished.result.metrics, finished.references["unweighted"].metrics
    assert unweighted["gap"] > 0.05
    assert abs(weighted["gap"]) < unweighted["gap"] - 0.02
    assert weighted["accuracy"] > unweighted["accuracy"] - 0.005
