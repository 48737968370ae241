"""``predict``: apply the trained model of a folder to new rows."""

import io
from pathlib import Path
from typing import Any

from fedbilevel.errors import FedbilevelError
from fedbilevel.storage.csv_files import CsvWriter
from fedbilevel.storage.files import write_atomically
from fedbilevel.storage.models import load_model, save_model
from fedbilevel.tasks.classifier import Classifier

MOST_SHOWN = 20
"""Classes that have a column of their own in a table of predictions."""


def save_classifier(folder: Path | str, classifier: Classifier) -> Path:
    """Save a classifier in a folder, for :func:`load_classifier` and ``fedbilevel predict``."""
    return save_model(folder, *classifier.packed())


def load_classifier(folder: Path | str) -> Classifier:
    """The classifier of a run folder, or of the folder of a cleaning."""
    about, arrays = load_model(folder)
    try:
        return Classifier.restore(about, arrays)
    except FedbilevelError as error:
        raise FedbilevelError(f"{folder}: {error}") from None


def predict(folder: Path | str, source: Any, id: str | None = None) -> Any:
    """Predict the classes of new rows with the trained model of a folder.

    Args:
        folder: of a run on an own table.
        source: a file, a data frame, an array or a folder of pictures, like what the model was trained on.
        id: the column with the names of the rows. Without it, their lines name them.

    Returns:
        A data frame: ``row``, ``predicted_label``, ``probability``, and "p(CLASS)" for each of up to 20 classes.
    """
    import pandas  # here, so that importing the library does not import it

    columns, rows = _predicted(load_classifier(folder), source, id)
    return pandas.DataFrame(rows, columns=pandas.Index(columns))


def write_predictions(folder: Path | str, source: Any, out: Path, id: str | None = None) -> dict[str, int]:
    """The same as a CSV file, which must not exist; returns how many rows have each label."""
    if out.exists():
        raise FedbilevelError(f"{out} already exists: choose another file with --out.")
    classifier = load_classifier(folder)
    columns, rows = _predicted(classifier, source, id)
    text = io.StringIO(newline="")
    CsvWriter(text).rows([columns, *rows])
    try:
        write_atomically(out, text.getvalue().encode())
    except OSError as error:
        raise FedbilevelError(f"cannot write to {out}: {error.strerror}.") from None
    counts = dict.fromkeys(classifier.classes, 0)
    for row in rows:
        counts[row[1]] += 1
    return counts


def _predicted(classifier: Classifier, source: Any, id: str | None) -> tuple[list[str], list[list[Any]]]:
    """The names of the columns, and the rows of a table of predictions."""
    classes = classifier.classes
    shown = classes if len(classes) <= MOST_SHOWN else ()
    rows: list[list[Any]] = []
    for ids, probabilities in classifier.predict(source, id):
        best = probabilities.argmax(1)
        rounded = probabilities.round(6)
        for row, (name, place) in enumerate(zip(ids, best.tolist(), strict=True)):
            each = rounded[row].tolist()
            rows.append([name, classes[place], each[place], *(each if shown else ())])
    return ["row", "predicted_label", "probability", *(f"p({name})" for name in shown)], rows
