"""``fedbilevel reproduce``: an experiment of a paper, run again, and what the paper says beside what came out.

Every experiment is a file in ``experiments/``: what the paper claims, its conditions ("panels"), its methods with the
parameters that the paper prints or that a search found, the printed numbers, and claims that can hold or fail. Runs are
kept in a folder of their own and go on after an interruption; the page about them is made from the runs and the file
alone, verdict included, so that nobody words it.
"""

import csv
import itertools
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedbilevel import grid
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.drawing import over_decades
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.experiment import Experiment, new_folder, plain
from fedbilevel.grid import Place, band
from fedbilevel.records import runs, write_atomically
from fedbilevel.tuning import Tuning, tune

PARAMETERS = {
    "printed": "the paper's",
    "found": "found by search",
    "ours": "ours",
}
"""Where the parameters of a row come from."""


@dataclass(frozen=True)
class Column:
    """A number of the table: a metric at the end, after so many rounds, or after so many exchanges; times ``scale``."""

    title: str
    metric: str
    round: int | None = None
    exchanges: int | None = None
    scale: float = 1.0
    digits: int = 2
    better: str = "higher"

    def of(self, history: Sequence[Mapping[str, Any]]) -> float:
        """Its value: that of the last row which is not later."""
        rows = [
            row
            for row in history
            if (self.round is None or row["round"] <= self.round)
            and (self.exchanges is None or row["exchanges"] <= self.exchanges)
        ]
        return float(rows[-1][self.metric]) * self.scale

    def shown(self, value: float) -> str:
        return f"{value:.{self.digits}f}" if math.isfinite(value) else "diverged"


@dataclass(frozen=True)
class Panel:
    """A condition: options of the task and of the run."""

    title: str
    task: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 0  # if not as many as elsewhere


@dataclass(frozen=True)
class Method:
    """A row: an algorithm and its parameters. ``by_panel`` are those of one condition only, ``paper`` the printed
    numbers by condition, one for each column.
    """

    label: str
    algorithm: str
    parameters: str = "printed"
    settings: Mapping[str, Any] = field(default_factory=dict)
    by_panel: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    panels: Sequence[str] = ()
    paper: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seeds: int = 0  # if not as many as the others
    found_as: str = ""  # the label that the parameters were found for, if it is another one

    @property
    def title(self) -> str:
        return f"{self.label} ({PARAMETERS[self.parameters]})"


@dataclass(frozen=True)
class Claim:
    """Something the paper says, in words, and what has to be seen for it to hold.

    ``kind`` is one of

    - "near": ours is within ``points``, or the paper's standard deviation, of the paper's number;
    - "order": ``methods`` are in this order, the best first, by at least ``points``;
    - "bound": ``methods`` are at ``least`` or at ``most`` this;
    - "spread": over the panels, the first method varies least (largest minus smallest);
    - "trend": from panel to panel, the first method minus the second (or the first alone) is "rising" or "falling".

    ``over`` = "rounds" takes the mean over all rounds instead of a column's moment: who is ahead on the way. A claim
    that is ``ours`` is a question of our own: it is answered, and does not enter the verdict.
    """

    words: str
    kind: str
    methods: Sequence[str]
    panels: Sequence[str] = ()
    column: str = ""
    points: float = 0.0
    least: float | None = None
    most: float | None = None
    direction: str = "rising"
    over: str = "end"
    ours: bool = False


@dataclass(frozen=True)
class Search:
    """How parameters are looked for: the same number of trials for every method, by validation loss, on a seed that is
    not among those reported. ``panels`` are the conditions it is done under; the others take what the first of them
    gave. ``fixed`` are parameters, by label, that are not searched for; ``rounds`` are those of the runs if 0;
    ``task`` are options for the search only. With a ``grid``, all its points are tried, and other parameters are as the
    task suggests them.
    """

    panels: Sequence[str]
    trials: int = 0
    rounds: int = 0
    seed: int = 100
    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    found: str = ""  # the experiment whose search is used, if it is another one's

    @property
    def budget(self) -> int:
        """The number of trials of every method."""
        return math.prod(map(len, self.grid.values())) if self.grid else self.trials


@dataclass(frozen=True)
class Reproduction:
    """One experiment of a paper. ``run`` and ``task`` are for all; ``quick`` replaces some of it for a smoke run."""

    id: str
    title: str
    paper: str
    where: str
    claim: str
    task: Mapping[str, Any]
    run: Mapping[str, Any]
    seeds: int
    columns: Sequence[Column]
    panels: Sequence[Panel]
    methods: Sequence[Method]
    claims: Sequence[Claim]
    first_seed: int = 0  # where parameters were tried out on the first ones
    differences: str = ""
    remarks: str = ""
    curves: Sequence[str] = ()
    against: str = "round"
    search: Search | None = None
    quick: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)  # by label and panel
    smoke: bool = False

    @property
    def printed(self) -> bool:
        """Whether the paper prints numbers."""
        return any(method.paper for method in self.methods)

    def seeds_of(self, panel: Panel, method: Method) -> range:
        """The seeds of a row under a condition."""
        count = min(each.seeds or self.seeds for each in (self, panel, method))
        return range(self.first_seed, self.first_seed + count)

    def cases(self) -> list[tuple[Panel, Method]]:
        """Every method under every condition that it has."""
        return [(p, m) for m in self.methods for p in self.panels if not m.panels or p.title in m.panels]

    def experiment(self, panel: Panel, method: Method, seed: int) -> Experiment:
        """One run of it."""
        found: Mapping[str, Any] = {}
        if method.parameters == "found":
            label = method.found_as or method.label
            of_method = {title: settings for (name, title), settings in self.found.items() if name == label}
            known = of_method.get(panel.title, next(iter(of_method.values()), None))
            if known is None:
                raise FedbilevelError(
                    f"{self.id}: nothing was found for {method.label} yet: fedbilevel reproduce {self.id} --search."
                )
            found = known
        options = {f"task.{k}": v for k, v in {**self.task, **panel.task}.items() if k != "name"}
        hyper = {**method.settings, **found, **method.by_panel.get(panel.title, {})}
        settings = {**options, **{f"algorithm.{k}": v for k, v in hyper.items()}}
        run = {f"run.{k}": v for k, v in {**self.run, **panel.run, **method.run}.items()}
        given = Experiment(str(self.task["name"]), method.algorithm, seed=seed, references=False)
        return given.changed({**settings, **run})

    def shortened(self) -> "Reproduction":
        """The smoke run: few rounds, one seed, and what ``quick`` says."""
        quick = dict(self.quick)
        rounds = int(quick.pop("rounds", 4))
        only = quick.pop("panels", None)
        run = {"rounds": rounds, "every": max(1, rounds // 2)}
        return replace(
            self,
            smoke=True,
            seeds=1,
            task={**self.task, **quick},
            run={**self.run, **run},
            panels=[replace(p, run={k: v for k, v in p.run.items() if k not in run}) for p in self.panels][:only],
            methods=[replace(m, run={k: v for k, v in m.run.items() if k not in run}) for m in self.methods],
        )


FOLDER = files("fedbilevel") / "experiments"


def known() -> list[str]:
    """The experiments there are."""
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def read(id: str) -> Reproduction:
    """An experiment by its name."""
    if id not in known():
        raise UnknownName("experiment of a paper", id, known())
    content = tomllib.loads((FOLDER / f"{id}.toml").read_text())
    search = Search(**content.pop("search")) if "search" in content else None
    made = Reproduction(
        id=id,
        columns=[Column(**each) for each in content.pop("columns")],
        panels=[Panel(**each) for each in content.pop("panels", [{"title": ""}])],
        methods=[Method(**each) for each in content.pop("methods")],
        claims=[Claim(**each) for each in content.pop("claims")],
        search=search,
        **content,
    )
    if search is not None:
        path = FOLDER / "found" / f"{search.found or id}.toml"
        if path.is_file():
            made = replace(made, found=_settings_of(tomllib.loads(path.read_text())))
    check(made)
    return made


def _settings_of(found: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(each["method"], each["panel"]): each["settings"] for each in found["found"]}


def check(made: Reproduction) -> None:
    """Refuse names in the file that mean nothing."""
    panels, labels = {panel.title for panel in made.panels}, {method.label for method in made.methods}
    for method in made.methods:
        _ = ALGORITHMS[method.algorithm]
        unknown = ({*method.panels} | {*method.by_panel} | {*method.paper}) - panels
        wrong = [title for title, values in method.paper.items() if len(values) != len(made.columns)]
        if unknown or wrong or method.parameters not in PARAMETERS:
            raise FedbilevelError(f"{made.id}: {method.title} names panels or columns that are not there.")
    for claim in made.claims:
        if {*claim.panels} - panels or {*claim.methods} - labels or claim.kind not in KINDS:
            raise FedbilevelError(f"{made.id}: the claim '{claim.words}' names what is not there.")
        if claim.column and claim.column not in {column.title for column in made.columns}:
            raise FedbilevelError(f"{made.id}: the claim '{claim.words}' names no column.")


@dataclass(frozen=True)
class Member(grid.Member):
    """One run."""

    panel: Panel
    method: Method
    seed: int


@dataclass(frozen=True)
class Reproduced:
    """All runs of an experiment."""

    reproduction: Reproduction
    members: Sequence[Member]
    folder: Path

    def of(self, panel: Panel, method: Method) -> list[Member]:
        return [m for m in self.members if m.panel.title == panel.title and m.method == method]

    @cached_property
    def minutes(self) -> float:
        """Of all runs together, without compiling."""
        return grid.seconds(self.members) / 60

    def value(self, panel: Panel, method: Method, column: Column, over: str = "end") -> tuple[float, float]:
        """Mean and standard deviation over seeds; NaN where a run did not come to its end."""
        members = self.of(panel, method)
        if not members or not all(m.done for m in members):
            return math.nan, math.nan
        if over == "rounds":
            values = [column.scale * float(np.mean([row[column.metric] for row in m.history])) for m in members]
        else:
            values = [column.of(m.history) for m in members]
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def run(
    made: Reproduction,
    out: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    jobs: int = 0,
) -> Reproduced:
    """Run every method under every condition with every seed; a folder that holds some of it is continued."""
    folder = out if out is not None and out.is_dir() else new_folder(f"reproduce-{made.id}", out)
    groups, members = [], []
    for panel, method in made.cases():
        name = _slug(f"{panel.title} {method.label} {method.parameters}")
        some = [
            (Place(folder / f"{name}-seed{seed}", made.experiment(panel, method, seed)), seed)
            for seed in made.seeds_of(panel, method)
        ]
        some[0][0].experiment.build().check()  # refuses what is wrong before anything is run
        _check_same(some[0][0])
        groups.append([place for place, _ in some])
        members += [(place, panel, method, seed) for place, seed in some]
    try:
        grid.run(groups, progress, jobs)
    except KeyboardInterrupt as interrupt:
        interrupt.saved = f"Go on with the same command and --out {folder}"  # pyright: ignore
        raise
    done = [Member(runs(place.folder)[0], panel, method, seed) for place, panel, method, seed in members]
    return Reproduced(made, done, folder)


def _check_same(place: Place) -> None:
    """Refuse a folder with a run of something else."""
    if not place.settled:
        return
    written = runs(place.folder)[0].config
    asked = place.experiment.build().config()
    differ = [
        f"{table}.{key}"
        for table in ("task", "algorithm", "run")
        for key, value in asked[table].items()
        if value is not None and written.get(table, {}).get(key) != value
    ]
    if differ:
        raise FedbilevelError(
            f"{place.folder} holds another run ({', '.join(differ[:3])} differ): remove it, or choose another --out."
        )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def search(made: Reproduction, out: Path, progress: Callable[[int, int], None] | None = None) -> Reproduction:
    """Look for the parameters of all rows that have "found", each with the same budget; writes ``found.toml``."""
    asked = made.search
    wanted = [method for method in made.methods if method.parameters == "found"]
    if asked is None or asked.found or not wanted:
        raise FedbilevelError(f"{made.id} has nothing to search for.")
    found: list[dict[str, Any]] = []
    with grid.processes(min(grid.cores(), len(wanted))) as pool:
        searches = [grid.submit(pool, _search_one, made, asked, method, out) for method in wanted]
        try:
            for number, search in enumerate(searches):
                if progress is not None:
                    progress(number, len(wanted))
                found += search.result()
        except KeyboardInterrupt:
            grid.end(pool, searches)
            raise
    how = {"trials": asked.budget, "rounds": asked.rounds, "seed": asked.seed}
    write_atomically(out / "found.toml", tomli_w.dumps({"search": how, "found": found}).encode())
    return replace(made, found=_settings_of({"found": found}))


def _search_one(made: Reproduction, asked: Search, method: Method, out: Path) -> list[dict[str, Any]]:
    """What was found for one row, condition by condition; each search begins with what was found before."""
    fixed, found, first = asked.fixed.get(method.label, {}), [], []
    for panel in (
        p for p in made.panels if p.title in asked.panels and (not method.panels or p.title in method.panels)
    ):
        experiment = replace(made, found={(method.label, panel.title): fixed}).experiment(panel, method, asked.seed)
        experiment = experiment.changed({f"task.{name}": value for name, value in asked.task.items()})
        experiment = experiment.changed({"rounds": asked.rounds}) if asked.rounds else experiment
        tuning = (
            Tuning.on_grid(experiment, asked.grid)
            if asked.grid
            else Tuning(experiment, asked.trials + len(first), first=first)
        )
        tuned = tune(tuning, out / _slug(f"{panel.title} {method.label}"))
        settings = {name: plain(value) for name, value in tuned.best.settings.items()}
        losses = {"loss": tuned.best.value}
        if not asked.grid:
            losses["suggested_loss"] = tuned.suggested.value
        which = {"method": method.label, "panel": panel.title, "trials": len(tuned.trials)}
        found.append({**which, **losses, "settings": {**fixed, **settings}})
        first = [*first, {name: getattr(value, "scale", value) for name, value in tuned.best.settings.items()}]
    return found


@dataclass(frozen=True)
class Judged:
    """A claim, whether it holds, and the numbers it was judged by."""

    claim: Claim
    holds: bool
    numbers: str


def _number(text: str) -> tuple[float, float]:
    """A printed number and its deviation.

    >>> _number("97.12 ± 0.07"), _number("~2e-4")
    ((97.12, 0.07), (0.0002, 0.0))
    """
    parts = [float(part) for part in re.findall(r"[\d.]+(?:e-?\d+)?", text)]
    return parts[0], parts[1] if len(parts) > 1 else 0.0


class _Judge:
    """Judges claims by the rows with these parameters, or, of methods that have none, by what there is."""

    def __init__(self, done: Reproduced, parameters: str) -> None:
        self.done, self.parameters = done, parameters

    def method(self, label: str) -> Method:
        rows = [method for method in self.done.reproduction.methods if method.label == label]
        return next((method for method in rows if method.parameters == self.parameters), rows[0])

    def panels(self, claim: Claim) -> list[Panel]:
        return [p for p in self.done.reproduction.panels if not claim.panels or p.title in claim.panels]

    def columns(self, claim: Claim) -> list[Column]:
        columns = list(self.done.reproduction.columns)
        if claim.column:
            return [column for column in columns if column.title == claim.column]
        return columns if claim.kind == "near" else columns[-1:]

    def claim(self, claim: Claim) -> Judged:
        holds, numbers = KINDS[claim.kind](self, claim)
        return Judged(claim, holds, "; ".join(numbers))

    def value(self, panel: Panel, label: str, column: Column, claim: Claim) -> float:
        return self.done.value(panel, self.method(label), column, claim.over)[0]

    def near(self, claim: Claim) -> tuple[bool, list[str]]:
        far, all_ = [], 0
        for panel in self.panels(claim):
            for label in claim.methods:
                printed = self.method(label).paper.get(panel.title, ())
                for column, text in zip(self.done.reproduction.columns, printed, strict=False):
                    if column not in self.columns(claim) or not text:
                        continue
                    paper, deviation = _number(text)
                    ours = self.value(panel, label, column, claim)
                    all_ += 1
                    if not abs(ours - paper) <= max(claim.points, deviation):
                        numbers = f"{column.shown(ours)} against {column.shown(paper)}"
                        far.append(f"{_at(panel)}{label}, {column.title}: {numbers}")
        return not far, [f"{all_ - len(far)} of {all_} are{', not ' if far else ''}{far[0] if far else ''}", *far[1:]]

    def order(self, claim: Claim) -> tuple[bool, list[str]]:
        holds, numbers = True, []
        (column,) = self.columns(claim)
        sign = 1 if column.better == "higher" else -1
        for panel in self.panels(claim):
            values = [self.value(panel, label, column, claim) for label in claim.methods]
            ranked = [-math.inf if math.isnan(value) else sign * value for value in values]
            in_order = all(a - b > claim.points for a, b in itertools.pairwise(ranked))
            holds &= in_order and math.isfinite(ranked[0])
            shown = ", ".join(
                f"{label} {column.shown(value)}" for label, value in zip(claim.methods, values, strict=True)
            )
            numbers.append(f"{_at(panel)}{shown}{'' if in_order else ' (no)'}")
        return holds, numbers

    def bound(self, claim: Claim) -> tuple[bool, list[str]]:
        holds, numbers = True, []
        (column,) = self.columns(claim)
        low = -math.inf if claim.least is None else claim.least
        high = math.inf if claim.most is None else claim.most
        for panel in self.panels(claim):
            for label in claim.methods:
                value = self.value(panel, label, column, claim)
                holds &= low <= value <= high
                numbers.append(f"{_at(panel)}{label} {column.shown(value)}")
        return holds, numbers

    def spread(self, claim: Claim) -> tuple[bool, list[str]]:
        (column,) = self.columns(claim)
        spreads = {}
        for label in claim.methods:
            values = [self.value(panel, label, column, claim) for panel in self.panels(claim)]
            spreads[label] = math.inf if any(map(math.isnan, values)) else max(values) - min(values)
        first, *others = spreads.values()
        return all(first < other for other in others), [f"{k} {column.shown(v)}" for k, v in spreads.items()]

    def trend(self, claim: Claim) -> tuple[bool, list[str]]:
        (column,) = self.columns(claim)
        values = []
        for panel in self.panels(claim):
            first, *second = (self.value(panel, label, column, claim) for label in claim.methods)
            values.append(first - (second[0] if second else 0.0))
        steps = np.diff(values) * (1 if claim.direction == "rising" else -1)
        shown = [f"{_at(p)}{column.shown(v)}" for p, v in zip(self.panels(claim), values, strict=True)]
        return bool(np.all(steps > 0)), shown


def _at(panel: Panel) -> str:
    return f"{panel.title}: " if panel.title else ""


KINDS: Mapping[str, Callable[[_Judge, Claim], tuple[bool, list[str]]]] = {
    "near": _Judge.near,
    "order": _Judge.order,
    "bound": _Judge.bound,
    "spread": _Judge.spread,
    "trend": _Judge.trend,
}


def judged(done: Reproduced) -> dict[str, list[Judged]]:
    """All claims, by the parameters of the rows that they were judged by."""
    kinds = list(dict.fromkeys(method.parameters for method in done.reproduction.methods))
    return {kind: [_Judge(done, kind).claim(claim) for claim in done.reproduction.claims] for kind in kinds}


def verdict(done: Reproduced) -> str:
    """One of three: it follows from the claims and nothing else."""
    if done.reproduction.smoke:
        return "none, this was a smoke run"
    by = {kind: [each for each in claims if not each.claim.ours] for kind, claims in judged(done).items()}
    if all(each.holds for each in by.get("printed", ())) and "printed" in by:
        return "reproduced"
    for kind, claims in by.items():
        if kind != "printed" and all(each.holds for each in claims):
            printed = "" if "printed" in by else "; the paper prints none"
            return f"reproduced with other parameters ({PARAMETERS[kind]}{printed})"
    best = max(by.values(), key=lambda claims: sum(each.holds for each in claims))
    return f"not reproduced ({sum(each.holds for each in best)} of {len(best)} claims hold)"


def table(done: Reproduced) -> list[list[str]]:
    """Headings and rows: panel, method, and for each column the paper's number, if it prints any, and ours."""
    made = done.reproduction
    headings = ["condition", "method (parameters)"]
    for column in made.columns:
        headings += [f"{column.title}, paper", f"{column.title}, ours"] if made.printed else [column.title]
    rows = [headings]
    for panel in made.panels:
        for method in made.methods:
            if (panel, method) not in made.cases():
                continue
            members, cells = done.of(panel, method), []
            failed = [m for m in members if not m.done]
            for number, column in enumerate(made.columns):
                if made.printed:
                    cells.append(method.paper[panel.title][number] if panel.title in method.paper else "-")
                if failed:
                    cells.append(_failures(failed, members))
                else:
                    mean, deviation = done.value(panel, method, column)
                    cells.append(column.shown(mean) + (f" ± {column.shown(deviation)}" if len(members) > 1 else ""))
            rows.append([panel.title, method.title, *cells])
    return rows


def _failures(failed: Sequence[Member], members: Sequence[Member]) -> str:
    found = re.search(r"round (\d+)", failed[0].failure)
    when = f" at round {found[1]}" if found else ""
    return f"diverged{when}" if len(failed) == len(members) else f"diverged ({len(failed)} of {len(members)})"


def write(done: Reproduced, folder: Path, command: str) -> Path:
    """Write ``ID.md``, ``ID.png`` with the curves and ``ID.csv`` with every curve into a folder."""
    made = done.reproduction
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_curves(done, folder / f"{made.id}.csv")
        _draw(done).savefig(folder / f"{made.id}.png", dpi=80)
        path = folder / f"{made.id}.md"
        path.write_text(_page(done, command))
    except OSError as error:
        raise FedbilevelError(f"cannot write to {folder}: {error.strerror}.") from error
    return path


def _page(done: Reproduced, command: str) -> str:
    made = done.reproduction
    cores = os.cpu_count()
    lines = [
        f"# {made.id}: {made.title}",
        "",
        f"**Verdict: {verdict(done)}.**",
        "",
        f"*The paper*: {made.paper}, {made.where}. {made.claim.strip()}",
        "",
        "*What we ran*:",
        "",
        f"    {command}",
        "",
        f"with `src/fedbilevel/experiments/{made.id}.toml`: seeds {made.first_seed} to "
        f"{made.first_seed + made.seeds - 1}, "
        f"{len(done.members)} runs, {done.minutes:.0f} minutes of computing on {cores} cores (both are used, so about "
        f"{done.minutes / min(2, cores or 1):.0f} minutes of waiting), fedbilevel {version('fedbilevel')}.",
    ]
    if made.search is not None:
        s = made.search
        which = f"`experiments/found/{s.found or made.id}.toml`"
        where = f"under {' and '.join(map(repr, s.panels))}, " if len(made.panels) > 1 else ""
        grid = "; ".join(f"{name} in {', '.join(map(str, values))}" for name, values in s.grid.items())
        trials = f"{s.budget} trials ({grid})" if grid else f"{s.budget} trials"
        lines += [
            "",
            f"*Search*: {trials} of {s.rounds or 'as many'} rounds for every method marked *found by search*, {where}"
            f"seed {s.seed}, by validation loss; what was found is in {which}.",
        ]
    if made.differences:
        lines += ["", "*What differs from the paper*: " + made.differences.strip()]
    lines += ["", "## Numbers", ""]
    headings, *rows = table(done)
    lines += [_line(headings), "|---" * len(headings) + "|", *map(_line, rows)]
    lines += ["", "## Claims", ""]
    by = judged(done)
    lines += [_line(["claim", *(f"parameters: {PARAMETERS[kind]}" for kind in by)]), "|---" * (1 + len(by)) + "|"]
    for number, claim in enumerate(made.claims):
        cells = [f"**{'holds' if of[number].holds else 'does not hold'}**: {of[number].numbers}" for of in by.values()]
        lines.append(_line([claim.words, *cells]))
    if made.remarks:
        lines += ["", "## Remarks", "", made.remarks.strip()]
    lines += ["", f"![curves]({made.id}.png)", "", f"Every curve of every seed: [{made.id}.csv]({made.id}.csv)", ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def _metrics(made: Reproduction) -> list[str]:
    return list(dict.fromkeys([*made.curves, *(column.metric for column in made.columns)]))


def _write_curves(done: Reproduced, path: Path) -> None:
    made = done.reproduction
    metrics = _metrics(made)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["condition", "method", "parameters", "seed", "round", "exchanges", *metrics])
        for m in done.members:
            start = [m.panel.title, m.method.label, m.method.parameters, m.seed]
            for row in m.history:
                values = [f"{row.get(metric, math.nan):.5g}" for metric in metrics]
                rows.writerow([*start, row["round"], row["exchanges"], *values])


def _draw(done: Reproduced) -> Figure:
    """A row for every metric, a column for every condition; bands are one standard deviation to each side."""
    made = done.reproduction
    metrics = list(made.curves) or [made.columns[-1].metric]
    columns = min(4, len(made.panels))
    down = -(-len(made.panels) // columns) * len(metrics)
    figure = Figure(figsize=(4.0 * columns + 2.2, 3.1 * down), layout="constrained")
    FigureCanvasAgg(figure)
    labels = list(dict.fromkeys(method.label for method in made.methods))
    lines = {"printed": "--", "found": "-", "ours": "-"}
    shown: dict[str, Any] = {}
    for number, (metric, panel) in enumerate(((metric, panel) for metric in metrics for panel in made.panels), 1):
        axes = figure.add_subplot(down, columns, number)
        settled: list[float] = []
        for method in made.methods:
            members = [m for m in done.of(panel, method) if m.done]
            if not members:
                continue
            mean, deviation = band(members, metric)
            across, _ = band(members, made.against)
            colour = f"C{labels.index(method.label) % 10}"
            (line,) = axes.plot(across, mean, lines[method.parameters], color=colour, linewidth=1.4)
            axes.fill_between(across, mean - deviation, mean + deviation, alpha=0.15, linewidth=0, color=colour)
            shown.setdefault(method.title, line)
            settled += [value for value, at in zip(mean, across, strict=True) if at >= 0.1 * across[-1]]
        known = [value for value in settled if math.isfinite(value)]
        if over_decades(known):
            axes.set_yscale("log")
        elif known:  # the first steps would hide the differences that matter
            margin = 0.08 * (max(known) - min(known)) or 0.1
            axes.set_ylim(min(known) - margin, max(known) + margin)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel({"round": "rounds"}.get(made.against, made.against))
        axes.set_ylabel(metric)
        axes.grid(alpha=0.3)
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", frameon=False, fontsize=8)
    return figure
