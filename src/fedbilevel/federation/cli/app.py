"""What the commands of a federation share: the group they belong to, and how they speak."""

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedbilevel.errors import readable
from fedbilevel.federation import project

app = typer.Typer(no_args_is_help=True, help="Run a federation between real parties, with mutual TLS, on NVIDIA FLARE.")
console = Console()

Which = Annotated[
    Path | None, typer.Option("--federation", help="Folder of the federation. Default: the only one here.")
]


@app.callback()
def _needs_flare() -> None:
    if "--help" not in sys.argv:
        project.needs_flare()


def say(text: str) -> None:
    """Print a line with the time."""
    console.print(f"{datetime.now():%H:%M:%S}  {escape(readable(text))}", soft_wrap=True, highlight=False)
