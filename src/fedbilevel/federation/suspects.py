"""What a study that finds wrong labels leaves at a site, and what little of it a coordinator may be told.

A site's list of suspicious labels is written into its own folder and never sent. The coordinator is told how many there
are of each class if the site allows it, and then only a number that is neither about too few rows itself nor leaves too
few. With another result, the number would be another, and the difference could be about a single row. So a site counts
once: for the first result of a run, and for one run of a study.
"""

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedbilevel.data.cells import Value
from fedbilevel.federation.schema import Schema
from fedbilevel.storage.csv_files import CsvWriter
from fedbilevel.storage.files import write_atomically
from fedbilevel.tasks.sites import Judged

SUSPECTS, SUMMARY, TOLD = "suspects.csv", "suspects.json", "told.json"
COLUMNS = ("client", "row", "is_label_issue", "label_quality", "given_label", "predicted_label", "probability_wrong",
           "trusted")  # fmt: skip
"""Of the list of suspects."""
NAME = "suspects "
"""How the number of suspects of a class is called in a message, before the number of the class."""
BYTES = 200
"""The most bytes of one number in a message."""


def save(
    folder: Path, site: str, names: Sequence[str], labels: np.ndarray, classes: Sequence[Value], found: Judged
) -> None:
    """Write the list of all labels of a site, the worst first and trusted ones last, and a summary.

    Args:
        folder: of the run, at the site.
        site: its name.
        names: of its rows.
        labels: given labels, as numbers of classes.
        classes: their values.
        found: what was found.
    """
    text = io.StringIO(newline="")
    table = CsvWriter(text)
    table.rows([COLUMNS])
    table.rows(
        [site, names[n], bool(found.issue[n]), f"{found.quality[n]:.6g}", classes[int(labels[n])],
         classes[int(found.predicted[n])], f"{found.wrong[n]:.6g}", bool(found.trusted[n])]
        for n in np.lexsort((found.quality, found.trusted)).tolist()
    )  # fmt: skip
    write_atomically(folder / SUSPECTS, text.getvalue().encode())
    write_atomically(folder / SUMMARY, json.dumps({"sentence": sentence(found)}).encode())


def sentence(found: Judged) -> str:
    """What was found, in a sentence.

    >>> rows = np.zeros(3)
    >>> sentence(Judged(rows > 1, np.array([True, False, False]), rows, rows, rows))
    '1 of 3 labels is probably wrong.'
    """
    rows, issues = len(found.issue), int(found.issue.sum())
    if found.trusted.all():
        return f"all {rows:,} labels are trusted, so none was looked at."
    said = f"{issues:,} of {rows:,} labels {'is' if issues == 1 else 'are'} probably wrong."
    return f"{said} {found.remark}" if found.remark else said


def summary(folder: Path) -> str:
    """What was found in a run, in a sentence; empty if nothing was looked for, or not yet."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return str(json.loads((folder / SUMMARY).read_text())["sentence"])
    return ""


def counts(found: Judged, labels: np.ndarray, classes: int, least: int) -> dict[str, np.ndarray]:
    """How many suspects each class has, as it may be sent: where neither they nor the others are fewer than the least.

    >>> issue = np.repeat([True, False, True, False, True, False], [3, 5, 1, 9, 6, 1])
    >>> rows, labels = np.zeros(25), np.repeat([0, 1, 2], [8, 10, 7])
    >>> counts(Judged(rows > 0, issue, rows, rows, rows), labels, 3, 3)
    {'suspects 0': array(3)}
    """
    told = {}
    for label in range(classes):
        own = found.issue[(labels == label) & ~found.trusted]
        if min(own.sum(), (~own).sum()) >= max(least, 1):
            told[f"{NAME}{label}"] = np.asarray(int(own.sum()))
    return told


def once(folder: Path, study: str, run: str, told: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a site tells in a run of a study, given what it could tell now: what it told before, nothing in other runs.

    Args:
        folder: of the site.
        study: the hash of its text.
        run: its name.
        told: the numbers.
    """
    path, known = folder / TOLD, {}
    try:
        if path.exists():
            known = json.loads(path.read_text())
        before = known.get(study)
        if before is None:
            known[study] = before = {"run": run, "counts": {name: int(count) for name, count in told.items()}}
            write_atomically(path, json.dumps(known).encode())
        return {name: np.asarray(count) for name, count in before["counts"].items()} if before["run"] == run else {}
    except (ValueError, TypeError, KeyError, AttributeError):  # who knows what was told before
        return {}


def received(arrays: Mapping[str, np.ndarray], schema: Schema, rows: int) -> dict[str, int]:
    """The numbers that a site of so many rows has sent, by class; none if they cannot be."""
    names = {f"{NAME}{number}": str(value) for number, value in enumerate(schema.classes)}
    possible = lambda array: not array.ndim and array.dtype.kind in "iu" and 0 < int(array) <= rows
    if not (arrays.keys() <= names.keys() and all(map(possible, arrays.values()))):
        return {}
    found = {label: int(arrays[name]) for name, label in names.items() if name in arrays}
    return found if sum(found.values()) <= rows else {}
