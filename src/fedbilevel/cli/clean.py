"""``clean``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedbilevel.cleaning import folder as folders
from fedbilevel.cleaning import terminal
from fedbilevel.cleaning.found import Found
from fedbilevel.cli.options import Json, Out, console, ending_well
from fedbilevel.errors import FedbilevelError, readable

Columns = list[str] | None


def clean(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="A CSV, TSV or Parquet file; several, one for each client; or a folder of pictures.",
            show_default=False,
        ),
    ],
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column with the labels.")] = None,
    client: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column that says which client a row belongs to.")
    ] = None,
    client_from: Annotated[
        str | None,
        typer.Option(metavar="folder", help="The folders of pictures are clients, and the folders in them classes."),
    ] = None,
    trusted: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The column that marks labels which somebody has checked: yes or no."),
    ] = None,
    id: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column with the names of the rows. Default: their lines.")
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.npy", help="Features to use in place of the columns: a row for each row of the table."
        ),
    ] = None,
    drop: Annotated[Columns, typer.Option(metavar="COLUMN", help="Leave a column out. May be repeated.")] = None,
    categorical: Annotated[
        Columns, typer.Option(metavar="COLUMN", help="Treat numbers in a column as names. May be repeated.")
    ] = None,
    numeric: Annotated[
        Columns, typer.Option(metavar="COLUMN", help="Refuse anything but numbers in a column. May be repeated.")
    ] = None,
    relabel: Annotated[
        bool,
        typer.Option(
            "--relabel", help="Correct suspicious labels in the cleaned data, instead of dropping their rows."
        ),
    ] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="Search longer, for about five times the cost.")] = False,
    seed: Annotated[int, typer.Option(help="Seed for everything random.")] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Find wrong labels in your own tables or pictures, and list them, the worst first."""
    asked = folders.Search(
        tuple(sources), label, client, client_from, trusted, id, features,
        _columns(drop), _columns(categorical), _columns(numeric), relabel, thorough, seed,
    )  # fmt: skip
    with ending_well():
        data = asked.read()
        folder = folders.place(asked, out)
    search(asked, data, folder, as_json)


def go_on(folder: Path, as_json: bool = False) -> None:
    """Continue the search of a folder."""
    if (folder / folders.SUMMARY).exists():
        raise FedbilevelError(f"the search in {folder} has finished.")
    asked = folders.Search.of(folder)
    search(asked, asked.read(), folder, as_json)


def search(asked: folders.Search, data: folders.OwnTable, folder: Path, as_json: bool) -> None:
    """Search, with what was understood before and what was found after it."""
    with ending_well(f"Continue with: fedbilevel resume {folder}"):
        if as_json:
            found = folders.run(asked, data, folder)
            print(json.dumps({**folders.summary(found), "folder": str(folder)}))
            return
        console.print(terminal.understood(data))
        with _Bar() as bar:
            found = folders.run(asked, data, folder, bar)
    _show(found, folder)


def _show(found: Found, folder: Path) -> None:
    console.print(terminal.per_client(found))
    console.print(terminal.worst(found))
    if found.gain is not None:
        _say(found.gain.sentence)
    for sentence in found.warnings:
        _say(f"Warning: {sentence}", "bold red")
    files = ", ".join(sorted(path.name for path in folder.glob("[!.]*")))
    _say(f"Results in {folder}: {files}")


def _say(sentence: str, style: str | None = None) -> None:
    """A sentence that may have anybody's words in it."""
    console.print(readable(sentence), style=style, highlight=False, markup=False, soft_wrap=True)


def _columns(names: Columns) -> tuple[str, ...]:
    return tuple(names or ())


class _Bar:
    """The progress of a search: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self.bars = Progress(
            TextColumn("searching"),
            BarColumn(30),
            TextColumn("round {task.completed}/{task.total}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bars.add_task("", total=None)
        self.told = 0

    def __enter__(self) -> "_Bar":
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def __call__(self, done: int, rounds: int) -> None:
        self.bars.update(self.task, completed=done, total=rounds)
        if not console.is_terminal and (done >= rounds or done >= self.told + rounds // 4):
            self.told = done
            console.print(f"searching: round {done}/{rounds}", highlight=False)
            sys.stdout.flush()
