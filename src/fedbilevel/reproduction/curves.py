"""The curves of an experiment, from which its page and its verdict are made, in memory and as a table."""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.engines.accounting import COUNTED
from fedbilevel.errors import FedbilevelError
from fedbilevel.reproduction.files import Method, Panel, Reproduction, ResultColumn, mark
from fedbilevel.storage.files import write_atomically

_RUN = ("condition", "method", "parameters", "seed", "settings", "failure")
_ROW = ("round", "exchanges", "seconds")

WINDOW = 0.1
"""The number of a run is the mean of its curve over this last share of the way, as a single evaluation is noisy."""


@dataclass(frozen=True)
class Curve:
    """The history of one run, and why it did not finish, if it did not."""

    panel: Panel
    method: Method
    seed: int
    history: Sequence[Mapping[str, Any]]
    failure: str = ""

    @property
    def done(self) -> bool:
        return not self.failure

    def along(self, axis: str) -> np.ndarray:
        """How far it was at every row."""
        if axis == "communications":
            each = self.method.communications
            return each * self.along("round") if each else self.along("exchanges")
        return np.array([row[axis] for row in self.history], float)

    def mean(self, column: ResultColumn, against: str, share: float = 1.0) -> float:
        """The mean of a column's metric over the last share of the way to its moment, linear between rows."""
        if column.metric not in self.history[-1]:
            raise FedbilevelError(f"a run of {self.method.title} has no '{column.metric}' for '{column.title}'.")
        across = self.along(column.along or against)
        values = np.array([row[column.metric] for row in self.history]) ** column.power
        if column.until is not None:
            there = np.flatnonzero(values <= column.until)
            return float(across[there[0]]) * column.scale if len(there) else math.nan
        end = across[-1] if column.at is None else column.at
        if across[-1] < end:
            raise FedbilevelError(f"a run of {self.method.title} ends at {across[-1]:g}, before '{column.title}'.")
        begin = end - share * (end - across[0])
        points = np.array([begin, *across[(across > begin) & (across < end)], end])
        return float(np.trapezoid(np.interp(points, across, values), points) / (end - begin)) * column.scale


@dataclass(frozen=True)
class Reproduced:
    """All runs of an experiment."""

    reproduction: Reproduction
    curves: Sequence[Curve]

    def of(self, panel: Panel, method: Method) -> list[Curve]:
        return [c for c in self.curves if c.panel.title == panel.title and c.method == method]

    @cached_property
    def minutes(self) -> float:
        """The time of all finished runs, without compiling."""
        minutes = sum(float(c.history[-1]["seconds"]) for c in self.curves if c.done) / 60
        return self.reproduction.minutes if math.isnan(minutes) else minutes

    def values(self, panel: Panel, method: Method, column: ResultColumn, over: str = "end") -> dict[int, float]:
        """One number for each seed: the mean over the last tenth of the curve, or the column's share of it, or, over
        the whole "way", of all of it. NaN where a run did not finish, or not arrive.
        """
        share = 1.0 if over == "way" else column.share or WINDOW
        curves = sorted(self.of(panel, method), key=lambda curve: curve.seed)
        return {c.seed: c.mean(column, self.reproduction.against, share) if c.done else math.nan for c in curves}


def ending(curves: Sequence[Curve]) -> str:
    """Why there is no number, "" if all runs finished."""
    if not curves:
        return "not run"
    failed = [curve.failure for curve in curves if not curve.done]
    rounds = [match[1] for failure in failed if (match := re.search(r"round (\d+)", failure))]
    since = f", from its round {min(map(int, rounds))} on" if rounds else ""
    return f"diverged in {len(failed)} of {len(curves)} seeds{since}" if failed else ""


def _metrics(made: Reproduction) -> list[str]:
    counted = [axis for axis in (made.against, *(column.along for column in made.columns)) if axis in COUNTED]
    found = dict.fromkeys([*made.curves, *(column.metric for column in made.columns), *counted])
    return [metric for metric in found if metric not in _ROW]


def write(done: Reproduced, path: Path) -> None:
    """Write every row of every history, with the metrics that the experiment uses."""
    metrics = _metrics(done.reproduction)
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow([*_RUN, *_ROW, *metrics])
    for c in done.curves:
        settings = mark(done.reproduction.experiment(c.panel, c.method, c.seed))
        run = [c.panel.title, c.method.label, c.method.parameters, c.seed, settings, c.failure]
        if not c.history:  # it did not even start
            rows.writerow(run)
        for row in c.history:
            values = [f"{row.get(metric, math.nan):.6g}" for metric in metrics]
            rows.writerow([*run, *(f"{row[name]:.6g}" for name in _ROW), *values])
    write_atomically(path, text.getvalue().encode())


def read(made: Reproduction, path: Path) -> Reproduced:
    """Read the curves that a page was written from."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        histories: dict[tuple[str, ...], list[dict[str, float]]] = {}
        for row in rows:
            int(row["seed"])
            history = histories.setdefault(tuple(row[name] for name in _RUN), [])
            if row["round"]:
                history.append({name: float(row[name]) for name in (*_ROW, *_metrics(made))})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedbilevelError(f"{path} does not contain the curves of {made.id} ({error}).") from error
    cases: dict[tuple[str, ...], tuple[Panel, Method]] = {
        (p.title, m.label, m.parameters): (p, m) for p, m in made.cases()
    }
    if unknown := {run[:3] for run in histories} - set(cases):
        raise FedbilevelError(f"{path} has curves that are not in the experiment: {', '.join(min(unknown))}.")
    for *run, seed, settings, _ in histories:
        if settings != mark(made.experiment(*cases[tuple(run)], int(seed))):
            raise FedbilevelError(
                f"{path} has curves with other settings than {made.id} has now ({', '.join(run)}): run it again."
            )
    curves = [Curve(*cases[run[:3]], int(run[3]), history, run[-1]) for run, history in histories.items()]
    return Reproduced(made, curves)
