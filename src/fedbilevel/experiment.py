"""An experiment: a task, an algorithm and all their options by name; its run folder with everything that came out."""

import csv
import dataclasses
import inspect
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import tomli_w

from fedbilevel import schedules
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core import Algorithm
from fedbilevel.engines.messages import encode, named_leaves
from fedbilevel.engines.participation import Independent, Participation, Uniform, participation
from fedbilevel.engines.plan import Program
from fedbilevel.errors import Diverged, FedbilevelError, UnknownName
from fedbilevel.solve import Result, Row, Stopped, check_seed, solve, traffic
from fedbilevel.task import Details, Reference, Task
from fedbilevel.tasks import TASKS


class Progress(Protocol):
    """Whoever wants to show how far a run of so many rounds is: called with None when it begins, then with every row
    of its history.
    """

    def __call__(self, label: str, rounds: int, row: Row | None) -> None: ...


@dataclass(frozen=True)
class Experiment:
    """Everything that determines a run; None is what the task suggests. ``settings`` reaches any option of the task or
    hyper-parameter of the algorithm.
    """

    task: str
    algorithm: str | None = None
    rounds: int | None = None
    seed: int = 0
    sample: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def build(self) -> "Built":
        """Make the task and the algorithm; refuses unknown names and wrong types."""
        check_seed(self.seed)
        if self.rounds is not None and self.rounds < 1:
            raise FedbilevelError(f"rounds must be at least 1, but is {self.rounds}.")
        make = TASKS[self.task]
        options = {name: p.default for name, p in inspect.signature(make).parameters.items()}
        if self.algorithm is not None:
            self._check_settings(self.algorithm, options)
        for_task: dict[str, Any] = {"seed": self.seed} if "seed" in options else {}
        for key, text in self.settings.items():
            prefix, _, name = key.rpartition(".")
            if prefix in ("", "task") and name in options:
                for_task[name] = convert(key, text, options[name])
        task = make(**for_task)
        name = self.algorithm or task.algorithm
        kind, hyper = self._check_settings(name, options)
        chosen = task.advice(name, hyper)
        for key, text in self.settings.items():
            prefix, _, known = key.rpartition(".")
            if prefix in ("", "algorithm") and known in hyper:
                chosen[known] = convert(key, text, hyper[known])
        rounds, sample = self.rounds or task.rounds, self.sample or task.sample
        return Built(dataclasses.replace(self, algorithm=name, rounds=rounds, sample=sample), task, kind(**chosen))

    def _check_settings(self, algorithm: str, options: Mapping[str, Any]) -> tuple[type[Algorithm], dict[str, Any]]:
        """The algorithm and its hyper-parameters; refuses settings that nobody knows, or two."""
        kind = ALGORITHMS[algorithm]
        hyper = {f.name: f.default for f in dataclasses.fields(kind)}
        for key in self.settings:
            prefix, _, name = key.rpartition(".")
            known = [
                name in names for place, names in (("task", options), ("algorithm", hyper)) if prefix in ("", place)
            ]
            if not any(known):
                raise UnknownName(f"setting of {self.task} or {algorithm}", key, [*options, *hyper])
            if sum(known) > 1:
                raise FedbilevelError(
                    f"'{name}' is an option of both {self.task} and {algorithm}: write task.{name} or algorithm.{name}."
                )
        return kind, hyper

    def participation(self) -> int | Participation | list[int] | None:
        """What ``sample`` means: "10" clients, a probability "0.5", or a list "0,3,5"; "10 resample" or "0.5 resample"
        for others in every exchange, "10 replacement" for draws with replacement, "everyone".
        """
        if self.sample is None or self.sample == "everyone":
            return None
        number, *words = self.sample.split()
        how = dict.fromkeys(words, True)
        try:
            if "," in number and not how:
                return [int(part) for part in number.split(",")]
            return Independent(float(number), **how) if "." in number else Uniform(int(number), **how)
        except (ValueError, TypeError):
            raise FedbilevelError(
                f"sample '{self.sample}' is neither a number of clients, nor a probability such as 0.5 (each may be "
                "followed by 'resample', a number also by 'replacement'), nor a list such as 0,3,5."
            ) from None


class Built(NamedTuple):
    """An experiment in full, and what it is about."""

    experiment: Experiment
    task: Task
    algorithm: Algorithm


def convert(name: str, text: str, default: Any) -> Any:
    """Read a setting as what its default is."""
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            value = float(text)
            if math.isnan(value):
                raise ValueError
            return value
        if isinstance(default, schedules.Schedule):
            return schedules.parse(text)
        if isinstance(default, tuple):
            number = lambda part: int(part) if part.strip().lstrip("-").isdigit() else float(part)
            return tuple(number(part) for part in text.split(",") if part.strip())
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "a whole number", float: "a number", tuple: "numbers such as 1,3"}[
            type(default)
        ]
        raise FedbilevelError(f"{name} must be {kind}, not '{text}'.") from None
    return text


def _plain(value: Any) -> Any:
    """A value as TOML knows it."""
    if isinstance(value, tuple):
        return ",".join(str(each) for each in value)
    return value if isinstance(value, bool | int | float | str) else repr(value)


def plain_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with null for what JSON cannot say (NaN and infinity)."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


@dataclass(frozen=True)
class Finished:
    """A run and its references; ``summary`` is what ``--json`` prints."""

    folder: Path
    task: Task
    algorithm: Algorithm
    result: Result
    references: Mapping[str, Result]
    summary: Mapping[str, Any]
    details: Details | None = None

    @property
    def results(self) -> dict[str, Result]:
        """All of them, the run itself as "run"."""
        return {"run": self.result, **self.references}


def run(experiment: Experiment, out: Path | None = None, progress: Progress | None = None) -> Finished:
    """Run an experiment and its references and write the run folder. Whatever stops it, what there was is saved."""
    began = time.perf_counter()
    experiment, task, algorithm = experiment.build()
    rounds = experiment.rounds or task.rounds
    sample = participation(experiment.participation(), len(task.clients))
    Program(task.problem, algorithm, task.layout, sample)  # refuses what does not fit before anything is written
    folder = new_folder(f"{experiment.task}-{experiment.algorithm}-seed{experiment.seed}", out)
    hyper = {f.name: _plain(getattr(algorithm, f.name)) for f in dataclasses.fields(algorithm)}
    config = {
        "fedbilevel": version("fedbilevel"),
        "task": {"name": experiment.task, **{k: _plain(v) for k, v in task.options.items()}},
        "algorithm": {"name": experiment.algorithm, **hyper},
        "run": {"rounds": rounds, "seed": experiment.seed, "sample": experiment.sample or "everyone"},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))

    with (folder / "metrics.jsonl").open("w") as records:

        def one(label: str, algorithm: Algorithm, x: Any = None) -> Result:
            def on_row(row: Row) -> None:
                records.write(json.dumps(plain_json({"run": label, **row})) + "\n")
                records.flush()
                if progress is not None:
                    progress(label, rounds, row)

            if progress is not None:
                progress(label, rounds, None)
            return solve(task, algorithm, rounds, experiment.seed, sample, x=x, on_row=on_row)

        def search(reference: Reference) -> Result:
            """The best of all that a reference starts from, for the price of all."""
            if not reference.others:
                return one(reference.label, reference.algorithm, reference.x)
            starts = [reference.x, *reference.others]
            found = [one(f"{reference.label}-{n}", reference.algorithm, x) for n, x in enumerate(starts, 1)]
            best = min(found, key=lambda result: result.metrics[reference.by])
            paid = {*traffic(best.plan, best.state), "seconds"}
            history = [{k: len(starts) * v if k in paid else v for k, v in row.items()} for row in best.history]
            return dataclasses.replace(best, history=history, seconds=sum(result.seconds for result in found))

        references: dict[str, Result] = {}
        try:
            for reference in task.references:
                references[reference.label] = search(reference)
            result = one(str(experiment.algorithm), algorithm)
        except (Diverged, KeyboardInterrupt) as error:
            stopped, in_reference = error.__cause__, len(references) < len(task.references)
            if isinstance(stopped, Stopped) and not in_reference:
                _save(stopped.result, folder)
                error.saved = f"The state of round {int(stopped.result.state.round)} is in {folder}."  # pyright: ignore
            else:
                error.saved = f"The records so far are in {folder}."  # pyright: ignore
            raise

    _save(result, folder)
    summary = {**{k: v for k, v in result.metrics.items() if k != "round"}, "rounds": result.metrics["round"]}
    for label, reference in references.items():
        summary |= {f"{name}_{label}": reference.metrics[name] for name in task.headline if name in reference.metrics}
    summary |= {
        "seconds": time.perf_counter() - began,
        "algorithm": experiment.algorithm,
        "task": experiment.task,
        "seed": experiment.seed,
        "folder": str(folder),
    }
    finished = Finished(folder, task, algorithm, result, references, summary)
    if task.details is not None:
        details = task.details(finished.results)
        finished = dataclasses.replace(finished, details=details)
        with (folder / "details.csv").open("w", newline="") as file:
            csv.writer(file).writerows([details.headings, *details.rows])
    if task.files is not None:
        task.files(finished.results, folder)
    return finished


def new_folder(name: str, out: Path | None) -> Path:
    """An empty folder for results: the one that was asked for, or a new one in runs/."""
    if out is None:
        stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        names = (Path("runs") / (stem + suffix) for suffix in ["", *(f"-{n}" for n in range(2, 100))])
        out = next(path for path in names if not path.exists())
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise FedbilevelError(
                f"the folder {out} is not empty: choose another one with --out, so that nothing is overwritten."
            )
    except OSError as error:
        raise FedbilevelError(f"cannot write to {out}: {error.strerror}.") from error
    return out


def _save(result: Result, folder: Path) -> None:
    """The final state, in a format that is safe to load: x, y, and all that the engine needs to go on."""
    state = result.state._replace(key=jax.random.key_data(result.state.key))
    arrays = {
        name: np.asarray(leaf)
        for name, leaf in named_leaves({"x": result.x, "y": result.y, "state": state._asdict()}).items()
    }
    (folder / "state.safetensors").write_bytes(encode({"round": int(result.state.round)}, arrays))
