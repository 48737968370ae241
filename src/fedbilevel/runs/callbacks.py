"""Follow a run: a plain function for every row, TensorBoard, MLflow, or a class of your own."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbilevel.errors import Names, needs

if TYPE_CHECKING:
    from fedbilevel.core import Algorithm
    from fedbilevel.core.task import Task


class Started(NamedTuple):
    """A run that starts, or continues after the rows of its ``history``."""

    task: "Task"
    algorithm: "Algorithm"
    rounds: int
    seed: int
    history: list[dict[str, Any]]

    @property
    def parameters(self) -> dict[str, Any]:
        """All settings, flat: ``task.name``, options of the task, ``algorithm.name``, its hyper-parameters."""
        hyper = {f"algorithm.{f.name}": getattr(self.algorithm, f.name) for f in fields(self.algorithm)}
        options = {f"task.{name}": value for name, value in self.task.options.items()}
        names = {"task.name": self.task.name, "algorithm.name": type(self.algorithm).__name__}
        return {**names, **options, **hyper, "rounds": self.rounds, "seed": self.seed}


class Callback:
    """Follows a run; override the methods you need."""

    def start(self, run: Started) -> None:
        """Called before the first round, or before a run continues."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Called after every evaluation."""

    def end(self) -> None:
        """Called at the end, however the run ended."""


class OnRow(Callback):
    """Calls a plain function with every row."""

    def __init__(self, function: Callable[[dict[str, Any]], Any]) -> None:
        self.function = function

    def row(self, row: Mapping[str, Any]) -> None:
        self.function(dict(row))


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "round" and isinstance(value, int | float)}


def _summary_writer() -> Any:
    return needs("tensorboardX", "tensorboard", "TensorBoard needs tensorboardX").SummaryWriter


def _mlflow() -> Any:
    return needs("mlflow", "mlflow", "MLflow needs its client")


class TensorBoard(Callback):
    """Writes event files for ``tensorboard --logdir FOLDER`` (needs ``pip install 'fedbilevel[tensorboard]'``)."""

    def __init__(self, folder: Path | str) -> None:
        self.make, self.folder, self.writer = _summary_writer(), str(folder), None

    def start(self, run: Started) -> None:
        # What was written after the last checkpoint is about to be written again.
        after = run.history[-1]["round"] + 1 if run.history else 0
        self.writer = self.make(self.folder, purge_step=after)
        text = "\n".join(f"| {name} | {value} |" for name, value in run.parameters.items())
        self.writer.add_text("parameters", f"| name | value |\n|---|---|\n{text}", 0)

    def row(self, row: Mapping[str, Any]) -> None:
        assert self.writer is not None
        for name, value in _numbers(row).items():
            self.writer.add_scalar(name, value, row["round"])
        self.writer.flush()

    def end(self) -> None:
        if self.writer is not None:
            self.writer.close()


class MLflow(Callback):
    """Logs a run to MLflow (needs ``pip install 'fedbilevel[mlflow]'``).

    Args:
        uri: address of the tracking server or store; None uses MLflow's own settings.
        experiment: its name in MLflow.
        name: name of the run; an unfinished run of the same name is continued.
    """

    def __init__(self, uri: str | None = None, experiment: str = "fedbilevel", name: str | None = None) -> None:
        self.client = _mlflow().MlflowClient(uri)
        self.experiment, self.name = experiment, name
        self.id: Any = None

    def start(self, run: Started) -> None:
        there = self.client.get_experiment_by_name(self.experiment)
        experiment = there.experiment_id if there else self.client.create_experiment(self.experiment)
        if self.name is not None and run.history:
            same = f"attributes.run_name = '{self.name}' and attributes.status != 'FINISHED'"
            unfinished = self.client.search_runs([experiment], same, max_results=1)
            self.id = unfinished[0].info.run_id if unfinished else None
        if self.id is None:
            self.id = self.client.create_run(experiment, run_name=self.name).info.run_id
        for name, value in run.parameters.items():
            self.client.log_param(self.id, name, value)
        self.rounds, self.seen = run.rounds, -1

    def row(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        moment = int(1000 * row["seconds"])
        self.seen = row["round"]
        metrics = [Metric(name, float(value), moment, row["round"]) for name, value in _numbers(row).items()]
        self.client.log_batch(self.id, metrics=metrics)

    def end(self) -> None:
        if self.id is not None:
            self.client.set_terminated(self.id, "FINISHED" if self.seen >= self.rounds else "KILLED")


class Tracker(NamedTuple):
    """A service that tracks experiments: ``check_installed`` raises an error if its extra is missing, ``follow`` makes
    the callback for the run with this label in a run folder.
    """

    check_installed: Callable[[], Any]
    follow: Callable[[Path, str], Callback]


TRACKERS: Names[Tracker] = Names(
    "tracker",
    {
        "tensorboard": Tracker(_summary_writer, lambda folder, label: TensorBoard(folder / "tensorboard" / label)),
        "mlflow": Tracker(_mlflow, lambda folder, label: MLflow(name=f"{folder.name}/{label}")),
    },
)
