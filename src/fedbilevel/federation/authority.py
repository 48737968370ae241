"""The certificate authority of a federation: it signs what parties request. It never sees their keys.

Its own key is in one file, encrypted with a passphrase. Nothing but signing needs it, so its folder may be on a disk
that lies in a drawer.
"""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import PrivateFormat, pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation.project import DAY, LONGEST_COMMON_NAME, Issued, Project, check_party
from fedbilevel.federation.revocation import number
from fedbilevel.storage.files import write_privately

KEY, ROOT = "authority.p12", "rootCA.pem"
LEAST_PASSPHRASE = 12
ROUNDS = 600_000  # of the function that makes a key of the passphrase
ROOT_DAYS, DAYS, SOON = 3650, 360, 30
LONGEST_REQUEST = 1 << 14
PARTY_KEY_BITS, ROOT_KEY_BITS = 2048, 3072  # FLARE encrypts messages with the keys of parties, and knows this size only
SKEW = datetime.timedelta(hours=1)  # clocks of parties may be behind


@dataclass(frozen=True)
class Request:
    """What somebody asks to be certified: a public key, and for whom."""

    name: str
    role: str
    key: rsa.RSAPublicKey


class Authority:
    """The key that all parties trust, once it was opened with its passphrase."""

    def __init__(self, folder: Path, key: rsa.RSAPrivateKey, root: x509.Certificate) -> None:
        self.folder, self.key, self.root = folder, key, root

    @staticmethod
    def create(folder: Path, name: str, passphrase: str) -> "Authority":
        """A new one, in an empty folder."""
        check_passphrase(passphrase)
        key = rsa.generate_private_key(65537, ROOT_KEY_BITS)
        made = Authority(folder, key, _root(name, key))
        # FLARE's own function makes a key of the passphrase with one round of MD5.
        how = PrivateFormat.PKCS12.encryption_builder().kdf_rounds(ROUNDS)
        how = how.key_cert_algorithm(pkcs12.PBES.PBESv2SHA256AndAES256CBC).hmac_hash(hashes.SHA256())
        # Its certificate is beside it, as that may be renewed.
        content = pkcs12.serialize_key_and_certificates(name.encode(), key, None, None, how.build(passphrase.encode()))
        write_privately(folder / KEY, content)
        made._save()
        return made

    @staticmethod
    def open(folder: Path, passphrase: str) -> "Authority":
        """The one of a folder."""
        try:
            content, root = (folder / KEY).read_bytes(), x509.load_pem_x509_certificate((folder / ROOT).read_bytes())
        except (OSError, ValueError):
            raise FedbilevelError(
                f"{folder} is not the folder of an authority: name the one that has {KEY} with --authority."
            ) from None
        try:
            key = pkcs12.load_key_and_certificates(content, passphrase.encode())[0]
        except ValueError:
            raise FedbilevelError("this is not the passphrase of the authority.") from None
        if not isinstance(key, rsa.RSAPrivateKey) or key.public_key() != root.public_key():
            raise FedbilevelError(f"{folder / KEY} is not the key of {folder / ROOT}.")
        return Authority(folder, key, root)

    def renew(self) -> None:
        """Extend the authority's own certificate. Its key stays, so that all certificates stay valid."""
        self.root = _root(common_name(self.root), self.key)
        self._save()

    def _save(self) -> None:
        write_privately(self.folder / ROOT, pem(self.root))

    def sign(self, project: Project, party: str, role: str, key: rsa.RSAPublicKey, days: int) -> x509.Certificate:
        """A certificate for a party. What it says comes from the federation, not from the request."""
        from nvflare.lighter.utils import Identity, generate_cert

        if not 1 <= days <= ROOT_DAYS:
            raise FedbilevelError(f"a certificate can be valid for 1 to {ROOT_DAYS} days, not {days}.")
        now = datetime.datetime.now(datetime.UTC)
        until = min(now + datetime.timedelta(days=days), self.root.not_valid_after_utc)
        if until <= now:
            raise FedbilevelError(
                "the authority's certificate has expired: renew it with 'fedbilevel federation renew'."
            )
        serving = role == "server"
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if serving else ExtendedKeyUsageOID.CLIENT_AUTH
        others = ("content_commitment", "data_encipherment", "key_agreement", "key_cert_sign", "crl_sign")
        usage = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
        return generate_cert(
            subject=subject(project, party, role),
            issuer=Identity(common_name(self.root)),
            signing_pri_key=self.key,
            subject_pub_key=key,
            server_default_host=project.host if serving else None,
            not_valid_before=now - SKEW,
            not_valid_after=until,
            extra_extensions=[
                (x509.BasicConstraints(ca=False, path_length=None), True),
                (x509.KeyUsage(digital_signature=True, key_encipherment=True, **usage), True),
                (x509.ExtendedKeyUsage([purpose]), False),
            ],
        )


def check_passphrase(passphrase: str) -> None:
    """Refuse one that is easily guessed."""
    if len(passphrase) < LEAST_PASSPHRASE:
        raise FedbilevelError(f"the passphrase of the authority needs at least {LEAST_PASSPHRASE} characters.")


def subject(project: Project, party: str, role: str) -> Any:
    """Whom a certificate is for, in FLARE's words: name, organization, and the role of an administrator."""
    from nvflare.lighter.utils import Identity

    group = project.name.replace("-", "_")  # names of organizations have no hyphens
    if role == "server":
        return Identity(project.host[:LONGEST_COMMON_NAME], group)
    if role == "site":
        return Identity(party, party.replace("-", "_"))
    return Identity(project.user(party), group, "project_admin" if role == "project_admin" else "lead")


def _root(name: str, key: rsa.RSAPrivateKey) -> x509.Certificate:
    from nvflare.lighter.utils import Identity, generate_cert

    return generate_cert(
        Identity(name), Identity(name), key, key.public_key(), ca=True,
        not_valid_before=(now := datetime.datetime.now(datetime.UTC)) - SKEW,
        not_valid_after=now + datetime.timedelta(days=ROOT_DAYS),
    )  # fmt: skip


def new_key() -> rsa.RSAPrivateKey:
    """A private key of a party, of the size that FLARE needs."""
    return rsa.generate_private_key(65537, PARTY_KEY_BITS)


def private_pem(key: rsa.RSAPrivateKey) -> bytes:
    """A private key as a file for FLARE, which cannot read encrypted ones."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as a file."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def write_request(name: str, role: str, key: rsa.RSAPrivateKey) -> bytes:
    """A signing request as a file, in the form of FLARE, whose own tool also writes into the home folder."""
    from nvflare.lighter.utils import x509_name

    request = x509.CertificateSigningRequestBuilder().subject_name(x509_name(name, None, role))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def read_request(path: Path) -> Request:
    """What a file requests; refuses weak keys, wrong signatures, and whatever is no request."""
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_REQUEST + 1)
        if len(content) > LONGEST_REQUEST:
            raise ValueError("it is too long")
        found = x509.load_pem_x509_csr(content)
        valid, key, names = found.is_signature_valid, found.public_key(), list(found.subject)
        method = found.signature_hash_algorithm
    except OSError as error:
        raise FedbilevelError(f"the request {path} cannot be read: {error.strerror}.") from None
    except Exception as error:  # the library has many errors for malformed files
        raise FedbilevelError(f"{path} is not a signing request ({type(error).__name__}).") from None
    if not valid:
        raise FedbilevelError(f"{path} is not signed with its own key: whoever sent it does not have this key.")
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size != PARTY_KEY_BITS or key.public_numbers().e != 65537:
        raise FedbilevelError(f"{path} has another key than RSA with {PARTY_KEY_BITS} bits: use 'request' to make it.")
    if method is None or method.name not in ("sha256", "sha384", "sha512"):
        raise FedbilevelError(f"{path} is signed with a weak method: use 'request' to make it.")
    known = {NameOID.COMMON_NAME: "name", NameOID.UNSTRUCTURED_NAME: "role"}
    said = {known.get(each.oid, ""): str(each.value) for each in names}
    if len(names) != 2 or set(said) != {"name", "role"}:
        raise FedbilevelError(f"{path} must have a name and a role, and nothing else: use 'request' to make it.")
    check_party(said["name"], said["role"], f"{path}: ")
    return Request(said["name"], said["role"], key)


def fingerprint(key: Any) -> str:
    """The hash by which people compare a public key, and by which it is known."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    digest = hashes.Hash(hashes.SHA256())
    digest.update(der)
    return digest.finalize().hex()


def spoken(found: str) -> str:
    """A fingerprint to be read on the telephone: its first 128 bits, in groups."""
    return " ".join(found[at : at + 4] for at in range(0, 32, 4))


def same(said: str, found: str) -> bool:
    """Whether somebody told a fingerprint: all of it, or at least the part that is :func:`spoken`."""
    told = "".join(said.lower().replace(":", " ").split())
    return len(told) >= 32 and found.startswith(told)


def common_name(certificate: x509.Certificate) -> str:
    """Whom a certificate is for."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else ""


def issued(party: str, certificate: x509.Certificate) -> Issued:
    """What is kept of a certificate."""
    until = certificate.not_valid_after_utc.timestamp()
    return Issued(party, number(certificate.serial_number), fingerprint(certificate.public_key()), until)


def days_left(certificate: x509.Certificate) -> int:
    """Whole days until a certificate expires."""
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return int(left.total_seconds() // DAY)
