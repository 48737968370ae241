"""How the found label errors are shown: a table of clients, the most suspicious images, and a file of all suspects."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel.core.presentation import Details, Outcomes
from fedbilevel.data import DataSet
from fedbilevel.tasks import scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 20  # clients in the table of details
COLUMNS = ("client", "images", "wrong labels", "suspects", "really wrong", "precision", "AUC of the weights")


@dataclass(frozen=True, eq=False)
class Suspects:
    """The labels that the model disagrees with, those of least weight first; and which of them are really wrong.

    Args:
        images: the data set.
        train: the training images of every client, as numbers of its images.
        given: their labels.
        wrong: which of these are wrong.
        shares: from x to the weights of every client's images, as shares of the full weight.
        predict: what a model says of some images of the data set.
    """

    images: DataSet
    train: Sequence[np.ndarray]
    given: Sequence[np.ndarray]
    wrong: Sequence[np.ndarray]
    shares: Callable[[Any], Sequence[np.ndarray]]
    predict: Callable[[Any, np.ndarray], np.ndarray]

    def _of_clients(self, results: Outcomes) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
        """For every client, the weights of its images and what the model says of them."""
        says = self.predict(results["run"].y, np.concatenate(self.train))
        ends = np.cumsum([len(part) for part in self.train])[:-1]
        return self.shares(results["run"].x), np.split(says, ends)

    def details(self, results: Outcomes) -> Details:
        """How many suspects every client has, and how many of them are label errors."""
        rows = []
        for m, (share, says) in enumerate(zip(*self._of_clients(results), strict=True)):
            hits = self.wrong[m][_suspects(share, says, self.given[m])]
            auc = scores.auc(self.wrong[m], -share) if 0 < self.wrong[m].mean() < 1 else "-"
            precision = float(hits.mean()) if len(hits) else "-"
            rows.append([m, len(share), int(self.wrong[m].sum()), len(hits), int(hits.sum()), precision, auc])
        title = "Suspects: labels the model disagrees with"
        return Details(title + (f" (the first {ROWS} clients)" if len(rows) > ROWS else ""), COLUMNS, rows[:ROWS])

    def files(self, results: Outcomes, folder: Path) -> None:
        """suspects.csv: all of them."""
        with (folder / "suspects.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["client", "rank", "sample", "weight", "given_label", "model_says", "index", "really_wrong"])
            for m, (share, says) in enumerate(zip(*self._of_clients(results), strict=True)):
                given, index, wrong = self.given[m], self.train[m], self.wrong[m]
                for rank, n in enumerate(_suspects(share, says, given), 1):
                    row = [f"{share[n]:.4f}", given[n], says[n], index[n], "yes" if wrong[n] else "no"]
                    table.writerow([m, rank, n, *row])

    def picture(self, results: Outcomes, figure: "Figure") -> None:
        """The images that are most suspicious, and how the weights of right and wrong labels are distributed."""
        shares, says = (np.concatenate(parts) for parts in self._of_clients(results))
        given, wrong, index = (np.concatenate(parts) for parts in (self.given, self.wrong, self.train))
        columns, rows = 10, 4
        figure.set_size_inches(13, 5.2)
        halves: Any = figure.subfigures(1, 2, width_ratios=[2.2, 1])
        left, right = halves
        left.suptitle(
            "The most suspicious images: given label → what the model says (red: the label is wrong, blue: right)"
        )
        grid = left.subplots(rows, columns, squeeze=False)
        names = self.images.classes
        short = max(map(len, names)) <= 2
        for axes in grid.flat:
            axes.axis("off")
        for axes, n in zip(grid.flat, _suspects(shares, says, given), strict=False):
            axes.imshow(self.images.train.inputs[index[n]], cmap="gray")
            text = f"{names[given[n]]}{' → ' if short else chr(10) + '→ '}{names[says[n]]}"
            axes.set_title(text, fontsize=10 if short else 8, color="tab:red" if wrong[n] else "tab:blue", pad=3)
        axes = right.subplots()
        bins = np.linspace(0, 1, 41)
        for chosen, color, label in ((wrong, "tab:red", "wrong labels"), (~wrong, "tab:blue", "right labels")):
            if chosen.any():
                axes.hist(shares[chosen], bins, color=color, alpha=0.55, label=f"{label} ({chosen.sum()})")
        axes.set_xlabel("weight of a training sample")
        axes.set_ylabel("samples")
        axes.set_title("Weights of all clients' samples")
        axes.margins(y=0.2)  # room for the legend
        axes.legend(frameon=False, loc="upper center")


def _suspects(share: np.ndarray, says: np.ndarray, given: np.ndarray) -> np.ndarray:
    """The samples whose label the model disagrees with, those of least weight first."""
    order = np.argsort(share, kind="stable")
    return order[says[order] != given[order]]
