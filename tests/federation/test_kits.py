"""Start-up kits: what they contain, which ones are refused, and that they cannot decide what a site runs."""

import datetime
import io
import json
import os
import random
import stat
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb

pytest.importorskip("nvflare")

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from admission import PASSPHRASE, admitted, created
from fedbilevel.federation import authority, flare_files, join, kits, project
from fedbilevel.federation.authority import read_request
from fedbilevel.federation.kits import Kit
from fedbilevel.federation.setup import AUTHORITY, Authority

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what FLARE calls


class Federation:
    """One with two sites and an administrator, who were admitted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, created(folder, a="site", b="site", anna="coordinator")
        self.kits = {
            name: admitted(self.home, name, folder / name, role) for name, role in self.project.parties.items()
        }
        self.authority = Authority.open(self.home / AUTHORITY, PASSPHRASE)

    @property
    def project(self) -> project.Project:
        return project.load(self.home)

    def members(self, name: str = "a") -> dict[str, bytes]:
        with zipfile.ZipFile(self.kits[name]) as file:
            return {each: file.read(each) for each in file.namelist()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation(tmp_path_factory.mktemp("federation"))


def modes(folder: Path) -> dict[str, int]:
    there = [path for path in [folder, *folder.rglob("*")] if path.is_dir() or path.stat().st_size]  # locks are empty
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in there}


def test_no_private_key_but_the_coordinators_own_lies_at_the_coordinator(made: Federation) -> None:
    files = [path for path in made.home.rglob("*") if path.is_file()]
    keys = [path for path in files if b"PRIVATE KEY" in path.read_bytes()]
    assert {str(path.relative_to(made.home)) for path in keys} == {
        "server/startup/server.key",
        "coordinator/startup/client.key",
    }
    for kit in made.kits.values():
        with zipfile.ZipFile(kit) as file:
            assert sorted(file.namelist()) == ["client.crt", "kit.json", "rootCA.pem", "study.toml"]
            assert not any(b"PRIVATE" in file.read(name) for name in file.namelist())
    own = (made.folder / "a" / "startup" / "client.key").read_bytes()
    assert not any(own in path.read_bytes() for path in files)


def test_what_is_secret_is_for_its_owner_only(made: Federation) -> None:
    made_modes = {**modes(made.home), **modes(made.folder / "a" / "startup")}
    for path, mode in made_modes.items():
        assert mode & 0o077 == 0, path


def edited(**changes: Any) -> Callable[[dict[str, bytes], Federation], dict[str, bytes]]:
    """A change of names and addresses."""

    def edit(members: dict[str, bytes], made: Federation) -> dict[str, bytes]:
        return {**members, "kit.json": json.dumps({**json.loads(members["kit.json"]), **changes}).encode()}

    return edit


def with_study(text: bytes) -> Callable[[dict[str, bytes], Federation], dict[str, bytes]]:
    return lambda members, made: {**members, "study.toml": text}


def certified(
    name: str = "a",
    days: tuple[float, float] = (-1, 100),
    ca: bool = False,
    purpose: Any = ExtendedKeyUsageOID.CLIENT_AUTH,
) -> Callable[[dict[str, bytes], Federation], dict[str, bytes]]:
    """Another certificate of the same authority, for the same key."""

    def certify(members: dict[str, bytes], made: Federation) -> dict[str, bytes]:
        from nvflare.lighter.utils import Identity, generate_cert

        now = datetime.datetime.now(datetime.UTC)
        key = x509.load_pem_x509_certificate(members["client.crt"]).public_key()
        since, until = (now + datetime.timedelta(days=each) for each in days)
        more: Any = [(x509.ExtendedKeyUsage([purpose]), False)]
        more += [] if ca else [(x509.BasicConstraints(ca=False, path_length=None), True)]
        issuer = Identity(authority.common_name(made.authority.root))
        certificate = generate_cert(
            Identity(name, "a"), issuer, made.authority.key, key, ca=ca,
            not_valid_before=since, not_valid_after=until, extra_extensions=more,
        )  # fmt: skip
        return {**members, "client.crt": authority.pem(certificate)}

    return certify


def another_authority(members: dict[str, bytes], made: Federation) -> dict[str, bytes]:
    folder = made.folder / "other"
    other = Authority.open(folder, PASSPHRASE) if folder.exists() else Authority.create(folder, "hospitals", PASSPHRASE)
    return {**members, "rootCA.pem": authority.pem(other.root)}


def own_key_as_authority(members: dict[str, bytes], made: Federation) -> dict[str, bytes]:
    """Its certificate is its own authority."""
    return {**members, "rootCA.pem": members["client.crt"]}


WRONG = {
    "another file": (
        lambda m, _: {**m, "local/resources.json": b"{}"},
        "has a file that does not belong there, 'local/",
    ),
    "a file for FLARE": (lambda m, _: {**m, "fed_client.json": b"{}"}, "does not belong there"),
    "a key": (lambda m, _: {**m, "client.key": b""}, "does not belong there"),
    "a path": (lambda m, _: {**m, "../outside": b"x"}, "does not belong there"),
    "an absolute path": (lambda m, _: {**m, "/tmp/outside": b"x"}, "does not belong there"),
    "lacks one": (lambda m, _: {k: v for k, v in m.items() if k != "study.toml"}, "lacks a file, 'study.toml'"),
    "another entry": (edited(command="rm"), "and nothing else"),
    "a list": (lambda m, _: {**m, "kit.json": b"[1]"}, "and nothing else"),
    "deep": (lambda m, _: {**m, "kit.json": b"[" * 4000}, "not a valid start-up kit"),
    "no JSON": (lambda m, _: {**m, "kit.json": b"{'a': \xff"}, "not a valid start-up kit"),
    "port 0": (edited(port=0), "port must be a number from 1 to 65535"),
    "port 65536": (edited(port=65536), "port must be"),
    "port as text": (edited(port="8102"), "wrong type"),
    "port as truth": (edited(port=True), "wrong type"),
    "a host with an option": (edited(host="localhost --set x=y"), "not a valid host"),
    "a host with an address": (edited(host="localhost:22/"), "not a valid host"),
    "a long host": (edited(host="a" * 300), "not a valid host"),
    "a host with a line": (edited(host="localhost\n"), "not a valid host"),
    "a path as name": (edited(party="../a"), "not a valid name"),
    "an escape in a name": (edited(federation="\x1b[2Jhospitals"), "not a valid name"),
    "a long name": (edited(federation="h" * 100), "not a valid name"),
    "another name": (edited(party="b"), "its certificate is for 'a', not for b"),
    "another role": (edited(role="coordinator"), "its certificate is for 'a', not for a@hospitals.org"),
    "an unknown role": (edited(role="king"), "king"),
    "a strange version": (edited(fedbilevel="1; rm"), "is not a version"),
    "an escape in the study": (with_study(b"seed = 1\x1b[1A\n"), "has the character .*x1b"),
    "a study that turns around": (with_study("seed = 1 \u202e1 = dees\n".encode()), "has the character"),
    "a long study": (with_study(b"#" * (1 << 17)), "its study is too long"),
    "a study of bytes": (with_study(b"\xff\xfe"), "not a valid start-up kit"),
    "a large study": (with_study(b"#" * (1 << 20)), "study.toml is too large"),
    "no certificate": (lambda m, _: {**m, "client.crt": b"nothing"}, "not a valid start-up kit"),
    "two certificates": (lambda m, _: {**m, "client.crt": m["client.crt"] * 2}, "2 certificates in one file"),
    "another authority": (another_authority, "its certificate is not from its authority"),
    "itself as authority": (own_key_as_authority, "its certificate is not from its authority"),
    "somebody else's": (certified("b"), "its certificate is for 'b', not for a"),
    "expired": (certified(days=(-10, -1)), "its certificate expired on .*: ask for a new one"),
    "of tomorrow": (certified(days=(1, 10)), "is not valid yet: check the clock"),
    "one that issues others": (certified(ca=True), "it could issue others, or serve"),
    "one that serves": (certified(purpose=ExtendedKeyUsageOID.SERVER_AUTH), "it could issue others, or serve"),
}


def kept(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", WRONG)
def test_a_kit_that_is_not_as_it_should_be_is_refused_and_nothing_is_written(
    made: Federation, tmp_path: Path, case: str
) -> None:
    change, said = WRONG[case]
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in change(made.members(), made).items():
            file.writestr(name, content)
    before = kept(made.folder / "a")
    with pytest.raises(fb.FedbilevelError, match=said) as raised:
        join.unpack(path, made.folder / "a", "builtin", {})
    assert str(raised.value).count("\n") == 0
    assert kept(made.folder / "a") == before
    assert not list(tmp_path.parent.rglob("outside"))


def test_links_folders_bombs_and_other_files_are_no_kits(made: Federation, tmp_path: Path) -> None:
    def refused(said: str, *extra: tuple[Any, bytes], without: str = "") -> None:
        path = tmp_path / "a.zip"
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            warnings.simplefilter("ignore")  # of repeated names
            for name, content in made.members().items():
                if name != without:
                    file.writestr(name, content)
            for info, content in extra:
                file.writestr(info, content)
        with pytest.raises(fb.FedbilevelError, match=said):
            Kit.read(path)

    link = zipfile.ZipInfo("study.toml")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    refused("does not belong there, 'study.toml'", (link, b"/etc/passwd"), without="study.toml")
    refused("does not belong there", ("study.toml", b"again"))
    refused("does not belong there", ("study.toml/", b""), without="study.toml")
    refused("study.toml is too large", ("study.toml", bytes(10**8)), without="study.toml")
    (tmp_path / "large.zip").write_bytes(bytes(1 << 20))
    (tmp_path / "text.zip").write_text("no zip")
    broken = bytearray(made.kits["a"].read_bytes())
    broken[60:100] = bytes(40)
    (tmp_path / "broken.zip").write_bytes(broken)
    for name in ("large.zip", "text.zip", "broken.zip", "missing.zip", "."):
        with pytest.raises(fb.FedbilevelError, match="is not a"):
            Kit.read(tmp_path / name)


def test_a_kit_needs_the_key_of_its_request(made: Federation, tmp_path: Path) -> None:
    with pytest.raises(fb.FedbilevelError, match="has no private key: make one with 'fedbilevel federation request a'"):
        join.unpack(made.kits["a"], tmp_path / "a", "builtin", {})
    assert not (tmp_path / "a").exists()
    kits.request(tmp_path / "a", "a")
    with pytest.raises(fb.FedbilevelError, match="does not belong to the key"):
        join.unpack(made.kits["a"], tmp_path / "a", "builtin", {})
    assert [path.name for path in (tmp_path / "a" / "startup").iterdir()] == ["client.key"]
    with pytest.raises(fb.FedbilevelError, match="this kit is for anna, a coordinator"):
        join.unpack(made.kits["anna"], made.folder / "anna", "builtin", {})


def test_a_folder_stays_with_its_federation(made: Federation, tmp_path: Path) -> None:
    join.unpack(made.kits["b"], made.folder / "b", "builtin", {})
    other = created(tmp_path, b="site")
    kit = admitted(other, "b", made.folder / "b")  # the same key, in another federation of the same name
    with pytest.raises(fb.FedbilevelError, match="belongs to another federation: choose another folder"):
        join.unpack(kit, made.folder / "b", "builtin", {})


def test_a_new_certificate_for_a_new_key_replaces_the_old(made: Federation, tmp_path: Path) -> None:
    kit = admitted(made.home, "b", tmp_path / "b", new_key=False)
    join.unpack(kit, tmp_path / "b", "builtin", {})
    first = (tmp_path / "b" / "startup" / "client.key").read_bytes()
    again = admitted(made.home, "b", tmp_path / "b")  # the same key
    assert Kit.read(again).certificate.public_key() == Kit.installed(tmp_path / "b").certificate.public_key()
    join.unpack(again, tmp_path / "b", "builtin", {})
    assert (tmp_path / "b" / "startup" / "client.key").read_bytes() == first
    kits.request(tmp_path / "b", "b", new_key=True)
    join.unpack(again, tmp_path / "b", "builtin", {})  # while the new one is not approved, the old one is used
    newest = admitted(made.home, "b", tmp_path / "b", new_key=True)
    join.unpack(newest, tmp_path / "b", "builtin", {})
    assert (tmp_path / "b" / "startup" / "client.key").read_bytes() != first
    assert not (tmp_path / "b" / "startup" / "new.key").exists()


LOAD = """
import argparse, json, os, sys
from nvflare.apis.fl_constant import SystemConfigs
from nvflare.apis.workspace import Workspace
from nvflare.fuel.f3.communicator import load_comm_drivers
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.fuel.utils.log_utils import configure_logging
from nvflare.private.fed.app.fl_conf import FLClientStarterConfiger, create_privacy_manager
from nvflare.private.fed.utils.fed_utils import fobs_initialize

folder = sys.argv[1]
workspace = Workspace(folder, "a", "config")
os.chdir(folder)
fobs_initialize(workspace)
options = argparse.Namespace(workspace=folder, job_id=None)
FLClientStarterConfiger(workspace, options, ["uid=a", "secure_train=true"]).configure()
configure_logging(workspace)
create_privacy_manager(workspace, names_only=False)
load_comm_drivers()
allowed = ConfigService.get_section(SystemConfigs.RESOURCES_CONF)["class_allow_list"]
print(json.dumps([allowed, sorted(os.listdir("local"))]))
"""
"""What FLARE's client does with the files of its folder when it starts."""


def load(folder: Path) -> list[Any]:
    command = [sys.executable, "-P", "-c", LOAD, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


JOB = "0a0a0a0a-0000-4000-8000-000000000000"


def in_a_job(folder: Path, marks: Path) -> None:
    """A job that does not bring code in FLARE's sense, but a driver for its connections, and another allow-list."""
    config = folder / JOB / "app_a" / "config"
    config.mkdir(parents=True)
    (config / "comm_config.json").write_text(json.dumps({"comm_driver_path": "."}))
    (config / "evil.py").write_text(f"open({str(marks / 'driver')!r}, 'w')\n")
    (config / "resources.json").write_text(json.dumps({"class_allow_list": ["*"]}))
    (config / "fed_client.json").write_text(json.dumps({"servers": []}))


def plant(folder: Path, marks: Path) -> None:
    """Files in FLARE's folder that would run commands when it starts."""
    touch = lambda name: {"args": ["touch", str(marks / name)]}
    component = lambda name: {"components": [{"id": name, "path": "subprocess.Popen", "args": touch(name)}]}
    local = folder / "local"
    resources = json.loads((local / "resources.json").read_text())
    resources["components"] += component("resources")["components"]
    resources["class_allow_list"] = ["*"]
    (local / "resources.json").write_text(json.dumps(resources))
    (folder / "startup" / "more__resources.json").write_text(json.dumps(component("startup")))
    (local / "more__p_resources.json").write_text(json.dumps(component("local")))
    logs = json.loads((local / "log_config.json").read_text())
    logs["formatters"]["baseFormatter"] = {"()": "subprocess.call", **touch("logs")}
    (local / "log_config.json").write_text(json.dumps(logs))
    decomposers = local / "custom" / "nvflare_decomposers"
    decomposers.mkdir(parents=True)
    (decomposers / "evil.py").write_text(f"open({str(marks / 'custom')!r}, 'w')\n")
    in_a_job(folder, marks)
    for name in ("comm_config.json", "resources.json", "fed_client.json"):
        (folder / name).unlink()


def test_edited_files_of_flare_have_no_effect(made: Federation, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    join.unpack(made.kits["a"], made.folder / "a", "builtin", {})
    kit = Kit.installed(made.folder / "a")
    folder = flare_files.site(made.folder / "a", kit)
    plant(folder, marks)
    load(folder)
    assert {path.name for path in marks.iterdir()} >= {"resources", "startup", "local", "logs", "custom", "driver"}
    for path in marks.iterdir():
        path.unlink()
    before = (folder / "local", folder / "startup")
    assert flare_files.site(made.folder / "a", kit) == folder
    in_a_job(folder, marks)  # jobs come while FLARE is running
    allowed, there = load(folder)
    assert not list(marks.iterdir())
    assert allowed == list(flare_files.ALLOWED_AT_SITES)
    assert there == ["authorization.json", "log_config.json", "resources.json"]
    assert all(path.is_dir() for path in before)


@pytest.mark.parametrize("place", ["flare", "flare/local", "flare/startup", "flare/resources.json"])
def test_links_in_flares_folder_lead_nowhere(made: Federation, tmp_path: Path, place: str) -> None:
    kit = Kit.read(made.kits["a"])
    kit.keep(made.folder / "a")
    folder = flare_files.site(made.folder / "a", kit)
    target, link = tmp_path / "target", made.folder / "a" / place
    flare_files._remove(link)
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    link.symlink_to(target)
    flare_files.site(made.folder / "a", kit)
    assert not link.is_symlink()
    assert [path.name for path in target.iterdir()] == ["mine.txt"]
    assert (folder / "local" / "resources.json").is_file()


def test_the_coordinators_files_are_written_anew_and_its_keys_stay(made: Federation) -> None:
    server, admin = made.home / "server", made.home / "coordinator"
    keys = [(folder / "startup" / name) for folder, name in ((server, "server.key"), (admin, "client.key"))]
    before = [path.read_bytes() for path in keys]
    (server / "local" / "custom").mkdir()
    (server / "local" / "resources.json").write_text("{}")
    (admin / "local" / "resources.json").write_text('{"handlers": [{"path": "subprocess.Popen"}]}')
    (admin / "startup" / "signature.json").write_text("{}")
    (server / "jobs").mkdir()
    flare_files.coordinator(made.home, made.project)
    assert [path.read_bytes() for path in keys] == before
    assert not (server / "local" / "custom").exists()
    assert not (admin / "startup" / "signature.json").exists()
    assert (server / "jobs").exists()
    for place in ("", "local"):
        allowed = json.loads((server / place / "resources.json").read_text())["class_allow_list"]
        assert allowed == list(flare_files.ALLOWED_AT_SERVER)
    assert "handlers" not in json.loads((admin / "local" / "resources.json").read_text())


def test_a_folder_that_flare_would_take_apart_is_refused(made: Federation, tmp_path: Path) -> None:
    kit = Kit.read(made.kits["a"])
    place = tmp_path / "a b"
    os.rename(made.folder / "a", place)
    try:
        with pytest.raises(fb.FedbilevelError, match="choose a folder without ' ' in its path"):
            flare_files.site(place, kit)
    finally:
        os.rename(place, made.folder / "a")


def test_what_is_kept_is_checked_again_before_flare_starts(made: Federation, tmp_path: Path) -> None:
    kit = admitted(made.home, "a", made.folder / "a")
    join.unpack(kit, made.folder / "a", "builtin", {})
    about = made.folder / "a" / "startup" / "kit.json"
    about.write_text(about.read_text().replace("localhost", "localhost --set x=y"))
    with pytest.raises(fb.FedbilevelError, match="not a valid host"):
        Kit.installed(made.folder / "a")
    join.unpack(kit, made.folder / "a", "builtin", {})
    assert join.about(made.folder / "a")["host"] == "localhost"


def test_an_administrator_gets_a_folder_for_flare(made: Federation) -> None:
    place = join.administrator(Kit.read(made.kits["anna"]), made.folder / "anna")
    about = json.loads((place / "startup" / "fed_admin.json").read_text())["admin"]
    assert (about["username"], about["host"], about["port"]) == ("anna@hospitals.org", "localhost", 8102)


def test_variables_that_change_what_flare_does_are_not_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fedbilevel.federation import process

    passed: dict[str, str] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **more: passed.update(env))
    for name in ("NVFLARE_COMM_DRIVER_PATH", "NVFL_LOG_ROOT", "FL_LOG_LEVEL", "FEDBILEVEL_PASSPHRASE", "KEPT"):
        monkeypatch.setenv(name, "x")
    process.start("json.tool", [], tmp_path / "log", {"MORE": "y"})
    assert {"KEPT": "x", "MORE": "y", "PYTHONSAFEPATH": "1"}.items() <= passed.items()
    assert not {"NVFLARE_COMM_DRIVER_PATH", "NVFL_LOG_ROOT", "FL_LOG_LEVEL", "FEDBILEVEL_PASSPHRASE"} & set(passed)


def test_kits_are_small_and_say_whom_they_are_for(made: Federation) -> None:
    kit = Kit.read(made.kits["a"])
    assert made.kits["a"].stat().st_size < 10_000
    assert (kit.federation, kit.party, kit.role, kit.host, kit.port) == ("hospitals", "a", "site", "localhost", 8102)
    assert kit.days in (358, 359)
    assert kit.fingerprint == authority.fingerprint(made.authority.key.public_key())
    assert authority.same(authority.spoken(kit.fingerprint), kit.fingerprint)
    assert not authority.same(kit.fingerprint[:8], kit.fingerprint)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """With bytes that changed, came, went or are there again."""
    found = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 5, 20])):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(4):
            case 0:
                found[at : at + 1] = chance.randbytes(1)
            case 1:
                found[at:at] = chance.randbytes(chance.choice([1, 3, 50]))
            case 2:
                del found[at : at + chance.choice([1, 4, 100])]
            case _:
                found[at:at] = found[at : at + 50]
    return bytes(found)


def test_mutated_kits_and_requests_are_refused_with_a_sentence(made: Federation, tmp_path: Path) -> None:
    chance, members, path = random.Random(0), made.members(), tmp_path / "x"
    whole, request = made.kits["a"].read_bytes(), (made.folder / "a" / "a.csr").read_bytes()
    said = []
    for _ in range(100):
        one = chance.choice(list(members))
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as file:
            for name, each in members.items():
                file.writestr(name, mutated(each, chance) if name == one else each)
        kit, other, asked = mutated(whole, chance), content.getvalue(), mutated(request, chance)
        for bad, read in ((kit, Kit.read), (other, Kit.read), (asked, read_request)):
            path.write_bytes(bad)
            try:
                read(path)
            except fb.FedbilevelError as error:
                said.append(str(error))
    assert not [sentence for sentence in said if "\n" in sentence]
    assert len(said) > 250  # the rest changed the text of the study, or nothing that counts
