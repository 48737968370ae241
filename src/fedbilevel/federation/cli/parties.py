"""What a coordinator types to decide who takes part: create, add, approve, renew, revoke."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import project
from fedbilevel.federation.cli.app import AuthorityFolder, PassphraseFile, Which, app, console, passphrase

Days = Annotated[int, typer.Option("--days", help="Days for which a certificate is valid.")]


@app.command()
def create(
    file: Annotated[Path, typer.Argument(help="TOML file with the parties, the server's address and the experiment.")],
    out: Annotated[Path | None, typer.Option(help="Folder to create. Default: the name of the federation.")] = None,
    authority: AuthorityFolder = None,
    passphrase_file: PassphraseFile = None,
    days: Days = 360,
) -> None:
    """Create a federation: its certificate authority, its server and the coordinator's own certificate."""
    from fedbilevel.federation import setup
    from fedbilevel.federation.study import Study

    wanted = project.read(file)
    folder = out or Path(wanted.name)
    given = Study.of(wanted.experiment, "the experiment", None)
    given.quorum(len(wanted.sites))
    given.build()
    made = setup.create(wanted, folder, passphrase(passphrase_file, new=True), authority, days)
    console.print(f"[bold]{wanted.name}[/bold]: everything is in {folder}, readable by you only.", highlight=False)
    table = Table("party", "makes a key, and sends you its request", "and you then run")
    for name, role in wanted.parties.items():
        more = "" if role == "site" else f" --role {role}"
        table.add_row(name, f"fedbilevel federation request {name}{more}", f"fedbilevel federation approve {name}.csr")
    console.print(table)
    _say(
        f"{made.folder} contains the key of the authority, encrypted with your passphrase. Only 'approve' and 'renew' "
        f"need it: you can keep it on another disk, and name it with --authority.\n"
        f"Fingerprint of this federation, for the sites: {_fingerprint(made.root.public_key())}\n"
        f"The sites must be able to reach {wanted.host}, port {wanted.port} (TCP); they need no open port themselves.\n"
        f"Next: fedbilevel federation start {folder}"
    )


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the party.")],
    role: Annotated[str, typer.Option(help="'site' or 'coordinator'.")] = "site",
    federation: Which = None,
) -> None:
    """List another party, so that its request can be approved. Runs that have already started continue without it."""
    from fedbilevel.federation import setup

    setup.add(project.find(federation), name, role)
    more = "" if role == "site" else f" --role {role}"
    _say(f"{name} can now send you the file of: fedbilevel federation request {name}{more}")


@app.command()
def approve(
    request: Annotated[Path, typer.Argument(help="The file of a party's 'request'.")],
    federation: Which = None,
    authority: AuthorityFolder = None,
    passphrase_file: PassphraseFile = None,
    days: Days = 360,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether the fingerprint is right.")] = False,
) -> None:
    """Sign a party's request: make its start-up kit, which contains nothing secret. Also renews a certificate."""
    from fedbilevel.federation import setup

    folder = project.find(federation)
    asked, again = setup.requested(folder, request)
    before = ", who has had one before" if again else ""
    _say(f"A certificate for {asked.name}, a {asked.role}{before}, with the key {_fingerprint(asked.key)}")
    if not yes:
        if not sys.stdin.isatty():
            raise FedbilevelError("compare the fingerprint with the party's, then approve with --yes.")
        if not typer.confirm(f"Did {asked.name} tell you the same fingerprint?", default=False):
            raise FedbilevelError("not approved: whoever sent this request has another key.")
    opened = setup.Authority.open(setup.authority_folder(folder, authority), passphrase(passphrase_file))
    kit = setup.admit(folder, asked, opened, days)
    _say(
        f"Send {kit} to {asked.name}. It is not secret, but tell them the fingerprint of this federation by another "
        f"way: {_fingerprint(opened.root.public_key())}"
    )


@app.command()
def renew(
    federation: Which = None,
    authority: AuthorityFolder = None,
    passphrase_file: PassphraseFile = None,
    days: Days = 360,
) -> None:
    """Renew the certificates of the server, the coordinator and the authority. Parties renew theirs with 'request'."""
    from fedbilevel.federation import coordinator, setup

    folder = project.find(federation)
    if coordinator.pid(folder) is not None:
        raise FedbilevelError(f"stop the server first: fedbilevel federation stop --federation {folder}")
    setup.renew(folder, passphrase(passphrase_file), authority, days)
    _say(f"Renewed. Next: fedbilevel federation start {folder}")


@app.command()
def revoke(
    name: Annotated[str | None, typer.Argument(help="Name of the party.")] = None,
    federation: Which = None,
    serial: Annotated[str | None, typer.Option(help="Revoke only the certificate with this serial number.")] = None,
) -> None:
    """Refuse the certificates that a party has so far, for instance because its key was lost."""
    from fedbilevel.federation import setup

    gone = setup.revoke(project.find(federation), name, serial)
    _say(
        f"Revoked {len(gone)} certificate{'s' * (len(gone) != 1)}: {', '.join(gone)}. To let the same people in again, "
        "approve a new request of theirs, made with --new-key."
    )


def _fingerprint(key: object) -> str:
    from fedbilevel.federation.authority import fingerprint, spoken

    return spoken(fingerprint(key))


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
