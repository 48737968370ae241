"""Tuning: search for the hyper-parameters with the least validation loss. Needs Optuna (``fedbilevel[tune]``).

The measure of a setting is its validation loss at its last (x, y): the task's ``choice``, on rows that nothing is
trained on, or else the upper loss, on all validation rows or on those that were ``kept_apart``. Methods whose model
follows the upper loss, too (MeFBO, F2SA, the primal-dual method), fit the rows they see; only rows kept apart tell
whether their settings are good. Test data and the task's metrics are never looked at.
Settings are proposed by a tree-structured Parzen estimator, and those that are not among the best third of all after a
third of the rounds are given up, unless all shall go to their end. What diverges, however late, counts as worst and
is in nobody's way. The first trial is what the task suggests, and is never given up. Or all points of a grid are
tried, each to its end. All settings share one compiled program, since step sizes are its arguments (see
``engines/sweep.py``).

The folder holds ``study.db``, the memory of the search: after an interruption, the same command goes on.
"""

import csv
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedbilevel.core import Algorithm, Tree, columns, select
from fedbilevel.core.schedules import Schedule
from fedbilevel.core.task import Task
from fedbilevel.diagnostics import upper_loss
from fedbilevel.engines.lanes import Shared, number
from fedbilevel.engines.participation import Participation, participation
from fedbilevel.engines.plan import Program
from fedbilevel.errors import Diverged, FedbilevelError, Interrupted, UnknownName
from fedbilevel.runs import configuration
from fedbilevel.runs.experiment import Built, Experiment
from fedbilevel.runs.settings import Setting, convert, plain
from fedbilevel.runs.solve import Row, solve
from fedbilevel.storage.files import alone, new_folder

AROUND = 30.0
"""Where the task suggests a value, the search goes from a 30th of it to 30 times it."""
AT_RANDOM = 6
"""So many settings are tried before the search learns from them."""
REDUCTION = 3
"""After one of so many parts of the rounds, one of so many settings goes on."""


class Range(NamedTuple):
    """Numbers to search in, on a log scale; only these ``values``, if there are any."""

    low: float
    high: float
    suggested: float
    values: tuple[float, ...] = ()


class Choice(NamedTuple):
    """Values to choose from."""

    values: tuple[Any, ...]
    suggested: Any


Space = dict[str, Range | Choice]


@dataclass(frozen=True)
class Tuning:
    """What to tune: an experiment, and how often to try. ``vary`` adds hyper-parameters by the values they may have,
    as text; ``ranges`` are other lowest and highest values than the suggested ones, ``start`` is another first trial
    than the suggested setting, and ``first`` are settings to try after it, for instance what was found under another
    condition. What the settings of the experiment fix stays fixed; what is ``tied`` to others is always
    their sum, each times a factor. ``kept_apart`` is the share of the validation rows
    that nothing is trained on, and that settings are compared by. Without ``prune``, every trial goes to its end: what
    is ahead early may diverge late, so that those given up for it would have been better. With a ``grid``, numbers by
    hyper-parameter, all its points are tried and nothing else, each to its end.
    """

    experiment: Experiment
    trials: int = 30
    vary: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    start: Mapping[str, float] = field(default_factory=dict)
    first: Sequence[Mapping[str, Any]] = ()
    tied: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)
    kept_apart: float = 0.0
    prune: bool = True

    @classmethod
    def on_grid(cls, experiment: Experiment, grid: Mapping[str, Sequence[float]], kept_apart: float = 0.0) -> "Tuning":
        """Every point of a grid, once."""
        points = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
        return cls(experiment, len(points), first=points[1:], grid=grid, kept_apart=kept_apart, prune=False)


@dataclass(frozen=True)
class Trial:
    """One setting and what became of it; ``value`` is its last validation loss, after so many rounds."""

    number: int
    state: str  # "complete", "pruned" or "diverged"
    value: float
    rounds: int
    settings: Mapping[str, Any]
    failure: str = ""


@dataclass(frozen=True)
class Tuned:
    """A finished search: ``importance`` is the share of each hyper-parameter in the ranks of the settings."""

    folder: Path
    experiment: Experiment
    space: Space
    trials: Sequence[Trial]
    importance: Mapping[str, float]

    @property
    def best(self) -> Trial:
        """The complete trial with the least validation loss."""
        return min((t for t in self.trials if t.state == "complete"), key=lambda t: t.value)

    @property
    def suggested(self) -> Trial:
        """The setting that the task suggests."""
        return self.trials[0]

    @property
    def summary(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        states = [trial.state for trial in self.trials]
        return {
            "task": self.experiment.task,
            "algorithm": self.experiment.algorithm,
            "validation_loss": self.best.value,
            "validation_loss_suggested": self.suggested.value,
            "best": {name: plain(value) for name, value in self.best.settings.items()},
            **{state: states.count(state) for state in ("complete", "pruned", "diverged")},
            "folder": str(self.folder),
        }


class _Pruned(Exception):
    """A trial that is not worth going on with."""


def tune(
    tuning: Tuning, out: Path | None = None, progress: Callable[[int, int, float | None], None] | None = None
) -> Tuned:
    """Search until so many trials are in the folder, also from where an interrupted search was.

    Writes ``best.toml`` (an experiment), ``trials.csv`` and ``importance.png``. ``progress`` is called with the number
    of trials done, their number in the end and the least loss so far.
    """
    if tuning.trials < 1:
        raise FedbilevelError(f"trials must be at least 1, but is {tuning.trials}.")
    built = tuning.experiment.build()
    built = built._replace(task=keep_apart(built.task, tuning.kept_apart))
    experiment, task, algorithm, _ = built
    cohort = participation(experiment.participation(), len(task.clients))
    Program(task.problem, algorithm, task.layout, cohort)  # refuses what does not fit before anything is written
    if ("restart", True) in task.problem.needs and task.choice is None:
        raise FedbilevelError(
            f"in {experiment.task}, y belongs to a batch, so that there is no validation loss of x and y to tune by."
        )
    fixed = {**tuning.experiment.settings, **tuning.tied}
    space = search_space(built, fixed, tuning.vary, tuning.grid, tuning.ranges, tuning.start)
    for name, others in tuning.tied.items():
        if free := [other for other in others if other not in space]:
            raise FedbilevelError(f"{name} is tied to {free[0]}, which is not tuned.")
    if not space:
        raise FedbilevelError("there is nothing to tune: every hyper-parameter with a range is set.")
    name = f"tune-{experiment.task}-{experiment.algorithm}-seed{experiment.seed}"
    folder = out if out is not None and (out / "study.db").exists() else new_folder(name, out)
    with alone(folder):
        return _search(folder, tuning, built, space, progress)


def _search(
    folder: Path,
    tuning: Tuning,
    built: Built,
    space: Space,
    progress: Callable[[int, int, float | None], None] | None,
) -> Tuned:
    experiment, task, algorithm, _ = built
    cohort = participation(experiment.participation(), len(task.clients))
    study = _study(folder, tuning, built, space)
    rounds = experiment.rounds or task.rounds
    names = tuple(name for name, values in space.items() if isinstance(values, Range)) + tuple(tuning.tied)
    while len(done := _finished(study, algorithm, space, tuning.tied)) < tuning.trials:
        if progress is not None:
            progress(len(done), tuning.trials, _least(done))
        trial = _ask(study, len(done))
        changed = _as_fields(algorithm, _suggest(trial, space), tuning.tied)
        try:
            tried = dataclasses.replace(algorithm, **changed)
            value = _try(trial, task, tried, names, rounds, experiment.seed, cohort, tuning.prune)
            study.tell(trial, value)
        except FedbilevelError as failure:  # it diverged, or its values do not go together
            trial.set_user_attr("failure", str(failure))
            study.tell(trial, math.inf)
        except _Pruned:
            study.tell(trial, state=_optuna().trial.TrialState.PRUNED)
        except KeyboardInterrupt as interrupt:
            raise Interrupted.of(interrupt, saved=f"The same command with --out {folder} goes on.") from None
    if progress is not None:
        progress(len(done), tuning.trials, _least(done))
    if _least(done) is None:
        raise FedbilevelError(f"no trial came to its end; the first one said: {done[0].failure}")
    tuned = Tuned(folder, experiment, space, done, _importance(study))
    _write(tuned, built)
    return tuned


def search_space(
    built: Built,
    fixed: Mapping[str, Any],
    vary: Mapping[str, str],
    grid: Mapping[str, Sequence[float]] | None = None,
    ranges: Mapping[str, Sequence[float]] | None = None,
    start: Mapping[str, float] | None = None,
) -> Space:
    """The hyper-parameters to tune. A suggestion of 0 is kept, as it has no log scale. Of ``ranges``, those of
    hyper-parameters that the algorithm has are used: the same ones may be given for several algorithms.
    """
    experiment, task, algorithm, _ = built
    known = {f.name: f for f in dataclasses.fields(algorithm)}
    suggested = task.advice(str(experiment.algorithm), known)
    set_by_user = {setting.name for setting in map(Setting.parse, fixed) if setting.table != "task"}
    space: Space = {}
    ranges, start = ranges or {}, start or {}
    for name in (*vary, *start, *(grid or ())):
        if name not in known:
            raise UnknownName(f"hyper-parameter of {experiment.algorithm}", name, known)
    if grid:
        return {name: Range(min(some), max(some), some[0], tuple(some)) for name, some in grid.items()}
    for name, entry in known.items():
        value, tune = getattr(algorithm, name), entry.metadata.get("tune")
        if name in vary or name in set_by_user or tune is None or number(algorithm, name) <= 0:
            continue
        value = start.get(name, number(algorithm, name))
        low, high = (value / AROUND, value * AROUND) if name in suggested else tune
        low, high = ranges.get(name, (low, high))
        space[name] = Range(min(low, value), max(high, value), value)
    for name, text in vary.items():
        if isinstance(known[name].default, tuple | Schedule):
            raise FedbilevelError(f"{name} is no number or word, which --vary needs.")
        values = [convert(name, part.strip(), known[name].default) for part in text.split(",") if part.strip()]
        for value in values:
            dataclasses.replace(algorithm, **{name: value})  # refuses wrong ones
        space[name] = Choice(tuple(dict.fromkeys([getattr(algorithm, name), *values])), getattr(algorithm, name))
    return space


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise FedbilevelError("tuning needs Optuna: pip install 'fedbilevel[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _study(folder: Path, tuning: Tuning, built: Built, space: Space) -> Any:
    """The search in this folder: a new one, or the one that was interrupted there."""
    optuna, experiment = _optuna(), built.experiment
    # SQLite keeps its promises when the process is killed; a file of records may end in half a line.
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{folder / 'study.db'}",
            study_name="tuning",
            load_if_exists=True,
        )
    except Exception as error:
        raise FedbilevelError(
            f"cannot use {folder / 'study.db'} as the memory of a search: {str(error).splitlines()[0]}"
        ) from error
    options = {k: str(v) for k, v in built.task.options.items()}
    # What was asked for, however it was written.
    run = {name: str(getattr(experiment, name)) for name in ("task", "algorithm", "rounds", "seed", "sample")}
    tied = [tuning.tied] if tuning.tied else []
    asked = json.dumps([run, options, repr(built.algorithm), repr(space), tuning.kept_apart, tuning.prune, *tied])
    if study.user_attrs.get("asked", asked) != asked:
        raise FedbilevelError(
            f"the folder {folder} holds another search (task, algorithm, rounds, seed or settings differ): "
            "choose another one with --out."
        )
    study.set_user_attr("asked", asked)
    interrupted = study.get_trials(states=[optuna.trial.TrialState.RUNNING])
    if not study.trials:
        suggested = {name: values.suggested for name, values in space.items()}
        study.enqueue_trial(suggested, user_attrs={"suggested": True})
    there = {trial.user_attrs.get("first") for trial in study.trials}
    for place, settings in enumerate(tuning.first):
        if place not in there:
            known = {name: value for name, value in settings.items() if name in space}
            study.enqueue_trial(known, user_attrs={"first": place})
    for trial in interrupted:  # once more, from its start
        study.enqueue_trial({**trial.system_attrs.get("fixed_params", {}), **trial.params}, user_attrs=trial.user_attrs)
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def _ask(study: Any, done: int) -> Any:
    """The next trial. The random numbers depend on what was asked for and on how many there are, so that an
    interruption does not matter, and that searches in a row do not try the same again.
    """
    state = np.random.SeedSequence([*study.user_attrs["asked"].encode(), done]).generate_state(1)
    study.sampler = _optuna().samplers.TPESampler(n_startup_trials=AT_RANDOM, seed=int(state[0]))
    return study.ask()


def _suggest(trial: Any, space: Space) -> dict[str, Any]:
    """The numbers and words of a trial."""
    changed: dict[str, Any] = {}
    for name, values in space.items():
        if isinstance(values, Choice) or values.values:
            changed[name] = trial.suggest_categorical(name, list(values.values))
        else:
            changed[name] = trial.suggest_float(name, values.low, values.high, log=True)
    return changed


def _as_fields(
    algorithm: Algorithm, numbers: Mapping[str, Any], tied: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Hyper-parameters as the algorithm has them: the number of a schedule is its scale; tied ones with the others."""
    sums = {name: sum(factor * numbers[other] for other, factor in others.items()) for name, others in tied.items()}
    numbers = {**numbers, **sums}
    held = {name: getattr(algorithm, name) for name in numbers}
    return {
        name: dataclasses.replace(held[name], scale=value) if isinstance(held[name], Schedule) else value
        for name, value in numbers.items()
    }


def keep_apart(task: Task, share: float) -> Task:
    """The task without this share of the validation rows of everyone who has some; its ``choice`` is the upper loss on
    them. A task that has a choice of its own stays as it is.
    """
    if not 0 <= share < 1:
        raise FedbilevelError(f"kept_apart is a share of the validation rows, from 0 to below 1, not {share}.")
    if share == 0 or task.choice is not None:
        return task
    rng = np.random.default_rng(0)

    def parted(rows: Tree) -> tuple[Tree, Tree]:
        count = len(columns(rows)[0][0])
        if count < 2:
            raise FedbilevelError("a client with one validation row cannot keep some of them apart: kept_apart = 0.")
        order, first = rng.permutation(count), min(max(round(share * count), 1), count - 1)
        return select(rows, np.sort(order[first:])), select(rows, np.sort(order[:first]))

    def with_validation(task: Task, rows: Sequence[Tree]) -> Task:
        if task.server is not None:
            return dataclasses.replace(task, server=rows[0])
        clients = [{**client, "val": some} for client, some in zip(task.clients, rows, strict=True)]
        return dataclasses.replace(task, clients=clients)

    held = [client["val"] for client in task.clients] if task.server is None else [task.server]
    seen, apart = zip(*map(parted, held), strict=True)
    one = [{**client, "train": select(client["train"], slice(1))} for client in task.clients]  # nobody looks at them
    judge = with_validation(dataclasses.replace(task, clients=one, weights=task.normalised_weights), apart)
    return dataclasses.replace(with_validation(task, seen), choice=lambda x, y: upper_loss(judge, x, y))


def validation_loss(task: Task, x: Any, y: Any) -> float:
    """What parameters are chosen by."""
    return upper_loss(task, x, y) if task.choice is None else float(task.choice(x, y))


def _try(
    trial: Any,
    task: Task,
    algorithm: Algorithm,
    names: Sequence[str],
    rounds: int,
    seed: int,
    cohort: Participation,
    prune: bool,
) -> float:
    """The validation loss of a setting after all rounds."""
    every = max(1, math.ceil(rounds / REDUCTION))

    def on_row(row: Row) -> None:
        if not math.isfinite(row["validation_loss"]):
            raise Diverged(f"round {row['round']}: the validation loss became NaN or infinite.", row["round"], ())
        if row["round"] > 0:
            trial.report(row["validation_loss"], row["round"])
        if prune and row["round"] == every < rounds and "suggested" not in trial.user_attrs and _behind(trial, every):
            raise _Pruned

    engine = Shared(task, algorithm, names, cohort)
    result = solve(
        task,
        algorithm,
        rounds,
        seed,
        cohort,
        every=every,
        diagnostics=[validation_loss],
        engine=engine,
        metrics=False,
        callbacks=[on_row],
    )
    return result.metrics["validation_loss"]


def _behind(trial: Any, after: int) -> bool:
    """Whether a trial is not among the best third after so many rounds, of those that came so far and did not diverge
    later.
    """
    failed = _optuna().trial.TrialState.FAIL
    others = [t for t in trial.study.get_trials(deepcopy=False) if after in t.intermediate_values and t.state != failed]
    values = {t.number: t.intermediate_values[after] for t in others if "failure" not in t.user_attrs}
    better = sum(value < values[trial.number] for value in values.values())
    return better >= max(1, len(values) // REDUCTION)


def _finished(study: Any, algorithm: Algorithm, space: Space, tied: Mapping[str, Mapping[str, float]]) -> list[Trial]:
    """The trials that count, the suggested setting first."""
    states = _optuna().trial.TrialState
    trials = []
    found = study.get_trials(deepcopy=False, states=[states.COMPLETE, states.PRUNED])
    for t in sorted(found, key=lambda t: "suggested" not in t.user_attrs):
        seen, failure = t.intermediate_values, t.user_attrs.get("failure", "")
        state = "diverged" if failure else "complete" if t.state == states.COMPLETE else "pruned"
        value = t.value if state == "complete" else seen[max(seen)] if seen and not failure else math.nan
        settings = _as_fields(algorithm, {name: t.params[name] for name in space}, tied)
        trials.append(Trial(t.number, state, value, max(seen, default=0), settings, failure))
    return trials


def _least(trials: Sequence[Trial]) -> float | None:
    return min((trial.value for trial in trials if trial.state == "complete"), default=None)


def _importance(study: Any) -> dict[str, float]:
    """The share of each hyper-parameter in the differences between all trials, by their rank at the first test, which
    all of them took; those that diverged are the last. Empty if there are too few.
    """
    optuna = _optuna()
    trials = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED])
    first = [
        math.inf if "failure" in t.user_attrs else t.intermediate_values[min(t.intermediate_values)] for t in trials
    ]
    ranks = np.searchsorted(np.sort(first), first)
    if len(set(ranks)) < 2:
        return {}
    ranked = optuna.create_study()
    for t, rank in zip(trials, ranks, strict=True):
        ranked.add_trial(optuna.trial.create_trial(params=t.params, distributions=t.distributions, value=float(rank)))
    return optuna.importance.get_param_importances(
        ranked, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
    )


def _write(tuned: Tuned, built: Built) -> None:
    """The files of a search."""
    best = built._replace(algorithm=dataclasses.replace(built.algorithm, **tuned.best.settings))
    (tuned.folder / "best.toml").write_text(configuration.write(best.config()))
    with (tuned.folder / "trials.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["trial", "state", "rounds", "validation_loss", *tuned.space, "failure"])
        for number, t in enumerate(tuned.trials):
            settings = [plain(t.settings[name]) for name in tuned.space]
            table.writerow([number, t.state, t.rounds, t.value, *settings, t.failure])
    if tuned.importance:
        _draw(tuned).savefig(tuned.folder / "importance.png", dpi=130)


def _draw(tuned: Tuned) -> Figure:
    """What matters: the importance of the hyper-parameters, and the trials against the one that matters most."""
    figure = Figure(figsize=(10.4, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    bars, points = figure.subplots(1, 2)
    names = list(tuned.importance)[::-1]
    bars.barh(names, [tuned.importance[name] for name in names], color="C0")
    bars.set_xlabel("share of the variance of the ranks of all trials")
    bars.set_title("importance")
    most = names[-1]
    scale = lambda t: t.settings[most].scale if isinstance(t.settings[most], Schedule) else t.settings[most]
    for state, title, face in (("complete", "complete", "C0"), ("pruned", "given up, where it was", "none")):
        some = [t for t in tuned.trials if t.state == state]
        points.plot(
            [scale(t) for t in some], [t.value for t in some], "o", color="C0", markerfacecolor=face, label=title
        )
    for trial, title, mark in ((tuned.suggested, "suggested", "C1s"), (tuned.best, "best", "C3*")):
        points.plot([scale(trial)], [trial.value], mark, markersize=11, label=title)
    values = [t.value for t in tuned.trials if math.isfinite(t.value)]
    low, high = min(values), float(np.quantile(values, 0.75))  # a few wild ones would hide the differences that matter
    points.set_ylim(low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1))
    if isinstance(tuned.space[most], Range):
        points.set_xscale("log")
    points.set_xlabel(most)
    points.set_title("validation loss")
    for axes in (bars, points):
        axes.grid(alpha=0.3)
    points.legend(frameon=False)
    return figure
