"""How well scores separate two classes."""

from typing import Any

import numpy as np


def auc(truth: Any, scores: Any) -> float:
    """The probability that a positive has a larger score than a negative; NaN, if not all scores are finite.

    >>> auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
    0.75
    """
    from sklearn.metrics import roc_auc_score  # here, as it takes longer to import than all of this library

    return float(roc_auc_score(truth, scores)) if np.all(np.isfinite(scores)) else float("nan")
