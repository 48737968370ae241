"""The coordinator's steps before and beside the runs: create a federation, add, approve, renew and revoke parties.

No private key of anybody else ever lies here: a party makes its own and sends a request (``kits.request``), and gets
back a kit without any secret (``approve``). Only signing needs the authority, whose folder may be elsewhere.
"""

from dataclasses import replace
from pathlib import Path

from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.federation import flare_files, kits, project, revocation
from fedbilevel.federation.authority import (
    DAYS,
    SOON,
    Authority,
    Request,
    check_passphrase,
    fingerprint,
    issued,
    new_key,
    pem,
    private_pem,
    read_request,
)
from fedbilevel.federation.project import ADMIN, SERVER, Issued, Project, load, save
from fedbilevel.storage.files import locked, private_folder, write_privately

AUTHORITY = "authority"


def authority_folder(folder: Path, elsewhere: Path | None = None) -> Path:
    """Where the authority of a federation is: in its folder, unless somebody says where else."""
    return elsewhere or folder / AUTHORITY


def create(
    wanted: Project, folder: Path, passphrase: str, authority: Path | None = None, days: int = DAYS
) -> Authority:
    """Create the folder of a federation: its authority, the server, and the coordinator's own administrator."""
    project.needs_flare()
    flare_files.check_place(folder.resolve())
    check_passphrase(passphrase)  # before there is anything in the folder
    place = authority_folder(folder, authority)
    for path, option in ((folder, "--out"), (place, "--authority")):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FedbilevelError(f"the folder {path} is not empty: choose another one with {option}.")
    for path in (folder, place):
        private_folder(path)
    made = Authority.create(place, wanted.name, passphrase)
    revocation.add(folder / SERVER, {})
    save(_with_own_certificates(wanted, folder, made, days), folder)
    project.note(folder, "created", parties=dict(wanted.parties), host=wanted.host, port=wanted.port)
    return made


def renew(folder: Path, passphrase: str, authority: Path | None = None, days: int = DAYS) -> None:
    """New keys and certificates for the server and the coordinator, and more time for the authority's certificate. The
    server must not be running: it would go on with the old ones, and its jobs with the new.
    """
    opened = Authority.open(authority_folder(folder, authority), passphrase)
    opened.renew()
    with locked(folder / project.FILE):
        before = load(folder)
        save(_with_own_certificates(before, folder, opened, days), folder)
    revocation.add(folder / SERVER, {each.serial: ADMIN for each in before.certificates if each.party == ADMIN})
    project.note(folder, "renewed")


def _with_own_certificates(known: Project, folder: Path, authority: Authority, days: int) -> Project:
    """Make keys and certificates of the server and the coordinator, and the files for FLARE."""
    new: list[Issued] = []
    for party, role, name in ((SERVER, "server", "server"), (ADMIN, "project_admin", "client")):
        key, start = new_key(), folder / party / kits.STARTUP
        certificate = authority.sign(known, party, role, key.public_key(), days)
        private_folder(start.parent)
        private_folder(start)
        write_privately(start / f"{name}.key", private_pem(key))
        write_privately(start / f"{name}.crt", pem(certificate))
        write_privately(start / kits.ROOT, pem(authority.root))
        new.append(issued(party, certificate))
    flare_files.coordinator(folder, known)
    return replace(known, certificates=(*known.certificates, *new))


def add(folder: Path, name: str, role: str = "site") -> None:
    """List a party, whose request can then be approved."""
    project.check_party(name, role)
    with locked(folder / project.FILE):
        known = load(folder)
        if name in known.parties:
            raise FedbilevelError(f"there is already a party called {name}: choose another name.")
        save(replace(known, parties={**known.parties, name: role}), folder)
    project.note(folder, "added", party=name, role=role)


def requested(folder: Path, path: Path) -> tuple[Request, bool]:
    """A request that may be approved, and whether its party has had a certificate before."""
    known, asked = load(folder), read_request(path)
    if asked.name not in known.parties:
        raise UnknownName("party", asked.name, known.parties, f"{path}: ")
    if (role := known.parties[asked.name]) != asked.role:
        raise FedbilevelError(f"{path}: {asked.name} is a {role} in this federation, but asks to be a {asked.role}.")
    key = fingerprint(asked.key)
    for each in known.certificates:
        if each.key == key and each.party != asked.name:
            raise FedbilevelError(f"{path}: this key is already used by {each.party}.")
        if each.key == key and each.serial in known.revoked:
            raise FedbilevelError(
                f"{path}: a certificate of this key was revoked; ask {asked.name} for a request with --new-key."
            )
    return asked, any(each.party == asked.name for each in known.certificates)


def approve(folder: Path, path: Path, passphrase: str, authority: Path | None = None, days: int = DAYS) -> Path:
    """Sign a request, and return the kit for its party."""
    asked, _ = requested(folder, path)
    return admit(folder, asked, Authority.open(authority_folder(folder, authority), passphrase), days)


def admit(folder: Path, asked: Request, authority: Authority, days: int = DAYS) -> Path:
    """Sign what was :func:`requested`, with an authority that is open already."""
    with locked(folder / project.FILE):
        known = load(folder)
        certificate = authority.sign(known, asked.name, known.parties[asked.name], asked.key, days)
        given = issued(asked.name, certificate)
        save(replace(known, certificates=(*known.certificates, given)), folder)
    project.note(folder, "approved", party=asked.name, serial=given.serial, key=given.key, until=given.until)
    written = project.kit(folder, asked.name)
    kits.made(known, asked.name, authority.root, certificate).write(written)
    return written


def revoke(folder: Path, name: str | None = None, serial: str | None = None) -> list[str]:
    """Revoke the certificates of a party, or one by its serial number. A running server refuses them within a second.
    Returns the serial numbers.
    """
    known = load(folder)
    if serial is not None:
        try:
            number = revocation.number(int(serial.replace(":", ""), 16))
        except (ValueError, OverflowError):
            raise FedbilevelError(f"{serial[:80]!r} is not a serial number: 'status --serials' lists them.") from None
        owner = next((each.party for each in known.certificates if each.serial == number), name or "somebody")
        gone = {number: owner}
    elif name is None:
        raise FedbilevelError("name the party whose certificates are to be revoked, or one certificate with --serial.")
    else:
        if name in (SERVER, ADMIN):
            raise FedbilevelError(f"the certificate of the {name} is replaced with 'fedbilevel federation renew'.")
        if name not in known.parties:
            raise UnknownName("party", name, known.parties)
        gone = {each.serial: name for each in known.certificates if each.party == name}
        if not gone:
            raise FedbilevelError(f"{name} has no certificate yet.")
    revocation.add(folder / SERVER, gone)
    project.note(folder, "revoked", parties=sorted({*gone.values()}), serials=sorted(gone))
    return sorted(gone)


def expiring(known: Project) -> list[str]:
    """A sentence for everybody whose certificate expires soon."""
    said = []
    for party in (SERVER, ADMIN, *known.parties):
        found = known.certificate(party)
        if found is not None and found.days < SOON:
            when = f"expires in {found.days} days" if found.days >= 0 else "has expired"
            how = "run 'fedbilevel federation renew'" if party in (SERVER, ADMIN) else "ask for a new request"
            said.append(f"the certificate of {party} {when}: {how}.")
    return said
