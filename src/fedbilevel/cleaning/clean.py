"""``fb.clean``: find the wrong labels of a table, of arrays, or of pictures."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedbilevel.cleaning.found import Found
from fedbilevel.cleaning.search import clean_arrays
from fedbilevel.data.inputs import are_paths
from fedbilevel.data.own_tables import OwnTable
from fedbilevel.data.reading import table
from fedbilevel.errors import FedbilevelError, FedbilevelWarning
from fedbilevel.runs.solve import check_seed

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int], Any]


def clean(
    data: "pd.DataFrame | np.ndarray | str | Path | Sequence[str | Path]",
    labels: Any = None,
    *,
    label: str | int | None = None,
    client: str | int | None = None,
    clients: Any = None,
    trusted: Any = None,
    id: str | None = None,
    drop: Sequence[str | int] = (),
    categorical: Sequence[str | int] = (),
    numeric: Sequence[str | int] = (),
    client_from: Literal["folder"] | None = None,
    features: Any = None,
    relabel: bool = False,
    thorough: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    checkpoint: Path | str | None = None,
) -> Found:
    """Find wrong labels. Rows of several clients are never pooled: only models and sums are exchanged.

    >>> found = fb.clean(frame, label="outcome", client="hospital", trusted="checked")  # doctest: +SKIP
    >>> found.suspects.head()  # doctest: +SKIP
    >>> found = fb.clean(features, labels, clients=owners, trusted=checked)  # doctest: +SKIP

    Args:
        data: a data frame; an array with a row of numbers, or a picture, for each sample; a CSV, TSV or Parquet file,
            or several, one for each client; a folder of pictures.
        labels: the given labels, if the data are an array.
        label: the column with the given labels.
        client: the column that says which client a row belongs to.
        clients: the client of each row; without ``client`` and ``clients``, every file is a client.
        trusted: the column that says which labels were checked and are right; or that, for each row.
        id: the column with the names of the rows. Without it, their lines name them, or the index of the data frame.
        drop: columns to leave out.
        categorical: columns whose values are names, even if they look like numbers.
        numeric: columns of numbers; other cells in them are errors.
        client_from: "folder": the folders of pictures are clients, and the folders in them classes.
        features: an array, or an .npy file, with a row of numbers for each row of the table, to use in place of its
            columns.
        relabel: give label issues their likely label in ``Found.cleaned``, instead of dropping them.
        thorough: search longer, for about five times the cost.
        seed: for everything random.
        progress: is called with the rounds done, and all rounds.
        checkpoint: a folder in which the search is saved, and continued from if it was interrupted.
    """
    if labels is not None and label is not None:
        raise FedbilevelError("give the labels either by the name of their column (label=) or as an array, not both.")
    if client is not None and clients is not None:
        raise FedbilevelError("give the clients either by the name of their column (client=) or as an array, not both.")
    check_seed(seed)
    is_frame = hasattr(data, "iloc") and hasattr(data, "columns")
    if labels is not None and are_paths(data):
        raise FedbilevelError(
            "labels as an array belong to features as an array; of a file, name the column with label=."
        )
    read = table(
        data,
        label=label if labels is None else labels,
        client=client if clients is None else clients,
        trusted=trusted,
        id=id,
        drop=drop,
        categorical=categorical,
        numeric=numeric,
        client_from=client_from,
        features=features,
    )
    settings = {"relabel": relabel, "thorough": thorough, "seed": seed}
    found = search(read, settings, progress, checkpoint)
    for warning in found.warnings:
        warnings.warn(warning, FedbilevelWarning, stacklevel=2)
    if not is_frame and labels is None:
        return found
    given = data if is_frame else (data, labels)
    names = tuple(
        _as_given(column, read.row, numbers, known)
        for column, numbers, known in (
            (_column(data, labels if labels is not None else label), read.labels, read.classes),
            (_column(data, client if clients is None else clients), read.client, read.clients),
        )
    )
    return Found(read, found.findings, found.settings, relabel, given, names)  # pyright: ignore[reportArgumentType]


def search(
    data: OwnTable, settings: dict[str, Any], progress: Progress | None = None, checkpoint: Path | str | None = None
) -> Found:
    """Search rows that were read; the settings are ``relabel``, ``thorough`` and ``seed``, and what else is to be shown
    with the results.
    """
    inputs = data.inputs
    if data.encoding.shape:  # pictures are scaled as a whole
        inputs = inputs.reshape(-1, *data.encoding.shape)
    findings = clean_arrays(
        inputs,
        data.labels,
        data.client,
        data.trusted,
        len(data.classes),
        thorough=bool(settings.get("thorough")),
        seed=int(settings.get("seed", 0)),
        progress=progress,
        checkpoint=checkpoint,
    )
    return Found(data, findings, settings, bool(settings.get("relabel")))


def _column(data: Any, given: Any) -> Any:
    """A column of a frame by its name, or what was given in its place."""
    if not isinstance(given, str | int | np.integer):
        return given
    return data.iloc[:, [str(name) for name in data.columns].index(str(given))]


def _as_given(column: Any, rows: np.ndarray, numbers: np.ndarray, known: Sequence[str]) -> tuple[Any, ...]:
    """The names of classes or clients as they were given: numbers stay numbers."""
    if column is None:
        return tuple(known)
    values = column.iloc if hasattr(column, "iloc") else np.asarray(column)
    first = {int(number): row for number, row in zip(numbers[::-1], rows[::-1], strict=True)}
    return tuple(values[int(first[n])] for n in range(len(known)))
