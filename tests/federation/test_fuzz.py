"""Mutated input of every kind: accepted, or refused with a sentence; see ``fuzzed.py``."""

from pathlib import Path

import pytest

from fuzz import GROWTH
from fuzzed import KINDS, fuzzed

MANY = {"questions": 50_000, "answers": 49_000, "rounds": 1000, "checkpoints": 10_000}
FEW = {"questions": 300, "answers": 400, "rounds": 15, "studies": 60, "checkpoints": 40}


def check(kind: str, count: int, folder: Path, seed: int = 0) -> None:
    outcome = fuzzed(kind, count, folder, seed)
    assert not outcome.others, outcome
    assert outcome.accepted + outcome.refused == count
    assert outcome.growth < GROWTH


@pytest.mark.parametrize("kind", KINDS)
def test_some_mutated_inputs(kind: str, tmp_path: Path) -> None:
    check(kind, FEW.get(kind, 200), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_inputs(kind: str, tmp_path: Path) -> None:
    check(kind, MANY.get(kind, 10_000), tmp_path, seed=1)
