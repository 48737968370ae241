"""Runs side by side: runs that differ only in their seed are one series, with means and deviations over seeds."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.engines.accounting import COUNTED, ORACLES
from fedbilevel.runs.settings import Setting
from fedbilevel.storage.load import runs as runs_at
from fedbilevel.storage.run_folder import Run

CHART_AXES = {
    "round": "rounds",
    "megabytes": "megabytes, down and up",
    "megabytes_down": "megabytes down",
    "megabytes_up": "megabytes up",
    "oracles": "oracle calls, all",
    "Gf": "Gf, gradients of the upper loss",
    "Gg": "Gg, gradients of the lower loss",
    "J": "J, cross products",
    "H": "H, Hessian products",
    "samples": "samples, the rows of all oracle calls",
    "seconds": "seconds",
}
"""What a metric can be drawn against; counts are those of all clients together."""
NO_METRICS = {"run", "oracles", *COUNTED}

Row = dict[str, Any]
Flat = dict[str, Any]


@dataclass(frozen=True)
class MeanCurve:
    """A column of the records over the seeds: how many seeds have a number, their mean and standard deviation."""

    seeds: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray


@dataclass
class Series:
    """What one line of the chart and one row of the table are about.

    ``histories`` has the records of every seed. ``reference`` is the label of a reference, "" for runs themselves.
    """

    task: str
    title: str
    reference: str
    config: Flat
    runs: list[Run] = field(default_factory=list)
    histories: list[list[Row]] = field(default_factory=list)
    name: str = ""

    @property
    def id(self) -> str:
        """A name that stays the same while runs are in progress and others are added."""
        about = repr((self.task, self.title, self.reference, sorted(self.config.items())))
        return "s" + hashlib.sha256(about.encode()).hexdigest()[:12]

    @property
    def seeds(self) -> list[Any]:
        """The seeds of its runs."""
        return [run.info.get("seed") for run in self.runs]

    @cached_property
    def rounds(self) -> list[int]:
        """All rounds of which a seed has a record."""
        return sorted({row["round"] for history in self.histories for row in history})

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics that can be drawn. What a reference does not change (of its fixed x) is none of its own."""
        values_of: dict[str, set[float]] = {}
        for row in (row for history in self.histories for row in history):
            for column in row:
                if column not in NO_METRICS and not math.isnan(value := number(row, column)):
                    values_of.setdefault(column, set()).add(value)
        return [metric for metric, values in values_of.items() if not self.reference or len(values) > 1]

    def states(self) -> list[str]:
        """How its runs stand; a reference that has all its rounds is finished, whatever became of the run."""
        return [
            "finished" if self.reference and h[-1]["round"] >= run.info.get("rounds", math.inf) else run.status
            for run, h in zip(self.runs, self.histories, strict=True)
        ]

    def curve(self, column: str) -> MeanCurve:
        """A column for every round of ``rounds``."""
        place = {round: index for index, round in enumerate(self.rounds)}
        values = np.full((len(self.histories), len(place)), np.nan)
        for seed, history in enumerate(self.histories):
            for row in history:
                values[seed, place[row["round"]]] = number(row, column)
        return _over_seeds(values)

    def last(self, column: str) -> tuple[float, float]:
        """Mean and standard deviation over seeds of the last record."""
        ends = [number(history[-1], column) for history in self._counted() if history]
        curve = _over_seeds(np.array(ends).reshape(-1, 1))
        return float(curve.mean[0]), float(curve.deviation[0])

    def _counted(self) -> list[list[Row]]:
        """The histories whose ends are results: of the finished runs, or while there are none of those that go on.
        Failed runs never count: their last record is from before they failed.
        """
        states = self.states()
        counted = [h for h, state in zip(self.histories, states, strict=True) if state == "finished"]
        return counted or [h for h, state in zip(self.histories, states, strict=True) if state != "failed"]


def _over_seeds(values: np.ndarray) -> MeanCurve:
    present = np.isfinite(values)
    count = present.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):  # nobody's mean is NaN, and the deviation of one
        mean = np.where(present, values, 0).sum(axis=0) / count
        squares = np.where(present, values - mean, 0) ** 2
        deviation = np.where(count > 1, np.sqrt(squares.sum(axis=0) / np.maximum(count - 1, 0)), np.nan)
    return MeanCurve(count, mean, deviation)


def number(row: Row, column: str) -> float:
    """An entry of a record as a number, NaN if it has none."""
    if column == "oracles":
        return sum(number(row, name) for name in ORACLES)
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def find(paths: Iterable[Path]) -> list[Run]:
    """All runs at or below the paths, each once, in natural order."""
    by_folder: dict[Path, Run] = {}
    for path in map(Path, paths):
        for run in sorted(runs_at(path), key=lambda run: _natural(str(run.folder))):
            by_folder.setdefault(run.folder.resolve(), run)
    return list(by_folder.values())


def _natural(text: str) -> list[tuple[int, str]]:
    """So that seed10 comes after seed9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def flat(config: Mapping[str, Any], prefix: str = "") -> Flat:
    """Nested tables with dotted keys.

    >>> flat({"task": {"name": "quadratic", "d": 3}})
    {'task.name': 'quadratic', 'task.d': 3}
    """
    result: Flat = {}
    for key, value in config.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return result


SEED_KEYS = ("run.seed", "task.seed")


def together(runs: Sequence[Run]) -> tuple[list[Series], list[tuple[Run, Run]]]:
    """The runs and their references as series; and the runs that are left out, each with the later one of the same
    configuration and seed that counts instead.
    """
    latest: dict[str, Run] = {}
    replaced: list[tuple[Run, str]] = []
    for run in runs:
        key = repr((sorted(flat(run.config).items(), key=str), run.info.get("seed"), run.info.get("algorithm")))
        if key in latest:
            older, run = sorted((latest[key], run), key=lambda each: str(each.info.get("started", "")))
            replaced.append((older, key))
        latest[key] = run
    mains: dict[str, Series] = {}
    references: dict[str, Series] = {}
    for run in latest.values():
        config = {key: value for key, value in flat(run.config).items() if key not in SEED_KEYS}
        shared = {key: value for key, value in config.items() if not key.startswith("algorithm.")}
        task, own = str(run.info.get("task", "")), str(run.info.get("main", run.info.get("algorithm", "")))
        labels = run.info.get("labels") or {}
        for label in dict.fromkeys([own, *labels, *(str(row.get("run")) for row in run.rows)]):
            history = [row for row in run.rows if str(row.get("run")) == label and isinstance(row.get("round"), int)]
            history.sort(key=lambda row: row["round"])
            title = str(labels.get(label, label))
            if label == own:
                title = str(run.info.get("title") or title)
                _join(mains, Series(task, title, "", config), run, history)
            elif history:  # what several algorithms are compared with is the same for all of them
                _join(references, Series(task, title, label, shared), run, history)
    series = [*mains.values(), *references.values()]
    _give_names(series)
    return series, [(older, latest[key]) for older, key in replaced]


def _join(table: dict[str, Series], series: Series, run: Run, history: list[Row]) -> None:
    same = table.setdefault(series.id, series)
    seed = run.info.get("seed")
    if seed not in same.seeds:
        same.runs.append(run)
        same.histories.append(history)
    elif same.reference and len(history) > len(same.histories[same.seeds.index(seed)]):
        index = same.seeds.index(seed)
        same.runs[index], same.histories[index] = run, history


def _give_names(series: list[Series]) -> None:
    """Titles; those that are not alone say how they differ."""
    for title in {each.title for each in series}:
        same = [each for each in series if each.title == title]
        keys = [row[0] for row in differences([each.config for each in same])] if len(same) > 1 else []
        for each in same:
            told = [f"{Setting.parse(key).name} = {exact(each.config[key])}" for key in keys if key in each.config]
            each.name = ", ".join([title, *told[:3]]) + (", ..." if len(told) > 3 else "")
    for name in {each.name for each in series}:
        same = [each for each in series if each.name == name]
        for each in same if len(same) > 1 else []:
            each.name = f"{name} ({each.runs[0].folder.name})"


def differences(configs: Sequence[Flat]) -> list[tuple[str, list[Any]]]:
    """The keys that do not have the same value everywhere, with their values (None: not there)."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def headline(series: Iterable[Series]) -> dict[str, str]:
    """The headline metrics of all runs, with what people read."""
    headings: dict[str, str] = {}
    for each in series:
        for run in each.runs:
            for metric, heading in (run.info.get("headline") or {}).items():
                headings.setdefault(str(metric), str(heading))
    return headings


def metrics(series: Sequence[Series]) -> dict[str, str]:
    """All metrics that can be drawn, those of the headline first, with what people read."""
    drawn = dict.fromkeys(metric for each in series for metric in each.metrics)
    first = headline(series)
    return {**{m: first[m] for m in first if m in drawn}, **{m: m for m in drawn if m not in first}}


def plain(value: Any) -> str:
    """A result as people read it: four significant digits, "-" for what is not there.

    >>> plain(0.123456), plain(12), plain(None), plain(math.inf), plain("seven")
    ('0.1235', '12', '-', '-', 'seven')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def exact(value: Any) -> str:
    """A setting with all its digits, so that what differs looks different."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(exact(each) for each in value) or "none"
    return "-" if value is None else str(value)


def with_spread(mean: float, deviation: float) -> tuple[str, str]:
    """A mean, and its standard deviation if there is one.

    >>> with_spread(0.912345, 0.0123456), with_spread(0.912345, math.nan), with_spread(math.nan, math.nan)
    (('0.9123', '± 0.012'), ('0.9123', ''), ('-', ''))
    """
    return plain(mean), "" if math.isnan(deviation) else f"± {deviation:.2g}"


def short(count: float) -> str:
    """A count in few figures.

    >>> short(950), short(12_500), short(3.1e6), short(math.nan)
    ('950', '12.5k', '3.1M', '-')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return plain(float(count))
