"""Several algorithms on one task, under one or several conditions and over several seeds: what came out, side by
side.
"""

import contextlib
import inspect
import json
import math
import multiprocessing
import os
import re
import signal
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from fedbilevel import interrupts
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.engines.participation import Everyone
from fedbilevel.engines.plan import Program
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.experiment import Experiment, new_folder, resume
from fedbilevel.experiment import run as run_experiment
from fedbilevel.records import CONFIG, INFO, Run, run_in, runs, write_atomically
from fedbilevel.task import Task
from fedbilevel.tasks import TASKS


@dataclass(frozen=True)
class Panel:
    """One condition: options of the task, who takes part, and hyper-parameters by the name of the algorithm;
    ``samples`` are for algorithms that need another ``sample`` than the others.
    """

    title: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    sample: str | None = None
    hyper: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    samples: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """What to compare. ``settings`` go to the task and to every algorithm that knows them; "NAME.key" only to NAME."""

    task: str
    algorithms: Sequence[str]
    rounds: int = 500
    seeds: Sequence[int] = (0,)
    panels: Sequence[Panel] = (Panel(),)
    settings: Mapping[str, str] = field(default_factory=dict)

    def experiment(self, panel: Panel, algorithm: str, seed: int) -> Experiment:
        """One member of the comparison."""
        known = {*_options(self.task), *_fields(algorithm)}
        chosen = {key: text for key, text in panel.options.items() if key in known}
        chosen |= {f"algorithm.{key}": text for key, text in panel.hyper.get(algorithm, {}).items()}
        for key, text in self.settings.items():
            prefix, _, name = key.rpartition(".")
            if prefix == algorithm:
                chosen[f"algorithm.{name}"] = text
            elif prefix in ("", "task", "algorithm") and name in known:
                chosen[key] = text
        sample = panel.samples.get(algorithm, panel.sample)
        return Experiment(self.task, algorithm, self.rounds, seed, sample, chosen)

    def check(self) -> None:
        """Refuse settings that nobody knows."""
        everything = {*_options(self.task), *(name for a in self.algorithms for name in _fields(a))}
        for key in self.settings:
            prefix, _, name = key.rpartition(".")
            if prefix not in ("", "task", "algorithm", *self.algorithms):
                raise UnknownName("algorithm of this comparison", prefix, list(self.algorithms))
            if name not in everything:
                raise UnknownName("setting", key, sorted(everything))


@dataclass(frozen=True)
class Member:
    """One run of a comparison and its folder."""

    panel: Panel
    algorithm: str
    seed: int
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


@dataclass(frozen=True)
class Compared:
    """All runs, and where their folders are."""

    comparison: Comparison
    members: list[Member]
    folder: Path
    seconds: float

    def of(self, panel: Panel, algorithm: str) -> list[Member]:
        """The runs of an algorithm under a condition, one per seed."""
        return [m for m in self.members if m.panel is panel and m.algorithm == algorithm]

    @property
    def info(self) -> Mapping[str, Any]:
        """What is known of the task."""
        return next((m for m in self.members if m.done), self.members[0]).run.info


def _options(task: str) -> list[str]:
    return list(inspect.signature(TASKS[task]).parameters)


def _fields(algorithm: str) -> list[str]:
    return [f.name for f in fields(ALGORITHMS[algorithm])]


def fitting(task: Task) -> list[str]:
    """The algorithms that solve problems like this one."""

    def fits(name: str) -> bool:
        kind = ALGORITHMS[name]
        try:
            Program(task.problem, kind(**task.advice(name, _fields(name))), task.layout, Everyone())
        except FedbilevelError:
            return False
        return kind.bilevel

    return [name for name in ALGORITHMS if fits(name)]


class Place(NamedTuple):
    """Where a member belongs, and what it runs."""

    panel: Panel
    algorithm: str
    seed: int
    folder: Path
    experiment: Experiment

    @property
    def status(self) -> str:
        """How its run stands, "" if it has not begun."""
        run = run_in(self.folder)
        return "" if run is None else run.status

    @property
    def settled(self) -> bool:
        """Whether it came to its end before."""
        return self.status in ("finished", "failed")


def run(
    comparison: Comparison, out: Path | None = None, progress: Callable[[int, int], None] | None = None, jobs: int = 0
) -> Compared:
    """Run all members, each into a run folder of its own; one that fails is reported and does not stop the others.

    Args:
        comparison: what to run.
        out: the folder; one that holds this very comparison is continued where it stopped.
        progress: called with how many members are done, and how many there are.
        jobs: processes, never more than there are cores; 0 is one for each core. Seeds of the same algorithm stay in
            one process, where it is compiled only once.
    """
    began = time.perf_counter()
    comparison.check()
    text = tomli_w.dumps(_config(comparison))
    name = out / COMPARISON if out is not None else None
    if name is not None and name.exists():
        if name.read_text() != text:
            raise FedbilevelError(f"{out} holds another comparison: choose another folder with --out.")
        folder = name.parent
        places = _places(comparison, folder)
    else:
        for place in _places(comparison, Path())[:: len(comparison.seeds)]:
            place.experiment.build().check()  # refuses what is wrong before anything is run
        folder = new_folder(f"compare-{comparison.task}", out)
        places = _places(comparison, folder)
        write_atomically(folder / COMPARISON, text.encode())
    groups: dict[tuple[str, str], list[Place]] = {}
    for place in places:
        if not place.settled:
            groups.setdefault((place.panel.title, place.algorithm), []).append(place)
    tell = lambda: progress(sum(place.settled for place in places), len(places)) if progress else None
    tell()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(jobs or cores, cores, len(groups))
    try:
        if workers > 1:
            _in_processes(list(groups.values()), workers, tell)
        else:
            for group in groups.values():
                _run_group(group, tell)
    except KeyboardInterrupt as interrupt:
        interrupt.saved = f"Go on with: fedbilevel resume {folder}"  # pyright: ignore[reportAttributeAccessIssue]
        raise
    members = [Member(p.panel, p.algorithm, p.seed, runs(p.folder)[0]) for p in places]
    if not any(member.done for member in members):
        raise FedbilevelError(f"every run failed; the first one said: {members[0].failure}")
    return Compared(comparison, members, folder, time.perf_counter() - began)


def _places(comparison: Comparison, folder: Path) -> list[Place]:
    places = []
    for panel in comparison.panels:
        word = re.sub(r"[^a-z0-9]+", "-", panel.title.lower()).strip("-")
        for algorithm in comparison.algorithms:
            for seed in comparison.seeds:
                name = "-".join(part for part in (word, algorithm, f"seed{seed}") if part)
                experiment = replace(comparison.experiment(panel, algorithm, seed), references=False)
                places.append(Place(panel, algorithm, seed, folder / name, experiment))
    return places


def _run_group(group: Sequence[Place], tell: Callable[[], None] | None = None) -> None:
    """Some members, one after the other; whatever fails is in its run folder."""
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
    threads = "--xla_cpu_multi_thread_eigen=false"
    before = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{before} {threads}".strip()
    left = groups
    try:
        while left:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(workers, spawn, initializer=_leave_interrupts_to_the_parent) as pool:
                waiting = {pool.submit(_run_group, group): group for group in left}
                pending = set(waiting)
                try:
                    while pending:
                        _, pending = wait(pending, timeout=0.5)
                        tell()
                except KeyboardInterrupt:
                    for future in pending:
                        future.cancel()
                    for place in (place for group in left for place in group):
                        _end(place)
                    raise
            left = [group for future, group in waiting.items() if isinstance(future.exception(), BrokenProcessPool)]
            left = [[place for place in group if not place.settled] for group in left]
            for group in left:
                for place in group:
                    if place.status == "killed":
                        _fail(place, "its process died (out of memory?).")
            left = [unsettled for group in left if (unsettled := [place for place in group if not place.settled])]
    finally:
        os.environ["XLA_FLAGS"] = before
    tell()


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches every process of a terminal; here only the parent acts on it, and ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.listen()


def _end(place: Place) -> None:
    """Interrupt a member that is running: it saves what it has."""
    run = run_in(place.folder)
    if run is not None and run.status == "running":
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.info["process"], signal.SIGTERM)


COMPARISON = "compare.toml"


def _config(comparison: Comparison) -> dict[str, Any]:
    panels = [
        {
            "title": p.title,
            **({"sample": p.sample} if p.sample else {}),
            "samples": dict(p.samples),
            "options": dict(p.options),
            "hyper": {k: dict(v) for k, v in p.hyper.items()},
        }
        for p in comparison.panels
    ]
    return {
        "task": comparison.task,
        "algorithms": list(comparison.algorithms),
        "rounds": comparison.rounds,
        "seeds": list(comparison.seeds),
        "settings": dict(comparison.settings),
        "panels": panels,
    }


def read(folder: Path) -> Comparison:
    """The comparison that a folder holds."""
    try:
        known = tomllib.loads((folder / COMPARISON).read_text())
        panels = [
            Panel(p["title"], p["options"], p.get("sample"), p["hyper"], p["samples"]) for p in known.pop("panels")
        ]
        return Comparison(**{**known, "panels": panels})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedbilevelError(f"{folder / COMPARISON} cannot be read ({error}).") from None


def band(members: Sequence[Member], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over seeds of a metric, for every row of the history."""
    values = np.array([[row[metric] for row in m.history] for m in members if m.done], float)
    return values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])


def last(members: Sequence[Member], metric: str) -> tuple[float, float]:
    """Mean and standard deviation over seeds at the end."""
    mean, deviation = band(members, metric)
    return float(mean[-1]), float(deviation[-1])


def per_client(member: Member, name: str) -> float:
    """A count over all clients at the end of a run, as a mean per client."""
    return member.history[-1][name] / member.run.info["clients"] if member.done else 0.0


def seconds(members: Sequence[Member]) -> float:
    """How long these runs took together."""
    return sum(member.history[-1]["seconds"] for member in members if member.done)


TOY_STEPS: Mapping[tuple[str, int], Mapping[str, float]] = {
    ("without noise", 1): {"primal-dual": 0.03, "gd": 0.1, "fednest": 0.3, "rfho": 0.3, "sustain": 0.1},
    ("without noise", 5): {"primal-dual": 0.1, "gd": 0.1, "fednest": 0.3, "rfho": 0.1, "sustain": 0.1},
    ("without noise", 10): {"primal-dual": 0.1, "gd": 0.1, "fednest": 0.1, "rfho": 0.1, "sustain": 0.03},
    ("with noise", 1): {"primal-dual": 0.003, "gd": 0.003, "fednest": 0.01, "rfho": 0.03, "sustain": 0.03},
    ("with noise", 5): {"primal-dual": 0.003, "gd": 0.003, "fednest": 0.01, "rfho": 0.01, "sustain": 0.01},
    ("with noise", 10): {"primal-dual": 0.003, "gd": 0.003, "fednest": 0.003, "rfho": 0.003, "sustain": 0.01},
}


def _toy() -> Comparison:
    """Figures 1 and 2 of the primal-dual paper: section 5.1, N = 15, K = 1, 5, 10, 20 repetitions.

    The paper gives no step sizes. Steps of the model and of the series are 0.04, below 1 / L for all repetitions, and
    half of it with noise, where the sums over active clients have the factor N / |A|; those of the primal-dual method
    were tried out by hand, on seeds 0, 1, 2. The step of x is, for each algorithm, K and setting, the best of 0.3
    (without noise only), 0.1, 0.03, 0.01, 0.003, 0.001 for f_0 after 400 rounds on the seeds 100, 101, 102, which are
    not among those compared. Exceptions: the primal-dual method with K = 5 has 0.1, as good there to four digits as
    0.3, which cycles on other seeds; with noise, GD (0.003) and SUSTAIN with K = 10 (0.01) were not searched for.
    FedNest and SUSTAIN take the whole series of K terms. With noise, every client takes part in an exchange with
    probability 1/2; in a round of RFHO, whose clients keep something.
    """
    panels = []
    for setting, options, sample in (("without noise", {}, None), ("with noise", {"noise": "0.5"}, "0.5 resample")):
        for K in (1, 5, 10):
            steps = {name: {"lr_upper": str(lr)} for name, lr in TOY_STEPS[setting, K].items()}
            step = "0.02" if options else "0.04"
            model = {"lr_lower": step, "lr_adjoint": step}
            forget = "0.3" if options else "1.0"
            hyper = {
                "primal-dual": {
                    "inner_steps": str(K), "lr_lower": "0.02", "lr_adjoint": "0.05", "augmentation": "2.0"
                },
                "fednest": {
                    "inner_rounds": str(K), "terms": str(K), "full_series": "true", "local_steps": "1", **model
                },
                "rfho": {"inner_rounds": str(K), "lr_lower": step},
                "sustain": {
                    "terms": str(K), "full_series": "true", "forget_upper": forget, "forget_lower": forget, **model
                },
                "gd": {"inner_rounds": str(K), "solver": "dense", "lr_lower": step},
            }  # fmt: skip
            merged = {name: {**hyper[name], **steps[name]} for name in hyper}
            panels.append(Panel(f"{setting}, K = {K}", options, sample, merged, {"rfho": "0.5"} if options else {}))
    names = ("primal-dual", "gd", "fednest", "rfho", "sustain")
    return Comparison("client-weighting-toy", names, 400, range(20), panels)


def parse_seeds(text: str) -> list[int]:
    """Seeds as people write them.

    >>> parse_seeds("0..3"), parse_seeds("1,5")
    ([0, 1, 2, 3], [1, 5])
    """
    try:
        if ".." in text:
            first, end = (int(part) for part in text.split(".."))
            seeds = list(range(first, end + 1))
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise FedbilevelError(f"seeds are written 0..4 or 0,3,7, not '{text}'.")
    return seeds


def plan(
    task: str,
    algorithms: str | None = None,
    rounds: int | None = None,
    seeds: str | None = None,
    sample: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> Comparison:
    """The comparison that a command line asks for; what it leaves open is the task's own comparison, if it has one,
    or all algorithms that fit.
    """
    settings = settings or {}
    _ = TASKS[task]  # refuses unknown ones
    usual = USUAL.get(task)
    if usual is None or algorithms == "all":
        made = Experiment(
            task, settings={k: v for k, v in settings.items() if k.removeprefix("task.") in _options(task)}
        ).build()
        default = Comparison(task, fitting(made.task), made.task.rounds, panels=[Panel(sample=sample)])
    else:
        default = usual
    names = [name.strip() for name in algorithms.split(",")] if algorithms not in (None, "all") else default.algorithms
    for name in names:
        _ = ALGORITHMS[name]  # refuses unknown ones
    changed = [replace(panel, sample=sample, samples={}) for panel in default.panels]
    panels = default.panels if sample is None else changed
    return Comparison(
        task,
        names,
        default.rounds if rounds is None else rounds,
        default.seeds if seeds is None else parse_seeds(seeds),
        panels,
        settings,
    )


USUAL: Mapping[str, Comparison] = {"client-weighting-toy": _toy()}
"""What a task is compared on if nothing else is asked for."""
