"""Cleaning as an estimator of scikit-learn."""

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fedbilevel.algorithms import FedBiO, FedBiOAcc
from fedbilevel.cleaning.findings import Findings
from fedbilevel.cleaning.search import clean_arrays
from fedbilevel.core import Algorithm
from fedbilevel.errors import Names

SOLVERS: Names[Algorithm | None] = Names(
    "algorithm for CleanClassifier",
    {
        "auto": None,
        "fedbio": FedBiO(lr_upper=1.0, lr_lower=0.1, lr_adjoint=0.02, local_steps=5),
        "fedbioacc": FedBiOAcc(lr_upper=1.0, lr_lower=0.1, lr_adjoint=0.03),
    },
)
"""Algorithms for the search, with steps for standardised inputs. FedBiO costs twice, FedBiOAcc four times as much as
the default."""


class CleanClassifier(ClassifierMixin, BaseEstimator):
    """A classifier for training data with wrong labels: it finds them, and is trained on what is left.

    Rows of several clients are never pooled: the search exchanges models only. Rows that are known to have the right
    label (``trusted``) make it better by far.

    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> y[:50] = 1 - y[:50]
    >>> model = CleanClassifier().fit(X, y, trusted=np.arange(len(y)) >= 500)  # doctest: +SKIP
    >>> model.label_issues_[:50].mean()  # doctest: +SKIP
    0.96

    Args:
        algorithm: the algorithm of the search: "auto", "fedbio" or "fedbioacc", or an algorithm of this library with
            its hyper-parameters.
        thorough: search longer, for about five times the cost.
        random_state: a seed of the search, or where to draw it from.

    Attributes:
        classes_: the labels.
        label_issues_: for every row of the training data, whether its label is probably wrong.
        label_quality_: the score to rank the rows by, low for labels that are probably wrong.
        probability_wrong_: the probability that the label is wrong; 0 where it is trusted.
        predicted_labels_: the likely label, by models that were not trained on the row.
        noise_: how the labels of each client go wrong, one entry per client.
        findings_: everything that was found.
        n_iter_: rounds of the search.
        n_features_in_, feature_names_in_: as in scikit-learn.
    """

    def __init__(self, algorithm: str | Algorithm = "auto", *, thorough: bool = False, random_state: Any = 0) -> None:
        self.algorithm = algorithm
        self.thorough = thorough
        self.random_state = random_state

    def fit(self, X: Any, y: Any, clients: Any = None, trusted: Any = None) -> Self:
        """Find the wrong labels of a training set, and train a model on the others.

        Args:
            X: (rows, columns), numbers.
            y: the given labels.
            clients: the client of each row; None if there is only one.
            trusted: which labels are known to be right; None if that is known of none.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"CleanClassifier needs labels of at least two classes, but all are {self.classes_[0]!r}.")
        owners = np.zeros(len(y), int) if clients is None else self._column(clients, len(y), "clients")
        sure = None if trusted is None else self._column(trusted, len(y), "trusted").astype(bool)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        solver = self.algorithm if isinstance(self.algorithm, Algorithm) else SOLVERS[self.algorithm]
        found = clean_arrays(
            X, labels, owners, sure, len(self.classes_), thorough=self.thorough, algorithm=solver, seed=seed
        )
        self.findings_: Findings = found
        self.label_issues_, self.label_quality_ = found.issue, found.quality
        self.probability_wrong_, self.predicted_labels_ = found.wrong, self.classes_[found.predicted]
        self.noise_, self.n_iter_ = found.noise, found.exchanged.rounds
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class for every row, in the order of ``classes_``."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return self.findings_.model.predict_proba(X)

    def predict(self, X: Any) -> np.ndarray:
        """The most likely class of every row."""
        likely = self.predict_proba(X).argmax(1)
        return self.classes_[likely]

    @staticmethod
    def _column(values: Any, rows: int, name: str) -> np.ndarray:
        column = column_or_1d(np.asarray(values))
        if len(column) != rows:
            raise ValueError(f"{name} has {len(column)} values, but there are {rows} rows.")
        return column
