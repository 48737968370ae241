"""Compare several algorithms on one task, over several seeds."""

import inspect
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.task import Task
from fedbilevel.diagnostics import DIAGNOSTICS
from fedbilevel.engines.participation import Everyone, participation
from fedbilevel.engines.program import check_fits
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import FedbilevelError, Interrupted, UnknownName
from fedbilevel.runs import grid
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.grid import PlannedRun, band
from fedbilevel.runs.settings import Setting
from fedbilevel.runs.until import parse as parse_until
from fedbilevel.runs.until import reached
from fedbilevel.storage.files import new_folder, write_atomically
from fedbilevel.storage.load import runs


@dataclass(frozen=True)
class Comparison:
    """What to compare. ``settings`` apply to the task and to every algorithm that has them; "NAME.key" only to NAME.

    With ``until``, such as "hypergradient=1e-3", each run ends when it is there, and what that has cost is compared.
    """

    task: str
    algorithms: Sequence[str]
    rounds: int = 500
    seeds: Sequence[int] = (0,)
    sample: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    until: str = ""
    diagnostics: Sequence[str] = ()

    def experiment(self, algorithm: str, seed: int) -> Experiment:
        """One member of the comparison."""
        names = {*_options(self.task, self.settings), *_fields(algorithm)}
        chosen: dict[str, str] = {}
        for key, text in self.settings.items():
            table, name = Setting.parse(key)
            if table == algorithm:
                chosen[Setting("algorithm", name).key] = text
            elif table in ("", "task", "algorithm") and name in names:
                chosen[key] = text
        every = max(1, self.rounds // 200) if self.until else None  # what was seen decides when it was there
        more: dict[str, Any] = {"every": every, "until": self.until, "diagnostics": tuple(self.diagnostics)}
        return Experiment(self.task, algorithm, self.rounds, seed, self.sample, chosen, **more)

    def check(self) -> None:
        """Refuse unknown settings."""
        everything = {*_options(self.task, self.settings), *(name for a in self.algorithms for name in _fields(a))}
        for key in self.settings:
            table, name = Setting.parse(key)
            if table not in ("", "task", "algorithm", *self.algorithms):
                raise UnknownName("algorithm of this comparison", table, list(self.algorithms))
            if name not in everything:
                raise UnknownName("setting", key, sorted(everything))


@dataclass(frozen=True)
class ComparedRun(grid.Member):
    """One run of a comparison."""

    algorithm: str
    seed: int


@dataclass(frozen=True)
class Compared:
    """All runs, and where their folders are."""

    comparison: Comparison
    members: list[ComparedRun]
    folder: Path
    seconds: float

    def of(self, algorithm: str) -> list[ComparedRun]:
        """The runs of an algorithm, one per seed."""
        return [m for m in self.members if m.algorithm == algorithm]

    @property
    def info(self) -> Mapping[str, Any]:
        """Facts about the task."""
        return next((m for m in self.members if m.done), self.members[0]).run.info


def _options(task: str, settings: Mapping[str, Any]) -> list[str]:
    return list(inspect.signature(Experiment(task, settings=settings).maker()).parameters)


def _fields(algorithm: str) -> list[str]:
    return [f.name for f in fields(ALGORITHMS[algorithm])]


def fitting(task: Task) -> list[str]:
    """The algorithms that solve problems like this one."""

    def fits(name: str) -> bool:
        kind = ALGORITHMS[name]
        try:
            chosen = kind(**task.suggested.for_algorithm(name, _fields(name)))
            check_fits(task.problem, chosen, task.layout, Everyone())
        except FedbilevelError:
            return False
        return kind.bilevel

    return [name for name in ALGORITHMS if fits(name)]


def run(
    comparison: Comparison, out: Path | None = None, progress: Callable[[int, int], None] | None = None, jobs: int = 0
) -> Compared:
    """Run all members, each in its own run folder; one that fails is reported and does not stop the others.

    Args:
        comparison: what to run.
        out: the folder; if it has the same comparison, that is continued.
        progress: called with the number of members done, and the number of all.
        jobs: processes, see ``grid.run``; seeds of the same algorithm stay in one.
    """
    began = time.perf_counter()
    comparison.check()
    text = tomli_w.dumps(_config(comparison))
    name = out / COMPARISON if out is not None else None
    if name is not None and name.exists():
        if name.read_text() != text:
            raise FedbilevelError(f"{out} contains another comparison: choose another folder with --out.")
        folder = name.parent
        places = _places(comparison, folder)
    else:
        for *_, place in _places(comparison, Path())[:: len(comparison.seeds)]:
            place.experiment.build().check()  # refuses what is wrong before anything is run
        folder = new_folder(f"compare-{comparison.task}", out)
        places = _places(comparison, folder)
        write_atomically(folder / COMPARISON, text.encode())
    groups = [[place for name, _, place in places if name == algorithm] for algorithm in comparison.algorithms]
    try:
        grid.run(groups, progress, jobs)
    except KeyboardInterrupt as interrupt:
        raise Interrupted.of(interrupt, saved=f"Continue with: fedbilevel resume {folder}") from None
    members = [ComparedRun(runs(place.folder)[0], name, seed) for name, seed, place in places]
    if not any(member.done for member in members):
        raise FedbilevelError(f"every run failed, the first one with: {members[0].failure}")
    return Compared(comparison, members, folder, time.perf_counter() - began)


def _places(comparison: Comparison, folder: Path) -> list[tuple[str, int, PlannedRun]]:
    return [
        (
            name,
            seed,
            PlannedRun(folder / f"{name}-seed{seed}", replace(comparison.experiment(name, seed), references=False)),
        )
        for name in comparison.algorithms
        for seed in comparison.seeds
    ]


COMPARISON = "compare.toml"


def _config(comparison: Comparison) -> dict[str, Any]:
    return {
        "task": comparison.task,
        "algorithms": list(comparison.algorithms),
        "rounds": comparison.rounds,
        "seeds": list(comparison.seeds),
        **({"sample": comparison.sample} if comparison.sample else {}),
        **({"until": comparison.until, "diagnostics": list(comparison.diagnostics)} if comparison.until else {}),
        "settings": dict(comparison.settings),
    }


def read(folder: Path) -> Comparison:
    """Read the comparison of a folder."""
    try:
        return Comparison(**tomllib.loads((folder / COMPARISON).read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedbilevelError(f"{folder / COMPARISON} cannot be read ({error}).") from None


def last(members: Sequence[ComparedRun], metric: str) -> tuple[float, float]:
    """Mean and standard deviation over seeds at the end."""
    mean, deviation = band([m.history[-1:] for m in members if m.done], metric)
    return float(mean[-1]), float(deviation[-1])


def arrived(member: ComparedRun, bounds: Mapping[str, float]) -> bool:
    """Whether a run came as far as it was to go."""
    return member.done and reached(member.history[-1], bounds)


def memory(comparison: Comparison, algorithm: str) -> int | None:
    """Bytes that a compiled round of an algorithm needs: data, state, and what it works with. None if not known."""
    experiment, task, chosen, _ = comparison.experiment(algorithm, comparison.seeds[0]).build()
    cohort = participation(experiment.participation(), len(task.clients))
    return Simulation(task, chosen, cohort, experiment.batching).memory()  # pyright: ignore[reportArgumentType]


def per_client(member: ComparedRun, name: str) -> float:
    """A count over all clients at the end of a run, as a mean per client."""
    return member.history[-1][name] / member.run.info["clients"] if member.done else 0.0


def parse_seeds(text: str) -> list[int]:
    """Read seeds from text.

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
        raise FedbilevelError(f"seeds must be written like 0..4 or 0,3,7, not '{text}'.")
    return seeds


def plan(
    task: str,
    algorithms: str | None = None,
    rounds: int | None = None,
    seeds: str | None = None,
    sample: str | None = None,
    settings: Mapping[str, str] | None = None,
    until: str = "",
) -> Comparison:
    """Plan a comparison, by default of all algorithms that fit the task."""
    settings, bounds = settings or {}, parse_until(until)
    names = [] if algorithms in (None, "all") else [name.strip() for name in algorithms.split(",")]
    diagnostics: list[str] = []
    if not names or rounds is None or bounds:
        parsed = {key: Setting.parse(key) for key in settings}
        of_task = [key for key, each in parsed.items() if each.is_for("task") and each.name in _options(task, settings)]
        made = Experiment(task, settings={key: settings[key] for key in of_task}).build().task
        names, rounds = names or fitting(made), made.suggested.rounds if rounds is None else rounds
        diagnostics = [name for name in bounds if name not in made.shown.headline and name in DIAGNOSTICS]
    for name in names:
        ALGORITHMS.check(name)
    numbers = parse_seeds(seeds) if seeds else (0,)
    return Comparison(task, names, rounds, numbers, sample, settings, until, diagnostics)
