"""How much a search may cost, and what is tried for it."""

from typing import NamedTuple

import numpy as np

from fedbilevel.tasks.label_errors import Candidate, Design

FEDAVG_ROUNDS = 200
"""Rounds of one FedAvg run of the final model, the unit of cost."""


class Effort(NamedTuple):
    """How much a search may cost.

    Args:
        rounds: of exchanges.
        step: the server's first step, for Adam; it falls by a third in a hundred rounds.
        folds: the number of folds.
        most: the cost that it keeps below, in FedAvg runs of the final model.
    """

    rounds: int
    step: float
    folds: int
    most: float


DEFAULT = Effort(rounds=100, step=0.03, folds=5, most=10)
THOROUGH = Effort(rounds=150, step=0.02, folds=10, most=45)

LINEAR = (Candidate("aware", 3e-2), Candidate("given", 3e-2), Candidate("cleaned", 1e-2))
TRUSTED = (Candidate("trusted", 1e-2), Candidate("trusted", 2e-1))
NOTHING_TRUSTED = tuple(Candidate("given", l2) for l2 in (1e-1, 3e-1, 1.0, 3.0, 10.0))
"""What is tried in addition if there are trusted rows, and if there are none: models of the labels as they are."""
NETWORKS = (Candidate("aware", 3e-2),)
MORE = (
    ("networks", Candidate("aware", 1e-2)),
    ("linear", Candidate("aware", 1e-2)),
    ("linear", Candidate("aware", 1e-1)),
    ("networks", Candidate("cleaned", 1e-2)),
    ("networks", Candidate("cleaned", 3e-3)),
    ("linear", Candidate("aware", 3e-3)),
    ("linear", Candidate("cleaned", 3e-2)),
)
"""What is tried in addition, in this order, as far as the cost allows."""
TRIED_BY_DEFAULT = 3


def design_of(features: int, classes: int, trusted: bool, effort: Effort) -> Design:
    """The candidates of a search: as many as its cost allows."""
    linear = (*LINEAR, *(TRUSTED if trusted else NOTHING_TRUSTED))
    design = Design(features, classes, linear, NETWORKS, folds=effort.folds)
    for kind, candidate in MORE if effort.most > DEFAULT.most else MORE[:TRIED_BY_DEFAULT]:
        larger = design._replace(**{kind: (*getattr(design, kind), candidate)})
        if larger.cost * effort.rounds / FEDAVG_ROUNDS <= effort.most:
            design = larger
    return design


def folds_of(labels: np.ndarray, trusted: np.ndarray, folds: int, rng: np.random.Generator) -> np.ndarray:
    """A fold for every row of a client: as many rows of every label, trusted and not, in each."""
    fold = np.zeros(len(labels), np.int32)
    for kind in np.unique(2 * labels + trusted):
        rows = rng.permutation(np.flatnonzero(2 * labels + trusted == kind))
        fold[rows] = (np.arange(len(rows)) + rng.integers(folds)) % folds
    return fold
