"""``fedbilevel federation ...``: the commands of coordinators and sites, and a demo of both.

A file for each kind of people. Imports the rest of federation; only the package's own command line imports it.
"""

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.federation.cli import coordinator, parties, service, site, watch  # noqa: F401  (they add their commands)
from fedbilevel.federation.cli.app import app, console


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for everything. Default: a new one.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds. Default: what suits the task.")] = None,
    task: Annotated[
        str, typer.Option(help="'regularization', or 'clean': find wrong labels, some of which were planted.")
    ] = "regularization",
) -> None:
    """Run a server and four sites as real processes on this machine, with mutual TLS."""
    from fedbilevel.federation.demo import run as run_demo

    run_demo(task, out, rounds, console)


__all__ = ["app"]
