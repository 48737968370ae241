"""A federation as a file describes it, and its folder at the coordinator: who takes part, and with which certificates.

``hospitals.toml``::

    name = "hospitals"
    host = "coordinator.example.org"   # where the server is reached
    port = 8102
    experiment = "heart.toml"          # what will be computed; sites see it before they join

    [[parties]]
    name = "cleveland"
    role = "site"                      # has data

    [[parties]]
    name = "anna"
    role = "coordinator"               # may start runs; the folder itself is one, so none is needed

``setup.py`` makes the folder and the certificates.
"""

import getpass
import json
import os
import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedbilevel.errors import FedbilevelError, UnknownName, needs
from fedbilevel.federation import revocation
from fedbilevel.federation.ledger import DONE, Ledger, owner
from fedbilevel.storage.files import write_privately

NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,60}")
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
ROLES = {"site": "has data", "coordinator": "may start runs"}
ADMIN, SERVER = "coordinator", "server"
"""The coordinator's own parties; nobody else can have these names. They are the folders of their keys, too."""
FILE = "federation.json"
LONGEST_COMMON_NAME = 64  # in a certificate
DAY = 86_400.0


def needs_flare() -> None:
    """Say what to install where NVIDIA FLARE is missing."""
    needs("nvflare", "federation", "a federation needs NVIDIA FLARE")


@dataclass(frozen=True)
class Issued:
    """A certificate that was issued: to whom, and until when it is valid."""

    party: str
    serial: str  # hexadecimal
    key: str  # fingerprint of the public key
    until: float

    @property
    def days(self) -> int:
        """Whole days left; negative once it has expired."""
        return int((self.until - time.time()) // DAY)


@dataclass(frozen=True)
class Project:
    """A federation: its name, where its server is, who takes part, with which certificates."""

    name: str
    host: str
    port: int
    parties: Mapping[str, str]  # name: role
    experiment: str  # the text of its file
    certificates: tuple[Issued, ...] = ()
    revoked: frozenset[str] = frozenset()  # serial numbers

    @property
    def sites(self) -> list[str]:
        """The parties with data, in the order of their numbers, without those that were revoked."""
        return [name for name, role in self.parties.items() if role == "site" and name not in self.excluded]

    @property
    def excluded(self) -> frozenset[str]:
        """Parties whose certificates were revoked, and who have no new one."""
        gone = {each.party for each in self.certificates if each.serial in self.revoked}
        return frozenset(gone - {each.party for each in self.certificates if each.serial not in self.revoked})

    def certificate(self, party: str) -> Issued | None:
        """The certificate of a party that is valid for longest, if it has one that was not revoked."""
        valid = [each for each in self.certificates if each.party == party and each.serial not in self.revoked]
        return max(valid, key=lambda each: each.until, default=None)

    def user(self, party: str) -> str:
        """The name of an administrator in certificates and in FLARE."""
        return f"{party}@{self.name}.org"


def read(path: Path) -> Project:
    """The federation that a file describes."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise FedbilevelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise FedbilevelError(f"{path} is not valid TOML: {error}.") from None
    known = {"name": str, "host": str, "port": int, "experiment": str, "parties": list}
    for key, value in table.items():
        if key not in known:
            raise UnknownName("entry", key, known, f"{path}: ")
        if not isinstance(value, known[key]) or isinstance(value, bool):
            kind = {str: "text", int: "a whole number", list: "an array of tables"}[known[key]]
            raise FedbilevelError(f"{path}: {key} must be {kind}.")
    for key in known:
        if key not in table:
            raise FedbilevelError(f"{path} lacks {key}.")
    parties: dict[str, str] = {}
    for party in table["parties"]:
        name, role = (party.get("name"), str(party.get("role", "site"))) if isinstance(party, dict) else (None, "")
        if not isinstance(name, str):
            raise FedbilevelError(f"{path}: every [[parties]] needs a name.")
        if name in parties:
            raise FedbilevelError(f"{path}: there are two parties called {name}.")
        check_party(name, str(role), f"{path}: ")
        parties[name] = str(role)
    check_name(table["name"])
    check_address(table["host"], table["port"], f"{path}: ")
    if "site" not in parties.values():
        raise FedbilevelError(f'{path}: no party has data; write role = "site" for those that do.')
    file = path.parent / table["experiment"]
    if not file.is_file():
        raise FedbilevelError(f"{path}: there is no experiment file {file}.")
    found = Project(table["name"], table["host"], table["port"], parties, file.read_text())
    for name in (ADMIN, *(name for name, role in parties.items() if role != "site")):
        if (length := len(found.user(name))) > LONGEST_COMMON_NAME:
            raise FedbilevelError(
                f"{path}: {found.user(name)} has {length} characters, but certificates allow {LONGEST_COMMON_NAME}: "
                "choose shorter names."
            )
    return found


def check_name(name: str, place: str = "") -> None:
    """Refuse names that cannot be in a certificate, or a folder."""
    if not NAME.fullmatch(name) or name.lower() in (SERVER, "admin", ADMIN):
        raise FedbilevelError(
            f"{place}{name[:80]!r} is not a valid name: use letters, digits and hyphens, and not server, admin or "
            f"{ADMIN}."
        )


def check_party(name: str, role: str, place: str = "") -> None:
    """Refuse what cannot be a party."""
    check_name(name, place)
    if role not in ROLES:
        raise UnknownName("role", role[:80], ROLES, place)


def check_address(host: str, port: int, place: str = "") -> None:
    """Refuse what cannot be the address of a server."""
    if not HOST.fullmatch(host):
        raise FedbilevelError(f"{place}{host[:80]!r} is not a valid host: use a name like server.example.org.")
    if not 1 <= port <= 65535:
        raise FedbilevelError(f"{place}port must be a number from 1 to 65535, not {str(port)[:20]}.")


def load(folder: Path) -> Project:
    """The federation of a folder that ``setup.create`` made."""
    try:
        known = json.loads((folder / FILE).read_text())
        certificates = tuple(Issued(**each) for each in known.pop("certificates"))
        found = Project(**known, certificates=certificates)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise FedbilevelError(
            f"{folder} is not the folder of a federation: create one with 'fedbilevel federation create FILE.toml'."
        ) from None
    return replace(found, revoked=revocation.load(folder / SERVER))


def save(project: Project, folder: Path) -> None:
    """Save who takes part, and with which certificates. What was revoked has a file of its own."""
    known: dict[str, Any] = asdict(replace(project, parties=dict(project.parties)))
    del known["revoked"]
    write_privately(folder / FILE, json.dumps(known, indent=1).encode())


def note(folder: Path, action: str, **facts: Any) -> None:
    """Add a line to the coordinator's ledger: what was done, and by which user of this machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        user = str(os.getuid())
    Ledger(folder / DONE, owner(folder, load(folder).name)).note({"action": action, **facts}, user)


def find(folder: Path | None) -> Path:
    """The folder of a federation: the only one here, if none is named."""
    if folder is not None:
        load(folder)
        return folder
    found = [path.parent for path in [Path(FILE), *sorted(Path().glob(f"*/{FILE}"))] if path.is_file()]
    if len(found) != 1:
        seen = ", ".join(map(str, found)) or "none"
        raise FedbilevelError(f"name the federation with --federation FOLDER (here: {seen}).")
    return found[0]


def kit(folder: Path, name: str) -> Path:
    """Where the start-up kit of a party is."""
    return folder / "kits" / f"{name}.zip"
