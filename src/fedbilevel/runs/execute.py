"""Run or continue an experiment, and write its run folder."""

import csv
import dataclasses
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Algorithm
from fedbilevel.core.presentation import Details, Reference, Sequel
from fedbilevel.core.task import Task
from fedbilevel.engines.accounting import traffic
from fedbilevel.errors import Diverged, FedbilevelError, Interrupted, Stopped
from fedbilevel.runs import configuration, plugins
from fedbilevel.runs.callbacks import TRACKERS
from fedbilevel.runs.experiment import Built, Experiment
from fedbilevel.runs.given import Given
from fedbilevel.runs.solve import Result, Row, solve
from fedbilevel.runs.until import parse as parse_until
from fedbilevel.storage.checkpoints import Checkpoints
from fedbilevel.storage.files import alone, new_folder
from fedbilevel.storage.models import save_model
from fedbilevel.storage.run_folder import CODE, CONFIG, RunFacts, RunFolder


class Progress(Protocol):
    """Shows the progress of a run: called with its label, its number of rounds, and None when it starts, then every row
    of its history.
    """

    def __call__(self, label: str, rounds: int, row: Row | None) -> None: ...


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


def run(experiment: Experiment | Built, out: Path | None = None, progress: Progress | None = None) -> Finished:
    """Run an experiment and its references, and write the run folder. If it is stopped, what it has is saved."""
    built = experiment.build() if isinstance(experiment, Experiment) else experiment
    built.check()
    experiment = built.experiment
    name = f"{plugins.short(experiment.task)}-{experiment.name}-seed{experiment.seed}"
    return _run(built, new_folder(name, out), progress)


def resume(
    folder: Path | str, rounds: int | None = None, progress: Progress | None = None, given: Given | None = None
) -> Finished:
    """Continue the run of a folder from its newest checkpoints, to the same result as without the interruption.

    Args:
        folder: the run folder.
        rounds: continue to more rounds than the run was started with.
        progress: called when a run starts, and with every row.
        given: what the run was given from Python, which its folder cannot hold.
    """
    folder = Path(folder)
    RunFolder(folder).check()
    experiment = dataclasses.replace(Experiment.read(folder / CONFIG), given=given or Given())
    _check_code(folder, given is not None)
    if rounds is not None:
        if experiment.rounds is not None and rounds < experiment.rounds:
            raise FedbilevelError(f"{folder} was started with {experiment.rounds} rounds: give at least as many.")
        experiment = dataclasses.replace(experiment, rounds=rounds)
    built = experiment.build()
    built.check()
    return _run(built, folder, progress)


def _check_code(folder: Path, again: bool) -> None:
    """Refuse to continue a run whose code is not as it was, or cannot be found by what the folder says."""
    info = RunFolder(folder).info()
    only_python = info.get("only_python", ())
    if only_python and not again:
        raise FedbilevelError(
            f"{folder} was started from Python, and no file leads to {' and '.join(only_python)}: continue it with the "
            f"same call and out='{folder}'."
        )
    for known in info.get("origins", {}).values():
        if trouble := plugins.Origin(**known).trouble:
            copy = f" ({folder / CODE} has a copy)" if (folder / CODE).exists() else ""
            raise FedbilevelError(f"{trouble}: put it back as it was{copy}, or start a new run.")


def _run(built: Built, folder: Path, progress: Progress | None) -> Finished:
    with alone(folder):
        return _run_alone(built, RunFolder(folder), progress)


def _run_alone(built: Built, folder: RunFolder, progress: Progress | None) -> Finished:
    began = time.perf_counter()
    experiment, task, algorithm, _ = built
    folder.write_config(configuration.write(built.config()))
    facts = describe(built, folder.path)
    folder.begin(**facts)
    for known in facts.get("origins", {}).values():
        if (path := Path(known["path"])).is_file():
            folder.keep_code(path)
    members = _Members(built, folder, progress)
    references: dict[str, Result] = {}
    wanted = task.shown.references if experiment.references else ()
    sequel = task.shown.sequel if experiment.references else None
    result: Result | None = None

    def keep(stopped: Stopped) -> None:
        """What the run itself has, if it came that far."""
        if result is not None:
            stopped.result = result
        if stopped.result is not None and len(references) == len(wanted):
            save_solution(stopped.result, folder, task)
        stopped.saved = f"The records so far are in {folder.path}."

    try:
        for reference in wanted:
            references[reference.label] = members.reference(reference)
        result = members.one(experiment.name, algorithm)
        if sequel is not None:
            references[sequel.label] = members.sequel(sequel, result)
        return _finish(built, folder, result, references, began)
    except KeyboardInterrupt as interrupt:
        folder.enter("interrupted", failure="")
        stopped = Interrupted.of(interrupt)
        keep(stopped)
        if experiment.engine == "simulation":
            stopped.saved = f"Continue with: fedbilevel resume {folder.path}"
        raise stopped from None
    except Exception as error:
        folder.fail(error)
        if isinstance(error, Diverged):
            keep(error)
        raise


def _finish(
    built: Built, folder: RunFolder, result: Result, references: Mapping[str, Result], began: float
) -> Finished:
    """Write the results: the solution, a summary, and what the task shows of its solution."""
    experiment, task, algorithm, _ = built
    save_solution(result, folder, task)
    summary = {**{k: v for k, v in result.metrics.items() if k != "round"}, "rounds": result.metrics["round"]}
    for label, reference in references.items():
        summary |= {
            f"{name}_{label}": reference.metrics[name] for name in task.shown.headline if name in reference.metrics
        }
    summary |= {
        "seconds": time.perf_counter() - began,
        "algorithm": experiment.name,
        "task": plugins.short(experiment.task),
        "seed": experiment.seed,
        "folder": str(folder.path),
    }
    finished = Finished(folder.path, task, algorithm, result, references, summary)
    table = None
    if task.shown.details is not None and experiment.references:
        details = task.shown.details(finished.results)
        finished = dataclasses.replace(finished, details=details)
        with (folder.path / "details.csv").open("w", newline="") as file:
            csv.writer(file).writerows([details.headings, *details.rows])
        rows = [[cell.item() if isinstance(cell, np.generic) else cell for cell in row] for row in details.rows]
        table = {"title": details.title, "headings": list(details.headings), "rows": rows}
    if task.shown.files is not None and experiment.references:
        task.shown.files(finished.results, folder.path)
    folder.finish(summary, table)
    return finished


class _Members:
    """Runs an experiment's algorithm and its references into one folder, each from its newest checkpoint."""

    def __init__(self, built: Built, folder: RunFolder, progress: Progress | None) -> None:
        self.built, self.folder, self.progress = built, folder, progress

    def one(
        self, label: str, algorithm: Algorithm, x: Any = None, task: Task | None = None, share: float = 1.0
    ) -> Result:
        """One run: of another task, if it is given, and of a share of the rounds."""
        experiment = self.built.experiment
        rounds = max(1, round(share * (experiment.rounds or 0))) if share < 1 else experiment.rounds or 0
        with self.folder.records() as records:

            def on_row(row: Row) -> None:
                records.append({"run": label, **row})
                if self.progress is not None:
                    self.progress(label, rounds, row)

            if self.progress is not None:
                self.progress(label, rounds, None)
            return solve(
                self.built.task if task is None else task,
                algorithm,
                rounds,
                experiment.seed,
                experiment.participation(),
                every=experiment.every,
                until=parse_until(experiment.until) if task is None and algorithm is self.built.algorithm else None,
                diagnostics=experiment.diagnostics if task is None else (),
                x=x,
                engine=experiment.engine,  # pyright: ignore[reportArgumentType]
                batching=experiment.batching,  # pyright: ignore[reportArgumentType]
                callbacks=[on_row, *(TRACKERS[name].follow(self.folder.path, label) for name in experiment.trackers)],
                checkpoint=self._checkpoints(label) if experiment.engine == "simulation" else None,
            )

    def _checkpoints(self, label: str) -> Checkpoints:
        experiment = self.built.experiment
        return self.folder.checkpoints(label, experiment.checkpoint_seconds, experiment.checkpoints)

    def sequel(self, sequel: Sequel, result: Result) -> Result:
        """The run that starts from the solution."""
        task, algorithm = sequel.make(result.x, result.y)
        return self.one(sequel.label, algorithm, None, task, sequel.share)

    def reference(self, reference: Reference) -> Result:
        """The best of all starting points of a reference, at the cost of all; one that diverges is not the best."""
        if not reference.others:
            return self.one(reference.label, reference.algorithm, reference.x)
        starts = [reference.x, *reference.others]
        results: list[Result] = []
        for n, x in enumerate(starts, 1):
            try:
                results.append(self.one(f"{reference.label}-{n}", reference.algorithm, x))
            except Diverged:
                if n == len(starts) and not results:
                    raise
        best = min(results, key=lambda result: result.metrics[reference.by])
        paid = {*traffic(best.plan, best.state), "seconds"}
        history = [{k: len(starts) * v if k in paid else v for k, v in row.items()} for row in best.history]
        return dataclasses.replace(best, history=history, seconds=sum(result.seconds for result in results))


def describe(built: Built, folder: Path) -> RunFacts:
    """What a reader of the folder must know about the run."""
    experiment, task, algorithm, _ = built
    main, title = experiment.name, experiment.title or type(algorithm).__name__
    labels: dict[str, str] = {}
    for reference in task.shown.references if experiment.references else ():
        for n in range(1, len(reference.others) + 2):  # a grid search is several runs
            more = (f"-{n}", f", {n} of {len(reference.others) + 1}") if reference.others else ("", "")
            labels[reference.label + more[0]] = reference.title + more[1]
    labels = dict([*list(labels.items())[:1], (main, title), *list(labels.items())[1:]])
    if task.shown.sequel is not None and experiment.references:
        labels[task.shown.sequel.label] = task.shown.sequel.title
    return {
        "name": folder.name,
        "task": plugins.short(experiment.task),
        "algorithm": main,
        "title": title,
        "seed": experiment.seed,
        "rounds": experiment.rounds,
        "clients": len(task.clients),
        "headline": dict(task.shown.headline),
        "compare_by": list(task.shown.compare_by),
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
        **_origins(experiment),
        "process": os.getpid(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _origins(experiment: Experiment) -> RunFacts:
    """Where other people's code of an experiment comes from, and what of it no word leads to."""
    only_python = experiment.given.only_python
    origins: dict[str, Any] = {}
    words: dict[plugins.Kind, str] = {"task": experiment.task, "algorithm": str(experiment.algorithm)}
    for kind, word in words.items():
        if kind not in only_python and (known := plugins.origin(kind, word)) is not None:
            origins[kind] = dataclasses.asdict(known)
    return {"origins": origins, "only_python": list(only_python.values())}


def save_solution(result: Result, folder: RunFolder, task: Task) -> None:
    """Save x and y, and the classifier, if the task has one."""
    folder.save_solution(result.x, result.y, int(result.state.round))
    if task.classifier is not None:
        save_model(folder.path, *task.classifier(result.x, result.y).packed())
