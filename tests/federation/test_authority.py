"""The authority: what it signs, how its key is kept, how certificates are renewed, expire and are revoked."""

import contextlib
import datetime
import json
import os
import shutil
import ssl
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb

pytest.importorskip("nvflare")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import NameOID

from admission import PASSPHRASE, admitted, created, described
from fedbilevel.federation import authority, kits, project, revocation, setup
from fedbilevel.federation.kits import Kit
from fedbilevel.federation.revocation import Revoked
from fedbilevel.federation.setup import AUTHORITY, Authority
from helpers import here

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what FLARE calls


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation")
    home = created(folder, a="site", b="site", anna="coordinator")
    for name, role in project.load(home).parties.items():
        admitted(home, name, folder / name, role)
    return folder


@pytest.fixture
def folder(first: Path, tmp_path: Path) -> Path:
    """A copy, to be changed: making keys takes seconds."""
    return Path(shutil.copytree(first, tmp_path / "federation"))


@pytest.fixture
def home(folder: Path) -> Path:
    return folder / "hospitals"


def test_the_key_of_the_authority_is_encrypted(home: Path) -> None:
    content = (home / AUTHORITY / authority.KEY).read_bytes()
    assert stat.S_IMODE((home / AUTHORITY / authority.KEY).stat().st_mode) == 0o600
    opened = Authority.open(home / AUTHORITY, PASSPHRASE)
    number = opened.key.private_numbers().p
    assert number.to_bytes(192, "big") not in content
    assert b"PRIVATE" not in content
    with pytest.raises(ValueError, match="password"):
        pkcs12.load_key_and_certificates(content, None)
    for wrong in ("", "another passphrase"):
        with pytest.raises(fb.FedbilevelError, match="this is not the passphrase"):
            Authority.open(home / AUTHORITY, wrong)
    with pytest.raises(fb.FedbilevelError, match=r"is not the folder of an authority: name the one .* --authority"):
        Authority.open(home, PASSPHRASE)


def test_a_federation_needs_an_empty_folder_and_a_long_passphrase(tmp_path: Path) -> None:
    wanted = described(tmp_path, a="site")
    with pytest.raises(fb.FedbilevelError, match="needs at least 12 characters"):
        setup.create(wanted, tmp_path / "hospitals", "short")
    assert not (tmp_path / "hospitals").exists()  # the next try finds nothing in its way
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(fb.FedbilevelError, match="not empty: choose another one with --out"):
        setup.create(wanted, tmp_path / "full", PASSPHRASE)
    with pytest.raises(fb.FedbilevelError, match="not empty: choose another one with --authority"):
        setup.create(wanted, tmp_path / "new", PASSPHRASE, tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["mine.txt"]


def test_the_authority_may_be_elsewhere(folder: Path, home: Path, tmp_path: Path) -> None:
    drawer = tmp_path / "drawer"
    (home / AUTHORITY).rename(drawer)
    request = kits.request(folder / "b", "b")
    with pytest.raises(fb.FedbilevelError, match="is not the folder of an authority"):
        setup.approve(home, request, PASSPHRASE)
    assert Kit.read(setup.approve(home, request, PASSPHRASE, drawer)).party == "b"
    # On another machine, with the two files that say who takes part.
    setup.revoke(home, "a")
    there = tmp_path / "there"
    for name in (project.FILE, f"server/{revocation.FILE}"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(home / name, there / name)
    with pytest.raises(fb.FedbilevelError, match="was revoked"):
        setup.approve(there, kits.request(folder / "a", "a"), PASSPHRASE, drawer)
    kit = Kit.read(setup.approve(there, request, PASSPHRASE, drawer))
    shutil.copy(there / project.FILE, home / project.FILE)
    assert project.load(home).certificates[-1].serial == revocation.number(kit.certificate.serial_number)
    assert project.load(home).excluded == {"a"}


def requested(path: Path, key: Any, *subject: tuple[Any, str], method: Any = None) -> Path:
    """A request as somebody else's program makes it."""
    name = x509.Name([x509.NameAttribute(oid, value) for oid, value in subject])
    method = method or hashes.SHA256()
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, method)
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return path


NAME, ROLE = NameOID.COMMON_NAME, NameOID.UNSTRUCTURED_NAME


def test_requests_that_are_not_signed(folder: Path, home: Path, tmp_path: Path) -> None:
    key, path = authority.new_key(), tmp_path / "x.csr"
    before = (home / project.FILE).read_bytes()

    def refused(said: str, request: Path) -> None:
        with pytest.raises(fb.FedbilevelError, match=said) as raised:
            setup.approve(home, request, PASSPHRASE)
        assert "\n" not in str(raised.value)

    a, site = (NAME, "a"), (ROLE, "site")
    small: Any = rsa.generate_private_key(65537, 1024)
    refused("another key than RSA with 2048 bits", requested(path, small, a, site))
    refused("another key than RSA", requested(path, ec.generate_private_key(ec.SECP256R1()), a, site))
    refused("another key than RSA", requested(path, rsa.generate_private_key(3, 2048), a, site))
    refused("there is no party called 'west'", requested(path, key, (NAME, "west"), site))
    refused("not a valid name", requested(path, key, (NAME, "../a"), site))
    refused("not a valid name", requested(path, key, (NAME, "server"), site))
    refused("no role called 'king'", requested(path, key, a, (ROLE, "king")))
    refused(
        "a is a site in this federation, but asks to be a coordinator", requested(path, key, a, (ROLE, "coordinator"))
    )
    refused("a name and a role, and nothing else", requested(path, key, a))
    refused("a name and a role, and nothing else", requested(path, key, a, (NAME, "b"), site))
    refused(
        "this key is already used by b",
        requested(path, kits._private_key(folder / "b" / "startup" / "client.key"), a, site),
    )
    good = kits.request(tmp_path / "a", "a").read_bytes()
    found = x509.load_pem_x509_csr(good)
    forged = found.public_bytes(serialization.Encoding.DER)
    for at in (20, 200, len(forged) - 5):  # of the name, the key, the signature
        changed = bytearray(forged)
        changed[at] ^= 1
        path.write_bytes(
            ssl.DER_cert_to_PEM_cert(bytes(changed)).replace("CERTIFICATE", "CERTIFICATE REQUEST").encode()
        )
        refused("x.csr", path)
    for content in (b"", b"nothing", good[:300], good * 40):
        path.write_bytes(content)
        refused("is not a signing request", path)
    refused("cannot be read", tmp_path / "missing.csr")
    assert (home / project.FILE).read_bytes() == before
    assert authority.read_request(kits.request(tmp_path / "a", "a")).name == "a"


def test_a_certificate_says_what_the_federation_says(folder: Path, home: Path) -> None:
    site, admin = (Kit.read(project.kit(home, name)).certificate for name in ("a", "anna"))
    assert site.subject.rfc4514_string() == "O=a,CN=a"
    assert authority.common_name(admin) == "anna@hospitals.org"
    assert admin.subject.get_attributes_for_oid(ROLE)[0].value == "lead"
    for certificate in (site, admin):
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert [purpose._name for purpose in purposes] == ["clientAuth"]
    server = x509.load_pem_x509_certificate((home / "server" / "startup" / "server.crt").read_bytes())
    purposes = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [purpose._name for purpose in purposes] == ["serverAuth"]


def test_days_are_limited_by_those_of_the_authority(folder: Path, home: Path) -> None:
    request = kits.request(folder / "a", "a")
    assert Kit.read(setup.approve(home, request, PASSPHRASE, days=3)).days == 2
    assert Kit.read(setup.approve(home, request, PASSPHRASE, days=3650)).days <= 3650
    for days in (0, -1, 4000):
        with pytest.raises(fb.FedbilevelError, match="valid for 1 to 3650 days"):
            setup.approve(home, request, PASSPHRASE, days=days)


def test_status_warns_of_certificates_that_expire(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.add(home, "c")
    known = project.load(home)
    assert known.certificate("c") is None
    assert setup.expiring(known) == []
    later = time.time() + 340 * project.DAY
    monkeypatch.setattr(time, "time", lambda: later)
    said = setup.expiring(known)
    assert "the certificate of a expires in 19 days: ask for a new request." in said
    assert "the certificate of server expires in 19 days: run 'fedbilevel federation renew'." in said
    monkeypatch.setattr(time, "time", lambda: later + 100 * project.DAY)
    assert "the certificate of anna has expired: ask for a new request." in setup.expiring(known)


def test_an_expired_authority_signs_nothing_until_it_is_renewed(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "ROOT_DAYS", -1)
    monkeypatch.setattr(authority, "SKEW", datetime.timedelta(days=2))
    opened = Authority.open(home / AUTHORITY, PASSPHRASE)
    opened.root = authority._root("hospitals", opened.key)
    opened._save()
    monkeypatch.undo()
    request = kits.request(folder / "a", "a")
    with pytest.raises(fb.FedbilevelError, match="the authority's certificate has expired: renew it"):
        setup.approve(home, request, PASSPHRASE)
    setup.renew(home, PASSPHRASE)
    assert Kit.read(setup.approve(home, request, PASSPHRASE)).days == 359


def test_renewing_the_server_keeps_the_parties(folder: Path, home: Path) -> None:
    before, known = Kit.read(project.kit(home, "a")), project.load(home)
    start = home / "server" / "startup"
    key, root = (start / "server.key").read_bytes(), (start / "rootCA.pem").read_bytes()
    setup.renew(home, PASSPHRASE)
    assert (start / "server.key").read_bytes() != key
    assert (start / "rootCA.pem").read_bytes() != root
    now = project.load(home)
    mine = [each.serial for each in known.certificates if each.party == "coordinator"]
    assert now.revoked == frozenset(mine)  # the key of the old one is no longer needed
    assert now.certificate("coordinator") is not None
    again = Kit.read(admitted(home, "a", folder / "a"))
    assert again.fingerprint == before.fingerprint
    again.keep(folder / "a")
    # What was signed before trusts, and is trusted by, what is signed now.
    server = x509.load_pem_x509_certificate((start / "server.crt").read_bytes())
    server.verify_directly_issued_by(before.root)
    before.certificate.verify_directly_issued_by(again.root)


def test_a_revoked_party_needs_a_new_key(folder: Path, home: Path) -> None:
    assert project.load(home).sites == ["a", "b"]
    serial = Kit.read(project.kit(home, "b")).certificate.serial_number
    assert setup.revoke(home, "b") == [revocation.number(serial)]
    known = project.load(home)
    assert known.sites == ["a"]
    assert known.excluded == {"b"}
    with pytest.raises(fb.FedbilevelError, match="was revoked; ask b for a request with --new-key"):
        admitted(home, "b", folder / "b")
    kit = Kit.read(admitted(home, "b", folder / "b", new_key=True))
    assert project.load(home).sites == ["a", "b"]
    listed = Revoked(home / "server")
    assert "of b was revoked" in listed.refusal(serial)
    assert listed.refusal(kit.certificate.serial_number) == ""


def test_one_certificate_can_be_revoked(folder: Path, home: Path) -> None:
    first = Kit.read(project.kit(home, "a")).certificate
    admitted(home, "a", folder / "a", new_key=True)
    text = f"{first.serial_number:x}"
    assert setup.revoke(home, serial=text.upper()) == [revocation.number(first.serial_number)]
    assert project.load(home).excluded == frozenset()
    with pytest.raises(fb.FedbilevelError, match="is not a serial number"):
        setup.revoke(home, serial="../x")
    with pytest.raises(fb.FedbilevelError, match="there is no party called 'west'"):
        setup.revoke(home, "west")
    with pytest.raises(fb.FedbilevelError, match="name the party"):
        setup.revoke(home)
    for own in ("server", "coordinator"):
        with pytest.raises(fb.FedbilevelError, match="is replaced with 'fedbilevel federation renew'"):
            setup.revoke(home, own)
    setup.add(home, "c")
    with pytest.raises(fb.FedbilevelError, match="c has no certificate yet"):
        setup.revoke(home, "c")


def test_a_list_that_cannot_be_read_lets_nobody_in(home: Path) -> None:
    listed, serial = Revoked(home / "server"), Kit.read(project.kit(home, "a")).certificate.serial_number
    path = home / "server" / revocation.FILE
    assert listed.refusal(serial) == ""
    for content in ("", "[]", '{"xyz": "a"}', "{"):
        path.write_text(content)
        assert "cannot be read" in listed.refusal(serial)
    path.unlink()
    assert listed.refusal(serial)
    revocation.add(home / "server", {})
    assert listed.refusal(serial) == ""
    revocation.add(home / "server", {revocation.number(serial): "a"})
    assert "of a was revoked" in listed.refusal(serial)
    path.write_text("{")
    with pytest.raises(fb.FedbilevelError, match="cannot be read"):
        project.load(home)


def test_everything_of_flare_that_is_replaced_is_there() -> None:
    """If this fails, look at the new FLARE before you change it: a check of certificates may have moved."""
    import nvflare
    from nvflare.fuel.f3.cellnet import cell_cipher
    from nvflare.fuel.f3.drivers import socket_conn, tcp_driver
    from nvflare.lighter import utils
    from nvflare.private.fed.utils import identity_utils

    assert nvflare.__version__ == "2.9.0"
    assert utils.verify_cert_chain is identity_utils.verify_cert_chain is cell_cipher.verify_cert_chain
    assert tcp_driver.ConnectionHandler is socket_conn.ConnectionHandler
    assert callable(socket_conn.ConnectionHandler.handle)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a description to a kit, a revocation and a renewal, as people type it."""
    assert authority.ROUNDS >= 600_000
    monkeypatch.setattr(authority, "ROUNDS", 2048)
    described(tmp_path, a="site", anna="coordinator")
    (tmp_path / "secret").write_text(f"{PASSPHRASE}\n")
    secret = ("--passphrase-file", "secret")
    run = lambda *arguments: here("federation", *arguments, cwd=tmp_path)
    monkeypatch.delenv("FEDBILEVEL_PASSPHRASE", raising=False)
    code, said = run("create", "hospitals.toml")
    assert (code, "the authority needs a passphrase: set FEDBILEVEL_PASSPHRASE" in said) == (2, True)
    assert run("create", "hospitals.toml", *secret, "--authority", "drawer")[0] == 0
    assert sorted(path.name for path in (tmp_path / "drawer").iterdir()) == ["authority.p12", "rootCA.pem"]
    assert not (tmp_path / "hospitals" / "authority").exists()
    assert run("request", "a")[0] == 0
    assert run("request", "../a")[0] == 2
    approve = ("approve", "a/a.csr", *secret, "--authority", "drawer")
    assert run(*approve) == (2, "fedbilevel: compare the fingerprint with the party's, then approve with --yes.\n")
    assert run(*approve, "--yes")[0] == 0
    kit = Path("hospitals") / "kits" / "a.zip"
    assert run("join", str(kit), "--dry-run", "--data", "builtin", "--fingerprint", "0" * 32)[0] == 2
    assert run("join", str(kit), "--dry-run")[0] == 2
    assert run("join", str(kit), "--dry-run", "--data", "builtin") == (0, "")
    monkeypatch.setenv("FEDBILEVEL_PASSPHRASE", PASSPHRASE)
    assert run("request", "anna", "--role", "coordinator")[0] == 0
    assert run("approve", "anna/anna.csr", "--authority", "drawer", "--yes")[0] == 0
    assert run("join", "hospitals/kits/anna.zip") == (0, "")
    assert (tmp_path / "anna" / "flare" / "startup" / "fed_admin.json").is_file()
    assert run("status", "--serials") == (0, "")
    assert run("revoke", "a") == (0, "")
    assert json.loads((tmp_path / "hospitals" / "server" / "revoked.json").read_text()).popitem()[1] == "a"
    assert run("renew", "--authority", "drawer") == (0, "")
    assert run("add", "b") == (0, "")
    assert run("add", "b")[0] == 2
    for path in tmp_path.rglob("*"):
        with contextlib.suppress(IsADirectoryError):
            assert path.name == "secret" or PASSPHRASE.encode() not in path.read_bytes()


def test_names_that_do_not_fit_into_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(fb.FedbilevelError, match="certificates allow 64: choose shorter names"):
        described(tmp_path, 8102, a="site", **{"x" * 60: "coordinator"})
    wanted = replace(described(tmp_path, a="site"), host="a" * 60 + "." + "b" * 60)
    certificate = Authority.create(tmp_path / "drawer", "hospitals", PASSPHRASE).sign(
        wanted, "server", "server", authority.new_key().public_key(), 10
    )
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [wanted.host]
