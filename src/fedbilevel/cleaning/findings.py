"""What a search for label errors has found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.cleaning.scaling import Scale
from fedbilevel.models import outputs
from fedbilevel.tasks.label_errors import Design

Array = np.ndarray


class Noise(NamedTuple):
    """How the labels of one client go wrong. Trusted rows do not count.

    Args:
        client: its name.
        rows: its suspicious rows.
        level: the estimated share of wrong labels among them.
        low, high: a 95 % interval of this share, as if the models were known.
        matrix: (classes, classes): the probability of each given label (columns) for every right label (rows).
        confusion: (classes, classes): the expected number of rows of each right label (rows) with each given label
            (columns).
        issues: how many of its rows are probably wrong.
    """

    client: Any
    rows: int
    level: float
    low: float
    high: float
    matrix: Array
    confusion: Array
    issues: int


class Score(NamedTuple):
    """How well a model does on the trusted rows of folds that it was not trained on."""

    accuracy: float
    loss: float


class Exchanged(NamedTuple):
    """What left the clients, and what it cost.

    Args:
        megabytes: sent and received, by all clients together.
        rounds: number of exchanges.
        fedavg_runs: the cost in runs of FedAvg (200 rounds) of the final model alone.
        what: in words, what was exchanged.
    """

    megabytes: float
    rounds: int
    fedavg_runs: float
    what: str


@dataclass(frozen=True, eq=False)
class FinalModel:
    """A model of the right labels, trained on all rows but those that are probably wrong."""

    design: Design
    parameters: Any
    scale: Scale

    def predict_proba(self, inputs: Array) -> Array:
        """The probability of every class: (rows, classes)."""
        logits = outputs(self.design.model.apply, self.parameters, self.scale(np.asarray(inputs))).astype(float)
        grown = np.exp(logits - logits.max(1, keepdims=True))
        return grown / grown.sum(1, keepdims=True)

    def predict(self, inputs: Array) -> Array:
        """The most likely class of every row."""
        return self.predict_proba(inputs).argmax(1)


@dataclass(frozen=True, eq=False)
class Findings:
    """What a search for label errors has found; arrays are aligned to the rows that were given.

    Args:
        wrong: the probability that the label is wrong; 0 for trusted rows.
        quality: the score to rank by, from 0 to 1: low for labels that are probably wrong.
        predicted: the most likely class, by models that were not trained on the row.
        issue: whether the label is probably wrong.
        probabilities: (rows, classes): of every class, by models that were not trained on the row.
        noise: how the labels of each client go wrong.
        identified: whether the share of wrong labels can be told from the data. If not, rows are only ranked and no
            row is an issue.
        warning: what the user should know, in one sentence; empty if nothing.
        model: the final model.
        given, cleaned: how well the same kind of model does on trusted rows if it is trained on all labels as given,
            and without those that are probably wrong; None without trusted rows.
        exchanged: what left the clients.
        history: of the run.
    """

    wrong: Array
    quality: Array
    predicted: Array
    issue: Array
    probabilities: Array
    noise: Sequence[Noise]
    identified: bool
    warning: str
    model: FinalModel
    given: Score | None
    cleaned: Score | None
    exchanged: Exchanged
    history: Sequence[Mapping[str, Any]]
