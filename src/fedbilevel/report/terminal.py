"""What people look at: the table and the picture of a finished run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from fedbilevel.drawing.curves import over_decades
from fedbilevel.engines.accounting import ORACLES
from fedbilevel.runs.comparison import Compared, arrived, last, memory, per_client
from fedbilevel.runs.execute import Finished
from fedbilevel.runs.grid import band, seconds
from fedbilevel.runs.plugins import short
from fedbilevel.runs.solve import Result
from fedbilevel.runs.until import parse as parse_until
from fedbilevel.storage.files import plain_json


def _runs(finished: Finished) -> list[tuple[str, Result]]:
    """The references and the run itself, by what people call them."""
    shown = finished.task.shown
    others = [*shown.references, *([shown.sequel] if shown.sequel is not None else [])]
    titles = {each.label: each.title for each in others}
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
    for heading in ("", *task.shown.headline.values(), "rounds", "MB sent", "seconds"):
        shown.add_column(heading, justify="right" if heading else "left")
    for title, result in _runs(finished):
        values = [
            f"{result.metrics[m]:.4g}" if _says_something(m, result, finished) else "-" for m in task.shown.headline
        ]  # fmt: skip
        end = result.metrics
        cells = (title, *values, str(end["round"]), f"{end['megabytes']:.1f}", f"{result.seconds:.1f}")
        shown.add_row(*cells, style="bold" if result is finished.result else None)
    return shown


def details(finished: Finished) -> Table:
    """What the solution looks like, if the task has words for it."""
    assert finished.details is not None
    title, headings, rows = finished.details
    shown = Table(title=title, title_justify="left")
    numbers = [all(isinstance(row[n], int | float) for row in rows) for n in range(len(headings))]
    for heading, number in zip(headings, numbers, strict=True):
        shown.add_column(heading, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    return shown


def pictures(finished: Finished) -> None:
    """Draw ``curves.png`` and, if the task can draw its solution, ``picture.png``, into the run folder."""
    curves(finished)
    if finished.task.shown.picture is not None:
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        finished.task.shown.picture(finished.results, figure)
        figure.savefig(finished.folder / "picture.png", dpi=130)


def costs(compared: Compared) -> Table:
    """What each algorithm of a comparison has spent until it was there: means over the seeds that were."""
    title = f"{compared.comparison.task}, {_seeds(compared)}, until {compared.comparison.until}"
    shown = Table(title=title, title_justify="left")
    for heading in ("", "there", "rounds", "floats", "samples", "Gf/Gg/J/H", "MB", "sec"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=not heading, overflow="fold")
    for row in until(compared):
        many = f"{row['there']} of {len(compared.comparison.seeds)}"
        if not row["there"]:
            shown.add_row(row["algorithm"], many, f"> {compared.comparison.rounds}" * bool(row["runs"]))
            continue
        counts = (_short(row[name]) for name in ("rounds", "floats", "samples"))
        oracles = "/".join(_short(row[name]) for name in ORACLES)
        megabytes = "-" if row["memory"] is None else _short(row["memory"] / 1e6)
        shown.add_row(row["algorithm"], many, *counts, oracles, megabytes, f"{row['seconds']:.1f}")
    return shown


def until(compared: Compared) -> list[dict[str, Any]]:
    """The same for machines; counts are per client, the bytes of ``memory`` those of a compiled round."""
    bounds, rows = parse_until(compared.comparison.until), []
    for algorithm in compared.comparison.algorithms:
        members = compared.of(algorithm)
        there = [member for member in members if arrived(member, bounds)]
        row: dict[str, Any] = {"algorithm": algorithm, "runs": sum(m.done for m in members), "there": len(there)}
        if there:
            mean = lambda value, there=there: float(np.mean([value(member) for member in there]))
            row["rounds"] = mean(lambda member: member.history[-1]["round"])
            row |= {name: mean(lambda m, name=name: per_client(m, name)) for name in ("floats", *ORACLES, "samples")}
            row["seconds"] = mean(lambda member: member.history[-1]["seconds"])
            row["memory"] = memory(compared.comparison, algorithm)
        rows.append(row)
    return rows


def comparison(compared: Compared) -> Table:
    """What came out of a comparison: means over seeds, and counts per client."""
    if compared.comparison.until:
        return costs(compared)
    headline = _headline(compared)
    title = f"{short(compared.comparison.task)}, {_seeds(compared)}"
    shown = Table(title=title, title_justify="left")
    for heading in ("", *headline.values(), "rounds", "floats", "samples", "Gf/Gg/J/H", "sec"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=not heading, overflow="fold")
    for algorithm in compared.comparison.algorithms:
        members = compared.of(algorithm)
        done = [m for m in members if m.done]
        if not done:
            shown.add_row(
                algorithm, *("-" for _ in headline), next(m.failure for m in members if not m.done).split(":")[0]
            )
            continue
        values = [_with_spread(*last(done, metric), len(done)) for metric in headline]
        floats, samples, *oracles = (_short(np.mean([per_client(m, c) for m in done])) for c in COUNTS)
        rounds = str(compared.comparison.rounds)
        shown.add_row(algorithm, *values, rounds, floats, samples, "/".join(oracles), f"{seconds(done):.1f}")
    return shown


COUNTS = ("floats", "samples", *ORACLES)


def _short(count: Any) -> str:
    """A count in at most four figures: 950, 12.5k, 3.1M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def _headline(compared: Compared) -> Mapping[str, str]:
    """The two headline metrics that matter most."""
    return dict(list(compared.info["headline"].items())[:2])


def _seeds(compared: Compared) -> str:
    seeds = compared.comparison.seeds
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _with_spread(mean: float, deviation: float, runs: int) -> str:
    return f"{mean:.2g}" if runs == 1 else f"{mean:.3g} ± {deviation:.1g}"


DASHES = ("-", "--", "-.", ":")


def comparison_curves(compared: Compared) -> Path:
    """Draw curves with bands over seeds: every metric against rounds, and against floats per client."""
    metrics = compared.info["compare_by"] or tuple(_headline(compared))
    figure = Figure(figsize=(10.8, 3.5 * len(metrics)), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {**_headline(compared)}
    axes: Any = None
    for number, (metric, axis) in enumerate(((m, a) for m in metrics for a in ("round", "floats")), 1):
        axes = figure.add_subplot(len(metrics), 2, number)
        positive = True
        for color, algorithm in enumerate(compared.comparison.algorithms):
            members = [m for m in compared.of(algorithm) if m.done]
            if not members:
                continue
            shortest = min(len(m.history) for m in members)  # runs may end when they are there
            histories = [m.history[:shortest] for m in members]
            mean, deviation = band(histories, metric)
            across, _ = band(histories, axis)
            if axis == "floats":  # on a log scale, so from the first message on
                across, mean, deviation = across[1:] / members[0].run.info["clients"], mean[1:], deviation[1:]
            style = {"color": f"C{color % 10}", "linestyle": DASHES[color // 10 % 4]}
            axes.plot(across, mean, label=algorithm, linewidth=1.5, **style)
            if len(members) > 1:
                half = deviation / np.sqrt(len(members))
                axes.fill_between(across, mean - half, mean + half, alpha=0.15, linewidth=0, color=style["color"])
            positive &= bool(np.all(mean[1:] > 0))
        if positive:
            axes.set_yscale("log")
        if axis == "floats":
            axes.set_xscale("log")
        axes.set_xlabel({"round": "round", "floats": "floats sent to and from each client"}[axis])
        axes.set_ylabel(titles.get(metric, metric))
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    path = compared.folder / "curves.png"
    figure.savefig(path, dpi=130)
    return path


def curves(finished: Finished) -> Path:
    """Draw the headline metrics against rounds into ``curves.png`` of the run folder."""
    result, task = finished.result, finished.task
    metrics = [m for m in task.shown.headline if m in result.metrics] or ["megabytes"]
    columns = min(3, len(metrics))
    rows = -(-len(metrics) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, metric in enumerate(metrics, 1):
        axes = figure.add_subplot(rows, columns, number)
        settled = []  # values after the first tenth of the rounds
        for color, (title, each) in enumerate(_runs(finished)):
            if not _says_something(metric, each, finished):
                continue
            rounds, values = [row["round"] for row in each.history], [row[metric] for row in each.history]
            style: dict[str, Any] = {"linewidth": 2.2} if each is result else {"linewidth": 1.2, "linestyle": "--"}
            axes.plot(rounds, values, label=title, color=f"C{color}", **style)
            settled += [v for r, v in zip(rounds, values, strict=True) if r >= rounds[-1] / 10]
        values = [row[metric] for row in result.history]
        if over_decades(values):
            axes.set_yscale("log")
        else:  # the first steps would hide the differences that matter
            margin = 0.15 * (max(settled) - min(settled)) or 0.1
            axes.set_ylim(min(settled) - margin, max(settled) + margin)
        axes.set_xlabel("round")
        axes.set_title(task.shown.headline.get(metric, metric))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    path = finished.folder / "curves.png"
    figure.savefig(path, dpi=130)
    return path


def comparison_json(compared: Compared) -> dict[str, Any]:
    """The table of a comparison for machines: one object per algorithm."""
    headline = _headline(compared)
    costly = {row["algorithm"]: row for row in until(compared)} if compared.comparison.until else {}
    rows = []
    for algorithm in compared.comparison.algorithms:
        members = compared.of(algorithm)
        done = [m for m in members if m.done]
        row: dict[str, Any] = {"algorithm": algorithm, "runs": len(done)}
        row |= {metric: last(done, metric)[0] for metric in headline if done}
        row |= costly.get(algorithm, {})
        row["failures"] = [m.failure for m in members if not m.done]
        rows.append(plain_json(row))
    return {"rows": rows, "seconds": compared.seconds, "folder": str(compared.folder)}
