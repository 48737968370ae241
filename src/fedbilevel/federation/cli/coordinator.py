"""What a coordinator types to serve a federation, and to run studies. ``parties.py`` has who takes part."""

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
def start(folder: Annotated[Path, typer.Argument(help="Folder of the federation.")]) -> None:
    """Start the server and continue its unfinished runs. Ctrl-C stops it."""
    from fedbilevel.federation import setup
    from fedbilevel.federation.coordinator import Coordinator

    for sentence in setup.expiring(project.load(folder)):
        say(sentence)
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
def show_status(
    federation: Which = None,
    serials: Annotated[bool, typer.Option("--serials", help="List every certificate with its serial number.")] = False,
) -> None:
    """Show which parties are connected, how long their certificates are valid, and the state of all runs."""
    from fedbilevel.federation import coordinator, setup
    from fedbilevel.storage.run_folder import RunFolder

    folder = project.find(federation)
    known = project.load(folder)
    alive = coordinator.pid(folder)
    connected = coordinator.state(folder).get("connected", []) if alive else []
    word = f"is running (process {alive})" if alive else "is not running"
    console.print(f"{known.name}: the server on {known.host}:{known.port} {word}.", highlight=False)
    table = Table("party", "role", "", "certificate")
    for name, role in {project.SERVER: "", project.ADMIN: "", **known.parties}.items():
        here = "connected" if name in connected else "offline"
        table.add_row(name, role, here if role == "site" else "", _validity(known, name))
    console.print(table)
    for sentence in setup.expiring(known):
        console.print(sentence, highlight=False, soft_wrap=True)
    if serials:
        every = Table("certificate of", "serial number", "")
        for each in known.certificates:
            every.add_row(
                each.party, each.serial, "revoked" if each.serial in known.revoked else f"{each.days} days left"
            )
        console.print(every)
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


def _validity(known: project.Project, party: str) -> str:
    """The certificate of a party in two words."""
    found = known.certificate(party)
    if found is None:
        return "revoked" if party in known.excluded else "none yet"
    return f"{found.days} days left" if found.days >= 0 else "expired"
