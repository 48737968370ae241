"""Who speaks: the two ends of a session prove who they are, then every message carries a proof that it is theirs.

The keys are those of the start-up kits. Both ends make a fresh X25519 key for each job and sign the same statement,
which has both keys, the run, the job and the site: a signature is of no use elsewhere or later. The secret that they
now share seals every message with AES-GCM: the tag covers the message, the number of the message, and its direction.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa, x25519
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbilevel.errors import FedbilevelError

VERSION = "fedbilevel session 1"
DOWN, UP = b"down", b"up\0\0"
ROLES = {"server": "server", "site": "client"}  # as FLARE calls them
USES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "site": ExtendedKeyUsageOID.CLIENT_AUTH}
LONGEST_NAME = 64  # of a certificate; FLARE cuts the names of servers that are longer


Bytes = bytes | bytearray | memoryview


class Forged(FedbilevelError):
    """It does not come from whom it should, or not for the first time, or it was changed on its way."""


class Proof(NamedTuple):
    """A certificate, and a signature with its key."""

    certificate: bytes
    signature: bytes


class Party:
    """One end, with its certificate and key: ``server`` or ``client`` in the folder ``startup`` of its kit."""

    def __init__(self, startup: Path, kind: str) -> None:
        self.certificate = (startup / f"{kind}.crt").read_bytes()
        self.root = (startup / "rootCA.pem").read_bytes()
        self.key: Any = serialization.load_pem_private_key((startup / f"{kind}.key").read_bytes(), None)

    def sign(self, kind: str, statement: bytes) -> Proof:
        """Sign a statement as the server or as a site."""
        text = kind.encode() + b" " + statement
        if isinstance(self.key, rsa.RSAPrivateKey):
            signature = self.key.sign(text, padding.PKCS1v15(), hashes.SHA256())
        elif isinstance(self.key, ec.EllipticCurvePrivateKey):
            signature = self.key.sign(text, ec.ECDSA(hashes.SHA256()))
        else:
            signature = self.key.sign(text)
        return Proof(self.certificate, signature)

    def verify(self, kind: str, name: str, statement: bytes, proof: Proof) -> None:
        """Refuse a statement that the server, or the site of this name, has not signed."""
        key: Any = trusted(proof.certificate, self.root, kind, name).public_key()
        text = kind.encode() + b" " + statement
        try:
            if isinstance(key, rsa.RSAPublicKey):
                key.verify(proof.signature, text, padding.PKCS1v15(), hashes.SHA256())
            elif isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(proof.signature, text, ec.ECDSA(hashes.SHA256()))
            elif isinstance(key, ed25519.Ed25519PublicKey):
                key.verify(proof.signature, text)
            else:
                raise Forged("its certificate has a key of an unknown kind.")
        except InvalidSignature:
            raise Forged(f"it is not signed with the key of {name}.") from None


def trusted(certificate: bytes, root: bytes, kind: str, name: str) -> x509.Certificate:
    """The certificate of the server, or of a site: of this authority, of today, of this kind and this name.

    The name decides: no two parties of an authority have the same. What else a certificate says must fit: the role,
    which those of administrators have, and what it may be used for.
    """
    try:
        found, authority = x509.load_pem_x509_certificate(certificate), x509.load_pem_x509_certificate(root)
        found.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise Forged("its certificate is not of this federation.") from None
    if not found.not_valid_before_utc <= datetime.now(UTC) <= found.not_valid_after_utc:
        raise Forged("its certificate has expired, or is not valid yet.")
    names = [attribute.value for attribute in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    roles = {attribute.value for attribute in found.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)}
    if names != [name[:LONGEST_NAME]] or not roles <= {ROLES[kind]}:
        whose = " ".join(map(str, [*names, *roles])) or "nobody"
        raise Forged(f"its certificate is that of {whose}, not of the {kind} {name}.")
    uses, constraints = _extension(found, x509.ExtendedKeyUsage), _extension(found, x509.BasicConstraints)
    if (uses is not None and USES[kind] not in uses) or (constraints is not None and constraints.ca):
        raise Forged(f"its certificate is not one of a {kind}.")
    return found


def _extension(certificate: x509.Certificate, kind: type[Any]) -> Any:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


@dataclass
class Seal:
    """The secret of a session, and the number of the last message."""

    key: bytes
    number: int = 0

    def close(self, way: bytes, number: int, body: Bytes, about: Mapping[str, Any]) -> bytes:
        """The head of a message: its number, and facts ``about`` it, sealed together with the body.

        One number may be used once in each direction.
        """
        place = number.to_bytes(8, "big")
        return place + AESGCM(self.key).encrypt(way + place, json.dumps(about).encode(), body)

    def open(self, way: bytes, head: bytes, body: Bytes) -> tuple[int, dict[str, Any]]:
        """The number of a message and the facts about it; refuses what was changed."""
        try:
            return int.from_bytes(head[:8], "big"), json.loads(AESGCM(self.key).decrypt(way + head[:8], head[8:], body))
        except (InvalidTag, ValueError):
            raise Forged("it does not carry the seal of this session: it comes from somebody else.") from None


class Ephemeral:
    """A key for one job."""

    def __init__(self) -> None:
        self.secret = x25519.X25519PrivateKey.generate()
        self.public = self.secret.public_key().public_bytes_raw().hex()

    def seal(self, other: str, statement: bytes) -> Seal:
        """What it shares with another such key, for what the statement says."""
        try:
            shared = self.secret.exchange(x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
        except (ValueError, TypeError):
            raise Forged("its key for the session is not valid.") from None
        return Seal(HKDF(hashes.SHA256(), 32, None, statement).derive(shared))


class ServersEnd:
    """The server's end of the session with one site."""

    def __init__(self, party: Party, run: str, job: str, site: str) -> None:
        self.party, self.site, self.ephemeral = party, site, Ephemeral()
        self.about = {"version": VERSION, "run": run, "job": job, "site": site, "server_key": self.ephemeral.public}
        self.statement, self.seal = b"", Seal(b"")

    def statement_for(self, greeting: bytes) -> bytes:
        """What the site needs to know that it talks to the server, given its greeting."""
        key = str(_fields(greeting, "key")["key"])
        self.statement = json.dumps({**self.about, "site_key": key}, sort_keys=True).encode()
        self.seal = self.ephemeral.seal(key, self.statement)
        return _packed(self.statement, self.party.sign("server", self.statement))

    def accept(self, answer: bytes) -> None:
        """Refuse an answer that the site has not signed."""
        statement, proof = _unpacked(answer)
        if statement != self.statement:
            raise Forged("it speaks of another session.")
        self.party.verify("site", self.site, self.statement, proof)

    def question(self, body: Bytes, about: Mapping[str, Any]) -> bytes:
        """The head of the next message."""
        self.seal.number += 1
        return self.seal.close(DOWN, self.seal.number, body, about)

    def check(self, number: int, head: bytes, body: Bytes) -> None:
        """Refuse what is not the site's answer to the message of this number."""
        found, _ = self.seal.open(UP, head, body)
        if found != number:
            raise Forged("it is the answer to another message.")


class SitesEnd:
    """A site's end of the session with the server, for one job."""

    def __init__(self, party: Party, server: str, site: str, job: str) -> None:
        self.party, self.server, self.site, self.job = party, server, site, job
        self.ephemeral, self.run, self.statement = Ephemeral(), "", b""
        self.seal: Seal | None = None

    def greeting(self) -> bytes:
        """The key of this end."""
        return json.dumps({"key": self.ephemeral.public}).encode()

    def accept(self, message: bytes) -> bytes:
        """Begin the session, if the server itself has signed its statement for this site and job. Returns the proof
        that this is the site.
        """
        statement, proof = _unpacked(message)
        self.party.verify("server", self.server, statement, proof)
        said = _fields(statement, "version", "run", "job", "site", "server_key", "site_key")
        ours = {"version": VERSION, "job": self.job, "site": self.site, "site_key": self.ephemeral.public}
        if strange := [name for name, value in ours.items() if said[name] != value]:
            raise Forged(f"it is meant for another {strange[0].replace('_', ' ')}.")
        if self.seal is not None and statement != self.statement:
            raise Forged("this site has a session of this job already.")
        if self.seal is None:  # otherwise the answer did not arrive
            self.seal = self.ephemeral.seal(str(said["server_key"]), statement)
            self.statement, self.run = statement, str(said["run"])
        return _packed(statement, self.party.sign("site", statement))

    def question(self, head: bytes, body: Bytes) -> tuple[int, dict[str, Any]]:
        """The number of a message and the facts about it; refuses messages that the server has not sent, or that were
        here before.
        """
        if self.seal is None:
            raise Forged("there is no session yet.")
        number, about = self.seal.open(DOWN, head, body)
        if number <= self.seal.number:
            raise Forged("it was here before, or is older than one that was.")
        self.seal.number = number
        return number, about

    def answer(self, number: int, body: Bytes) -> bytes:
        """The head of the answer to a message."""
        assert self.seal is not None
        return self.seal.close(UP, number, body, {})


def _packed(statement: bytes, proof: Proof) -> bytes:
    fields = {"statement": statement, **proof._asdict()}
    return json.dumps({name: value.hex() for name, value in fields.items()}).encode()


def _unpacked(data: bytes) -> tuple[bytes, Proof]:
    fields = _fields(data, "statement", "certificate", "signature")
    try:
        statement, *proof = (bytes.fromhex(fields[name]) for name in ("statement", "certificate", "signature"))
    except (ValueError, TypeError):
        raise Forged("its proof cannot be read.") from None
    return statement, Proof(*proof)


def _fields(data: bytes, *names: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or set(found) != set(names):
        raise Forged("its first message cannot be read.")
    return found
