"""What people look at: the table and the picture of a finished run."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from fedbilevel.experiment import Finished
from fedbilevel.solve import Result


def _runs(finished: Finished) -> list[tuple[str, Result]]:
    """The references and the run itself, by what people call them."""
    titles = {reference.label: reference.title for reference in finished.task.references}
    runs = [(titles[label], result) for label, result in finished.references.items()]
    runs.insert(1 if runs else 0, (type(finished.algorithm).__name__, finished.result))
    return runs


def _says_something(metric: str, result: Result, finished: Finished) -> bool:
    """A metric that a reference cannot change (a metric of its fixed x) says nothing about it."""
    values = {row.get(metric) for row in result.history}
    return metric in result.metrics and (result is finished.result or len(values) > 1)


def table(finished: Finished) -> Table:
    """The results in a small table."""
    task = finished.task
    shown = Table(
        title=f"{task.name}, {len(task.clients)} clients, seed {finished.summary['seed']}", title_justify="left"
    )
    for heading in ("", *task.headline.values(), "rounds", "MB sent", "seconds"):
        shown.add_column(heading, justify="right" if heading else "left")
    for title, result in _runs(finished):
        values = [
            f"{result.metrics[m]:.4g}" if _says_something(m, result, finished) else "-" for m in task.headline
        ]  # fmt: skip
        end = result.metrics
        shown.add_row(title, *values, str(end["round"]), f"{end['megabytes']:.1f}", f"{result.seconds:.1f}")
    return shown


def curves(finished: Finished) -> Path:
    """Draw the headline metrics against rounds into ``curves.png`` of the run folder."""
    result, task = finished.result, finished.task
    metrics = [m for m in task.headline if m in result.metrics] or ["megabytes"]
    figure = Figure(figsize=(5.2 * len(metrics), 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    for number, metric in enumerate(metrics, 1):
        axes = figure.add_subplot(1, len(metrics), number)
        settled = []  # values after the first tenth of the rounds
        for color, (title, each) in enumerate(_runs(finished)):
            if not _says_something(metric, each, finished):
                continue
            rounds, values = [row["round"] for row in each.history], [row[metric] for row in each.history]
            style: dict[str, Any] = {"linewidth": 2.2} if each is result else {"linewidth": 1.2, "linestyle": "--"}
            axes.plot(rounds, values, label=title, color=f"C{color}", **style)
            settled += [v for r, v in zip(rounds, values, strict=True) if r >= rounds[-1] / 10]
        values = [row[metric] for row in result.history]
        if min(values) > 0 and max(values) > 100 * min(values):
            axes.set_yscale("log")
        else:  # the first steps would hide the differences that matter
            margin = 0.15 * (max(settled) - min(settled)) or 0.1
            axes.set_ylim(min(settled) - margin, max(settled) + margin)
        axes.set_xlabel("round")
        axes.set_title(task.headline.get(metric, metric))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    path = finished.folder / "curves.png"
    figure.savefig(path, dpi=130)
    return path
