"""Start-up kits: what a party gets from the coordinator, and the private key that it makes itself.

A kit has four small files: names and addresses, the certificate of the party, that of the authority, and the text of
the study. None is secret, and none decides what code runs: everything else is written from the installed package (see
``flare_files.py``). What a kit says is checked before any of it is kept.
"""

import datetime
import json
import os
import re
import stat
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import authority
from fedbilevel.federation.consent import LONGEST_STUDY
from fedbilevel.federation.project import ROLES, Project, check_address, check_name, check_party
from fedbilevel.storage.files import private_folder, write_privately

STARTUP = "startup"
"""The folder, in that of a party, with its key and what its kit had."""
ABOUT, ROOT, CERTIFICATE, STUDY = "kit.json", "rootCA.pem", "client.crt", "study.toml"
KEY, NEW_KEY = "client.key", "new.key"
LARGEST = {ABOUT: 1 << 12, ROOT: 1 << 14, CERTIFICATE: 1 << 14, STUDY: 4 * LONGEST_STUDY}  # bytes
LARGEST_KIT = 1 << 19
_VERSION = re.compile(r"[0-9A-Za-z.+!-]{1,40}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
"""What could make a terminal show another text than the one that is approved."""


@dataclass(frozen=True)
class Kit:
    """A kit whose contents were checked."""

    federation: str
    party: str
    role: str
    host: str
    port: int
    fedbilevel: str  # the coordinator's version
    study: str
    root: x509.Certificate
    certificate: x509.Certificate

    @staticmethod
    def of(members: Mapping[str, bytes], place: Path) -> "Kit":
        """The kit with these files; ``place`` is where they are from, for messages."""
        if set(members) != set(LARGEST):
            strange = sorted(set(members) - set(LARGEST)) or sorted(set(LARGEST) - set(members))
            word = "has a file that does not belong there" if set(members) - set(LARGEST) else "lacks a file"
            raise FedbilevelError(f"{place} is not a start-up kit: it {word}, {strange[0][:80]!r}.")
        try:
            about, study = _about(members[ABOUT]), members[STUDY].decode()
            if len(study) > LONGEST_STUDY:
                raise ValueError("its study is too long")
            if found := _CONTROL.search(study.replace("\r\n", "\n")):
                raise ValueError(f"its study has the character {found[0]!r}")
            root, certificate = (_one(members[name]) for name in (ROOT, CERTIFICATE))
            kit = Kit(**about, study=study, root=root, certificate=certificate)
            _check(kit)
        except (ValueError, TypeError, KeyError, RecursionError, FedbilevelError) as error:
            raise FedbilevelError(f"{place} is not a valid start-up kit: {str(error).rstrip('.')}.") from None
        return kit

    @staticmethod
    def read(path: Path) -> "Kit":
        """The kit of a file."""
        return Kit.of(_members(path), path)

    @staticmethod
    def installed(folder: Path) -> "Kit":
        """The kit that was kept in a party's folder. It is checked again: anybody may have edited it since."""
        try:
            members = {name: (folder / STARTUP / name).read_bytes() for name in LARGEST}
        except OSError:
            raise FedbilevelError(f"{folder} has no start-up kit: join with the one from the coordinator.") from None
        return Kit.of(members, folder / STARTUP)

    @property
    def files(self) -> dict[str, bytes]:
        """What it consists of."""
        names = ("federation", "party", "role", "host", "port", "fedbilevel")
        about = json.dumps({name: getattr(self, name) for name in names}, indent=1)
        certificates = {ROOT: authority.pem(self.root), CERTIFICATE: authority.pem(self.certificate)}
        return {ABOUT: about.encode(), **certificates, STUDY: self.study.encode()}

    @property
    def user(self) -> str:
        """The party's name in its certificate."""
        return authority.common_name(self.certificate)

    @property
    def fingerprint(self) -> str:
        """By which a site knows that the kit is from its federation."""
        return authority.fingerprint(self.root.public_key())

    @property
    def days(self) -> int:
        """Whole days until its certificate expires."""
        return authority.days_left(self.certificate)

    def write(self, path: Path) -> None:
        """Write it to a file."""
        private_folder(path.parent)
        draft = path.with_suffix(".new")
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in self.files.items():
                file.writestr(name, content)
        draft.chmod(0o600)
        draft.replace(path)

    def keep(self, folder: Path) -> None:
        """Keep it in the folder of its party, with the key that belongs to it."""
        start = folder / STARTUP
        with suppress(OSError, ValueError):  # without one, or a broken one
            before = x509.load_pem_x509_certificate((start / ROOT).read_bytes())
            if before.public_key() != self.root.public_key():
                raise FedbilevelError(f"{folder} belongs to another federation: choose another folder with --folder.")
        key = _matching(start, self)
        for name, content in self.files.items():
            write_privately(start / name, content)
        if key.name == NEW_KEY:
            os.replace(key, start / KEY)


def made(project: Project, party: str, root: x509.Certificate, certificate: x509.Certificate) -> Kit:
    """The kit of a party."""
    role, text = project.parties[party], project.experiment
    return Kit(project.name, party, role, project.host, project.port, version("fedbilevel"), text, root, certificate)


def request(folder: Path, name: str, role: str = "site", new_key: bool = False) -> Path:
    """Make a private key in a party's folder, unless there is one, and return a signing request for it."""
    check_party(name, role)
    start = folder / STARTUP
    private_folder(folder)
    private_folder(start)
    path = start / NEW_KEY if new_key and (start / KEY).exists() else start / KEY
    if path.exists() and not new_key:
        key = _private_key(path)
    else:
        key = authority.new_key()
        write_privately(path, authority.private_pem(key))
    written = folder / f"{name}.csr"
    write_privately(written, authority.write_request(name, role, key))
    return written


def _private_key(path: Path) -> authority.rsa.RSAPrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise FedbilevelError(f"the key {path} cannot be read: {error}.") from None
    if not isinstance(key, authority.rsa.RSAPrivateKey):
        raise FedbilevelError(f"{path} is not an RSA key: make one with 'fedbilevel federation request --new-key'.")
    return key


def _matching(start: Path, kit: Kit) -> Path:
    """The private key that belongs to a kit."""
    there = [path for path in (start / KEY, start / NEW_KEY) if path.exists()]
    if not there:
        raise FedbilevelError(
            f"{start.parent} has no private key: make one with 'fedbilevel federation request {kit.party}', and send "
            "the request to the coordinator; or name the folder where it is with --folder."
        )
    for path in there:
        if _private_key(path).public_key() == kit.certificate.public_key():
            return path
    raise FedbilevelError(
        f"this kit does not belong to the key in {start.parent}: it was made for another request. Send the latest one, "
        f"{start.parent / kit.party}.csr, to the coordinator."
    )


def _members(path: Path) -> dict[str, bytes]:
    """The files of a kit, none of them larger than it may be."""
    try:
        if path.stat().st_size > LARGEST_KIT:
            raise ValueError("it is too large")
        with zipfile.ZipFile(path) as file:
            every = file.infolist()
            if len(every) > len(LARGEST) or len({each.filename for each in every}) < len(every):
                extra = next((each.filename for each in every if each.filename not in LARGEST), every[0].filename)
                raise ValueError(f"it has a file that does not belong there, {extra[:80]!r}")
            found = {}
            for each in every:
                kind = stat.S_IFMT(each.external_attr >> 16)
                if each.filename not in LARGEST or each.is_dir() or kind not in (0, stat.S_IFREG):
                    raise ValueError(f"it has a file that does not belong there, {each.filename[:80]!r}")
                with file.open(each) as member:
                    found[each.filename] = member.read(LARGEST[each.filename] + 1)
                if len(found[each.filename]) > LARGEST[each.filename]:
                    raise ValueError(f"{each.filename} is too large")
    except Exception as error:  # the library has many errors for malformed files
        raise FedbilevelError(f"{path} is not a start-up kit: {str(error)[:200].rstrip('.')}.") from None
    return found


def _about(content: bytes) -> dict[str, Any]:
    """Names and addresses."""
    known = json.loads(content)
    kinds = {"federation": str, "party": str, "role": str, "host": str, "port": int, "fedbilevel": str}
    if not isinstance(known, dict) or set(known) != set(kinds):
        raise ValueError(f"{ABOUT} must have {', '.join(kinds)}, and nothing else")
    for name, kind in kinds.items():
        if type(known[name]) is not kind:
            raise ValueError(f"{ABOUT}: {name} has the wrong type")
    check_name(known["federation"], "federation: ")
    check_party(known["party"], known["role"], "party: ")
    check_address(known["host"], known["port"])
    if not _VERSION.fullmatch(known["fedbilevel"]):
        raise ValueError(f"{known['fedbilevel'][:40]!r} is not a version")
    return known


def _one(content: bytes) -> x509.Certificate:
    found = x509.load_pem_x509_certificates(content)
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} certificates in one file")
    return found[0]


def _check(kit: Kit) -> None:
    """Refuse certificates that are not this party's, or not now, or not of one authority."""
    from nvflare.lighter.utils import verify_cert_chain

    now = datetime.datetime.now(datetime.UTC)
    for certificate, whose in ((kit.root, "the authority's"), (kit.certificate, "its")):
        if certificate.not_valid_after_utc < now:
            raise ValueError(
                f"{whose} certificate expired on {certificate.not_valid_after_utc:%d %B %Y}: ask for a new one, with "
                f"'fedbilevel federation request {kit.party}'"
            )
        if certificate.not_valid_before_utc > now:
            raise ValueError(f"{whose} certificate is not valid yet: check the clock of this machine")
    try:
        kit.root.verify_directly_issued_by(kit.root)
        verify_cert_chain(kit.certificate, [], kit.root)
        rights = kit.certificate.extensions
        constraints = rights.get_extension_for_class(x509.BasicConstraints).value
        purposes = rights.get_extension_for_class(x509.ExtendedKeyUsage).value
    except Exception as error:  # the library has many errors for malformed certificates
        raise ValueError(f"its certificate is not from its authority ({type(error).__name__})") from None
    if constraints.ca or list(purposes) != [ExtendedKeyUsageOID.CLIENT_AUTH]:
        raise ValueError("its certificate is not for a party: it could issue others, or serve")
    known = Project(kit.federation, kit.host, kit.port, {}, "")
    expected = kit.party if kit.role == "site" else known.user(kit.party)
    if kit.user != expected or kit.role not in ROLES:
        raise ValueError(f"its certificate is for {kit.user[:80]!r}, not for {expected}")
