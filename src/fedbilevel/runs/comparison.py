"""Compare several algorithms on one task, over several seeds."""

import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core import Algorithm
from fedbilevel.core.schedules import Schedule
from fedbilevel.core.task import Task
from fedbilevel.diagnostics import DIAGNOSTICS
from fedbilevel.engines.participation import Everyone, participation
from fedbilevel.engines.program import check_fits
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import FedbilevelError, Interrupted, UnknownName
from fedbilevel.runs import grid, plugins
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.fair_search import Found
from fedbilevel.runs.given import Given, Maker, words_of_algorithm, words_of_task
from fedbilevel.runs.grid import PlannedRun, band
from fedbilevel.runs.settings import Setting, options_of, plain
from fedbilevel.runs.until import parse as parse_until
from fedbilevel.runs.until import reached
from fedbilevel.storage.files import new_folder, write_atomically
from fedbilevel.storage.load import runs

Method = Algorithm | type[Algorithm] | str
Algorithms = Sequence[Method] | Mapping[str, Method] | Method
"""Algorithms with or without hyper-parameters, or their names; a mapping gives them names of one's own."""


@dataclass(frozen=True)
class Comparison:
    """What to compare. ``settings`` apply to the task and to every algorithm that has them; "NAME.key" only to NAME.

    ``algorithms`` are the names of the members; ``words`` are the algorithms of those whose name is not a word.
    With ``until``, such as "hypergradient=1e-3", each run ends when it is there, and what that has cost is compared.
    """

    task: str
    algorithms: Sequence[str]
    rounds: int = 500
    seeds: Sequence[int] = (0,)
    sample: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    only_python: Sequence[str] = ()
    given: Mapping[str, Given] = field(default_factory=dict, compare=False, repr=False)  # by member
    until: str = ""
    diagnostics: Sequence[str] = ()

    def experiment(self, member: str, seed: int) -> Experiment:
        """One member of the comparison."""
        bare = self._bare(member)
        names = {*options_of(bare.maker()), *_fields(bare)}
        chosen: dict[str, Any] = {}
        for key, value in self.settings.items():
            table, name = _parse(key, self.algorithms)
            if table == member:
                chosen[Setting("algorithm", name).key] = value
            elif table in ("", "task", "algorithm") and name in names:
                chosen[key] = value
        title = member if member in self.words else ""
        chosen_run = replace(bare, rounds=self.rounds, seed=seed, sample=self.sample, settings=chosen, title=title)
        if not self.until:
            return chosen_run
        # What was seen decides when it was there.
        every = max(1, self.rounds // 200)
        return replace(chosen_run, every=every, until=self.until, diagnostics=tuple(self.diagnostics))

    def _bare(self, member: str) -> Experiment:
        given = self.given.get(member, Given())
        return Experiment(self.task, self.words.get(member, member), settings=self.settings, given=given)

    def check(self) -> None:
        """Refuse unknown settings."""
        members = [self._bare(member) for member in self.algorithms]
        everything = {*options_of(members[0].maker()), *(name for each in members for name in _fields(each))}
        for key in self.settings:
            table, name = _parse(key, self.algorithms)
            if table not in ("", "task", "algorithm", *self.algorithms):
                raise UnknownName("algorithm of this comparison", table, list(self.algorithms))
            if name not in everything:
                raise UnknownName("setting", key, sorted(everything))


def _parse(key: str, members: Sequence[str]) -> Setting:
    """A setting; the names of members may have dots."""
    whose = [member for member in members if key.startswith(f"{member}.")]
    return Setting(whose[0], key.removeprefix(f"{whose[0]}.")) if whose else Setting.parse(key)


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


def _fields(experiment: Experiment) -> list[str]:
    return [f.name for f in fields(experiment.kind())]


def fitting(task: Task) -> list[str]:
    """The algorithms of this package that solve problems like this one."""

    def fits(name: str) -> bool:
        kind = ALGORITHMS[name]
        try:
            chosen = kind(**task.suggested.for_algorithm(name, [f.name for f in fields(kind)]))
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
        folder = new_folder(f"compare-{plugins.short(comparison.task)}", out)
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
        "settings": {key: plain(value) for key, value in comparison.settings.items()},
        **({"words": dict(comparison.words)} if comparison.words else {}),
        **({"only_python": list(comparison.only_python)} if comparison.only_python else {}),
    }


def read(folder: Path) -> Comparison:
    """Read the comparison of a folder."""
    try:
        found = Comparison(**tomllib.loads((folder / COMPARISON).read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedbilevelError(f"{folder / COMPARISON} cannot be read ({error}).") from None
    if found.only_python:
        raise FedbilevelError(
            f"{folder} was started from Python, and no file leads to {' and '.join(found.only_python)}: continue it "
            f"with the same call and out='{folder}'."
        )
    return found


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
    task: "str | Task | Maker",
    algorithms: "Algorithms | None" = None,
    rounds: int | None = None,
    seeds: Sequence[int] = (0,),
    sample: str | None = None,
    settings: Mapping[str, Any] | None = None,
    until: str = "",
    tuned: Path | None = None,
) -> Comparison:
    """Plan a comparison, by default of all algorithms that fit the task. ``tuned`` is the folder of a search, whose
    settings are used.
    """
    about, bounds = words_of_task(task), parse_until(until)
    if isinstance(algorithms, str):
        algorithms = None if algorithms == "all" else [name.strip() for name in algorithms.split(",") if name.strip()]
    found = None if tuned is None else Found.read(tuned)
    if found is not None and tuned is not None:
        if found.task != about.word:
            raise FedbilevelError(
                f"{tuned} is about the task {plugins.short(found.task)}, not {plugins.short(about.word)}."
            )
        algorithms, rounds = algorithms or list(found.best), rounds or found.rounds
        settings = {**found.settings, **(settings or {})}
    settings = {**about.settings, **(settings or {})}
    diagnostics: list[str] = []
    if not algorithms or rounds is None or bounds:
        bare = Experiment(about.word, settings=settings, given=Given(about.make))
        options = options_of(bare.maker())
        parsed = {key: Setting.parse(key) for key in settings}
        of_task = [key for key, each in parsed.items() if each.is_for("task") and each.name in options]
        made = replace(bare, settings={key: settings[key] for key in of_task}).build().task
        algorithms, rounds = algorithms or fitting(made), made.suggested.rounds if rounds is None else rounds
        diagnostics = [name for name in bounds if name not in made.shown.headline and name in DIAGNOSTICS]
    names, words, given, only_python = [], {}, {}, list(about.only_python.values())
    for name, algorithm in _named(algorithms):
        word, kind, strange = words_of_algorithm(algorithm)
        only_python += strange.values()
        if name != word or kind is not None:
            words[name] = word
        if isinstance(algorithm, Algorithm):  # its numbers are those of this member
            settings = {**_numbers(name, algorithm), **settings}
        elif found is not None:
            if word not in found.best:
                raise FedbilevelError(
                    f"{tuned} has no search for {name}: it has {', '.join(map(plugins.short, found.best))}."
                )
            settings = {**{f"{name}.{key}": value for key, value in found.best[word].items()}, **settings}
        names.append(name)
        given[name] = Given(about.make, kind, {**about.only_python, **strange})
        if kind is None:
            plugins.algorithm(word)
    python_only = tuple(dict.fromkeys(only_python))
    return Comparison(
        about.word, names, rounds, tuple(seeds), sample, settings, words, python_only, given, until, diagnostics
    )


def of_file(
    experiment: Experiment,
    algorithms: "Algorithms | None",
    seeds: Sequence[int],
    tuned: Path | None = None,
    until: str = "",
) -> Comparison:
    """A comparison on the task of an experiment, with its settings; without algorithms, its own."""
    chosen, given = algorithms or experiment.algorithm, experiment
    return plan(given.task, chosen, given.rounds, seeds, given.sample, given.settings, until or given.until, tuned)


def _named(algorithms: "Algorithms") -> list[tuple[str, Any]]:
    """The members by name: those that were given as a mapping have theirs, the others are numbered where they meet."""
    if isinstance(algorithms, Mapping):
        return list(algorithms.items())
    every = [algorithms] if isinstance(algorithms, Algorithm | type | str) else list(algorithms)
    named: dict[str, Any] = {}
    for each in every:
        word, kind, _ = words_of_algorithm(each)
        name = plugins.short(word) if kind is None else (kind if isinstance(kind, type) else type(kind)).__name__
        count = 1
        while (numbered := name if count == 1 else f"{name}-{count}") in named:
            count += 1
        named[numbered] = each
    return list(named.items())


def _numbers(name: str, algorithm: Algorithm) -> dict[str, Any]:
    """The hyper-parameters of an algorithm as settings of this member, as far as a file can hold them."""
    values = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}
    known = bool | int | float | str | tuple | Schedule
    return {f"{name}.{key}": plain(value) for key, value in values.items() if isinstance(value, known)}
