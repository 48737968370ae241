"""What both coordinators and sites type to see how things are."""

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.federation import project
from fedbilevel.federation.cli.app import Which, app


@app.command()
def watch(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of a site, or of the federation. Default: the federation here.")
    ] = None,
    federation: Which = None,
    port: Annotated[int, typer.Option(help="Port on this machine. Default: any free port.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Serve a live page on this machine: the coordinator's, or that of a site with what it sees."""
    from fedbilevel.federation.watch import serve

    serve(folder or project.find(federation), port, open_)


@app.command()
def health(
    folder: Annotated[Path | None, typer.Argument(help="Folder of a site, or of the federation.")] = None,
    federation: Which = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Say in one line how the server or a site is. The exit code is 1 if something is wrong."""
    from fedbilevel.federation.health import of

    found = of(folder or project.find(federation))
    print(found.json() if json_ else found.line())
    raise typer.Exit(0 if found.healthy else 1)
