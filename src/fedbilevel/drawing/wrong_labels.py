"""The picture of wrong labels: their share per client, which are taken for which, and how sure that is."""

from collections.abc import Hashable, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fedbilevel.drawing.curves import Picture

MOST = 40  # clients, and classes: more cannot be read


def wrong_labels(
    clients: Sequence[Hashable],
    share: np.ndarray,
    interval: np.ndarray,
    classes: Sequence[Hashable],
    counts: np.ndarray,
    probability: np.ndarray,
) -> Picture:
    """Draw the share of wrong labels per client, the confusion of given and likely labels, and all probabilities.

    Args:
        clients: their names.
        share: the share of wrong labels of each.
        interval: the lower and the upper end of its interval, (clients, 2).
        classes: their names.
        counts: given labels by likely labels.
        probability: of every row that is not trusted, that its label is wrong.
    """
    figure = Picture(figsize=(12.6, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)

    order = np.argsort(-share, kind="stable")[:MOST][::-1]
    sides = np.abs(interval[order].T - share[order])
    left.errorbar(share[order], np.arange(len(order)), xerr=sides, fmt="o", color="C1", capsize=3)
    left.set_yticks(np.arange(len(order)), [_short(clients[n]) for n in order])
    left.set_xlim(0, None)
    left.set_ylim(-0.7, len(order) - 0.3)
    more = f" ({MOST} of {len(share)} clients)" if len(share) > MOST else ""
    left.set_title(f"share of wrong labels, 95 %{more}", fontsize=10)

    off = counts.astype(float)
    np.fill_diagonal(off, np.nan)
    middle.imshow(off, cmap="Oranges", vmin=0)
    if len(classes) <= MOST:
        for axis in (middle.xaxis, middle.yaxis):
            axis.set_ticks(np.arange(len(classes)), [_short(name) for name in classes])
        if max(len(_short(name)) for name in classes) > 2:
            middle.tick_params(axis="x", rotation=90)
    if len(classes) <= 12:
        for i, j in zip(*np.nonzero(~np.isnan(off)), strict=True):
            middle.text(j, i, str(counts[i, j]), ha="center", va="center", fontsize=8)
    middle.set_xlabel("likely label")
    middle.set_ylabel("given label")
    middle.set_title("label issues", fontsize=10)

    right.hist(probability, np.linspace(0, 1, 41), color="C0", log=len(probability) > 0)
    right.axvline(0.5, color="C1", linestyle="--")
    right.set_xlabel("probability that the label is wrong")
    right.set_ylabel("rows")
    right.set_title("all rows that are not trusted", fontsize=10)
    return figure


def _short(name: Hashable, most: int = 18) -> str:
    """A name that fits beside an axis; $ is no formula here."""
    text = " ".join(str(name).split())
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")
