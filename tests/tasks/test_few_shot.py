"""Few-shot learning with one head per task: losses, tasks, both kinds of head, a tiny run, and the default run."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import fedbilevel as fb
from fedbilevel.core.task import Task
from fedbilevel.data import DataSet, Samples
from fedbilevel.report import terminal as report
from fedbilevel.runs.execute import run
from fedbilevel.runs.experiment import Experiment
from fedbilevel.tasks import few_shot
from helpers import REAL

TINY = {"data": "mini-imagenet", "ways": 2, "queries": 3, "clients": 2, "tasks": 6, "filters": 4, "size": 16}
SMALL = {**TINY, "held_out": 4, "adapt_steps": 5}


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mini-ImageNet of 4 + 2 + 3 classes with 5 pictures each, whose brightness tells the class."""
    root = tmp_path / "data" / "mini-imagenet"
    rng, number = np.random.default_rng(0), 0
    for part, classes in {"train": 4, "val": 2, "test": 3}.items():
        rows = ["filename,label"]
        for _ in range(classes):
            label = f"n{number:02}"
            (root / label).mkdir(parents=True)
            for i in range(5):
                noise = rng.integers(0, 8, (16, 16, 3))
                Image.fromarray((25 * number + noise).astype(np.uint8)).save(root / label / f"{label}_{i}.png")
                rows.append(f"{label}_{i}.png,{label}")
            number += 1
        (root / f"{part}.csv").write_text("\n".join(rows))
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "data"))
    return root


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """An Omniglot of 50 alphabets of 3 or 4 characters with 4 drawings of 16 x 16 each; every drawing is different."""
    rng = np.random.default_rng(1)
    sizes = [3 + number % 2 for number in range(50)]
    alphabet = np.repeat(np.arange(50), sizes)
    labels = np.repeat(np.arange(len(alphabet)), 4).astype(np.int32)
    images = rng.integers(0, 256, (len(labels), 16, 16)).astype(np.uint8)
    first = alphabet[labels] < 30
    parts = [Samples(images[w], labels[w], {"alphabet": alphabet[labels[w]].astype(np.int32)}) for w in (first, ~first)]
    names = tuple(f"alphabet {n}" for n in range(50))
    made = DataSet("omniglot", parts[0], parts[1], tuple(map(str, range(len(alphabet)))), groups={"alphabet": names})
    monkeypatch.setitem(fb.data.SETS, "omniglot", lambda size: made)
    return made


def used(task: Task, client: int) -> np.ndarray:
    """Images in the tasks of a client."""
    held = task.clients[client]
    return np.concatenate([held[split]["image"].index.ravel() for split in ("train", "val")])


def test_tasks_of_omniglot(drawings: DataSet) -> None:
    small = {"ways": 3, "queries": 2, "tasks": 20, "filters": 4, "held_out": 4, "adapt_steps": 2}
    task = few_shot(**small, shots=2)
    assert len(task.clients) == 11
    labels = np.concatenate([drawings.train.labels, drawings.test.labels])  # pyright: ignore
    alphabets = np.concatenate([drawings.train.groups["alphabet"], drawings.test.groups["alphabet"]])  # pyright: ignore
    owners = [set(alphabets[used(task, m)]) for m in range(11)]
    assert sum(map(len, owners)) == len(set.union(*owners)) <= 33  # nobody shares an alphabet
    assert max(map(len, owners)) == 3
    for held in task.clients:
        support, query = held["train"]["image"], held["val"]["image"]
        assert support.table is query.table is task.clients[0]["train"]["image"].table
        assert support.index.shape == (20, 6)
        assert query.index.shape == (20, 6)
        own, asked = (labels[part.index].reshape(20, 3, 2) for part in (support, query))
        assert np.all(own == own[:, :, :1])  # class by class
        assert np.all(own == asked)
        assert all(len(set(row)) == 3 for row in own[:, :, 0])
        assert all(not set(s) & set(q) for s, q in zip(support.index, query.index, strict=True))
        np.testing.assert_array_equal(held["train"]["turn"], held["val"]["turn"])
        np.testing.assert_array_equal(held["train"]["head"], np.arange(20))
    assert {0, 1, 2, 3} == set(np.concatenate([held["train"]["turn"] for held in task.clients]).ravel())
    table = task.clients[0]["train"]["image"].table
    np.testing.assert_array_equal(255 - table[..., 0], np.concatenate([drawings.train.inputs, drawings.test.inputs]))  # pyright: ignore
    again, other = few_shot(**small, shots=2), few_shot(**small, shots=2, seed=1)
    np.testing.assert_array_equal(used(task, 3), used(again, 3))
    assert set(alphabets[used(task, 3)]) != set(alphabets[used(other, 3)])
    apart = few_shot(**small, shots=2, one_alphabet=True, rotations=False)
    for held in apart.clients:
        assert np.ptp(alphabets[held["train"]["image"].index], axis=1).max() == 0
        assert held["train"]["turn"].max() == 0
    with pytest.raises(fb.FedbilevelError, match="a single alphabet must have 5 classes"):
        few_shot(**{**small, "ways": 5}, one_alphabet=True)
    with pytest.raises(fb.FedbilevelError, match="34 clients cannot share 33 alphabets"):
        few_shot(**small, clients=34)


@pytest.mark.parametrize("head", [pytest.param("restart", marks=pytest.mark.slow), "persistent"])
def test_losses(head: str, drawings: DataSet) -> None:
    """Against numpy, given the features: turned as told, cross-entropy per task, the sum and the mean over tasks."""
    task = few_shot(ways=3, shots=1, queries=2, tasks=6, filters=4, held_out=4, adapt_steps=2, head=head, norm="none")
    problem, rows = task.problem, task.clients[4]
    x, y = problem.init(jax.random.key(0))
    heads = 5 if head == "restart" else 6
    assert y["w"].shape == (heads, 4, 3)
    y = jax.tree.map(lambda a: jax.random.normal(jax.random.key(1), a.shape), y)
    chosen = np.array([5, 2])
    features = jax.jit(fb.models.conv4((16, 16, 1), None, 4).apply)
    for split, loss in (("train", problem.lower), ("val", problem.upper)):
        batch = {name: part[chosen] for name, part in rows[split].items()}
        each = []
        for place, n in enumerate(chosen):
            images = rows[split]["image"][n]
            per = len(images) // 3
            images = np.stack([np.rot90(image, rows[split]["turn"][n][i // per]) for i, image in enumerate(images)])
            slot = place if head == "restart" else n
            logits = np.asarray(features(x, jnp.asarray(images))) / 2 @ y["w"][slot] + y["b"][slot]
            cost = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), np.repeat(np.arange(3), per)]
            decay = sum(np.square(y[k][slot]).sum() for k in "wb") if split == "train" else 0
            each.append(cost.mean() + 0.01 / 2 * decay)
        expected = np.sum(each) if split == "train" else np.mean(each)
        np.testing.assert_allclose(jax.jit(loss)(x, y, batch), expected, rtol=1e-6)


def test_bad_input_is_refused(pictures: Path) -> None:
    for options, message in (
        ({"data": "omniglott"}, "there is no data set for few-shot called 'omniglott': did you mean 'omniglot'?"),
        ({"head": "new"}, "there is no head for few-shot called 'new'"),
        ({"shots": 0}, "few-shot: shots must be at least 1, not 0."),
        ({"l2": -1.0}, "few-shot: clients, size, l2 and seed must not be negative."),
        (
            {"shots": 3},
            "few-shot: the alphabets or classes of a client, or of those held out, must have 2 classes with",
        ),
        ({"clients": 9}, "few-shot: 9 clients cannot share 4 alphabets or classes."),
    ):
        with pytest.raises(fb.FedbilevelError) as refused:
            few_shot(**{**SMALL, **options})
        assert str(refused.value).startswith(message)
    task = few_shot(**SMALL)
    batch = jax.tree.map(lambda a: np.concatenate([a] * 6), {k: v[:] for k, v in task.clients[0]["train"].items()})
    with pytest.raises(fb.FedbilevelError, match="a batch has 36 tasks, but there are 5 heads: lower first_batch"):
        jax.eval_shape(task.problem.lower, *task.problem.init(jax.random.key(0)), batch)


def test_suggested_steps_fit_the_kind_of_head(pictures: Path) -> None:
    """The suggested steps fit the kind of head, and all four algorithms accept them."""
    for head, restart in (("restart", True), ("persistent", False)):
        task = few_shot(**SMALL, head=head)
        for name in ("fedbio-local", "fedbioacc-local", "distbio", "distbioacc"):
            advice = task.suggested.hyper[name]
            kind = fb.ALGORITHMS[name]
            algorithm: Any = kind(**{k: v for k, v in advice.items() if k in {f.name for f in fields(kind)}})
            assert algorithm.restart == restart
            assert algorithm.shared_batch


def test_a_tiny_run(pictures: Path, tmp_path: Path) -> None:
    settings = {name: str(value) for name, value in SMALL.items()} | {"local_steps": "1", "norm": "none"}
    finished = run(Experiment("few-shot", rounds=2, sample="1", settings=settings), out=tmp_path / "run")
    assert finished.algorithm.restart  # pyright: ignore
    assert 0 <= finished.summary["accuracy"] <= 1
    assert finished.result.y["w"].shape == (2, 5, 4, 2)
    report.pictures(finished)
    report.table(finished)
    shown: Any = report.details(finished)
    assert shown.row_count == 2 + 1 + 3 + 1
    text = (finished.folder / "details.csv").read_text()
    assert "n04,validation,1," in text
    assert "n08,test,1," in text
    assert "n00" not in text  # of the training
    assert {"picture.png", "curves.png"} <= {path.name for path in finished.folder.iterdir()}


@pytest.mark.skipif(not (Path(REAL) / "omniglot").is_dir(), reason="FEDBILEVEL_DATA has no Omniglot")
@pytest.mark.slow
def test_the_default_run(tmp_path: Path) -> None:
    finished = run(Experiment("few-shot"), out=tmp_path / "run")
    assert len(finished.task.clients) == 11
    first, last = finished.result.history[0]["accuracy"], finished.summary["accuracy"]
    assert last > first + 0.2  # 0.473 and 0.889 were seen
    assert last > 0.8


def test_heads_and_algorithm_must_agree(drawings: DataSet) -> None:
    task = few_shot(tasks=2, held_out=1, filters=4, ways=2, queries=2, size=16, adapt_steps=1)
    for algorithm in (fb.FedBiOLocal(), fb.FedBiOLocal(shared_batch=True)):
        with pytest.raises(fb.FedbilevelError, match="needs an algorithm with"):
            fb.solve(task, algorithm, rounds=1)
