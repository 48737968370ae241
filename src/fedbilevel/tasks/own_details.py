"""What a solution on people's own tables looks like, in a table: of features, classes or clients."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedbilevel.core.presentation import Details, Outcomes
from fedbilevel.data import OwnTable

Make = Callable[[OwnTable, Sequence[str], np.ndarray], Callable[[Outcomes], Details]]
"""Of a table, the names of the clients and their numbers of training rows."""


def _strengths(table: OwnTable, clients: Sequence[str], sizes: np.ndarray) -> Callable[[Outcomes], Details]:
    def details(results: Outcomes) -> Details:
        strengths, weights = np.exp(np.asarray(results["run"].x, float)), np.asarray(results["run"].y["weights"], float)
        order = np.argsort(strengths, kind="stable")
        rows = [[table.encoding.titles[n], float(strengths[n]), float(weights[n])] for n in order]
        return Details("Strength of regularisation of each feature", ["feature", "strength", "weight"], rows)

    return details


def _losses(table: OwnTable, clients: Sequence[str], sizes: np.ndarray) -> Callable[[Outcomes], Details]:
    def details(results: Outcomes) -> Details:
        x = results["run"].x
        counts = np.bincount(table.labels, minlength=len(table.classes))
        columns = [np.asarray(x[part], float).tolist() for part in ("omega", "delta", "tau")]
        rows = [list(row) for row in zip(table.classes, counts.tolist(), *columns, strict=True)]
        return Details("Tuned loss of each class", ["class", "rows", "omega", "delta", "tau"], rows)

    return details


def _weights(table: OwnTable, clients: Sequence[str], sizes: np.ndarray) -> Callable[[Outcomes], Details]:
    def details(results: Outcomes) -> Details:
        x = np.asarray(results["run"].x, float)
        rows = [[clients[m], int(sizes[m]), float(x[m])] for m in np.argsort(-x, kind="stable")]
        return Details("Weights of the clients", ["client", "training rows", "weight"], rows)

    return details


def _groups(table: OwnTable, clients: Sequence[str], sizes: np.ndarray) -> Callable[[Outcomes], Details]:
    def details(results: Outcomes) -> Details:
        x = np.asarray(results["run"].x["groups"], float)
        weights = 4 * np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        group = np.zeros(len(table), int) if table.group is None else table.group
        names = [f"{name}, {label}" for name in table.groups for label in table.classes]
        counts = np.bincount(2 * group + table.labels, minlength=4)
        rows = [[name, int(count), float(weight)] for name, count, weight in zip(names, counts, weights, strict=True)]
        return Details("Weights of the groups", ["group and label", "rows", "weight"], rows)

    return details


DETAILS: Mapping[str, Make] = {
    "client-weighting": _weights,
    "fairness": _groups,
    "loss-tuning": _losses,
    "regularization": _strengths,
}
"""By the name of the task."""
