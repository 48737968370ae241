"""The curves that an experiment leaves: what its page and its verdict are made from, in memory and as a table."""

import csv
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.errors import FedbilevelError
from fedbilevel.reproduction.files import Column, Method, Panel, Reproduction

_RUN = ("condition", "method", "parameters", "seed", "failure")
_ROW = ("round", "exchanges", "seconds")


@dataclass(frozen=True)
class Curve:
    """What is kept of one run: its history, and why it did not come to its end, if it did not."""

    panel: Panel
    method: Method
    seed: int
    history: Sequence[Mapping[str, Any]]
    failure: str = ""

    @property
    def done(self) -> bool:
        return not self.failure


@dataclass(frozen=True)
class Reproduced:
    """All runs of an experiment."""

    reproduction: Reproduction
    curves: Sequence[Curve]

    def of(self, panel: Panel, method: Method) -> list[Curve]:
        return [c for c in self.curves if c.panel.title == panel.title and c.method == method]

    @cached_property
    def minutes(self) -> float:
        """Of all runs that came to their end, without compiling."""
        known = sum(float(c.history[-1]["seconds"]) for c in self.curves if c.done) / 60
        return self.reproduction.minutes if math.isnan(known) else known

    def value(
        self, panel: Panel, method: Method, column: Column, over: str = "end", seeds: Container[int] | None = None
    ) -> tuple[float, float]:
        """Mean and standard deviation over seeds, or some of them; NaN where a run did not come to its end."""
        curves = [c for c in self.of(panel, method) if seeds is None or c.seed in seeds]
        if not curves or not all(c.done for c in curves):
            return math.nan, math.nan
        if over == "rounds":
            values = [column.scale * float(np.mean([row[column.metric] for row in c.history])) for c in curves]
        else:
            values = [column.of(c.history) for c in curves]
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _metrics(made: Reproduction) -> list[str]:
    return list(dict.fromkeys([*made.curves, *(column.metric for column in made.columns)]))


def write(done: Reproduced, path: Path) -> None:
    """Every row of every history, with the numbers that the experiment looks at."""
    metrics = _metrics(done.reproduction)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*_RUN, *_ROW, *metrics])
        for c in done.curves:
            run = [c.panel.title, c.method.label, c.method.parameters, c.seed, c.failure]
            if not c.history:  # it did not even start
                rows.writerow(run)
            for row in c.history:
                values = [f"{row.get(metric, math.nan):.6g}" for metric in metrics]
                rows.writerow([*run, *(f"{row[name]:.6g}" for name in _ROW), *values])


def read(made: Reproduction, path: Path) -> Reproduced:
    """The curves that a page was written from."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        histories: dict[tuple[str, ...], list[dict[str, float]]] = {}
        for row in rows:
            history = histories.setdefault(tuple(row[name] for name in _RUN), [])
            if row["round"]:
                history.append({name: float(row[name]) for name in (*_ROW, *_metrics(made))})
    except (OSError, ValueError, KeyError) as error:
        raise FedbilevelError(f"{path} does not hold the curves of {made.id} ({error}).") from error
    cases: dict[tuple[str, ...], tuple[Panel, Method]] = {
        (p.title, m.label, m.parameters): (p, m) for p, m in made.cases()
    }
    if unknown := {run[:3] for run in histories} - set(cases):
        raise FedbilevelError(f"{path} has curves that are not in the experiment: {', '.join(min(unknown))}.")
    curves = [Curve(*cases[run[:3]], int(run[3]), history, run[4]) for run, history in histories.items()]
    return Reproduced(made, curves)
