"""Partitions, label noise, tables and pictures of who has what."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

import fedbilevel as fb

PARTITIONS: dict[str, Callable[..., list[np.ndarray]]] = {
    "iid": fb.data.iid,
    "shards": fb.data.shards,
    "three shards": lambda labels, clients, seed: fb.data.shards(labels, clients, seed, per_client=3),
    "dirichlet": lambda labels, clients, seed: fb.data.dirichlet(labels, clients, seed, alpha=1.0),
    "by class": lambda labels, clients, seed: fb.data.by_class(labels, clients + 3, seed),
    "natural": lambda labels, clients, seed: fb.data.natural(labels),
    "dealt": lambda labels, clients, seed: fb.data.natural(labels, min(clients, 4), seed),
}


@pytest.mark.parametrize("name", sorted(PARTITIONS))
@given(samples=st.integers(40, 200), clients=st.integers(1, 7), seed=st.integers(0, 1000))
def test_every_sample_goes_to_one_client(name: str, samples: int, clients: int, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.arange(samples) % 4)
    parts = PARTITIONS[name](labels, clients, seed)
    assert all(len(part) for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    again = PARTITIONS[name](labels, clients, np.random.default_rng(seed))
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    if samples // len(parts) >= 4 and min(map(len, parts)) >= 4:
        train, validation = fb.data.split(parts, (0.75, 0.25), seed)
        joined = [np.sort(np.concatenate(pair)) for pair in zip(train, validation, strict=True)]
        assert all((a == b).all() for a, b in zip(parts, joined, strict=True))


def test_shapes_of_partitions() -> None:
    labels = np.repeat(np.arange(10), 100)
    assert {len(part) for part in fb.data.iid(labels, 30, 0)} == {33, 34}
    own = fb.data.counts(fb.data.shards(labels, 10, 0), labels)
    assert (own.sum(1) == 100).all()
    assert ((own > 0).sum(1) <= 2).all()
    single = fb.data.counts(fb.data.by_class(labels, 20, 0), labels)
    assert (single == 50 * np.tile(np.eye(10), (2, 1))).all()
    even = fb.data.counts(fb.data.dirichlet(labels, 5, 0, alpha=1e6), labels)
    assert (abs(even - 20) <= 1).all()
    skewed = fb.data.counts(fb.data.dirichlet(labels, 5, 0, alpha=0.05, smallest=20), labels)
    assert skewed.sum(1).min() >= 20
    assert (skewed.max(0) > 90).mean() > 0.5  # most classes belong to one client


@pytest.mark.parametrize(
    "call",
    [
        lambda labels: fb.data.iid(labels, 0, 0),
        lambda labels: fb.data.iid(labels, 41, 0),
        lambda labels: fb.data.shards(labels, 21, 0),
        lambda labels: fb.data.shards(labels, 2, 0, per_client=0),
        lambda labels: fb.data.dirichlet(labels, 4, 0, alpha=0.0),
        lambda labels: fb.data.dirichlet(labels, 4, 0, alpha=0.01, smallest=11),
        lambda labels: fb.data.dirichlet(labels, 9, 0, alpha=0.01, draws=2),
        lambda labels: fb.data.by_class(labels, 3, 0),
        lambda labels: fb.data.by_class(labels[:5], 5 + 4, 0),
        lambda labels: fb.data.natural(labels, 5),
        lambda labels: fb.data.split([labels[:1]], (0.5, 0.5), 0),
        lambda labels: fb.data.split([labels], (0.5, 0.6), 0),
        lambda labels: fb.data.corrupt(labels, 1.5, 4, 0),
        lambda labels: fb.data.corrupt(labels, 0.5, 3, 0),
        lambda labels: fb.data.corrupt(labels, 0.5, 4, 0, reading="odd"),
        lambda labels: fb.data.long_tail(labels, 0.0, 0),
        lambda labels: fb.data.counts([labels], labels, 2),
    ],
)
def test_what_cannot_be_is_a_sentence(call: Callable[[np.ndarray], object]) -> None:
    with pytest.raises(fb.FedbilevelError, match=r"\.$"):
        call(np.arange(40) % 4)


# Noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.95, 1.0])
def test_corruption_in_both_readings(share: float) -> None:
    labels = (np.arange(20_000) % 10).astype(np.int32)
    drawn = round(share * len(labels))
    given, wrong = fb.data.corrupt(labels, share, 10, seed=3)
    assert wrong.sum() == drawn
    given_any, wrong_any = fb.data.corrupt(labels, share, 10, seed=3, reading="uniform")
    # Every draw is right by chance one time in ten: a binomial number, here within four deviations.
    assert abs(wrong_any.sum() - 0.9 * drawn) <= 4 * np.sqrt(drawn * 0.09)
    for new, differs in ((given, wrong), (given_any, wrong_any)):
        assert new.dtype == labels.dtype
        assert ((new != labels) == differs).all()
        assert new.min() >= 0
        assert new.max() <= 9
    if share == 0.95:
        # Of the true zeros: the right label is the rarest under "wrong", the most frequent under "uniform".
        assert np.bincount(given[labels == 0]).argmin() == 0
        assert np.bincount(given_any[labels == 0]).argmax() == 0


def test_corruption_draws_as_the_first_release_did() -> None:
    labels, rng = np.arange(100) % 10, np.random.default_rng(7)
    wrong = np.zeros(100, bool)
    wrong[rng.choice(100, 40, replace=False)] = True
    expected = np.where(wrong, (labels + rng.integers(1, 10, 100)) % 10, labels)
    np.testing.assert_array_equal(fb.data.corrupt(labels, 0.4, 10, seed=7)[0], expected)


def test_long_tail() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 1000))
    kept = fb.data.long_tail(labels, 0.01, seed=0)
    assert (np.diff(kept) > 0).all()
    assert np.bincount(labels[kept]).tolist() == [round(1000 * 0.01 ** (i / 9)) for i in range(10)]
    assert np.bincount(labels[kept])[[0, 9]].tolist() == [1000, 10]


# Tables and pictures ---------------------------------------------------------------------------------------------


def printed(table: object) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_describe_and_heat_map(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(10), 100)
    parts = fb.data.shards(labels, 25, seed=0)
    text = printed(fb.data.describe(parts, labels))
    assert text.split("\n")[1].split()[-1] == "9"  # the last class has its column
    assert "25 clients, 1000 samples: 40 to 40 each, median 40" in text
    assert "+5" in text
    large = np.repeat(np.arange(10), 9000)
    text = printed(fb.data.describe(fb.data.iid(large, 2, 0), large, [f"name {k}" for k in range(10)]))
    assert "…" not in text
    assert "45000" in text
    assert text.split("\n")[-2].count("4") >= 10  # no column is dropped: every class has about 4500
    assert len(text.split("\n")[-2].split()) == 13
    many = np.arange(200) % 50
    text = printed(fb.data.describe(fb.data.iid(many, 2, 0), many, [f"kind {k}" for k in range(50)]))
    assert "most frequent" in text
    assert "kind " in text
    path = fb.data.heat_map(parts, labels, tmp_path / "who.png", [f"class {k}" for k in range(10)])
    with Image.open(path) as picture:
        assert min(picture.size) > 200
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10
