"""Many experiments, each in a run folder of its own: in processes, one failure does not stop the others, and what was
interrupted goes on.
"""

import contextlib
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel import interrupts
from fedbilevel.experiment import Experiment, resume
from fedbilevel.experiment import run as run_experiment
from fedbilevel.records import CONFIG, INFO, Run, run_in, write_atomically


class Place(NamedTuple):
    """An experiment and the folder of its run."""

    folder: Path
    experiment: Experiment

    @property
    def status(self) -> str:
        """How its run stands, "" if it has not begun."""
        run = run_in(self.folder)
        return "" if run is None else run.status

    @property
    def settled(self) -> bool:
        """Whether it came to its end."""
        return self.status in ("finished", "failed")


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
        return "" if self.done else str(self.run.info.get("failure") or "it did not finish.")

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


def run(groups: Sequence[Sequence[Place]], progress: Callable[[int, int], None] | None = None, jobs: int = 0) -> None:
    """Run all that have not come to their end; whatever fails is in its run folder.

    Args:
        groups: those of a group stay in one process, where what has the same shapes is compiled only once.
        progress: called with how many are done, and how many there are.
        jobs: processes, never more than there are cores; 0 is one for each core.
    """
    places = [place for group in groups for place in group]
    left = [group for all_ in groups if (group := [place for place in all_ if not place.settled])]
    tell = lambda: progress(sum(place.settled for place in places), len(places)) if progress else None
    tell()
    workers = min(jobs or cores(), cores(), len(left))
    if workers > 1:
        _in_processes(left, workers, tell)
    else:
        for group in left:
            _run_group(group, tell)


def _run_group(group: Sequence[Place], tell: Callable[[], None] | None = None) -> None:
    """One after the other."""
    for place in group:
        with contextlib.suppress(Exception):
            begun = (place.folder / CONFIG).exists()
            resume(place.folder) if begun else run_experiment(place.experiment, place.folder)
        if not place.status:
            _fail(place, "it could not be started.")
        if tell is not None:
            tell()


def _fail(place: Place, why: str) -> None:
    """Say in a member's folder that it failed."""
    run = run_in(place.folder)
    known = {"task": place.experiment.task, "name": place.folder.name} if run is None else run.info
    write_atomically(place.folder / INFO, json.dumps({**known, "status": "failed", "failure": why}).encode())


def _in_processes(groups: list[list[Place]], workers: int, tell: Callable[[], None]) -> None:
    """Groups in processes of one thread each. A process that dies fails the member it was at, and no other."""
    left = groups
    while left:
        with processes(workers) as pool:
            waiting = {submit(pool, _run_group, group): group for group in left}
            started = pool._processes
            pending = set(waiting)
            try:
                while pending:
                    _, pending = wait(pending, timeout=0.5)
                    tell()
            except KeyboardInterrupt:
                end(pool, pending)
                raise
        left = [group for future, group in waiting.items() if isinstance(future.exception(), BrokenProcessPool)]
        left = [[place for place in group if not place.settled] for group in left]
        # When one process dies, the pool ends the others: theirs are run again.
        ended = {number for number, process in started.items() if process.exitcode in (0, 1, -signal.SIGTERM)}
        ended = ended if len(ended) < len(started) else set()
        for group in left:
            for place in group:
                run = run_in(place.folder)
                if run is not None and run.status == "killed" and run.info.get("process") not in ended:
                    _fail(place, "its process died (out of memory?).")
        left = [unsettled for group in left if (unsettled := [place for place in group if not place.settled])]
    tell()


def cores() -> int:
    """How many processes can work at the same time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes of one thread each, which leave interrupts to this one."""
    threads, before = "--xla_cpu_multi_thread_eigen=false", os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{before} {threads}".strip()
    try:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, initializer=_leave_interrupts_to_the_parent) as pool:
            yield pool
    finally:
        os.environ["XLA_FLAGS"] = before


def submit(pool: ProcessPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Have a process call a function. A process that was interrupted begins nothing more."""
    return pool.submit(_unless_ended, function, *arguments)


_ended = False


def _unless_ended(function: Callable[..., Any], *arguments: Any) -> Any:
    global _ended
    if _ended:  # one call was already on its way to this process
        raise interrupts.Terminated
    try:
        return function(*arguments)
    except KeyboardInterrupt:
        _ended = True
        raise


def end(pool: ProcessPoolExecutor, futures: Iterable[Future[Any]]) -> None:
    """Begin nothing more, and interrupt what the processes are doing, which saves what it has."""
    for future in futures:
        future.cancel()
    for process in list(pool._processes.values()):
        process.terminate()


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches every process of a terminal; here only the parent acts on it, and ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.listen()
