"""What a coordinator types."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import project
from fedbilevel.federation.cli.app import Which, app, console, say
from fedbilevel.federation.cli.following import follow
from fedbilevel.runs.interrupts import Terminated


@app.command()
def create(
    file: Annotated[Path, typer.Argument(help="TOML file with the parties, the server's address and the experiment.")],
    out: Annotated[Path | None, typer.Option(help="Folder to create. Default: the name of the federation.")] = None,
) -> None:
    """Create the certificates and a start-up kit for every party."""
    from fedbilevel.federation.study import Study

    wanted = project.read(file)
    folder = out or Path(wanted.name)
    given = Study.of(wanted.experiment, "the experiment")
    given.quorum(len(wanted.sites))
    given.build()
    kits = project.create(wanted, folder)
    console.print(f"[bold]{wanted.name}[/bold]: everything is in {folder}, readable by you only.", highlight=False)
    table = Table("kit", "send it to", "they then run")
    for kit, (name, role) in zip(kits, wanted.parties.items(), strict=True):
        typed = f"fedbilevel federation join {kit.name} --data FILE" if role == "site" else "(an administrator's kit)"
        table.add_row(str(kit), name, typed)
    console.print(table)
    console.print(
        f"Each kit contains a private key: send it to its party only, over a channel you trust, not by plain e-mail.\n"
        f"{folder} contains the key of the certificate authority: back it up, and do not share it.\n"
        f"The sites must be able to reach {wanted.host}, port {wanted.port} (TCP); they need no open port themselves.\n"
        f"Next: fedbilevel federation start {folder}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def start(folder: Annotated[Path, typer.Argument(help="Folder of the federation.")]) -> None:
    """Start the server and continue its unfinished runs. Ctrl-C stops it."""
    from fedbilevel.federation.coordinator import Coordinator

    project.load(folder)
    try:
        Coordinator(folder, say).serve()
    except KeyboardInterrupt:
        say("stopped. Runs continue when the server is started again.")


@app.command()
def run(
    experiment: Annotated[Path | None, typer.Argument(help="Experiment file. Default: the federation's own.")] = None,
    federation: Which = None,
    resume: Annotated[bool, typer.Option("--resume", help="Follow the last run again, or continue it.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: date and time.")] = None,
) -> None:
    """Start a run and follow its progress. Ctrl-C stops following; the run continues."""
    from fedbilevel.federation import coordinator
    from fedbilevel.storage.run_folder import RunFolder

    folder = project.find(federation)
    if coordinator.pid(folder) is None:
        raise FedbilevelError(f"the server is not running: start it with 'fedbilevel federation start {folder}'.")
    if resume:
        named = [run for run in coordinator.runs(folder) if name in (None, run.name)]
        if not named:
            raise FedbilevelError(f"{folder} has no run to continue.")
        place = named[-1]
        if RunFolder(place).want_again():
            project.note(folder, "run requested again", run=place.name)
    else:
        path = experiment
        if path is None:
            path = folder / "experiment.toml"
            path.write_text(project.load(folder).experiment)
        if not path.is_file():
            raise FedbilevelError(f"there is no experiment file {path}.")
        place = coordinator.want(folder, path, name or f"{datetime.now():%Y%m%d-%H%M%S}")
    try:
        follow(place)
    except KeyboardInterrupt as interrupt:
        console.print(
            "The run continues on the server. Follow it again: "
            f"fedbilevel federation run --resume --federation {folder}",
            soft_wrap=True,
            highlight=False,
        )
        raise SystemExit(143 if isinstance(interrupt, Terminated) else 130) from None


@app.command("status")
def show_status(federation: Which = None) -> None:
    """Show which parties are connected, and the state of all runs."""
    from fedbilevel.federation import coordinator
    from fedbilevel.storage.run_folder import RunFolder

    folder = project.find(federation)
    known = project.load(folder)
    alive = coordinator.pid(folder)
    connected = coordinator.state(folder).get("connected", []) if alive else []
    word = f"is running (process {alive})" if alive else "is not running"
    console.print(f"{known.name}: the server on {known.host}:{known.port} {word}.", highlight=False)
    table = Table("party", "role", "")
    for name, role in known.parties.items():
        here = "revoked" if name in known.revoked else "connected" if name in connected else "offline"
        table.add_row(name, role, here if role == "site" or here == "revoked" else "")
    console.print(table)
    runs = Table("run", "task", "algorithm", "status", "round", "")
    queued = 0
    for place in coordinator.runs(folder):
        run = RunFolder(place).info()
        goal = f"{run.get('round', 0)}/{run['rounds']}" if "rounds" in run else "-"
        more = run.get("failure") or ""
        if run.get("status") in ("wanted", "waiting"):
            queued += 1
            more = " ".join(filter(None, (f"number {queued} in the queue;", run.get("waits"), more))).rstrip(";")
        runs.add_row(place.name, run.get("task", ""), run.get("title", ""), run.get("status", ""), goal, escape(more))
    if runs.row_count:
        console.print(runs)


@app.command()
def stop(
    federation: Which = None,
    only_run: Annotated[str | None, typer.Option("--run", help="Stop only this run; the server keeps running.")] = None,
) -> None:
    """Stop the server, or one run. Nothing is lost: 'start' or 'run --resume' continues."""
    from fedbilevel.federation import coordinator
    from fedbilevel.federation.consent import check_run_name
    from fedbilevel.storage.run_folder import RunFolder

    folder = project.find(federation)
    if only_run is not None:
        check_run_name(only_run)
        run = RunFolder(folder / "runs" / only_run)
        if not run.info():
            raise FedbilevelError(f"there is no run {only_run} in {folder}.")
        if not run.enter("stopped"):
            raise FedbilevelError(f"{only_run} cannot be stopped: it is already {run.info()['status']}.")
        project.note(folder, "run stopped", run=only_run)
        console.print(f"{only_run} will stop after its current round.", highlight=False)
        return
    was = coordinator.stop(folder)
    console.print("The server has stopped." if was else "The server was not running.")


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the party.")],
    role: Annotated[str, typer.Option(help="'site' or 'coordinator'.")] = "site",
    federation: Which = None,
) -> None:
    """Add a party: create its start-up kit. Runs that have already started continue without it."""
    made = project.add(project.find(federation), name, role)
    console.print(f"Send {made} to {name} over a channel you trust.", highlight=False)


@app.command()
def revoke(name: Annotated[str, typer.Argument(help="Name of the party.")], federation: Which = None) -> None:
    """Exclude a party for good, for instance because its key was lost."""
    folder = project.find(federation)
    project.revoke(folder, name)
    console.print(
        f"{name} can no longer connect. To let the same people in again, add them under another name.",
        highlight=False,
    )
