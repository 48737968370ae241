"""What the commands of a federation share: the group they belong to, and how they speak."""

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedbilevel.errors import FedbilevelError, readable
from fedbilevel.federation import project
from fedbilevel.federation.process import PASSPHRASE

app = typer.Typer(no_args_is_help=True, help="Run a federation between real parties, with mutual TLS, on NVIDIA FLARE.")
console = Console()

Which = Annotated[
    Path | None, typer.Option("--federation", help="Folder of the federation. Default: the only one here.")
]
AuthorityFolder = Annotated[
    Path | None,
    typer.Option("--authority", help="Folder of the authority. Default: 'authority' in that of the federation."),
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option(help=f"File with the authority's passphrase. Default: the variable {PASSPHRASE}, or you are asked."),
]


@app.callback()
def _needs_flare() -> None:
    if "--help" not in sys.argv:
        project.needs_flare()


def say(text: str) -> None:
    """Print a line with the time."""
    console.print(f"{datetime.now():%H:%M:%S}  {escape(readable(text))}", soft_wrap=True, highlight=False)


def passphrase(file: Path | None, new: bool = False) -> str:
    """The passphrase of the authority: from a file, a variable, or the terminal."""
    if file is not None:
        try:
            return file.read_text().strip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise FedbilevelError(f"the passphrase cannot be read from {file}: {error}.") from None
    if given := os.environ.get(PASSPHRASE):
        return given
    if not sys.stdin.isatty():
        raise FedbilevelError(f"the authority needs a passphrase: set {PASSPHRASE}, or name a file, --passphrase-file.")
    return typer.prompt("Passphrase of the authority", hide_input=True, confirmation_prompt=new)
