"""Tuning: search for the hyper-parameters with the lowest validation loss. Needs Optuna (``fedbilevel[tune]``).

A setting is judged by its validation loss at its last (x, y): the task's ``choice``, on rows that nothing is trained
on, or else the upper loss, on all validation rows or on those that were held out (``held_out``). Methods whose model
also follows the upper loss (MeFBO, F2SA, the primal-dual method) fit the rows they see; only held-out rows show whether
their settings are good. Test data and the task's metrics are never used.

A tree-structured Parzen estimator proposes settings. Those that are not among the best third after a third of the
rounds are stopped, if ``prune`` is set. A setting that diverges, however late, counts as worst and does not affect the
others. The first trial is what the task suggests, and is never stopped early. Or all points of a grid are tried, each
run to the end. All settings share one compiled program, since step sizes are its arguments.

The folder has ``study.db``, the memory of the search: after an interruption, the same command continues it.
"""

import csv
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel.core import Algorithm
from fedbilevel.core.schedules import Schedule
from fedbilevel.core.task import Task
from fedbilevel.drawing.importance import Tried
from fedbilevel.drawing.importance import importance as draw_importance
from fedbilevel.engines.participation import Participation, participation
from fedbilevel.engines.program import check_fits
from fedbilevel.errors import Diverged, FedbilevelError, Interrupted
from fedbilevel.runs import configuration, plugins
from fedbilevel.runs.experiment import Built, Experiment
from fedbilevel.runs.search_memory import (
    REDUCTION,
    STUDY,
    Trial,
    ask,
    behind,
    finished,
    give_up,
    importance,
    open_study,
    suggest,
)
from fedbilevel.runs.search_space import Range, Space, as_fields, search_space
from fedbilevel.runs.settings import plain
from fedbilevel.runs.solve import Row, solve
from fedbilevel.runs.validation import hold_out, validation_loss
from fedbilevel.storage.files import alone, new_folder

BEST = "best.toml"


@dataclass(frozen=True)
class Tuning:
    """What to tune: an experiment, and the number of trials. ``vary`` adds hyper-parameters with the values they may
    have, as text; ``ranges`` replaces the suggested lowest and highest values, ``start`` replaces the suggested setting
    as the first trial, and ``first`` are settings to try after it, for instance those found under another condition.
    Settings of the experiment stay fixed; a hyper-parameter that is ``tied`` to others is always their sum, each times
    a factor. ``held_out`` is the share of the validation rows that are held out to compare settings on. Without
    ``prune``, every trial is run to the end: a setting that is ahead early may diverge late, and one that was stopped
    for it would have been better. With a ``grid``, numbers by hyper-parameter, exactly its points are tried, each run
    to the end.
    """

    experiment: Experiment
    trials: int = 30
    vary: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    start: Mapping[str, float] = field(default_factory=dict)
    first: Sequence[Mapping[str, Any]] = ()
    tied: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)
    held_out: float = 0.0
    prune: bool = True
    seeds: Sequence[int] = ()  # more than that of the experiment: a setting is judged by its mean over all

    @classmethod
    def on_grid(cls, experiment: Experiment, grid: Mapping[str, Sequence[float]], held_out: float = 0.0) -> "Tuning":
        """Every point of a grid, once."""
        points = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
        return cls(experiment, len(points), first=points[1:], grid=grid, held_out=held_out, prune=False)


@dataclass(frozen=True)
class Tuned:
    """A finished search: ``importance`` is the share of each hyper-parameter in the ranks of the settings."""

    folder: Path
    experiment: Experiment
    space: Space
    trials: Sequence[Trial]
    importance: Mapping[str, float]
    start: Algorithm

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm with the best setting."""
        return dataclasses.replace(self.start, **self.best.settings)

    @property
    def best(self) -> Trial:
        """The complete trial with the lowest validation loss."""
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
            "task": plugins.short(self.experiment.task),
            "algorithm": self.experiment.name,
            "validation_loss": self.best.value,
            "validation_loss_suggested": self.suggested.value,
            "best": {name: plain(value) for name, value in self.best.settings.items()},
            **{state: states.count(state) for state in ("complete", "pruned", "diverged")},
            "folder": str(self.folder),
        }


class _Pruned(Exception):
    """Raised in a trial that is not worth continuing."""


def tune(
    tuning: Tuning, out: Path | None = None, progress: Callable[[int, int, float | None], None] | None = None
) -> Tuned:
    """Search until the folder has this number of trials; an interrupted search is continued.

    Writes ``best.toml`` (an experiment), ``trials.csv`` and ``importance.png``. ``progress`` is called with the number
    of trials done, the number of all and the lowest loss so far.
    """
    if tuning.trials < 1:
        raise FedbilevelError(f"trials must be at least 1, not {tuning.trials}.")
    built = tuning.experiment.build()
    built = built._replace(task=hold_out(built.task, tuning.held_out))
    experiment, task, algorithm, _ = built
    cohort = participation(experiment.participation(), len(task.clients))
    check_fits(task.problem, algorithm, task.layout, cohort)  # before anything is written
    if ("restart", True) in task.problem.needs and task.choice is None:
        raise FedbilevelError(
            f"in {experiment.task}, y belongs to a batch, so there is no validation loss of x and y to tune by."
        )
    fixed = {**tuning.experiment.settings, **tuning.tied}
    space = search_space(built, fixed, tuning.vary, tuning.grid, tuning.ranges, tuning.start)
    for name, others in tuning.tied.items():
        if free := [other for other in others if other not in space]:
            raise FedbilevelError(f"{name} is tied to {free[0]}, which is not tuned.")
    if not space:
        raise FedbilevelError("there is nothing to tune: every hyper-parameter with a range is set.")
    name = f"tune-{plugins.short(experiment.task)}-{experiment.name}-seed{experiment.seed}"
    folder = out if out is not None and (out / STUDY).exists() else new_folder(name, out)
    with alone(folder):
        return _search(folder, tuning, built, space, progress)


def _asked(tuning: Tuning, built: Built, space: Space) -> str:
    """What was asked for, however it was written."""
    options = {k: str(v) for k, v in built.task.options.items()}
    run = {name: str(getattr(built.experiment, name)) for name in ("task", "algorithm", "rounds", "seed", "sample")}
    tied = [tuning.tied] if tuning.tied else []
    seeds = [list(tuning.seeds)] if tuning.seeds else []
    asked = [run, options, repr(built.algorithm), repr(space), tuning.held_out, tuning.prune, *tied, *seeds]
    return json.dumps(asked)


def _search(
    folder: Path,
    tuning: Tuning,
    built: Built,
    space: Space,
    progress: Callable[[int, int, float | None], None] | None,
) -> Tuned:
    experiment, task, algorithm, _ = built
    cohort = participation(experiment.participation(), len(task.clients))
    study = open_study(folder, _asked(tuning, built, space), space, tuning.first)
    rounds = experiment.rounds or task.suggested.rounds
    others = [dataclasses.replace(tuning.experiment, seed=seed).build().task for seed in tuning.seeds]
    places = [(experiment.seed, task)]
    places += [(seed, hold_out(made, tuning.held_out)) for seed, made in zip(tuning.seeds, others, strict=True)]
    while len(done := finished(study, algorithm, space, tuning.tied)) < tuning.trials:
        if progress is not None:
            progress(len(done), tuning.trials, _least(done))
        trial = ask(study, len(done))
        changed = as_fields(algorithm, suggest(trial, space), tuning.tied)
        try:
            tried = dataclasses.replace(algorithm, **changed)
            values = []
            for seed, made in places:  # the first one shows whether the others are worth it
                values.append(_try(trial, made, tried, rounds, seed, cohort, tuning.prune, first=not values))
            study.tell(trial, sum(values) / len(values))
        except FedbilevelError as failure:  # it diverged, or its values do not go together
            trial.set_user_attr("failure", str(failure))
            study.tell(trial, math.inf)
        except _Pruned:
            give_up(study, trial)
        except KeyboardInterrupt as interrupt:
            raise Interrupted.of(interrupt, saved=f"Continue with the same command and --out {folder}") from None
    if progress is not None:
        progress(len(done), tuning.trials, _least(done))
    if _least(done) is None:
        raise FedbilevelError(f"no trial finished; the first one failed with: {done[0].failure}")
    tuned = Tuned(folder, experiment, space, done, importance(study), algorithm)
    _write(tuned, built)
    return tuned


def _try(
    trial: Any,
    task: Task,
    algorithm: Algorithm,
    rounds: int,
    seed: int,
    cohort: Participation,
    prune: bool,
    first: bool = True,
) -> float:
    """The validation loss of a setting after all rounds."""
    every = max(1, math.ceil(rounds / REDUCTION))

    def on_row(row: Row) -> None:
        if not math.isfinite(row["validation_loss"]):
            raise Diverged(f"round {row['round']}: the validation loss became NaN or infinite.", row["round"], ())
        if row["round"] > 0 and first:
            trial.report(row["validation_loss"], row["round"])
        if (
            prune
            and first
            and row["round"] == every < rounds
            and "suggested" not in trial.user_attrs
            and behind(trial, every)
        ):
            raise _Pruned

    result = solve(
        task,
        algorithm,
        rounds,
        seed,
        cohort,
        every=every,
        diagnostics=[validation_loss],
        metrics=False,
        callbacks=[on_row],
    )
    return result.metrics["validation_loss"]


def _least(trials: Sequence[Trial]) -> float | None:
    return min((trial.value for trial in trials if trial.state == "complete"), default=None)


def _write(tuned: Tuned, built: Built) -> None:
    """The files of a search."""
    best = built._replace(algorithm=dataclasses.replace(built.algorithm, **tuned.best.settings))
    (tuned.folder / BEST).write_text(configuration.write(best.config()))
    with (tuned.folder / "trials.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["trial", "state", "rounds", "validation_loss", *tuned.space, "failure"])
        for number, t in enumerate(tuned.trials):
            settings = [plain(t.settings[name]) for name in tuned.space]
            table.writerow([number, t.state, t.rounds, t.value, *settings, t.failure])
    if tuned.importance:
        _picture(tuned).savefig(tuned.folder / "importance.png", dpi=130)


def _picture(tuned: Tuned) -> Any:
    most = next(iter(tuned.importance))

    def tried(trial: Trial) -> Tried:
        value = trial.settings[most]
        return Tried(value.scale if isinstance(value, Schedule) else value, trial.value)

    by_state = {state: [tried(t) for t in tuned.trials if t.state == state] for state in ("complete", "pruned")}
    marked = {"suggested": tried(tuned.suggested), "best": tried(tuned.best)}
    log = isinstance(tuned.space[most], Range)
    return draw_importance(tuned.importance, by_state["complete"], by_state["pruned"], marked, log)
