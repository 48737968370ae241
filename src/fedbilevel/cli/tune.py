"""``tune``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedbilevel.cli.options import (
    AlgorithmName,
    ClientCount,
    DataName,
    Json,
    Sample,
    Set,
    by_key,
    console,
    ending_well,
    settings_of,
)  # fmt: skip
from fedbilevel.errors import FedbilevelError
from fedbilevel.runs import tuning
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.search_space import Range
from fedbilevel.storage.files import plain_json


def tune(
    task: Annotated[str, typer.Argument(help="Name of a task (see 'fedbilevel tasks').")],
    algorithm: AlgorithmName = None,
    trials: Annotated[int, typer.Option(help="Number of settings to try, including those already in the folder.")] = 30,
    data: DataName = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds of a trial. Default: the task's own.")] = None,
    clients: ClientCount = None,
    sample: Sample = None,
    seed: Annotated[int, typer.Option(help="Seed for everything random.")] = 0,
    set_: Set = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,...", help="Also try these values of a hyper-parameter. May be repeated."),
    ] = None,
    hold_out: Annotated[
        float,
        typer.Option(help="Share of the validation rows to hold out and to compare settings on."),
    ] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results, or of a search to continue. Default: in runs/."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search for the hyper-parameters with the lowest validation loss. Test data are never used."""
    given = Experiment(task, algorithm, rounds, seed, sample)
    asked = tuning.Tuning(given.changed(settings_of(set_, clients, data)), trials, _varied(vary), held_out=hold_out)
    with ending_well():
        if as_json:
            print(json.dumps(plain_json(tuning.tune(asked, out).summary)))
            return
        columns = (BarColumn(), TextColumn("trial {task.completed}/{task.total}"), TextColumn("{task.fields[seen]}"))
        with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
            bar = bars.add_task("", seen="compiling ...", total=None)

            def progress(done: int, trials: int, best: float | None) -> None:
                seen = "compiling ..." if best is None else f"best validation loss {best:.4g}"
                bars.update(bar, total=trials, completed=done, seen=seen)

            tuned = tuning.tune(asked, out, progress)
    _show_tuned(tuned)


def _varied(pairs: list[str] | None) -> dict[str, str]:
    needs = "--vary needs KEY=VALUES, for instance --vary local_steps=1,5"
    varied = by_key(pairs, needs)
    for key, values in varied.items():
        if not values:
            raise FedbilevelError(f"{needs}, not '{key}='.")
    return varied


def _show_tuned(tuned: tuning.Tuned) -> None:
    best, suggested = tuned.best, tuned.suggested
    title = f"{tuned.experiment.task}, {tuned.experiment.algorithm}, {len(tuned.trials)} trials"
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
