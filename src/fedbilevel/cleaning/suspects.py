"""The table of suspects: every row, the worst first; and what is left of the data without them."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "client", "row", "is_label_issue", "label_quality", "given_label", "predicted_label", "probability_wrong", "trusted",
)  # fmt: skip


class Judged(NamedTuple):
    """What is known of every row of the data, in the order of the data.

    Args:
        client: the number of its client.
        row: what people call it.
        given: the number of its given label.
        predicted: the number of its likely label.
        quality: the rank score: the probability of the given label by models that were not trained on it.
        wrong: the probability that the given label is wrong.
        issue: whether it is a label issue.
        trusted: whether the label is trusted.
    """

    client: np.ndarray
    row: np.ndarray
    given: np.ndarray
    predicted: np.ndarray
    quality: np.ndarray
    wrong: np.ndarray
    issue: np.ndarray
    trusted: np.ndarray


def worst_first(judged: Judged) -> np.ndarray:
    """The numbers of all rows, those of least quality first, trusted ones last."""
    return np.lexsort((judged.quality, judged.trusted))


def table(
    judged: Judged,
    order: np.ndarray,
    clients: Sequence[Hashable],
    classes: Sequence[Hashable],
    index: "pd.Index | None" = None,
    more: dict[str, np.ndarray] | None = None,
) -> "pd.DataFrame":
    """The table of suspects.

    Args:
        judged: what is known of the rows.
        order: the numbers of the rows as the table has them.
        clients, classes: their names.
        index: of the data, if they are a DataFrame: the table has the same.
        more: further columns, in the order of the data.
    """
    import pandas as pd

    columns: dict[str, Any] = {
        "client": _named(clients, judged.client),
        "row": judged.row,
        "is_label_issue": judged.issue.astype(bool),
        "label_quality": judged.quality.astype(float),
        "given_label": _named(classes, judged.given),
        "predicted_label": _named(classes, judged.predicted),
        "probability_wrong": judged.wrong.astype(float),
        "trusted": judged.trusted.astype(bool),
        **(more or {}),
    }
    columns = {name: values[order] for name, values in columns.items()}
    return pd.DataFrame(columns, index=None if index is None else index[order])


def _named(names: Sequence[Hashable], numbers: np.ndarray) -> np.ndarray:
    """The names of numbers, of their own type if they have one."""
    plain = np.array(names) if len({type(name) for name in names}) == 1 else np.array(names, object)
    if plain.ndim != 1 or plain.dtype.kind in "US":  # texts of any length, and names that are tuples
        plain = np.empty(len(names), object)
        plain[:] = list(names)
    return plain[numbers]
