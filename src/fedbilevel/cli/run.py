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
    Categorical,
    Client,
    ClientCount,
    ClientFrom,
    DataName,
    DataNames,
    Drop,
    Features,
    Id,
    Json,
    Label,
    Numeric,
    Out,
    Sample,
    Set,
    TaskOrFile,
    Trusted,
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


def run(
    task: TaskOrFile,
    algorithm: AlgorithmName = None,
    data: DataNames = None,
    label: Label = None,
    client: Client = None,
    trusted: Trusted = None,
    id_: Id = None,
    drop: Drop = None,
    categorical: Categorical = None,
    numeric: Numeric = None,
    client_from: ClientFrom = None,
    features: Features = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds. Default: what the task suggests.")] = None,
    clients: ClientCount = None,
    sample: Sample = None,
    seed: Annotated[int | None, typer.Option(help="Seed for everything random. Default: 0.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Several seeds, for instance 0..4: a run folder for each.")] = None,
    set_: Set = None,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Log to 'tensorboard' or 'mlflow'. May be repeated."),
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run an algorithm on a task and save everything to a folder."""
    fields = {"algorithm": algorithm, "rounds": rounds, "sample": sample, "seed": seed}
    settings: dict[str, Any] = {name: str(value) for name, value in fields.items() if value is not None}
    settings |= {"trackers": ",".join(track)} if track else {}
    about_table = {
        "label": label, "client": client, "trusted": trusted, "id": id_, "drop": drop, "categorical": categorical,
        "numeric": numeric, "client_from": client_from, "features": features,
    }  # fmt: skip
    settings |= {name: value for name, value in about_table.items() if value}
    experiment = experiment_of(task, {**settings, **settings_of(set_, clients, data)})
    if seeds is not None:
        if seed is not None or track:
            raise FedbilevelError("--seeds makes several runs: leave out --seed and --track.")
        with ending_well():
            name = experiment.algorithm or experiment.build().task.suggested.algorithm
            compare_and_show(comparisons.of_file(experiment, name, comparisons.parse_seeds(seeds)), out, 0, as_json)
        return
    with ending_well():
        built = experiment.build()
        if built.task.shown.note and not as_json:
            console.print(built.task.shown.note, highlight=False, markup=False, soft_wrap=True)
        _run_and_show(lambda progress: execute.run(built, out, progress), as_json)


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of an interrupted run or comparison.")],
    rounds: Annotated[int | None, typer.Option(help="Continue to more rounds than the run was started with.")] = None,
    as_json: Json = False,
) -> None:
    """Continue an interrupted run, comparison or search; the result is the same as without the interruption."""
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
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: TASK.toml.")] = None,
) -> None:
    """Write an experiment file with every setting and its meaning, ready to edit and run."""
    path = out or Path(f"{task}.toml")
    if path.exists():
        raise FedbilevelError(f"{path} already exists: choose another file with --out.")
    experiment = Experiment(task, algorithm, settings=settings_of(set_, None, data))
    make = experiment.maker()
    built = experiment.build()
    meanings = {
        "task": {"name": first_line(make), **configuration.explained(make)},
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
