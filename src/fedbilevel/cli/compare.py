"""``compare``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedbilevel.cli.options import (
    ClientCount,
    DataNames,
    Json,
    Sample,
    Seeds,
    Set,
    TaskOrFile,
    console,
    ending_well,
    experiment_of,
    settings_of,
)
from fedbilevel.report import terminal as report
from fedbilevel.runs import comparison as comparisons


def compare(
    task: TaskOrFile,
    algorithms: Annotated[str | None, typer.Option(help="Names with commas. Default: all that fit the task.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seeds: Seeds = None,
    sample: Sample = None,
    data: DataNames = None,
    clients: ClientCount = None,
    tuned: Annotated[
        Path | None, typer.Option(help="Folder of a search: compare with the hyper-parameters that it found.")
    ] = None,
    until: Annotated[
        str,
        typer.Option(help="End each run when a column is at most this, such as hypergradient=1e-3; compare the costs."),
    ] = "",
    set_: Set = None,
    jobs: Annotated[int, typer.Option(help="Number of processes. Default: one per core.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results; an existing comparison is continued. Default: a new one in runs/."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run several algorithms on a task and compare them in a table and in curves."""
    with ending_well():
        fields = {"rounds": rounds, "sample": sample}
        asked: dict[str, Any] = {name: str(value) for name, value in fields.items() if value is not None}
        experiment = experiment_of(task, {**asked, **settings_of(set_, clients, data)}, comparing=True)
        chosen = comparisons.parse_seeds(seeds) if seeds else [experiment.seed]
        comparison = comparisons.of_file(experiment, algorithms, chosen, tuned, until)
        compare_and_show(comparison, out, jobs, as_json)


def compare_and_show(comparison: comparisons.Comparison, out: Path | None, jobs: int, as_json: bool) -> None:
    """Run a comparison, or continue it, and show what came out."""
    if as_json:
        compared = comparisons.run(comparison, out, jobs=jobs)
    else:
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bars:
            bar = bars.add_task("", total=None)
            show = lambda done, members: bars.update(bar, total=members, completed=done)
            compared = comparisons.run(comparison, out, show, jobs)
    picture = report.comparison_curves(compared)
    if as_json:
        print(json.dumps(report.comparison_json(compared)))
        return
    console.print(report.comparison(compared))
    for member in compared.members:
        if not member.done:
            console.print(f"{member.algorithm} (seed {member.seed}): {member.failure}")
    console.print(
        f"Floats and oracle calls are means per client. Results in [bold]{compared.folder}[/bold]: "
        f"{comparisons.COMPARISON}, {picture.name}, and a folder for each run",
        soft_wrap=True,
        highlight=False,
    )
