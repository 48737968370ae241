"""An experiment: a task, an algorithm and all their options by name; its run folder with everything that came out."""

import csv
import dataclasses
import inspect
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core import Algorithm, schedules
from fedbilevel.core.task import Details, Reference, Task
from fedbilevel.diagnostics import DIAGNOSTICS
from fedbilevel.engines.participation import Independent, Participation, Uniform, participation
from fedbilevel.engines.plan import Program
from fedbilevel.engines.simulation import BATCHINGS
from fedbilevel.errors import Diverged, FedbilevelError, UnknownName
from fedbilevel.runs import callbacks, configuration
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.solve import ENGINES, Result, Row, Stopped, check_rounds, check_seed, interval, solve, traffic
from fedbilevel.storage.checkpoints import Checkpoints
from fedbilevel.storage.files import alone
from fedbilevel.storage.run_folder import CONFIG, RunFacts, RunFolder
from fedbilevel.tasks import TASKS


class Progress(Protocol):
    """Whoever wants to show how far a run of so many rounds is: called with None when it begins, then with every row
    of its history.
    """

    def __call__(self, label: str, rounds: int, row: Row | None) -> None: ...


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Experiment:
    """Everything that determines a run; None is what the task suggests.

    Args:
        task: its name in ``fb.TASKS``.
        algorithm: its name in ``fb.ALGORITHMS``.
        settings: options of the task and hyper-parameters of the algorithm, as "lr_upper", or "task.NAME" and
            "algorithm.NAME"; values or text.
        places: where each was written ("my.toml, line 7"), for messages.

    The other fields are the table ``[run]`` of an experiment file.

    >>> Experiment("quadratic", "fedbio").changed({"lr_upper": "0.2", "rounds": "50"}).rounds
    50
    """

    task: str
    algorithm: str | None = None
    rounds: int | None = _field(None, "how many rounds")
    seed: int = _field(0, "of everything random: data, starting points, batches, cohorts")
    sample: str | None = _field(
        None, "who takes part in a round: 'everyone', a number, a probability such as 0.5, or a list '0,3,5'"
    )
    settings: Mapping[str, Any] = field(default_factory=dict)
    every: int | None = _field(None, "rounds between evaluations; left out: about fifty evaluations")
    diagnostics: Sequence[str] = _field((), "exact quantities at every evaluation, such as 'hypergradient'")
    engine: str = _field("simulation", "'simulation' (compiled) or 'local' (serialized messages, no checkpoints)")
    batching: str = _field("auto", "how the simulator visits clients: 'scan' one by one, 'vmap' all at once, 'auto'")
    references: bool = _field(True, "whether to run what the task compares with, too")
    checkpoint_seconds: float = _field(30.0, "least time between two checkpoints")
    checkpoints: int = _field(2, "how many checkpoints are kept")
    trackers: Sequence[str] = _field((), "'tensorboard', 'mlflow': who else is told of every evaluation")
    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def read(path: Path | str) -> "Experiment":
        """The experiment of a TOML file."""
        tables, places = configuration.read(Path(path))
        name = tables["task"].pop("name")
        settings = {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}
        return Experiment(name, places=places).changed(settings)

    def changed(self, settings: Mapping[str, Any]) -> "Experiment":
        """The same with other settings: fields of ``[run]`` ("rounds" or "run.rounds"), "algorithm", options and
        hyper-parameters; the last word counts.
        """
        fields: dict[str, Any] = {}
        others = dict(self.settings)
        for key, value in settings.items():
            prefix, _, name = key.rpartition(".")
            if key in ("algorithm", "algorithm.name"):
                fields["algorithm"] = convert(key, value, "", self._at(key))
            elif prefix == "run" or (not prefix and name in RUN):
                if name not in RUN:
                    raise UnknownName("setting of [run]", name, RUN, self._at(key))
                fields[name] = _convert_run(key, name, value, self._at(key))
            else:
                others.pop(name, None)
                others.pop(f"task.{name}" if prefix == "task" else f"algorithm.{name}", None)
                others[key] = value
        return dataclasses.replace(self, **fields, settings=others)

    def _at(self, key: str) -> str:
        return self.places.get(key, "")

    def build(self, make: Callable[..., Task] | None = None) -> "Built":
        """Make the task and the algorithm; refuses unknown names and wrong types. The task is made by the function of
        its name, or by the one given.
        """
        check_seed(self.seed)
        if self.rounds is not None and self.rounds < 1:
            raise FedbilevelError(f"{self._at('run.rounds')}rounds must be at least 1, but is {self.rounds}.")
        for name in self.diagnostics:
            _ = DIAGNOSTICS[name]  # refuses unknown ones
        for name in self.trackers:
            if name not in TRACKERS:
                raise UnknownName("tracker", name, TRACKERS, self._at("run.trackers"))
        if make is None:
            if self.task not in TASKS:
                raise UnknownName("task", self.task, TASKS, self._at("task.name"))
            make = TASKS[self.task]
        options = {name: p.default for name, p in inspect.signature(make).parameters.items()}
        if self.algorithm is not None:
            self._check_settings(self.algorithm, options)
        for_task: dict[str, Any] = {"seed": self.seed} if "seed" in options else {}
        for key, value in self.settings.items():
            prefix, _, name = key.rpartition(".")
            if prefix in ("", "task") and name in options:
                for_task[name] = convert(key, value, options[name], self._at(key))
        task = make(**for_task)
        name = self.algorithm or task.algorithm
        kind, hyper = self._check_settings(name, options)
        chosen = task.advice(name, hyper)
        for key, value in self.settings.items():
            prefix, _, known = key.rpartition(".")
            if prefix in ("", "algorithm") and known in hyper:
                chosen[known] = convert(key, value, hyper[known], self._at(key))
        rounds, sample = self.rounds or task.rounds, self.sample or task.sample
        every = interval(rounds, self.every)
        whole = dataclasses.replace(self, algorithm=name, rounds=rounds, sample=sample, every=every)
        return Built(whole, task, kind(**chosen), {**options, **for_task})

    def _check_settings(self, algorithm: str, options: Mapping[str, Any]) -> tuple[type[Algorithm], dict[str, Any]]:
        """The algorithm and its hyper-parameters; refuses settings that nobody knows, or two."""
        if algorithm not in ALGORITHMS:
            raise UnknownName("algorithm", algorithm, ALGORITHMS, self._at("algorithm.name"))
        kind = ALGORITHMS[algorithm]
        hyper = {f.name: f.default for f in dataclasses.fields(kind)}
        for key in self.settings:
            prefix, _, name = key.rpartition(".")
            known = [
                name in names for place, names in (("task", options), ("algorithm", hyper)) if prefix in ("", place)
            ]
            if not any(known):
                who = {"task": self.task, "algorithm": algorithm}.get(prefix, f"{self.task} or {algorithm}")
                names = {"task": [*options], "algorithm": [*hyper]}.get(prefix, [*options, *hyper, *RUN])
                raise UnknownName(
                    f"setting of {who}", name if prefix in ("task", "algorithm") else key, names, self._at(key)
                )
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
                return [int(part) for part in number.split(",") if part]
            return Independent(float(number), **how) if "." in number else Uniform(int(number), **how)
        except (ValueError, TypeError):
            raise FedbilevelError(
                f"{self._at('run.sample')}sample '{self.sample}' is neither a number of clients, nor a probability "
                "such as 0.5 (each may be followed by 'resample', a number also by 'replacement'), nor a list such as "
                "0,3,5."
            ) from None

    def run(self, out: Path | str | None = None, progress: Progress | None = None) -> "Finished":
        """Run it, see :func:`run`."""
        return run(self, None if out is None else Path(out), progress)


RUN: Mapping[str, str] = {f.name: f.metadata["help"] for f in dataclasses.fields(Experiment) if "help" in f.metadata}
"""The fields of the table [run], with what they mean."""

TRACKERS: Mapping[str, Callable[[Path, str], Callback]] = {
    "tensorboard": lambda folder, label: callbacks.TensorBoard(folder / "tensorboard" / label),
    "mlflow": lambda folder, label: callbacks.MLflow(name=f"{folder.name}/{label}"),
}


def _convert_run(key: str, name: str, value: Any, place: str) -> Any:
    """A setting of [run] as what its field is."""
    if name in ("diagnostics", "trackers"):
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise FedbilevelError(f"{place}{key} must be a list of names, not {value!r}.")
        return tuple(part.strip() for part in parts if part.strip())
    if name == "sample":
        parts = value if isinstance(value, list) else [value]
        if isinstance(value, bool) or not all(isinstance(part, str | int | float) for part in parts):
            raise FedbilevelError(f"{place}{key} must be a number, a list of clients or a text, not {value!r}.")
        return ",".join(str(part) for part in parts) + ("," if isinstance(value, list) and len(value) == 1 else "")
    like = {"rounds": 0, "every": 0, "seed": 0, "checkpoints": 0, "references": True, "checkpoint_seconds": 0.0}
    return convert(key, value, like.get(name, ""), place)


class Built(NamedTuple):
    """An experiment in full, and what it is about."""

    experiment: Experiment
    task: Task
    algorithm: Algorithm
    options: Mapping[str, Any]  # what the task was made with

    def config(self) -> dict[str, dict[str, Any]]:
        """All of it as tables: what ``config.toml`` holds, and what an experiment file may hold."""
        # A task knows best what became of its options, such as a default that depends on the data set.
        options = {name: self.task.options.get(name, value) for name, value in self.options.items()}
        if options.get("seed") == self.experiment.seed:
            del options["seed"]  # it follows the seed of the run
        hyper = {f.name: getattr(self.algorithm, f.name) for f in dataclasses.fields(self.algorithm)}
        run = {name: getattr(self.experiment, name) for name in RUN}
        tables = {
            "task": {"name": self.experiment.task, **options},
            "algorithm": {"name": self.experiment.algorithm, **hyper},
            "run": run,
        }
        return {table: {k: plain(v) for k, v in keys.items()} for table, keys in tables.items()}

    def check(self) -> None:
        """Refuse what does not fit, before anything is written."""
        experiment = self.experiment
        check_rounds(experiment.rounds, experiment.every)
        for name, value, known in (
            ("engine", experiment.engine, ENGINES),
            ("batching", experiment.batching, BATCHINGS),
        ):
            if value not in known:
                raise UnknownName(name, value, known, experiment.places.get(f"run.{name}", ""))
        for name in experiment.trackers:
            TRACKERS[name](Path(), "")  # is it installed?
        Checkpoints("", experiment.checkpoint_seconds, experiment.checkpoints)
        sample = participation(experiment.participation(), len(self.task.clients))
        Program(self.task.problem, self.algorithm, self.task.layout, sample)


KINDS = {bool: "true or false", int: "a whole number", float: "a number", tuple: "numbers such as 1,3", str: "a text"}


def convert(name: str, value: Any, default: Any, place: str = "") -> Any:
    """Read a setting, a value or text, as what its default is."""
    try:
        if isinstance(default, bool):
            words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            return value if isinstance(value, bool) else words[value.lower()]
        if isinstance(value, bool):
            raise ValueError
        if isinstance(default, int):
            if isinstance(value, float):
                raise ValueError
            return int(value)
        if isinstance(default, float):
            number = float(value)
            if math.isnan(number):
                raise ValueError
            return number
        if isinstance(default, schedules.Schedule):
            return schedules.parse(value)
        if isinstance(default, tuple):
            number = lambda part: int(part) if str(part).strip().lstrip("-").isdigit() else float(part)
            parts = (
                value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
            )
            return tuple(number(part) for part in parts if str(part).strip())
        if not isinstance(value, str):
            raise ValueError
    except FedbilevelError as error:
        raise FedbilevelError(f"{place}{name}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FedbilevelError(f"{place}{name} must be {KINDS[type(default)]}, not {value!r}.") from None
    return value


def plain(value: Any) -> Any:
    """A value as TOML knows it."""
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, bool | int | float | str) else repr(value)


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
    built = experiment.build()
    built.check()
    name = f"{experiment.task}-{built.experiment.algorithm}-seed{experiment.seed}"
    return _run(built, new_folder(name, out), progress)


def resume(folder: Path | str, rounds: int | None = None, progress: Progress | None = None) -> Finished:
    """Go on with the run of a folder, from its newest checkpoints, to the result it would have had without a break.

    Args:
        folder: the run folder.
        rounds: go on to more rounds than the run was begun with.
    """
    folder = Path(folder)
    if not RunFolder(folder).begun:
        raise FedbilevelError(f"{folder} is not a run folder: it has no {CONFIG}.")
    RunFolder(folder).info()  # refuses the folder of a newer version
    experiment = Experiment.read(folder / CONFIG)
    if rounds is not None:
        if experiment.rounds is not None and rounds < experiment.rounds:
            raise FedbilevelError(f"{folder} was begun for {experiment.rounds} rounds: give at least as many.")
        experiment = dataclasses.replace(experiment, rounds=rounds)
    built = experiment.build()
    built.check()
    return _run(built, folder, progress)


def _run(built: Built, folder: Path, progress: Progress | None) -> Finished:
    with alone(folder):
        return _run_alone(built, folder, progress)


def _run_alone(built: Built, folder: Path, progress: Progress | None) -> Finished:
    began = time.perf_counter()
    experiment, task, algorithm, _ = built
    place = RunFolder(folder)
    place.write_config(configuration.write(built.config()))
    place.begin(**describe(built, folder))
    finish = _Members(built, place, progress)
    references: dict[str, Result] = {}
    wanted = task.references if experiment.references else ()
    try:
        for reference in wanted:
            references[reference.label] = finish.reference(reference)
        result = finish.one(str(experiment.algorithm), algorithm)
    except (KeyboardInterrupt, Exception) as error:
        stopped = error.__cause__
        interrupted = isinstance(error, KeyboardInterrupt)
        if isinstance(error, Exception):
            place.fail(error)
        else:
            place.enter("interrupted", failure="")
        if isinstance(error, KeyboardInterrupt | Diverged):
            if isinstance(stopped, Stopped) and len(references) == len(wanted):
                _save_solution(stopped.result, place)
            saved = f"The records so far are in {folder}."
            if interrupted and experiment.engine == "simulation":
                saved = f"Go on with: fedbilevel resume {folder}"
            error.saved = saved  # pyright: ignore[reportAttributeAccessIssue]
        raise

    _save_solution(result, place)
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
    if task.details is not None and experiment.references:
        details = task.details(finished.results)
        finished = dataclasses.replace(finished, details=details)
        with (folder / "details.csv").open("w", newline="") as file:
            csv.writer(file).writerows([details.headings, *details.rows])
    if task.files is not None and experiment.references:
        task.files(finished.results, folder)
    shown = None
    if finished.details is not None:
        rows = [
            [cell.item() if isinstance(cell, np.generic) else cell for cell in row] for row in finished.details.rows
        ]
        shown = {"title": finished.details.title, "headings": list(finished.details.headings), "rows": rows}
    place.finish(summary, shown)
    return finished


class _Members:
    """Runs an experiment's algorithm and its references into one folder, each from its newest checkpoint."""

    def __init__(self, built: Built, folder: RunFolder, progress: Progress | None) -> None:
        self.built, self.folder, self.progress = built, folder, progress

    def one(self, label: str, algorithm: Algorithm, x: Any = None) -> Result:
        experiment, task, rounds = self.built.experiment, self.built.task, self.built.experiment.rounds or 0
        with self.folder.records() as records:

            def on_row(row: Row) -> None:
                records.append({"run": label, **row})
                if self.progress is not None:
                    self.progress(label, rounds, row)

            if self.progress is not None:
                self.progress(label, rounds, None)
            return solve(
                task,
                algorithm,
                rounds,
                experiment.seed,
                experiment.participation(),
                every=experiment.every,
                diagnostics=experiment.diagnostics,
                x=x,
                engine=experiment.engine,  # pyright: ignore[reportArgumentType]
                batching=experiment.batching,  # pyright: ignore[reportArgumentType]
                callbacks=[on_row, *(TRACKERS[name](self.folder.path, label) for name in experiment.trackers)],
                checkpoint=self._checkpoints(label) if experiment.engine == "simulation" else None,
            )

    def _checkpoints(self, label: str) -> Checkpoints:
        experiment = self.built.experiment
        return self.folder.checkpoints(label, experiment.checkpoint_seconds, experiment.checkpoints)

    def reference(self, reference: Reference) -> Result:
        """The best of all that a reference starts from, for the price of all; one that diverges is not the best."""
        if not reference.others:
            return self.one(reference.label, reference.algorithm, reference.x)
        starts = [reference.x, *reference.others]
        found: list[Result] = []
        for n, x in enumerate(starts, 1):
            try:
                found.append(self.one(f"{reference.label}-{n}", reference.algorithm, x))
            except Diverged:
                if n == len(starts) and not found:
                    raise
        best = min(found, key=lambda result: result.metrics[reference.by])
        paid = {*traffic(best.plan, best.state), "seconds"}
        history = [{k: len(starts) * v if k in paid else v for k, v in row.items()} for row in best.history]
        return dataclasses.replace(best, history=history, seconds=sum(result.seconds for result in found))


def describe(built: Built, folder: Path) -> RunFacts:
    """What a reader of the folder must know of the run."""
    experiment, task, algorithm, _ = built
    main, title = str(experiment.algorithm), type(algorithm).__name__
    labels: dict[str, str] = {}
    for reference in task.references if experiment.references else ():
        for n in range(1, len(reference.others) + 2):  # a grid search is several runs
            more = (f"-{n}", f", {n} of {len(reference.others) + 1}") if reference.others else ("", "")
            labels[reference.label + more[0]] = reference.title + more[1]
    labels = dict([*list(labels.items())[:1], (main, title), *list(labels.items())[1:]])
    return {
        "name": folder.name,
        "task": experiment.task,
        "algorithm": main,
        "title": title,
        "seed": experiment.seed,
        "rounds": experiment.rounds,
        "clients": len(task.clients),
        "headline": dict(task.headline),
        "compare_by": list(task.compare_by),
        "main": main,
        "labels": labels,
        "environment": {
            **{name: version(name) for name in ("fedbilevel", "jax", "jaxlib", "numpy")},
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "device": jax.devices()[0].device_kind,
            "numbers": str(jnp.result_type(float)),
        },
        "process": os.getpid(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def new_folder(name: str, out: Path | None) -> Path:
    """An empty folder for results: the one that was asked for, or a new one in runs/."""
    if out is None:
        stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        names = (Path("runs") / (stem + suffix) for suffix in ["", *(f"-{n}" for n in range(2, 100))])
        out = next(path for path in names if not path.exists())
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(not path.name.startswith(".") for path in out.iterdir()):  # what is hidden, a killed process left
            raise FedbilevelError(
                f"the folder {out} is not empty: choose another one with --out, so that nothing is overwritten."
            )
    except OSError as error:
        raise FedbilevelError(f"cannot write to {out}: {error.strerror}.") from error
    return out


def _save_solution(result: Result, folder: RunFolder) -> None:
    folder.save_solution(result.x, result.y, int(result.state.round))
