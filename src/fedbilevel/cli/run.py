"""``run``, ``resume``, ``init``."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbilevel.cleaning.folder import is_search
from fedbilevel.cli import clean
from fedbilevel.cli.compare import compare_and_show
from fedbilevel.cli.options import (
    AlgorithmName,
    ClientCount,
    DataName,
    Json,
    Out,
    Sample,
    Set,
    console,
    ending_well,
    experiment_of,
    first_line,
    settings_of,
)  # fmt: skip
from fedbilevel.errors import FedbilevelError
from fedbilevel.report import terminal as report
from fedbilevel.report.progress import Display
from fedbilevel.runs import comparison as comparisons
from fedbilevel.runs import configuration, execute
from fedbilevel.runs.experiment import RUN_SETTINGS, Experiment
from fedbilevel.storage.files import plain_json
from fedbilevel.tasks import TASKS


def run(
    task: Annotated[
        str, typer.Argument(help="Name of a task (see 'fedbilevel tasks') or an experiment file: my.toml.")
    ],
    algorithm: AlgorithmName = None,
    data: DataName = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds. Default: what the task suggests.")] = None,
    clients: ClientCount = None,
    sample: Sample = None,
    seed: Annotated[int | None, typer.Option(help="Seed for everything random. Default: 0.")] = None,
    set_: Set = None,
    track: Annotated[
        list[str] | None, typer.Option(help="Log every evaluation to 'tensorboard' or 'mlflow'. May be repeated.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run an algorithm on a task and save everything to a folder."""
    fields = {"algorithm": algorithm, "rounds": rounds, "sample": sample, "seed": seed}
    settings = {name: str(value) for name, value in fields.items() if value is not None}
    settings |= {"trackers": ",".join(track)} if track else {}
    experiment = experiment_of(task, {**settings, **settings_of(set_, clients, data)})
    with ending_well():
        _run_and_show(lambda progress: execute.run(experiment, out, progress), as_json)


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of an interrupted run or comparison.")],
    rounds: Annotated[int | None, typer.Option(help="Continue to more rounds than the run was started with.")] = None,
    as_json: Json = False,
) -> None:
    """Continue an interrupted run, comparison or search for wrong labels, to the same result as without the interruption."""
    if is_search(folder):
        if rounds is not None:
            raise FedbilevelError("a search for wrong labels has its own number of rounds.")
        clean.go_on(folder, as_json)
        return
    with ending_well(f"Continue with: fedbilevel resume {folder}"):
        if (folder / comparisons.COMPARISON).exists():
            if rounds is not None:
                raise FedbilevelError("a comparison cannot be extended to more rounds: start a new one.")
            compare_and_show(comparisons.read(folder), folder, 0, as_json)
        else:
            _run_and_show(lambda progress: execute.resume(folder, rounds, progress), as_json)


def _run_and_show(run: Callable[[Any], execute.Finished], as_json: bool) -> None:
    if as_json:
        finished = run(None)
        report.pictures(finished)
        print(json.dumps(plain_json(finished.summary)))
        return
    with Display(console) as progress:
        finished = run(progress)
    report.pictures(finished)
    console.print(report.table(finished))
    if finished.details is not None:
        console.print(report.details(finished))
    files = ", ".join(sorted(path.name for path in finished.folder.glob("[!.]*")))
    console.print(f"Results in [bold]{finished.folder}[/bold]: {files}", soft_wrap=True, highlight=False)


def init(
    task: Annotated[str, typer.Argument(help="Name of a task (see 'fedbilevel tasks').")],
    algorithm: AlgorithmName = None,
    data: DataName = None,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: TASK.toml.")] = None,
) -> None:
    """Write an experiment file with every setting and its meaning, ready to edit and run."""
    path = out or Path(f"{task}.toml")
    if path.exists():
        raise FedbilevelError(f"{path} already exists: choose another file with --out.")
    built = Experiment(task, algorithm, settings=settings_of(None, None, data)).build()
    meanings = {
        "task": {"name": first_line(TASKS[task]), **configuration.explained(TASKS[task])},
        "algorithm": {
            "name": first_line(type(built.algorithm)),
            **{f.name: f.metadata["help"] for f in fields(built.algorithm)},
        },
        "run": RUN_SETTINGS,
    }
    try:
        path.write_text(configuration.commented(built.config(), meanings, ["run.every"]))
    except OSError as error:
        raise FedbilevelError(f"cannot write to {path}: {error.strerror}.") from error
    console.print(f"Wrote {path}. Run it with: fedbilevel run {path}", soft_wrap=True, highlight=False)
