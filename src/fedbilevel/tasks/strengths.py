"""How the strengths of regularisation are shown: the AUC at every hospital, a bar for each feature, and a file."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedbilevel.core.presentation import Details, Outcomes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = {"untuned": "no tuning", "grid": "grid search", "run": "per feature"}


@dataclass(frozen=True, eq=False)
class Strengths:
    """What a table and a picture of the solution need to know."""

    features: Sequence[str]
    clients: Sequence[str]
    rows: Sequence[Sequence[np.ndarray]]  # for training, validation and test, the numbers of every client's rows
    labels: np.ndarray
    bounds: tuple[float, float]  # of a strength

    @property
    def columns(self) -> list[str]:
        """The metrics with every client's AUC."""
        return [f"auc_{name.lower().replace(' ', '_')}" for name in self.clients]

    def details(self, results: Outcomes) -> Details:
        """The AUC of every client."""
        last = [results[label].metrics for label in WAYS]
        sizes = np.array([[len(part) for part in parts] for parts in self.rows]).T
        own = [self.labels[np.concatenate(parts)] for parts in zip(*self.rows, strict=True)]
        table = [
            [name, *map(int, sizes[m]), f"{own[m].mean():.0%}", *(way[self.columns[m]] for way in last)]
            for m, name in enumerate(self.clients)
        ]
        share = f"{self.labels.mean():.0%}"
        table.append(["all, mean", *map(int, sizes.sum(0)), share, *(way["auc"] for way in last)])
        return Details("AUC on the test rows", ["client", "train", "val", "test", "positive", *WAYS.values()], table)

    def picture(self, results: Outcomes, figure: "Figure") -> None:
        """The strength of every feature, and the AUC of every client."""
        weakest, strongest = self.bounds
        figure.set_size_inches(11, max(4.5, 1.5 + 0.19 * len(self.features)))
        left, right = figure.subplots(1, 2)
        strengths = np.exp(np.asarray(results["run"].x, float))
        order = np.argsort(strengths, kind="stable")
        left.barh(range(len(order)), strengths[order] - weakest / 2, left=weakest / 2, color="C1", height=0.7)
        left.axvline(float(np.exp(results["grid"].x[0])), color="C0", linestyle="--", label="best shared strength")
        left.set_xscale("log")
        left.set_xlim(weakest / 2, 1.5 * strongest)
        left.set_yticks(range(len(order)), [self.features[j] for j in order], fontsize=8)
        left.margins(y=0.01)
        left.set_xlabel("learned strength of regularisation")
        left.legend(loc="lower right", fontsize=8)
        groups = np.arange(len(self.clients) + 1)
        for n, (label, way) in enumerate(WAYS.items()):
            values = [results[label].metrics[name] for name in (*self.columns, "auc")]
            right.bar(groups + 0.27 * (n - 1), values, 0.25, label=way, color=f"C{(2, 0, 1)[n]}")
        right.set_xticks(groups, [*self.clients, "mean"], rotation=20)
        right.set_ylim(0.5, 1.08)
        right.set_yticks(np.arange(0.5, 1.01, 0.1))
        right.set_ylabel("AUC on the test rows (0.5 is guessing)")
        right.grid(axis="y", alpha=0.3)
        right.legend(loc="upper center", ncols=3, fontsize=8)

    def files(self, results: Outcomes, folder: Path) -> None:
        """features.csv: the strength and the weight of every feature."""
        x, y = results["run"].x, results["run"].y
        with (folder / "features.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["feature", "strength", "weight"])
            for name, strength, weight in zip(self.features, np.exp(np.asarray(x, float)), y["weights"], strict=True):
                table.writerow([name, f"{strength:.5f}", f"{float(weight):.5f}"])
