"""The model that is trained on the cleaned labels: it reads the same tables, arrays and pictures as the search."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.cleaning.findings import FinalModel
from fedbilevel.cleaning.suspects import named
from fedbilevel.data.own_tables import OwnTable
from fedbilevel.runs.prediction import save_classifier
from fedbilevel.tasks.classifier import Classifier, standardising


@dataclass(frozen=True, eq=False)
class CleanedModel:
    """A model for new rows.

    Args:
        classifier: what is stored of it.
        classes: the names of the classes, as the data have them.
    """

    classifier: Classifier = field(repr=False)
    classes: Sequence[Any]

    def predict_proba(self, data: Any) -> np.ndarray:
        """The probability of every class, in the order of ``classes``, for new rows.

        Args:
            data: a data frame, an array, a file or a folder of pictures, with the columns that it was trained on.
        """
        return np.concatenate([block for _, block in self.classifier.predict(data)])

    def predict(self, data: Any) -> np.ndarray:
        """The most likely class of new rows."""
        return named(self.classes, self.predict_proba(data).argmax(1))

    def save(self, folder: Path | str) -> Path:
        """Save it in a folder, for ``fedbilevel predict``."""
        return save_classifier(folder, self.classifier)


def model_of(final: FinalModel, data: OwnTable, classes: Sequence[Any]) -> CleanedModel:
    """The final model of a search in these rows."""
    mean, deviation = _shift(final, data.inputs)
    layers = standardising(final.parameters, mean, deviation)
    return CleanedModel(Classifier(data.encoding, data.classes, [layers], label=data.label), classes)


def _shift(final: FinalModel, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How the search scaled its inputs, as a mean and a deviation for each.

    It cuts off what is far from the mean. Of an input with two values, that is another mean and deviation; of others,
    only outliers differ.
    """
    mean, deviation = (np.array(np.broadcast_to(each, inputs.shape[1:]), float) for each in final.scale[:2])
    low, high = inputs.min(0), inputs.max(0)
    at_low, at_high = final.scale(np.stack([low, high])).astype(float)
    for n in range(inputs.shape[1]):
        if at_low[n] < at_high[n] and np.all((inputs[:, n] == low[n]) | (inputs[:, n] == high[n])):
            deviation[n] = (high[n] - low[n]) / (at_high[n] - at_low[n])
            mean[n] = low[n] - at_low[n] * deviation[n]
    return mean, deviation
