"""``reproduce``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedbilevel import reproduction
from fedbilevel.cli.options import console, ending_well
from fedbilevel.errors import FedbilevelError
from fedbilevel.storage.files import new_folder


def reproduce(
    id: Annotated[str | None, typer.Argument(help="Which experiment (see --list).")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments of the papers.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds. Default: as in its file.", min=1)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run: few rounds, one seed, small data.")] = False,
    search: Annotated[
        bool,
        typer.Option("--search", help="Search for parameters first, as its file specifies (needs Optuna)."),
    ] = False,
    judge: Annotated[
        bool, typer.Option("--judge", help="Run nothing: judge the saved curves again and rewrite the page.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Number of processes. Default: one per core.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the runs; an existing one is continued. Default: a new one in runs/."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            help="Folder for page, picture and curves. Default: reproduction/, or that of the runs with --quick."
        ),
    ] = None,
) -> None:
    """Reproduce an experiment of a paper: its numbers beside ours, and whether its claims hold."""
    if list_ or id is None:
        table = Table("experiment", "what it is", "in the paper", "seeds")
        for name in reproduction.names():
            made = reproduction.read(name)
            table.add_row(name, made.title, made.where, str(made.seeds))
        console.print(table)
        return
    chosen = [name for name, given in {"--judge": judge, "--quick": quick, "--search": search}.items() if given]
    if len(chosen) > 1 or (seeds and (judge or quick)):
        raise FedbilevelError(f"{' and '.join([*chosen, *(['--seeds'] if seeds else [])])} cannot be combined.")
    made = reproduction.read(id)
    if quick:
        made = made.shortened()
    elif seeds is not None:
        made = replace(made, seeds=seeds)
        reproduction.check(made)
    words = [f"fedbilevel reproduce {id}", *([f"--seeds {seeds}"] if seeds else [])]
    if judge:
        pages = to or Path("reproduction")
        done = reproduction.read_curves(made, pages / f"{id}.csv")
        _show_reproduced(done)
        written = reproduction.write(done, pages, words[0], keep=False)
        console.print(f"Written: {written}", soft_wrap=True, highlight=False)
        return
    words += chosen
    folder = out if out is not None and out.is_dir() else new_folder(f"reproduce-{id}", out)
    with ending_well("Run the same command with the same --out to continue."):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bars:
            bar = bars.add_task("searching" if search else "runs", total=None)
            show = lambda done, members: bars.update(bar, total=members, completed=done)
            if search:
                made = reproduction.search(made, folder / "search", show, jobs)
                bars.update(bar, description="runs")
            done = reproduction.run(made, folder, show, jobs)
    _show_reproduced(done)
    pages = to or (folder if quick else Path("reproduction"))
    written = reproduction.write(done, pages, " ".join(words))
    console.print(f"Written: {written}; the runs are in {folder}", soft_wrap=True, highlight=False)


def _show_reproduced(done: reproduction.Reproduced) -> None:
    made = done.reproduction
    headings, *rows = reproduction.table(done)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    if sum(widths) + 3 * len(widths) < console.width:
        table = Table(title=f"{made.id}: {made.title}", title_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="left" if number < 2 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:  # too narrow for a table that can be read
        console.print(f"{made.id}: {made.title}", highlight=False)
        for row in rows:
            said = "; ".join(f"{heading} {cell}" for heading, cell in zip(headings[2:], row[2:], strict=True))
            console.print(f"  {', '.join(cell for cell in row[:2] if cell)}: {said}", highlight=False, markup=False)
    for kind, claims in reproduction.judged(done).items():
        console.print(f"Claims, parameters: {reproduction.PARAMETERS[kind]}", highlight=False)
        for each in claims:
            console.print(
                f"  {each.word}: {each.claim.words} ({each.numbers})",
                highlight=False,
                markup=False,
            )
    console.print(f"[bold]Verdict: {reproduction.verdict(done)}[/bold]", highlight=False)
    for name, words in reproduction.headline(done).items():
        console.print(f"  {name}: {words}", highlight=False, markup=False)
