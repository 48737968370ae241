"""What coordinators and sites type to keep running for weeks."""

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.federation import project
from fedbilevel.federation.cli.app import Which, app, console, say


@app.command()
def rejoin(folder: Annotated[Path, typer.Argument(help="Folder of a site that has joined before.")]) -> None:
    """Take part again with the data, the approvals and the limits of the last 'join'. Ctrl-C leaves."""
    from fedbilevel.errors import FedbilevelError
    from fedbilevel.federation.join import Joined
    from fedbilevel.federation.worker import SETTINGS, Settings

    try:
        settings = Settings.load(folder)
    except (OSError, ValueError, TypeError, KeyError):
        raise FedbilevelError(
            f"{folder / SETTINGS} cannot be read: join once with 'fedbilevel federation join'."
        ) from None
    if not (settings.consent.approved or settings.consent.rules):
        raise FedbilevelError("this site takes part in no study: join again and approve one.")
    say(f"{settings.name} takes part again, as told in {folder / SETTINGS}.")
    try:
        Joined(folder, settings, say).serve()
    except KeyboardInterrupt:
        say("left the federation. Run the same command to join again and continue.")


@app.command()
def service(
    folder: Annotated[Path | None, typer.Argument(help="Folder of a site, or of the federation.")] = None,
    federation: Which = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write the files to. Default: print them.")] = None,
    user: Annotated[str | None, typer.Option(help="Who runs the service. Default: the owner of the folder.")] = None,
    dynamic_user: Annotated[
        bool, typer.Option("--dynamic-user", help="Let systemd make a user; the folder must be in /var/lib.")
    ] = False,
    container: Annotated[bool, typer.Option("--container", help="A Containerfile instead of units.")] = False,
) -> None:
    """Write units for systemd, or a Containerfile, that keep the server or a site running."""
    from fedbilevel.federation import service as services

    wanted = services.Service.of(folder or project.find(federation))
    if container:
        text, run = services.container(wanted)
        files, then = {"Containerfile": text}, run
    else:
        files = services.units(wanted, user, dynamic_user)
        names = " ".join(str((out or Path()) / name) for name in files)
        then = (
            f"sudo install -m 644 {names} /etc/systemd/system/ && sudo systemctl daemon-reload && "
            f"sudo systemctl enable --now {wanted.unit}.service {wanted.unit}-health.timer"
        )
    for name, text in files.items():
        if out is None:
            print(text)
        else:
            out.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text)
    if out is not None:
        console.print(
            f"Wrote {', '.join(files)} to {out}. To start it:\n{then}", soft_wrap=True, highlight=False, markup=False
        )
    else:
        print(f"# To start it, save the file{'s' if len(files) > 1 else ''} above, then: {then}")
