"""The experiment files: what a paper claims about which methods, under which conditions, and what we run."""

import hashlib
import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from typing import Any

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.settings import Settings

PARAMETERS = {
    "printed": "the paper's",
    "found": "found by search",
    "ours": "ours",
}
"""Where the parameters of a row come from."""


CURVE_AXES = {
    "round": "rounds",
    "exchanges": "exchanges",
    "communications": "communication rounds, as the paper counts them",
    "floats": "floats of all clients, down and up",
    "samples": "samples of all clients",
}
"""What curves are drawn against."""


@dataclass(frozen=True)
class ResultColumn:
    """A number of the table: a metric at the end, or ``at`` a number of rounds or exchanges; times ``scale``. ``along``
    is what is counted, if it is not what the curves are drawn against. The metric is taken to a ``power`` and its mean
    is over the last ``share`` of the way. With ``until``, the number is how far the first evaluation is along the way
    at which the metric is at most this.
    """

    title: str
    metric: str
    at: float | None = None
    along: str = ""
    scale: float = 1.0
    power: float = 1.0
    share: float = 0.0  # as everywhere else
    until: float | None = None
    digits: int = 2
    better: str = "higher"

    @property
    def sign(self) -> int:
        """The sign of an improvement."""
        return 1 if self.better == "higher" else -1

    def shown(self, value: float) -> str:
        return f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Panel:
    """A condition: options of the task and of the run. ``number`` is what slopes are taken over."""

    title: str
    number: float = 0.0
    task: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 0  # if another number than elsewhere


@dataclass(frozen=True)
class Method:
    """A row: an algorithm and its parameters. ``by_panel`` are parameters for one condition only, ``paper`` the printed
    numbers by condition, one for each column; one row of a label has them for all. ``communications`` are those of one
    round as the paper counts them, if they are not its exchanges.
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
    communications: int = 0

    @property
    def title(self) -> str:
        return f"{self.label} ({PARAMETERS[self.parameters]})"


CLAIM_KINDS = ("near", "order", "ahead", "level", "bound", "steady", "best", "spread", "trend", "approach", "slope")

ABOUT = {
    "method": "Claims about the paper's own method",
    "baselines": "Claims about the baselines",
    "ours": "Questions of ours",
}
"""What a claim is about, as the page says it. Only claims about the paper's own method decide the verdict."""


@dataclass(frozen=True)
class Claim:
    """Something the paper says, in words, and what our runs must show for it to hold.

    ``kind`` is one of

    - "near": ours is within ``points``, or the paper's standard deviation, of the paper's number;
    - "order": ``methods`` are in this order, the best first, by more than ``points``;
    - "ahead": the first of ``methods`` is better than each of the others, by more than ``points``;
    - "level": all ``methods`` are within ``points`` of the first one, to either side;
    - "bound": ``methods`` are at ``least`` or at ``most`` this;
    - "steady": the first of ``methods`` has the smallest standard deviation over seeds;
    - "best": over the panels, the method is best under the first one;
    - "spread": over the panels, the first method varies least (largest minus smallest);
    - "trend": from panel to panel, the first method minus the second (or the first alone) is "rising" or "falling";
    - "approach": from panel to panel, the first method comes closer to the second;
    - "slope": over the panels, on logarithmic scales, each method's slope over the panels' numbers is at ``least`` or
      at ``most`` this.

    The first six are judged once for each panel. ``over`` = "way" uses the mean of the whole curve instead of its last
    tenth. With a ``target``, a number for each of some columns, closer is better: the sum of the distances ("steady" is
    then about each of these columns). A claim
    with ``parameters`` is judged only by rows with these. How numbers of a few seeds decide: ``decisions.py``.
    """

    words: str
    kind: str
    methods: Sequence[str]
    about: str = "method"
    panels: Sequence[str] = ()
    column: str = ""
    target: Mapping[str, float] = field(default_factory=dict)
    points: float = 0.0
    least: float | None = None
    most: float | None = None
    direction: str = "rising"
    over: str = "end"
    parameters: str = ""


@dataclass(frozen=True)
class Search:
    """How to search for parameters: the same number of trials for every method, by validation loss, on a seed that is
    not among those reported.

    ``panels`` are the conditions to search under; the others use what was found under the first of them. The search
    starts from the printed parameters of a method, or from what ``start`` has for its label, and covers ``ranges``, by
    parameter, which are the same for every method. ``fixed`` are parameters, by label, that are not searched for,
    ``tied`` those that are sums of others, with factors; ``rounds`` = 0 means as many as the runs have; with ``prune``,
    trials that are behind are stopped early; ``task`` are options for the search only, and ``held_out`` is the share
    of the validation rows that are held out to compare settings on. With a ``grid``, all its points are tried, with
    ``seeds`` seeds from ``seed`` on, and other parameters are as the task suggests.
    """

    panels: Sequence[str] = ()
    trials: int = 0
    rounds: int = 0
    seed: int = 100
    seeds: int = 1
    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)
    ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)  # the lowest and the highest
    start: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tied: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    held_out: float = 0.0
    prune: bool = True
    found: str = ""  # the experiment whose search is used, if it is another one's

    @property
    def budget(self) -> int:
        """The number of trials for every method."""
        return math.prod(map(len, self.grid.values())) if self.grid else self.trials

    @property
    def conditions(self) -> dict[str, Any]:
        """What is saved next to the parameters found, as they depend on it."""
        default = Search()
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in given.items() if value != getattr(default, name)}


@dataclass(frozen=True)
class Reproduction:
    """One experiment of a paper. ``run`` and ``task`` apply to all runs; ``quick`` replaces some for a smoke run."""

    id: str
    title: str
    paper: str
    where: str
    claim: str
    task: Mapping[str, Any]
    run: Mapping[str, Any]
    seeds: int
    columns: Sequence[ResultColumn]
    panels: Sequence[Panel]
    methods: Sequence[Method]
    claims: Sequence[Claim]
    minutes: float = math.nan  # of computing, where the curves do not say it
    first_seed: int = 0  # where parameters were tried out on the first ones
    differences: str = ""
    remarks: str = ""
    curves: Sequence[str] = ()
    across: str = ""  # what the numbers of the panels are; the columns are then drawn against them
    against: str = "round"
    search: Search | None = None
    quick: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)  # by label and panel
    smoke: bool = False

    @property
    def printed(self) -> bool:
        """Whether the paper prints numbers."""
        return any(method.paper for method in self.methods)

    def printed_of(self, label: str) -> Mapping[str, Sequence[str]]:
        """The printed numbers of a method, by condition."""
        return next((method.paper for method in self.methods if method.label == label and method.paper), {})

    def seeds_of(self, panel: Panel, method: Method) -> range:
        """The seeds of a row under a condition."""
        count = min(each.seeds or self.seeds for each in (self, panel, method))
        return range(self.first_seed, self.first_seed + count)

    def cases(self) -> list[tuple[Panel, Method]]:
        """Every method under each of its conditions."""
        return [(p, m) for m in self.methods for p in self.panels if not m.panels or p.title in m.panels]

    def experiment(self, panel: Panel, method: Method, seed: int) -> Experiment:
        """The experiment of one run."""
        searched: Mapping[str, Any] = {}
        if method.parameters == "found":
            of_method = {title: settings for (name, title), settings in self.found.items() if name == method.label}
            searched = of_method.get(panel.title, next(iter(of_method.values()), {}))
            if not of_method:
                raise FedbilevelError(
                    f"{self.id}: there are no parameters for {method.label} from the search in its file: run "
                    f"fedbilevel reproduce {(self.search and self.search.found) or self.id} --search."
                )
        tables = {
            "task": {name: value for name, value in {**self.task, **panel.task}.items() if name != "name"},
            "algorithm": {**method.settings, **searched, **method.by_panel.get(panel.title, {})},
            "run": {**self.run, **panel.run, **method.run},
        }
        given = Experiment(str(self.task["name"]), method.algorithm, seed=seed, references=False)
        return given.changed(Settings.of_tables(tables))

    def searched(self, panel: Panel, method: Method) -> tuple[Experiment, dict[str, float]]:
        """The experiment to search the parameters of a method with, and where the search starts: from the printed
        parameters for this condition, or else from those that the search has for this method.
        """
        asked = self.search or Search()
        fixed = asked.fixed.get(method.label, {})
        experiment = replace(self, found={(method.label, panel.title): fixed}).experiment(panel, method, asked.seed)
        experiment = experiment.changed(Settings.of_tables({"task": asked.task}))
        experiment = experiment.changed({"rounds": asked.rounds}) if asked.rounds else experiment
        printed = [m for m in self.methods if (m.label, m.parameters) == (method.label, "printed")]
        given = {**printed[0].settings, **printed[0].by_panel.get(panel.title, {})} if printed else {}
        given = {**asked.start.get(method.label, {}), **given}
        numbers = {name: value for name, value in given.items() if isinstance(value, int | float)}
        return experiment, {name: value for name, value in numbers.items() if name not in fixed}

    def shortened(self) -> "Reproduction":
        """The smoke run: one seed, and what ``quick`` sets: fewer ``rounds``, the number of ``panels``, only the rows
        with these ``parameters``, and options of the task.
        """
        quick = dict(self.quick)
        rounds = int(quick.pop("rounds", 4))
        kept = self.panels[: quick.pop("panels", None)]
        parameters = quick.pop("parameters", None)
        methods = [m for m in self.methods if parameters in (None, m.parameters)]
        run = {"rounds": rounds, "every": max(1, rounds // 2)}
        return replace(
            self,
            smoke=True,
            seeds=1,
            task={**self.task, **quick},
            run={**self.run, **run},
            panels=[replace(p, run={k: v for k, v in p.run.items() if k not in run}) for p in kept],
            methods=[replace(m, run={k: v for k, v in m.run.items() if k not in run}) for m in methods],
            columns=[replace(column, at=None) for column in self.columns],
            claims=[claim for claim in self.claims if {*claim.panels} <= {panel.title for panel in kept}],
        )


def mark(experiment: Experiment, *more: Any) -> str:
    """A hash of everything a run depends on except the seed. Saved next to a result, it shows whether the result still
    belongs to the file.
    """
    default = Experiment(experiment.task, experiment.algorithm)
    given = {f.name: getattr(experiment, f.name) for f in fields(experiment) if f.name not in ("seed", "places")}
    changed = {name: value for name, value in given.items() if value != getattr(default, name)}
    content = [experiment.task, experiment.algorithm, changed, *more]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:8]


EXPERIMENTS = files("fedbilevel.reproduction") / "experiments"


def names() -> list[str]:
    """The names of all experiments."""
    return sorted(file.name.removesuffix(".toml") for file in EXPERIMENTS.iterdir() if file.name.endswith(".toml"))


def read(id: str) -> Reproduction:
    """An experiment by its name."""
    if id not in names():
        raise UnknownName("experiment of a paper", id, names())
    content = tomllib.loads((EXPERIMENTS / f"{id}.toml").read_text())
    search = Search(**content.pop("search")) if "search" in content else None
    made = Reproduction(
        id=id,
        columns=[ResultColumn(**each) for each in content.pop("columns")],
        panels=[Panel(**each) for each in content.pop("panels", [{"title": ""}])],
        methods=[Method(**each) for each in content.pop("methods")],
        claims=[Claim(**each) for each in content.pop("claims")],
        search=search,
        **content,
    )
    if search is not None and search.found:
        made = replace(made, found=read(search.found).found)
    elif search is not None and (path := EXPERIMENTS / "found" / f"{id}.toml").is_file():
        written = tomllib.loads(path.read_text())
        if written["search"] == search.conditions:  # else it is what another search found
            fitting = [line for line in written["found"] if _fits(made, line)]
            made = replace(made, found=settings_of({"found": fitting}))
    check(made)
    return made


def _fits(made: Reproduction, line: Mapping[str, Any]) -> bool:
    """Whether this was found for a method and a condition as they are in the file now."""
    cases = {(m.label, p.title): (p, m) for p, m in made.cases() if m.parameters == "found"}
    case = cases.get((line["method"], line["panel"]))
    return case is not None and line["of"] == mark(*made.searched(*case))


def settings_of(written: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """What a search found, by method and condition."""
    return {(each["method"], each["panel"]): each["settings"] for each in written["found"]}


def check(made: Reproduction) -> None:
    """Refuse an experiment file with unknown names."""
    panels, labels = {panel.title for panel in made.panels}, {method.label for method in made.methods}
    if unknown := {made.against, *(column.along or made.against for column in made.columns)} - {*CURVE_AXES}:
        raise FedbilevelError(
            f"{made.id}: curves must be drawn against one of {', '.join(CURVE_AXES)}, not {unknown.pop()}."
        )
    for method in made.methods:
        ALGORITHMS.check(method.algorithm)
        unknown = ({*method.panels} | {*method.by_panel} | {*method.paper}) - panels
        wrong = [title for title, values in method.paper.items() if len(values) != len(made.columns)]
        if unknown or wrong or method.parameters not in PARAMETERS:
            raise FedbilevelError(f"{made.id}: {method.title} names unknown panels or columns.")
    names = [*(panel.title for panel in made.panels), *(method.title for method in made.methods)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise FedbilevelError(f"{made.id}: there are two rows called {twice[0]}.")
    if made.search is not None:
        if {*made.search.start, *made.search.fixed, *made.search.tied} - labels or {*made.search.panels} - panels:
            raise FedbilevelError(f"{made.id}: the search names unknown methods or panels.")
        if made.search.seeds > 1 and not made.search.grid:
            raise FedbilevelError(f"{made.id}: only a search on a grid can have several seeds.")
        used = read(made.search.found).search if made.search.found else made.search
        if used is not None and max(made.seeds_of(p, m)[-1] for p, m in made.cases()) >= used.seed:
            raise FedbilevelError(f"{made.id}: the runs must not use the seeds of the search, from {used.seed} on.")
    if all(claim.about != "method" for claim in made.claims):
        raise FedbilevelError(f"{made.id} needs at least one claim about the paper's own method.")
    columns = {column.title for column in made.columns}
    for claim in made.claims:
        unknown = ({*claim.panels} - panels) | ({*claim.methods} - labels) | ({*claim.target} - columns)
        if unknown or claim.kind not in CLAIM_KINDS or claim.about not in ABOUT:
            raise FedbilevelError(f"{made.id}: the claim '{claim.words}' has unknown names.")
        least = {"order": 2, "ahead": 2, "level": 2, "steady": 2, "spread": 2, "approach": 2}.get(claim.kind, 1)
        bounds = [bound for bound in (claim.least, claim.most) if bound is not None]
        if len(claim.methods) < least or (claim.kind in ("bound", "slope") and not bounds):
            raise FedbilevelError(f"{made.id}: the claim '{claim.words}' needs more methods, or a bound.")
        chosen = [panel for panel in made.panels if not claim.panels or panel.title in claim.panels]
        if claim.kind == "slope" and (len({p.number for p in chosen}) < 2 or min(p.number for p in chosen) <= 0):
            raise FedbilevelError(f"{made.id}: the claim '{claim.words}' needs panels with different numbers.")
        if claim.kind == "best" and len(claim.methods) > 1:
            raise FedbilevelError(f"{made.id}: the claim '{claim.words}' is about one method only.")
        if claim.column and claim.column not in columns:
            raise FedbilevelError(f"{made.id}: the claim '{claim.words}' needs a column.")
