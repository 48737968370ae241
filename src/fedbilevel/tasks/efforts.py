"""How much a search for label errors may cost: the candidates, the steps and the rounds, here and between parties."""

from typing import Any, NamedTuple

import numpy as np

from fedbilevel.core.schedules import constant
from fedbilevel.tasks.label_errors import Candidate, Design, Kind

Array = np.ndarray


class Effort(NamedTuple):
    """How much a search may cost."""

    rounds: int
    linear: tuple[float, ...]
    networks: tuple[float, ...]


DEFAULT = Effort(150, (1e-4, 1e-3, 1e-2), (1e-3,))
THOROUGH = Effort(300, (1e-5, 1e-4, 1e-3, 1e-2, 1e-1), (1e-4, 1e-3, 1e-2))


def design_of(features: int, classes: int, trusted: bool, effort: Effort) -> Design:
    """The candidates of a search."""
    aware = [Candidate("aware", l2) for l2 in effort.linear]
    kinds: tuple[Kind, ...] = ("given", "cleaned", "trusted") if trusted else ("given", "cleaned")
    middle = effort.linear[len(effort.linear) // 2]
    linear = (*aware, *(Candidate(kind, middle) for kind in kinds))
    return Design(features, classes, linear, tuple(Candidate("aware", l2) for l2 in effort.networks))


def steps() -> dict[str, Any]:
    """The hyper-parameters of the algorithm, ``alternating``."""
    return {"lr_upper": 4.0, "lr_lower": 1.0, "server": "adam", "lr_server": constant(0.02)}


def folds_of(labels: Array, trusted: Array, folds: int, rng: np.random.Generator) -> Array:
    """A fold for every row of a client: as many rows of every label, trusted and not, in each."""
    fold = np.zeros(len(labels), np.int32)
    for kind in np.unique(2 * labels + trusted):
        rows = rng.permutation(np.flatnonzero(2 * labels + trusted == kind))
        fold[rows] = (np.arange(len(rows)) + rng.integers(folds)) % folds
    return fold
