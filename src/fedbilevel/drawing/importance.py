"""The picture of a search: which hyper-parameters matter, and the trials against the one that matters most."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Tried(NamedTuple):
    """A trial: the value of the hyper-parameter that matters most, and the validation loss."""

    value: Any
    loss: float


def importance(
    shares: Mapping[str, float],
    complete: Sequence[Tried],
    given_up: Sequence[Tried],
    marked: Mapping[str, Tried],
    log: bool,
) -> "Figure":
    """Draw the importance of the hyper-parameters, the most important first, and the trials.

    Args:
        shares: how much of the differences between trials each hyper-parameter explains.
        complete: trials that ran to the end.
        given_up: trials that were stopped early, at their last value.
        marked: the trials "suggested" and "best".
        log: whether the values of the hyper-parameter need a log scale.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    bars, points = figure.subplots(1, 2)
    names = list(shares)[::-1]
    bars.barh(names, [shares[name] for name in names], color="C0")
    bars.set_xlabel("share of the variance of the ranks of all trials")
    bars.set_title("importance")
    for some, title, face in ((complete, "complete", "C0"), (given_up, "stopped early, last value", "none")):
        points.plot([t.value for t in some], [t.loss for t in some], "o", color="C0", markerfacecolor=face, label=title)
    for (title, trial), mark in zip(marked.items(), ("C1s", "C3*"), strict=True):
        points.plot([trial.value], [trial.loss], mark, markersize=11, label=title)
    losses = [t.loss for t in (*complete, *given_up) if math.isfinite(t.loss)]
    low, high = min(losses), float(np.quantile(losses, 0.75))  # a few wild ones would hide the differences that matter
    points.set_ylim(low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1))
    if log:
        points.set_xscale("log")
    points.set_xlabel(names[-1])
    points.set_title("validation loss")
    for axes in (bars, points):
        axes.grid(alpha=0.3)
    points.legend(frameon=False)
    return figure
