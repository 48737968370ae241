"""The picture of a history: ``Result.plot``."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedbilevel.engines.accounting import COUNTED
from fedbilevel.errors import FedbilevelError, UnknownName


class Picture(Figure):
    """A figure that notebooks show by themselves, and that does not have to be closed."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def over_decades(values: Iterable[float]) -> bool:
    """Whether values, which are finite, need a log scale: all positive, over more than two decades."""
    finite = list(values)
    return bool(finite) and min(finite) > 0 and max(finite) > 100 * min(finite)


def curves(history: Sequence[Mapping[str, Any]], metrics: str | Sequence[str] | None, against: str) -> Figure:
    """Draw columns of a history (None: all metrics) against another column, each on its own axes."""
    recorded = list(history[-1])
    chosen = [name for name in recorded if name not in COUNTED] if metrics is None else metrics
    chosen = [chosen] if isinstance(chosen, str) else chosen
    for name in (*chosen, against):
        if name not in recorded:
            raise UnknownName("column of this history", name, recorded)
    if not chosen:
        raise FedbilevelError(
            "this history has no metrics to draw: give the task metrics=, solve diagnostics=, or name columns."
        )
    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = Picture(figsize=(4.6 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    across = [row[against] for row in history]
    for number, name in enumerate(chosen, 1):
        axes = figure.add_subplot(rows, columns, number)
        values = [row[name] for row in history]
        axes.plot(across, values)
        if over_decades(value for value in values if math.isfinite(value)):
            axes.set_yscale("log")
        axes.set(xlabel=against, title=name)
        axes.grid(alpha=0.3)
    return figure
