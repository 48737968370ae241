"""What a site types."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation.cli.app import app, console, say


@app.command()
def request(
    name: Annotated[str, typer.Argument(help="Name of this party, as the coordinator lists it.")],
    role: Annotated[str, typer.Option(help="'site' or 'coordinator'.")] = "site",
    folder: Annotated[Path | None, typer.Option(help="Folder of this party. Default: its name.")] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Make a new private key, even if there is one.")] = False,
) -> None:
    """Make a private key, which stays here, and a request for the coordinator. Also how a certificate is renewed."""
    from fedbilevel.federation import kits
    from fedbilevel.federation.authority import fingerprint, read_request, spoken
    from fedbilevel.federation.project import check_party

    check_party(name, role)
    made = kits.request(folder or Path(name), name, role, new_key)
    key = spoken(fingerprint(read_request(made).key))
    console.print(
        f"Send {made} to the coordinator, and tell them its fingerprint by another way, say by telephone: {key}\n"
        f"The private key stays in {made.parent / kits.STARTUP}: do not send it to anybody, and do not lose it.\n"
        f"With the kit that you get back: fedbilevel federation join {name}.zip"
        + (" --data FILE" if role == "site" else "")
        + ("" if folder is None else f" --folder {folder}"),
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="Start-up kit from the coordinator.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="A .csv, .parquet or .npz file, a folder of images, package.module:function, or 'builtin' for an "
            "experiment on the task's own data. An administrator has none."
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=YOURS", help="Your name for a column of the experiment. May be repeated."),
    ] = None,
    id: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Your column that names rows in suspects.csv. Default: their numbers."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of this party, from 'request'. Default: its name.")
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="Refuse a kit of another federation than the one with this fingerprint.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the data and show what would be sent, but send nothing.")
    ] = False,
    approve: Annotated[
        bool, typer.Option("--approve", help="Take part in the kit's study without being asked.")
    ] = False,
    study: Annotated[
        list[Path] | None, typer.Option(help="Also take part in the study of this file. May be repeated.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="Also take part in every study that keeps the rules of this file.")
    ] = None,
    largest_upload: Annotated[float, typer.Option(help="Largest message to send, in megabytes.")] = 100.0,
    algorithm: Annotated[list[str] | None, typer.Option(help="Run only this algorithm. May be repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Take part only in this task. May be repeated.")] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE[=HASH]", help="Allow studies to run code of this installed package. May be repeated."
        ),
    ] = None,
    min_clients: Annotated[int, typer.Option(help="Fewest parties that the federation must have.")] = 2,
    min_rows: Annotated[int, typer.Option(help="Fewest rows that any number sent may be computed from.")] = 10,
    share_counts: Annotated[
        bool, typer.Option("--share-counts", help="Tell the coordinator how many labels of each class are suspicious.")
    ] = False,
) -> None:
    """Take part with this site's data, which stay here, in studies that you approve. Ctrl-C leaves."""
    from fedbilevel.federation import authority
    from fedbilevel.federation import join as joining
    from fedbilevel.federation.consent import Consent, Limits, Rules, digest
    from fedbilevel.federation.kits import Kit
    from fedbilevel.federation.preview import preview

    if not kit.is_file():
        raise FedbilevelError(f"there is no start-up kit {kit}.")
    columns: dict[str, str] = {}
    for pair in column or []:
        name, equals, own = pair.partition("=")
        if not equals or not name or not own:
            raise FedbilevelError(f"--column needs NAME=YOURS, for instance --column age=Alter, not '{pair}'.")
        columns[name] = own
    limits = Limits(largest_upload, tuple(algorithm or ()), tuple(task or ()), min_clients, min_rows, share_counts)
    allowed = None if rules is None else Rules.read(rules)
    found = Kit.read(kit)
    seen = authority.spoken(found.fingerprint)
    if fingerprint is not None and not authority.same(fingerprint, found.fingerprint):
        raise FedbilevelError(f"{kit} is from another federation, {seen}: ask the coordinator for the right one.")
    console.print(
        f"Federation {found.federation}, fingerprint {seen}. The certificate is valid for {found.days} more days.",
        highlight=False,
        soft_wrap=True,
    )
    if found.days < authority.SOON:
        say(f"renew it: send the coordinator the file of 'fedbilevel federation request {found.party}'.")
    if found.role != "site":
        made = joining.administrator(found, folder)
        console.print(f"FLARE's console and API start from {made}, as {found.user}.", highlight=False, soft_wrap=True)
        return
    if data is None:
        raise FedbilevelError("name the data of this site with --data FILE, or --data builtin.")
    place, settings = joining.unpack(kit, folder, data, columns)
    settings = replace(settings, id=id or "", consent=Consent((), allowed, limits, packages=_packages(plugin or [])))
    about = joining.about(place)
    texts = {"the kit's study": (about["experiment"], approve)}
    texts |= {str(path): (joining.text_of(path), True) for path in study or []}
    approved, schemas = [], []
    for what, (text, agreed) in texts.items():
        schemas.append(digest(repr(preview(place, settings, text, console).schema)))
        if agreed or (not dry_run and allowed is None and not study and _asked(what)):
            approved.append(digest(text))
    if dry_run:
        console.print("Dry run: nothing was sent.")
        return
    if not approved and allowed is None:
        raise FedbilevelError("this site takes part in no study: approve the kit's with --approve, or give --rules.")
    settings = replace(settings, consent=replace(settings.consent, approved=tuple(approved), schemas=tuple(schemas)))
    say(f"connecting to {about['host']}:{about['port']} as {about['party']} ...")
    try:
        joining.Joined(place, settings, say).serve()
    except KeyboardInterrupt:
        say("left the federation. Run the same command to join again and continue.")


def _packages(listed: list[str]) -> dict[str, str]:
    """The packages of ``--plugin`` with the hash of their files here, which must be the given one, if there is one."""
    from fedbilevel.runs.plugins import folder_of, hash_of

    found: dict[str, str] = {}
    for each in listed:
        name, _, wanted = each.partition("=")
        found[name] = hash_of(folder_of(name))
        if wanted and (len(wanted) < 12 or not found[name].startswith(wanted)):
            raise FedbilevelError(f"the package {name} here has the hash {found[name]}, not {wanted}.")
        console.print(f"Package {name}: {found[name]}", highlight=False, soft_wrap=True)
    return found


def _asked(what: str) -> bool:
    """Whether the user wants to take part; nobody is asked where nobody can answer."""
    return sys.stdin.isatty() and typer.confirm(f"Take part in {what}?", default=False)


@app.command()
def log(
    folder: Annotated[Path, typer.Argument(help="Folder of a site, of a federation, or of one of its runs.")],
    last: Annotated[int, typer.Option(help="Also show the last N lines one by one.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that no line was changed or removed since it was written.")
    ] = False,
) -> None:
    """Show what a site has sent, what a coordinator has done, or the exchanges of a run; or check that nobody changed
    these ledgers.
    """
    from fedbilevel.federation.ledgers import check_ledgers, ledger

    if verify:
        check_ledgers(folder, console)
    else:
        ledger(folder, console, last)
