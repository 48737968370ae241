"""What a search for wrong labels has found, with the names that people know: of rows, clients and classes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedbilevel.cleaning import suspects
from fedbilevel.cleaning.cleaned import without
from fedbilevel.cleaning.findings import Findings, Score
from fedbilevel.cleaning.model import CleanedModel, model_of
from fedbilevel.cleaning.shares import Share, confusion, shares
from fedbilevel.cleaning.words import percent
from fedbilevel.data.own_tables import OwnTable

if TYPE_CHECKING:
    import pandas as pd

    from fedbilevel.drawing.curves import Picture


class Gain(NamedTuple):
    """How good a model is on trusted rows that it was not trained on, before and after cleaning.

    Args:
        given: trained on all labels as they were given.
        cleaned: trained on what is left.
        rows: how many rows are trusted.
    """

    given: Score
    cleaned: Score
    rows: int

    @property
    def sentence(self) -> str:
        """In one sentence.

        >>> Gain(Score(0.8, 0.5), Score(0.9, 0.3), 60).sentence
        'After cleaning, a model gets 90.0 % of the 60 trusted rows right, without having seen them; before, 80.0 %.'
        """
        before, after = percent(self.given.accuracy), percent(self.cleaned.accuracy)
        return (
            f"After cleaning, a model gets {after} of the {self.rows:,} trusted rows right, without having seen them; "
            f"before, {before}."
        )


@dataclass(frozen=True, eq=False)
class Found:
    """What ``fb.clean`` has found.

    Args:
        data: the rows, as they were read.
        findings: what was found in their arrays.
        settings: how it was found.
        relabel: whether label issues get their likely label in ``cleaned``, instead of being dropped.
        given: what was read, if it was a data frame, or features and labels.
        names: of classes and of clients, as the data have them.
    """

    data: OwnTable = field(repr=False)
    findings: Findings = field(repr=False)
    settings: Mapping[str, Any]
    relabel: bool = False
    given: Any = field(default=None, repr=False)
    names: tuple[Sequence[Any], Sequence[Any]] | None = field(default=None, repr=False)

    @property
    def classes(self) -> Sequence[Any]:
        """The names of the classes."""
        return self.data.classes if self.names is None else self.names[0]

    @property
    def clients(self) -> Sequence[Any]:
        """The names of the clients."""
        return self.data.clients if self.names is None else self.names[1]

    @property
    def warnings(self) -> list[str]:
        """What the user should know about the results."""
        return [self.findings.warning] if self.findings.warning else []

    @property
    def trusted(self) -> np.ndarray:
        """Which rows are trusted."""
        return np.zeros(len(self.data), bool) if self.data.trusted is None else self.data.trusted

    @cached_property
    def order(self) -> np.ndarray:
        """The numbers of the rows, the worst first, as in ``suspects``."""
        return suspects.worst_first(self.findings.quality, self.trusted)

    @cached_property
    def suspects(self) -> "pd.DataFrame":
        """Every row, the worst first: ``client``, ``row`` (its id, or its line in the file), ``is_label_issue``,
        ``label_quality``, ``given_label``, ``predicted_label``, ``probability_wrong`` and ``trusted``. Of a data frame,
        it has the index.
        """
        import pandas as pd  # here and below, so that importing the library does not import it

        found = self.findings
        columns = {
            "client": suspects.named(self.clients, self.data.client),
            "row": np.array(self.data.ids, object),
            "is_label_issue": found.issue.astype(bool),
            "label_quality": found.quality.astype(float),
            "given_label": suspects.named(self.classes, self.data.labels),
            "predicted_label": suspects.named(self.classes, found.predicted),
            "probability_wrong": found.wrong.astype(float),
            "trusted": self.trusted,
        }
        index = self.given.index[self.data.row[self.order]] if hasattr(self.given, "iloc") else None
        return pd.DataFrame({name: column[self.order] for name, column in columns.items()}, index)

    @cached_property
    def noise(self) -> "pd.DataFrame":
        """How many labels of each client are probably wrong: ``client``, ``rows``, ``trusted``, ``label_issues``, the
        share ``noise`` among the rows that are not trusted, and its interval of 95 %, from ``low`` to ``high``.
        """
        import pandas as pd

        columns = ["client", "rows", "trusted", "label_issues", "noise", "low", "high"]
        return pd.DataFrame(self.per_client, columns=columns)

    @cached_property
    def per_client(self) -> list[Share]:
        """The same as a list. The intervals have room for what the search knows of the models' errors, too."""
        searched = {int(noise.client): noise for noise in self.findings.noise}
        return [
            share._replace(low=min(share.low, searched[m].low), high=max(share.high, searched[m].high))
            if m in searched and share.rows > share.trusted
            else share
            for m, share in enumerate(shares(self.suspects, "client", self.clients))
        ]

    @cached_property
    def model(self) -> CleanedModel:
        """The model that is trained on what is left, for new rows."""
        return model_of(self.findings.model, self.data, self.classes)

    @property
    def cleaned(self) -> Any:
        """The data without label issues, or, if asked to relabel, with the likely labels: a data frame as it was given;
        features and labels; or, of a file, its cells, by the name of the file if there are several.
        """
        return without(self)

    @property
    def title(self) -> str:
        """What was found, in one line."""
        name = Path(self.data.source).name or self.data.source
        if not self.findings.identified:
            return f"{name}: suspicious labels, ranked"
        issues = int(self.findings.issue.sum())
        verb = "is" if issues == 1 else "are"
        return f"{issues:,} of {len(self.data):,} labels of {name} {verb} probably wrong"

    @property
    def gain(self) -> Gain | None:
        """How much better a model becomes; None without trusted rows."""
        given, cleaned = self.findings.given, self.findings.cleaned
        return None if given is None or cleaned is None else Gain(given, cleaned, int(self.trusted.sum()))

    @property
    def exchanged(self) -> list[tuple[str, str]]:
        """What the clients exchanged, and how much of it."""
        spent = self.findings.exchanged
        return [
            ("Sent and received by all clients together", f"{spent.megabytes:.1f} MB"),
            ("Rounds of messages", f"{spent.rounds:,}"),
            ("As many megabytes as training the final model alone", f"{spent.fedavg_runs:.1f} times with FedAvg"),
            ("What was in the messages", spent.what),
        ]

    @property
    def pictures(self) -> Callable[[int], Any] | None:
        """The picture of a row by its number, if the rows are pictures."""
        files = self.data.pictures
        return (lambda row: files[row]) if files else None

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the table that people are shown: those that were looked at, or those besides own features."""
        if self.data.parts[0].cells:
            return [column.name for column in self.data.encoding.columns]
        taken = {name for name, _, _ in self.data.understood}
        others = [set(part.table.names) for part in self.data.parts[1:]]
        return [n for n in self.data.parts[0].table.names if n not in taken and all(n in names for names in others)]

    def values(self, rows: Sequence[int] | np.ndarray, columns: Sequence[str]) -> list[list[Any]]:
        """The cells of some rows, given by their numbers, as they are in the data."""
        read = [
            {name: part.cells[name].array for name in columns} if part.cells else part.table.read(columns)
            for part in self.data.parts
        ]
        return [
            [
                getattr(cell, "as_py", lambda cell=cell: cell)()
                for cell in (read[part][name][int(row)] for name in columns)
            ]
            for part, row in zip(self.data.part[rows], self.data.row[rows], strict=True)
        ]

    def save(self, folder: Path | str) -> list[Path]:
        """Write everything into a folder, as ``fedbilevel clean`` does, and return the files."""
        from fedbilevel.cleaning.folder import save  # which writes these

        return save(self, Path(folder))

    def plot(self) -> "Picture":
        """Draw the share of wrong labels per client, which labels are taken for which, and how sure that is."""
        from fedbilevel.drawing.wrong_labels import wrong_labels

        counted = confusion(self.suspects, self.classes)
        interval = self.noise[["low", "high"]].to_numpy(float)
        share, wrong = self.noise["noise"].to_numpy(float), self.findings.wrong[~self.trusted]
        return wrong_labels(list(self.clients), share, interval, list(self.classes), counted.counts, wrong)
