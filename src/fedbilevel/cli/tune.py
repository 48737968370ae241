"""``tune``."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedbilevel.cli.options import (
    AlgorithmName,
    ClientCount,
    DataNames,
    Json,
    Sample,
    Set,
    TaskOrFile,
    by_key,
    console,
    ending_well,
    experiment_of,
    settings_of,
)  # fmt: skip
from fedbilevel.errors import FedbilevelError
from fedbilevel.runs import tuning
from fedbilevel.runs.comparison import parse_seeds
from fedbilevel.runs.fair_search import search
from fedbilevel.runs.plugins import short
from fedbilevel.runs.search_space import Range
from fedbilevel.storage.files import plain_json


def tune(
    task: TaskOrFile,
    algorithm: AlgorithmName = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Names with commas: one search with as many trials for each, on the same held-out rows. 'fedbilevel "
            "compare --tuned FOLDER' compares what it finds."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Number of settings to try, including those already in the folder.")] = 30,
    data: DataNames = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds of a trial. Default: the task's own.")] = None,
    clients: ClientCount = None,
    sample: Sample = None,
    seed: Annotated[int | None, typer.Option(help="Seed for everything random. Default: 0.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Several seeds, for instance 0..2: a setting is judged by its mean over them.")
    ] = None,
    set_: Set = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,...", help="Also try these values of a hyper-parameter. May be repeated."),
    ] = None,
    hold_out: Annotated[
        float | None,
        typer.Option(
            help="Share of the validation rows to hold out and to compare settings on. Default: 0; 0.2 for several."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results, or of a search to continue. Default: in runs/."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search for the hyper-parameters with the lowest validation loss. Test data are never used."""
    if seeds is not None and seed is not None:
        raise FedbilevelError("give --seed or --seeds.")
    several = parse_seeds(seeds) if seeds is not None else []
    first, more = (several[0], several[1:]) if several else (seed, [])
    fields = {"algorithm": algorithm, "rounds": rounds, "seed": first, "sample": sample}
    chosen = {name: str(value) for name, value in fields.items() if value is not None}
    given = experiment_of(task, {**chosen, **settings_of(set_, clients, data)})
    held = hold_out if hold_out is not None else 0.2 if algorithms else 0.0
    if algorithms and (algorithm or vary):
        raise FedbilevelError("--algorithms goes without --algorithm and --vary.")
    names = [name.strip() for name in algorithms.split(",") if name.strip()] if algorithms else [given.algorithm]
    every = [
        tuning.Tuning(replace(given, algorithm=name), trials, _varied(vary), held_out=held, seeds=tuple(more))
        for name in names
    ]
    run = (
        (lambda progress: search(every, out, progress))
        if algorithms
        else lambda progress: tuning.tune(every[0], out, progress)
    )
    with ending_well():
        if as_json:
            print(json.dumps(plain_json(run(None).summary)))
            return
        columns = (BarColumn(), TextColumn("trial {task.completed}/{task.total}"), TextColumn("{task.fields[seen]}"))
        with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
            bar = bars.add_task("", seen="compiling ...", total=None)

            def progress(done: int, trials: int, best: float | None) -> None:
                seen = "compiling ..." if best is None else f"best validation loss {best:.4g}"
                bars.update(bar, total=trials, completed=done, seen=seen)

            tuned = run(progress)
    if isinstance(tuned, tuning.Tuned):
        _show_tuned(tuned)
        return
    for each in tuned.members:
        _show_tuned(each)
    task = task if task.endswith(".toml") else tuned.found.task
    say = f"Compare them, each with its best: fedbilevel compare {task} --tuned {tuned.folder}"
    console.print(say, soft_wrap=True, highlight=False, markup=False)


def _varied(pairs: list[str] | None) -> dict[str, str]:
    needs = "--vary needs KEY=VALUES, for instance --vary local_steps=1,5"
    varied = by_key(pairs, needs)
    for key, values in varied.items():
        if not values:
            raise FedbilevelError(f"{needs}, not '{key}='.")
    return varied


def _show_tuned(tuned: tuning.Tuned) -> None:
    best, suggested = tuned.best, tuned.suggested
    title = f"{short(tuned.experiment.task)}, {tuned.experiment.name}, {len(tuned.trials)} trials"
    table = Table(title=title, title_justify="left")
    for heading in ("", "suggested", "best", "searched", "importance"):
        table.add_column(heading, justify="right" if heading else "left")
    shown = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
    for name, values in tuned.space.items():
        ranged = isinstance(values, Range)
        searched = f"{values.low:.3g} .. {values.high:.3g}" if ranged else ", ".join(map(str, values.values))
        importance = f"{tuned.importance[name]:.0%}" if name in tuned.importance else "-"
        table.add_row(name, shown(suggested.settings[name]), shown(best.settings[name]), searched, importance)
    table.add_section()
    table.add_row("validation loss", shown(suggested.value), shown(best.value), style="bold")
    console.print(table)
    states = ", ".join(f"{tuned.summary[state]} {state}" for state in ("complete", "pruned", "diverged"))
    files = ", ".join(sorted(path.name for path in tuned.folder.iterdir()))
    console.print(f"Trials: {states}. Results in [bold]{tuned.folder}[/bold]: {files}", soft_wrap=True, highlight=False)
    console.print(f"Run the best: fedbilevel run {tuned.folder / 'best.toml'}", soft_wrap=True, highlight=False)
