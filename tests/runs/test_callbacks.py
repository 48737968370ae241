"""Whoever follows a run: plain functions, classes, TensorBoard's files, MLflow's store."""

import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb
from fedbilevel.runs.callbacks import Started
from fedbilevel.tasks import Quadratic


def _solve(rounds: int = 6, **options: Any) -> fb.Result:
    return fb.solve(Quadratic.random().task(), fb.FedBiO(0.1, 0.2, 0.2), rounds=rounds, every=2, **options)


class Recorder(fb.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def start(self, run: Started) -> None:
        self.seen.append(("start", run.rounds, [row["round"] for row in run.history]))

    def row(self, row: Mapping[str, Any]) -> None:
        self.seen.append(row["round"])

    def end(self) -> None:
        self.seen.append("end")


def test_callbacks_are_told_in_order() -> None:
    recorder, rows = Recorder(), []
    result = _solve(callbacks=[recorder, rows.append])
    assert recorder.seen == [("start", 6, []), 0, 2, 4, 6, "end"]
    assert rows == result.history


def test_a_callback_is_told_of_the_end_whatever_it_was() -> None:
    recorder = Recorder()

    def fail(row: dict[str, Any]) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        _solve(callbacks=[recorder, fail])
    assert recorder.seen == [("start", 6, []), 0, "end"]


def test_a_run_that_goes_on_says_where_it_is(tmp_path: Path) -> None:
    _solve(4, checkpoint=tmp_path)
    recorder = Recorder()
    _solve(checkpoint=tmp_path, callbacks=[recorder])
    assert recorder.seen == [("start", 6, [0, 2, 4]), 6, "end"]


def _scalars(folder: Path) -> dict[tuple[str, int], float]:
    """The numbers in TensorBoard's event files: records of a length, a checksum, the event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted(folder.glob("events.*")):
        raw = path.read_bytes()
        while raw:
            (length,) = struct.unpack("<Q", raw[:8])
            event = Event.FromString(raw[12 : 12 + length])
            raw = raw[16 + length :]
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found[value.tag, event.step] = value.simple_value
    return found


def test_tensorboard(tmp_path: Path) -> None:
    result = _solve(callbacks=[fb.TensorBoard(tmp_path)])
    found = _scalars(tmp_path)
    for row in result.history:
        for name in ("error", "megabytes", "Gf", "seconds"):
            assert found[name, row["round"]] == pytest.approx(row[name], rel=1e-6)


MLFLOW = """
import sys, fedbilevel as fb, mlflow
from fedbilevel.tasks import Quadratic

uri = sys.argv[1]

def solve(*callbacks):
    tracker = fb.MLflow(uri, experiment="mine", name="first")
    options = {"every": 2, "callbacks": [tracker, *callbacks], "checkpoint": "saved"}
    return fb.solve(Quadratic.random().task(), fb.FedBiO(0.1, 0.2, 0.2), rounds=6, **options)

def stop(row):
    if row["round"] == 4:
        raise KeyboardInterrupt

try:
    solve(stop)
except KeyboardInterrupt:
    pass
result = solve()
client = mlflow.MlflowClient(uri)
(run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
assert run.info.status == "FINISHED", run.info.status
assert run.data.params["algorithm.lr_upper"] == "0.1"
assert run.data.params["task.name"] == "quadratic"
history = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "error")}
assert history == {row["round"]: row["error"] for row in result.history}, history
print("as it should be")
"""


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    """A real store; in a process of its own, as other people's warnings are not our errors. The run is interrupted,
    and goes on under the same name."""
    command = [sys.executable, "-c", MLFLOW, f"sqlite:///{tmp_path / 'store.db'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.endswith("as it should be\n"), done.stderr


def test_trackers_by_name(tmp_path: Path) -> None:
    experiment = fb.Experiment("quadratic", "fedbio", rounds=2, trackers=("tensorboard",))
    experiment.run(tmp_path / "run")
    assert ("error", 2) in _scalars(tmp_path / "run" / "tensorboard" / "fedbio")
