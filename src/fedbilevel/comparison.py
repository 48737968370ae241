"""Several algorithms on one task, under one or several conditions and over several seeds: what came out, side by
side.
"""

import inspect
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedbilevel import grid
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.engines.participation import Everyone
from fedbilevel.engines.plan import Program
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.experiment import Experiment, new_folder
from fedbilevel.grid import Place, band
from fedbilevel.records import runs, write_atomically
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
class Member(grid.Member):
    """One run of a comparison."""

    panel: Panel
    algorithm: str
    seed: int


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


def run(
    comparison: Comparison, out: Path | None = None, progress: Callable[[int, int], None] | None = None, jobs: int = 0
) -> Compared:
    """Run all members, each into a run folder of its own; one that fails is reported and does not stop the others.

    Args:
        comparison: what to run.
        out: the folder; one that holds this very comparison is continued where it stopped.
        progress: called with how many members are done, and how many there are.
        jobs: processes, see ``grid.run``; seeds of the same algorithm stay in one.
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
        for *_, place in _places(comparison, Path())[:: len(comparison.seeds)]:
            place.experiment.build().check()  # refuses what is wrong before anything is run
        folder = new_folder(f"compare-{comparison.task}", out)
        places = _places(comparison, folder)
        write_atomically(folder / COMPARISON, text.encode())
    groups: dict[tuple[str, str], list[Place]] = {}
    for panel, algorithm, _, place in places:
        groups.setdefault((panel.title, algorithm), []).append(place)
    try:
        grid.run(list(groups.values()), progress, jobs)
    except KeyboardInterrupt as interrupt:
        interrupt.saved = f"Go on with: fedbilevel resume {folder}"  # pyright: ignore[reportAttributeAccessIssue]
        raise
    members = [Member(runs(place.folder)[0], panel, name, seed) for panel, name, seed, place in places]
    if not any(member.done for member in members):
        raise FedbilevelError(f"every run failed; the first one said: {members[0].failure}")
    return Compared(comparison, members, folder, time.perf_counter() - began)


def _places(comparison: Comparison, folder: Path) -> list[tuple[Panel, str, int, Place]]:
    places = []
    for panel in comparison.panels:
        word = re.sub(r"[^a-z0-9]+", "-", panel.title.lower()).strip("-")
        for algorithm in comparison.algorithms:
            for seed in comparison.seeds:
                name = "-".join(part for part in (word, algorithm, f"seed{seed}") if part)
                experiment = replace(comparison.experiment(panel, algorithm, seed), references=False)
                places.append((panel, algorithm, seed, Place(folder / name, experiment)))
    return places


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


def last(members: Sequence[Member], metric: str) -> tuple[float, float]:
    """Mean and standard deviation over seeds at the end."""
    mean, deviation = band(members, metric)
    return float(mean[-1]), float(deviation[-1])


def per_client(member: Member, name: str) -> float:
    """A count over all clients at the end of a run, as a mean per client."""
    return member.history[-1][name] / member.run.info["clients"] if member.done else 0.0


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
