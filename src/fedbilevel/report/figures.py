"""Figures for a paper: every headline metric against what it costs, in the width of a column."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedbilevel.drawing.curves import over_decades
from fedbilevel.errors import FedbilevelError
from fedbilevel.report.page.series import Series, find, headline, metrics, together

FIGURE_AXES = {
    "round": "rounds",
    "megabytes": "megabytes sent",
    "oracles": "oracle calls of all clients",
    "seconds": "seconds",
}
FORMATS = ("pdf", "svg", "png")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5c6470")  # for all kinds of eyes
LINE_STYLES = ("-", "-.", (0, (5, 1)), ":")
STYLE: Any = {
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.4,
    "pdf.fonttype": 42,  # fonts that publishers accept and editors can change
    "ps.fonttype": 42,
    "svg.hashsalt": "fedbilevel",  # the same figure is the same file
}
WIDTH = 3.3  # inches, a column of most two-column papers


def write(paths: Iterable[Path], folder: Path) -> list[Path]:
    """Draw one figure per headline metric and axis into a folder, as PDF, SVG and PNG.

    Lines are means over seeds, bands are one standard deviation to each side.
    """
    series, _ = together(find(paths))
    drawn = metrics(series)
    shown = {metric: heading for metric, heading in headline(series).items() if metric in drawn} or drawn
    if not shown:
        raise FedbilevelError("there are no figures to draw yet: the runs have no records with metrics.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(STYLE):
            return [
                path
                for metric, heading in shown.items()
                for axis, title in FIGURE_AXES.items()
                for path in _figure(series, metric, heading, axis, title, folder)
            ]
    except OSError as error:
        raise FedbilevelError(f"cannot write figures to {folder}: {error.strerror}.") from error


def _figure(series: Sequence[Series], metric: str, heading: str, axis: str, title: str, folder: Path) -> list[Path]:
    drawn = [(number, each) for number, each in enumerate(series) if metric in each.metrics]
    rows = -(-len(drawn) // 2)
    figure = Figure(figsize=(WIDTH, 2.1 + 0.15 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends, bands = [], []
    for number, each in drawn:
        across, curve = each.curve(axis).mean, each.curve(metric)
        line = "--" if each.reference else LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(
            across, curve.mean, color=colour, linestyle=line, linewidth=0.9 if each.reference else 1.4, label=each.name
        )
        bands.append((across, curve, colour))
        ends += curve.mean[np.isfinite(curve.mean)].tolist()
    log = over_decades(ends)
    for across, curve, colour in bands:
        low = curve.mean - curve.deviation
        if log:  # a band that reaches zero has no end on this scale
            low = np.maximum(low, curve.mean / 10)
        axes.fill_between(across, low, curve.mean + curve.deviation, color=colour, alpha=0.18, linewidth=0)
    axes.set_yscale("log" if log else "linear")
    axes.set_xlabel(title)
    axes.set_ylabel(_literal(heading))
    axes.grid(alpha=0.35)
    handles, labels = axes.get_legend_handles_labels()
    columns = 1 if any(len(label) > 24 for label in labels) else min(3, len(labels)) or 1
    figure.legend(
        handles, [_literal(label) for label in labels], loc="outside upper left", ncols=columns, frameon=False,
        handlelength=2.2, columnspacing=1.2, borderaxespad=0.1,
    )  # fmt: skip
    made = []
    for kind in FORMATS:
        path = folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', metric)}-{axis}.{kind}"
        metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
        figure.savefig(path, dpi=300, metadata=metadata)
        made.append(path)
    return made


def _literal(text: str) -> str:
    """Names are not formulas."""
    return text.replace("$", r"\$")
