"""Many experiments in processes, each in its own run folder. One failure does not stop the others, and interrupted runs
are continued.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.errors import FedbilevelError, FedbilevelWarning
from fedbilevel.runs import processes
from fedbilevel.runs.execute import resume
from fedbilevel.runs.execute import run as run_experiment
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.plugins import short
from fedbilevel.runs.processes import DIED, cores
from fedbilevel.storage.run_folder import Run, RunFolder


class PlannedRun(NamedTuple):
    """An experiment and the folder of its run."""

    folder: Path
    experiment: Experiment

    @property
    def status(self) -> str:
        """The status of its run, "" if it has not started."""
        run = RunFolder(self.folder).read()
        return "" if run is None else run.status

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be done now."""
        return self.status in ("finished", "failed")

    @property
    def settled(self) -> bool:
        """Whether it has a result, so that running it again would give the same. Other failures may be fixed."""
        run = RunFolder(self.folder).read()
        return run is not None and (run.status == "finished" or bool(run.info.get("diverged")))


@dataclass(frozen=True)
class Member:
    """One run of many."""

    run: Run

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """Its rows, NaN where a number was not finite."""
        return [{k: math.nan if v is None else v for k, v in row.items()} for row in self.run.rows]

    @property
    def failure(self) -> str:
        """Why there is no result."""
        if self.done:
            return ""
        at_work = "another process is using it." if self.run.status == "running" else "it did not finish."
        return str(self.run.info.get("failure") or at_work)

    @property
    def done(self) -> bool:
        return self.run.status == "finished"


def band(histories: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over seeds of a metric, for every row of their histories."""
    values = np.array([[row[metric] for row in history] for history in histories], float)
    return values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])


def seconds(members: Sequence[Member]) -> float:
    """How long these runs took together."""
    return sum(member.history[-1]["seconds"] for member in members if member.done)


def run(
    groups: Sequence[Sequence[PlannedRun]], progress: Callable[[int, int], None] | None = None, jobs: int = 0
) -> None:
    """Run all that have no result yet, including those that failed for other reasons than divergence; a failure is
    recorded in its run folder.

    Args:
        groups: runs of a group stay in one process, where equal shapes are compiled only once.
        progress: called with the number of runs done, and the number of all.
        jobs: number of processes, never more than there are cores; 0 is one for each core.
    """
    places = [place for group in groups for place in group]
    left = [group for all_ in groups if (group := [place for place in all_ if not place.settled])]
    for place in (place for group in left for place in group if place.ended):
        RunFolder(place.folder).forget_failure()
    tell = lambda: progress(sum(place.ended for place in places), len(places)) if progress else None
    tell()
    workers = min(jobs or cores(), cores(), len(left))
    if workers > 1 and (stuck := next(filter(None, (group[0].experiment.given.obstacle for group in left)), "")):
        if jobs:
            raise FedbilevelError(f"{stuck}: give it a name at the top level of a file, or leave out jobs.")
        said = f"{stuck}: all runs share this one. Give it a name at the top level of a file to use all cores."
        warnings.warn(said, FedbilevelWarning, stacklevel=3)
        workers = 1
    if workers > 1:
        _in_processes(left, workers, tell)
    else:
        for group in left:
            _run_group(group, tell)


def _run_group(group: Sequence[PlannedRun], tell: Callable[[], None] | None = None) -> None:
    """One after the other."""
    for place in group:
        try:
            begun = RunFolder(place.folder).begun
            if begun:
                resume(place.folder, given=place.experiment.given)
            else:
                run_experiment(place.experiment, place.folder)
        except Exception as error:
            if place.status not in ("failed", "running"):  # it said so itself, or another process is at work there
                _fail(place, error, "it could not be started: ")
        if tell is not None:
            tell()


def _fail(place: PlannedRun, why: Exception | str, before: str = "") -> None:
    """Record in a member's folder that it failed."""
    RunFolder(place.folder).fail(why, before, task=short(place.experiment.task), name=place.folder.name)


def _in_processes(groups: Sequence[Sequence[PlannedRun]], workers: int, tell: Callable[[], None]) -> None:
    """Run groups in processes; a process that dies fails only the member it was running."""
    left = list(groups)
    while left:
        with contextlib.closing(processes.calls(_run_group, [(group,) for group in left], workers, tell)) as results:
            died = [left[number] for number, result in results if result is DIED]
        left = []
        for group in died:
            at, *others = [place for place in group if not place.ended] or [None]
            if at is not None:
                _fail(at, "its process died (out of memory?).")
            left += [others] if others else []
    tell()
