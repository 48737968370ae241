"""The memory of a search: an Optuna study in a file, which outlives the process. Needs ``fedbilevel[tune]``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.core import Algorithm
from fedbilevel.errors import FedbilevelError, needs
from fedbilevel.runs.search_space import Choice, Space, as_fields

STUDY = "study.db"
AT_RANDOM = 6
"""The number of settings to try before the search learns from them."""
REDUCTION = 3
"""After 1 / REDUCTION of the rounds, 1 / REDUCTION of the settings continue."""


@dataclass(frozen=True)
class Trial:
    """One setting and its outcome; ``value`` is its last validation loss, after ``rounds``."""

    number: int
    state: str  # "complete", "pruned" or "diverged"
    value: float
    rounds: int
    settings: Mapping[str, Any]
    failure: str = ""


def _optuna() -> Any:
    optuna = needs("optuna", "tune", "tuning needs Optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_study(folder: Path, asked: str, space: Space, first: Sequence[Mapping[str, Any]]) -> Any:
    """The search in a folder: a new one, or the one that was interrupted there.

    Args:
        folder: the folder with ``study.db``.
        asked: everything that determines the search; a folder with another search is refused.
        space: the search space. The first trial is the setting that it suggests.
        first: settings to try after that.
    """
    optuna = _optuna()
    # SQLite keeps its promises when the process is killed; a file of records may end in half a line.
    try:
        study = optuna.create_study(storage=f"sqlite:///{folder / STUDY}", study_name="tuning", load_if_exists=True)
    except Exception as error:
        raise FedbilevelError(f"{folder / STUDY} cannot be used for a search: {str(error).splitlines()[0]}") from error
    if study.user_attrs.get("asked", asked) != asked:
        raise FedbilevelError(
            f"the folder {folder} contains another search (task, algorithm, rounds, seed or settings differ): "
            "choose another one with --out."
        )
    study.set_user_attr("asked", asked)
    interrupted = study.get_trials(states=[optuna.trial.TrialState.RUNNING])
    if not study.trials:
        suggested = {name: values.suggested for name, values in space.items()}
        study.enqueue_trial(suggested, user_attrs={"suggested": True})
    there = {trial.user_attrs.get("first") for trial in study.trials}
    for place, settings in enumerate(first):
        if place not in there:
            searched = {name: value for name, value in settings.items() if name in space}
            study.enqueue_trial(searched, user_attrs={"first": place})
    for trial in interrupted:  # once more, from its start
        study.enqueue_trial({**trial.system_attrs.get("fixed_params", {}), **trial.params}, user_attrs=trial.user_attrs)
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def ask(study: Any, done: int) -> Any:
    """The next trial. The random numbers depend on what was asked for and on how many there are, so that an
    interruption does not matter, and that searches in a row do not try the same again.
    """
    state = np.random.SeedSequence([*study.user_attrs["asked"].encode(), done]).generate_state(1)
    study.sampler = _optuna().samplers.TPESampler(n_startup_trials=AT_RANDOM, seed=int(state[0]))
    return study.ask()


def suggest(trial: Any, space: Space) -> dict[str, Any]:
    """The numbers and words of a trial."""
    changed: dict[str, Any] = {}
    for name, values in space.items():
        if isinstance(values, Choice) or values.values:
            changed[name] = trial.suggest_categorical(name, list(values.values))
        else:
            changed[name] = trial.suggest_float(name, values.low, values.high, log=True)
    return changed


def give_up(study: Any, trial: Any) -> None:
    """Stop a trial that is not worth continuing."""
    study.tell(trial, state=_optuna().trial.TrialState.PRUNED)


def behind(trial: Any, after: int) -> bool:
    """Whether a trial is not among the best third after some rounds, of those that came so far and did not diverge
    later.
    """
    failed = _optuna().trial.TrialState.FAIL
    others = [t for t in trial.study.get_trials(deepcopy=False) if after in t.intermediate_values and t.state != failed]
    values = {t.number: t.intermediate_values[after] for t in others if "failure" not in t.user_attrs}
    better = sum(value < values[trial.number] for value in values.values())
    return better >= max(1, len(values) // REDUCTION)


def finished(study: Any, algorithm: Algorithm, space: Space, tied: Mapping[str, Mapping[str, float]]) -> list[Trial]:
    """The trials that count, the suggested setting first."""
    states = _optuna().trial.TrialState
    trials = []
    counted = study.get_trials(deepcopy=False, states=[states.COMPLETE, states.PRUNED])
    for t in sorted(counted, key=lambda t: "suggested" not in t.user_attrs):
        seen, failure = t.intermediate_values, t.user_attrs.get("failure", "")
        state = "diverged" if failure else "complete" if t.state == states.COMPLETE else "pruned"
        value = t.value if state == "complete" else seen[max(seen)] if seen and not failure else math.nan
        settings = as_fields(algorithm, {name: t.params[name] for name in space}, tied)
        trials.append(Trial(t.number, state, value, max(seen, default=0), settings, failure))
    return trials


def importance(study: Any) -> dict[str, float]:
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
