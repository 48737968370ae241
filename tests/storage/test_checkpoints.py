"""Checkpoints: a run goes on from them, bit for bit, and bad ones are refused."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.errors import FedbilevelWarning
from fedbilevel.storage.arrays import decode, encode
from fedbilevel.tasks.quadratic import Quadratic


def _solve(folder: Path | None, rounds: int = 20, **changes: Any) -> fb.Result:
    algorithm = fb.FedBiO(0.1, 0.2, 0.2, **changes)
    checkpoint = None if folder is None else fb.Checkpoints(folder, seconds=0, keep=3)
    return fb.solve(Quadratic.random().task(), algorithm, rounds=rounds, every=2, checkpoint=checkpoint)


def _same(a: fb.Result, b: fb.Result) -> bool:
    same = jax.tree.map(lambda p, q: bool(np.array_equal(p, q)), (a.x, a.y), (b.x, b.y))
    return all(jax.tree.leaves(same))


def test_from_python(tmp_path: Path) -> None:
    whole = _solve(None, 30)
    _solve(tmp_path / "here", 14)
    assert len(list((tmp_path / "here").iterdir())) <= 3  # only the last ones are kept
    parts = _solve(tmp_path / "here", 30)
    assert _same(whole, parts)
    strip = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    assert strip(whole.history) == strip(parts.history)
    assert parts.seconds > parts.history[7]["seconds"]
    again = _solve(tmp_path / "here", 30)  # nothing is left to do
    assert _same(whole, again)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda raw: raw[: len(raw) // 2], "this is not a message of fedbilevel"),
        (lambda raw: b"", "this is not a message of fedbilevel"),
        (lambda raw: raw[:-4] + bytes(4), "its contents are damaged"),
        (lambda raw: encode({"method": "descend"}, {"a": np.zeros(2)}), "it is not a checkpoint of fedbilevel"),
        (lambda raw: encode({**decode(raw)[0], "run": "other"}, decode(raw)[1]), "another configuration or other data"),
    ],
)
def test_a_bad_checkpoint_is_refused_and_the_one_before_used(damage: Any, why: str, tmp_path: Path) -> None:
    whole = _solve(None)
    _solve(tmp_path, 12)
    newest, *others = fb.Checkpoints(tmp_path).files()
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.warns(FedbilevelWarning, match=why):
        assert _same(whole, _solve(tmp_path))
    for path in fb.Checkpoints(tmp_path).files():
        path.write_bytes(b"nothing")
    with pytest.warns(FedbilevelWarning), pytest.raises(fb.FedbilevelError, match="There is no other one: remove"):
        _solve(tmp_path)
    assert others


def test_every_flipped_bit_and_every_missing_byte_is_noticed() -> None:
    """In the header, too."""
    whole = encode({"run": "a", "round": 3, "history": [{"loss": 0.5}]}, {"y": np.arange(3.0), "n": np.ones(2, int)})
    expected = decode(whole)
    for place in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(fb.FedbilevelError):
            decode(bytes(changed))
    for length in range(len(whole)):
        with pytest.raises(fb.FedbilevelError):
            decode(whole[:length])
    assert expected[0]["round"] == 3


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Another step size, and the same step size on other data."""
    _solve(tmp_path, 4)
    with pytest.warns(FedbilevelWarning, match="another configuration"), pytest.raises(fb.FedbilevelError):
        _solve(tmp_path, 4, local_steps=2)
    other = Quadratic.random(seed=1).task()
    with pytest.warns(FedbilevelWarning, match="other data"), pytest.raises(fb.FedbilevelError):
        fb.solve(other, fb.FedBiO(0.1, 0.2, 0.2), rounds=4, every=2, checkpoint=tmp_path)


def test_the_local_engine_says_that_it_has_none(tmp_path: Path) -> None:
    with pytest.raises(fb.FedbilevelError, match="checkpoints need engine='simulation'"):
        fb.solve(Quadratic.random().task(), fb.FedBiO(0.1, 0.2, 0.2), 2, engine="local", checkpoint=tmp_path)
