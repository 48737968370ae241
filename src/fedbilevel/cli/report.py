"""``report`` and ``watch``."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedbilevel.cli.options import console
from fedbilevel.report import figures, page
from fedbilevel.report import watch as watching


def write_report(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Run folders, or folders of run folders.")],
    out: Annotated[Path | None, typer.Option(help="File to write. Default: report.html in the first folder.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    draw: Annotated[
        bool, typer.Option("--figures", help="Also draw figures for a paper, in figures/ next to the report.")
    ] = False,
) -> None:
    """Write an HTML page about runs and comparisons, finished or not: curves, tables, pictures, settings."""
    written = page.write(paths, out or paths[0] / "report.html")
    console.print(f"Report in [bold]{escape(str(written))}[/bold]", soft_wrap=True, highlight=False)
    if draw:
        made = figures.write(paths, written.parent / "figures")
        console.print(f"{len(made)} figures in {escape(str(made[0].parent))}", soft_wrap=True, highlight=False)
    if open_:
        webbrowser.open(written.resolve().as_uri())


def watch(
    path: Annotated[Path, typer.Argument(help="A run folder, or a folder of run folders.")],
    port: Annotated[int, typer.Option(help="Port on this machine. Default: any free port.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Serve the report on this machine and update it while runs are in progress."""
    watching.serve(path, port, open_)
