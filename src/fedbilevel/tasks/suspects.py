"""How the found label errors are shown: a table of clients, the most suspicious images, and a file of all suspects."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedbilevel.core.presentation import Details, Outcomes
from fedbilevel.data import DataSet
from fedbilevel.tasks import scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 20  # clients in the table of details
COLUMNS = ("client", "images", "wrong labels", "suspects", "really wrong", "precision", "AUC", "AUC of the weights")


FILE = (
    "client", "rank", "sample", "label_quality", "weight", "given_label", "predicted_label", "index", "really_wrong",
)  # fmt: skip


class _Judged(NamedTuple):
    """What is known of some images: their weights, as shares of the full weight; their likely labels; and the
    probability of the given ones.
    """

    share: np.ndarray
    likely: np.ndarray
    quality: np.ndarray

    def suspects(self, given: np.ndarray) -> np.ndarray:
        """Those whose label the models disagree with, the least probable labels first."""
        order = np.argsort(self.quality, kind="stable")
        return order[self.likely[order] != given[order]]


@dataclass(frozen=True, eq=False)
class Suspects:
    """The labels that models which were not trained on them disagree with, the least probable ones first; and which of
    them are really wrong.

    Args:
        images: the data set.
        train: the training images of every client, as numbers of its images.
        given: their labels.
        wrong: which of these are wrong.
        shares: from x to the weights of every client's images, as shares of the full weight.
        out_of_fold: the probability of every class for all training images, by models that were not trained on them.
    """

    images: DataSet
    train: Sequence[np.ndarray]
    given: Sequence[np.ndarray]
    wrong: Sequence[np.ndarray]
    shares: Callable[[Any], Sequence[np.ndarray]]
    out_of_fold: Callable[[Any], np.ndarray]

    def _of_clients(self, results: Outcomes) -> list[_Judged]:
        """For every client, what is known of its images."""
        probabilities = self.out_of_fold(results["folds"].y)
        ends = np.cumsum([len(part) for part in self.train])[:-1]
        shares = self.shares(results["run"].x)
        return [
            _Judged(share, said.argmax(1), np.take_along_axis(said, given[:, None], 1)[:, 0])
            for share, said, given in zip(shares, np.split(probabilities, ends), self.given, strict=True)
        ]

    def details(self, results: Outcomes) -> Details:
        """How many suspects every client has, and how many of them are label errors."""
        rows = []
        for m, judged in enumerate(self._of_clients(results)):
            wrong = self.wrong[m]
            hits = wrong[judged.suspects(self.given[m])]
            ways = (judged.quality, judged.share)
            auc = [scores.auc(wrong, -way) if 0 < wrong.mean() < 1 else "-" for way in ways]
            precision = float(hits.mean()) if len(hits) else "-"
            rows.append([m, len(wrong), int(wrong.sum()), len(hits), int(hits.sum()), precision, *auc])
        title = "Suspects: labels that models which were not trained on them disagree with"
        return Details(title + (f" (the first {ROWS} clients)" if len(rows) > ROWS else ""), COLUMNS, rows[:ROWS])

    def files(self, results: Outcomes, folder: Path) -> None:
        """suspects.csv: all of them."""
        with (folder / "suspects.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(FILE)
            for m, judged in enumerate(self._of_clients(results)):
                given, index, wrong = self.given[m], self.train[m], self.wrong[m]
                for rank, n in enumerate(judged.suspects(given), 1):
                    row = [f"{judged.quality[n]:.4g}", f"{judged.share[n]:.4f}", given[n], judged.likely[n]]
                    table.writerow([m, rank, n, *row, index[n], "yes" if wrong[n] else "no"])

    def picture(self, results: Outcomes, figure: "Figure") -> None:
        """The images that are most suspicious, and how probable right and wrong labels are."""
        judged = _Judged(*(np.concatenate(parts) for parts in zip(*self._of_clients(results), strict=True)))
        given, wrong, index = (np.concatenate(parts) for parts in (self.given, self.wrong, self.train))
        columns, rows = 10, 4
        figure.set_size_inches(13, 5.2)
        halves: Any = figure.subfigures(1, 2, width_ratios=[2.2, 1])
        left, right = halves
        left.suptitle(
            "The most suspicious images: given label → likely label (red: the given label is wrong, blue: right)"
        )
        grid = left.subplots(rows, columns, squeeze=False)
        names = self.images.classes
        short = max(map(len, names)) <= 2
        for axes in grid.flat:
            axes.axis("off")
        for axes, n in zip(grid.flat, judged.suspects(given), strict=False):
            axes.imshow(self.images.train.inputs[index[n]], cmap="gray")
            text = f"{names[given[n]]}{' → ' if short else chr(10) + '→ '}{names[judged.likely[n]]}"
            axes.set_title(text, fontsize=10 if short else 8, color="tab:red" if wrong[n] else "tab:blue", pad=3)
        axes = right.subplots()
        bins = np.linspace(0, 1, 41)
        for chosen, color, label in ((wrong, "tab:red", "wrong labels"), (~wrong, "tab:blue", "right labels")):
            if chosen.any():
                axes.hist(judged.quality[chosen], bins, color=color, alpha=0.55, label=f"{label} ({chosen.sum()})")
        axes.set_xlabel("probability of the given label, out of fold")
        axes.set_ylabel("samples")
        axes.set_title("All clients' samples")
        axes.margins(y=0.2)  # room for the legend
        axes.legend(frameon=False, loc="upper center")
