"""What the demo computes: a study, the data of its four sites, and what it shows at the end.

- ``regularization``: how strongly to regularise each feature of a common logistic regression.
- ``clean``: which labels are wrong. Before the sites start, the demo plants wrong labels, and at the end it says how
  many of them each site has found. No site knows which ones they are.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from fedbilevel.cleaning.effort import DEFAULT
from fedbilevel.data import heart_disease
from fedbilevel.errors import Names
from fedbilevel.federation.suspects import SUSPECTS
from fedbilevel.tasks.regularization import HEART_WORDS

WRONG, TRUSTED, SEED = 0.15, 0.2, 0
"""Of ``clean``: the share of wrong labels among the rows that are not trusted, and that of trusted rows."""
PLANTED = "planted.csv"


class Study(NamedTuple):
    """What the demo computes.

    Args:
        study: the tables of its file, without ``[run]``.
        sites: the data file of each site.
        about: a sentence about the data.
        rounds: how many, unless asked for others.
        options: of every ``join``.
        end: shows more at the end, given the folder of the demo.
    """

    study: dict[str, Any]
    sites: dict[str, Path]
    about: str
    rounds: int
    options: Sequence[str] = ()
    end: Callable[[Path, Console], object] = lambda folder, console: None


class Hospital(NamedTuple):
    """The rows of a hospital."""

    name: str
    inputs: np.ndarray
    labels: np.ndarray


def regularization(folder: Path) -> Study:
    """A strength of regularisation for each feature."""
    names, hospitals = _hospitals()
    sites = {each.name: _write(folder / f"{each.name}.csv", names, each) for each in hospitals}
    study = {"task": {"name": "regularization"}, "federation": {"quorum": 3}, "schema": _schema(names)}
    return Study(study, sites, "The four hospitals of the UCI heart disease data.", 60)


def clean(folder: Path) -> Study:
    """Wrong labels, some of which were planted."""
    names, hospitals = _hospitals()
    rng, sites, truth = np.random.default_rng(SEED), {}, []
    for each in hospitals:
        rows = len(each.labels)
        checked = np.zeros(rows, bool)
        checked[rng.permutation(rows)[: round(TRUSTED * rows)]] = True
        others = rng.permutation(np.flatnonzero(~checked))
        planted = others[: round(WRONG * len(others))]
        given = each.labels.copy()
        given[planted] = 1 - given[planted]
        patients = [f"{each.name}-{number:03}" for number in range(1, rows + 1)]
        more = {"checked": ["yes" if one else "no" for one in checked], "patient": patients}
        sites[each.name] = _write(folder / f"{each.name}.csv", names, each._replace(labels=given), more)
        truth += [[each.name, patients[row]] for row in np.sort(planted)]
    _table(folder / PLANTED, ["site", "patient"], truth)
    study = {
        "task": {"name": "label-errors"},
        "federation": {"quorum": 3, "weights": "size"},
        "schema": {**_schema(names), "trusted": {"column": "checked", "values": ["no", "yes"]}},
    }
    about = (
        f"The four hospitals of the UCI heart disease data. {TRUSTED:.0%} of the labels are trusted; of the others, "
    )
    about += f"{WRONG:.0%} were made wrong ({PLANTED} has the truth, the sites do not)."
    return Study(study, sites, about, DEFAULT.rounds, ["--id", "patient", "--share-counts"], _found)


STUDIES: Names[Callable[[Path], Study]] = Names("demo", {"regularization": regularization, "clean": clean})
"""What the demo can show, by name."""


def _found(folder: Path, console: Console) -> None:
    """How many of the planted errors each site has found."""
    with (folder / PLANTED).open(newline="") as file:
        planted = {(row["site"], row["patient"]) for row in csv.DictReader(file)}
    title = "What the sites found, and what only the demo knows"
    table = Table("site", "labels", "trusted", "suspects", "wrong among them", "wrong in all", title=title)
    lists = []
    for site in dict.fromkeys(site for site, _ in planted):
        lists.append(folder / site / "runs" / "demo" / SUSPECTS)
        with lists[-1].open(newline="") as file:
            rows = list(csv.DictReader(file))
        suspects = {(site, row["row"]) for row in rows if row["is_label_issue"] == "True"}
        trusted, wrong = sum(row["trusted"] == "True" for row in rows), sum(name == site for name, _ in planted)
        numbers = (len(rows), trusted, len(suspects), len(suspects & planted), wrong)
        table.add_row(site, *(str(number) for number in numbers))
    console.print(table)
    for path in lists:
        console.print(f"Suspects: {path}", highlight=False, soft_wrap=True, markup=False)


def _hospitals() -> tuple[Sequence[str], list[Hospital]]:
    """The names of the features, and the hospitals."""
    loaded = heart_disease()
    groups, rows = loaded.train.groups["hospital"], loaded.train
    return loaded.features, [
        Hospital(name, rows.inputs[groups == number], rows.labels[groups == number])
        for number, name in enumerate(loaded.groups["hospital"])
    ]


def _schema(names: Sequence[str]) -> dict[str, Any]:
    features = {name: {"values": list(HEART_WORDS[name])} if name in HEART_WORDS else {} for name in names}
    return {"label": {"column": "label", "values": [0, 1]}, "features": features}


def _write(
    path: Path, names: Sequence[str], hospital: Hospital, more: Mapping[str, Sequence[str]] | None = None
) -> Path:
    """A hospital's table, with more columns."""
    more = more or {}
    rows = [
        [
            *("" if np.isnan(value) else f"{value:g}" for value in row),
            int(label),
            *(column[n] for column in more.values()),
        ]
        for n, (row, label) in enumerate(zip(hospital.inputs, hospital.labels, strict=True))
    ]
    return _table(path, [*names, "label", *more], rows)


def _table(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path
