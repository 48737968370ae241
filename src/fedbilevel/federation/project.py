"""The setup of a federation: who takes part, their certificates, and one start-up kit for each.

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

The folder that ``create`` makes contains the keys of the project's own certificate authority: anybody who has them can
admit parties. Everything secret in it is readable by its owner only.
"""

import contextlib
import io
import json
import os
import re
import shutil
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedbilevel.errors import FedbilevelError, UnknownName, needs
from fedbilevel.storage.files import write_atomically

NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,60}")
ROLES = {"site": "has data", "coordinator": "may start runs"}
ADMIN = "coordinator"
ALLOWED_AT_SITES = ("nvflare.collab.runtime.executor.CollabExecutor", "fedbilevel.federation.site.Site")
ALLOWED_AT_SERVER = ("nvflare.collab.runtime.controller.CollabController", "fedbilevel.federation.server.Server")
FILE = "federation.json"


def needs_flare() -> None:
    """Say what to install where NVIDIA FLARE is missing."""
    needs("nvflare", "federation", "a federation needs NVIDIA FLARE")


@dataclass(frozen=True)
class Project:
    """A federation: its name, where its server is, who takes part."""

    name: str
    host: str
    port: int
    parties: Mapping[str, str]  # name: role
    experiment: str  # the text of its file
    revoked: tuple[str, ...] = ()

    @property
    def sites(self) -> list[str]:
        """The parties with data, in the order of their numbers, without those that were revoked."""
        return [name for name, role in self.parties.items() if role == "site" and name not in self.revoked]


def read(path: Path) -> Project:
    """The federation that a file describes."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise FedbilevelError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
        name, role = (party.get("name"), party.get("role", "site")) if isinstance(party, dict) else (None, None)
        if not isinstance(name, str):
            raise FedbilevelError(f"{path}: every [[parties]] needs a name.")
        check_name(name)
        if role not in ROLES:
            raise UnknownName("role", str(role), ROLES, f"{path}: ")
        if name in parties:
            raise FedbilevelError(f"{path}: there are two parties called {name}.")
        parties[name] = role
    check_name(table["name"])
    if not 1 <= table["port"] <= 65535:
        raise FedbilevelError(f"{path}: port must be a number from 1 to 65535, but is {table['port']}.")
    if "site" not in parties.values():
        raise FedbilevelError(f'{path}: no party has data; write role = "site" for those that do.')
    file = path.parent / table["experiment"]
    if not file.is_file():
        raise FedbilevelError(f"{path}: there is no experiment file {file}.")
    return Project(table["name"], table["host"], table["port"], parties, file.read_text())


def check_name(name: str) -> None:
    """Refuse names that cannot be in a certificate."""
    if not NAME.fullmatch(name) or name.lower() in ("server", "admin", ADMIN):
        raise FedbilevelError(
            f"'{name}' is not a valid name: use letters, digits and hyphens, and not server, admin or {ADMIN}."
        )


def load(folder: Path) -> Project:
    """The federation of a folder that ``create`` made."""
    try:
        known = json.loads((folder / FILE).read_text())
        return Project(**{**known, "revoked": tuple(known["revoked"])})
    except (OSError, ValueError, TypeError, KeyError):
        raise FedbilevelError(
            f"{folder} is not the folder of a federation: create one with 'fedbilevel federation create FILE.toml'."
        ) from None


def save(project: Project, folder: Path) -> None:
    """Save who takes part."""
    write_atomically(folder / FILE, json.dumps(project.__dict__, indent=1).encode())


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


def create(project: Project, folder: Path) -> list[Path]:
    """Create the folder with the server, the coordinator and a kit for every party. Returns the kits."""
    needs_flare()
    if folder.exists() and any(folder.iterdir()):
        raise FedbilevelError(f"the folder {folder} is not empty: choose another one with --out.")
    with _private():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        _provision(project, folder)
        save(project, folder)
    return [kit(folder, name) for name in project.parties]


def add(folder: Path, name: str, role: str = "site") -> Path:
    """Add a party, and return its kit."""
    needs_flare()
    project = load(folder)
    check_name(name)
    if role not in ROLES:
        raise UnknownName("role", role, ROLES)
    if name in project.parties:
        more = " A revoked name cannot be used again." if name in project.revoked else ""
        raise FedbilevelError(f"there is already a party called {name}: choose another name.{more}")
    project = Project(**{**project.__dict__, "parties": {**project.parties, name: role}})
    with _private():
        _provision(project, folder)
        save(project, folder)
    return kit(folder, name)


def revoke(folder: Path, name: str) -> None:
    """Exclude a party for good, whatever certificate it has. The server refuses it from its next start on; a running
    server is told by ``coordinator.py``.
    """
    project = load(folder)
    if name not in project.parties:
        raise UnknownName("party", name, project.parties)
    if project.parties[name] != "site":
        raise FedbilevelError(
            f"{name} is not a site, and FLARE can refuse only sites: create a new federation if this key is lost."
        )
    if name not in project.revoked:
        save(Project(**{**project.__dict__, "revoked": (*project.revoked, name)}), folder)
    disabled = sorted(load(folder).revoked)
    # FLARE reads this file when it starts, and refuses the parties in it.
    write_atomically(folder / "server" / "disabled_clients.json", json.dumps({"disabled_clients": disabled}).encode())
    kit(folder, name).unlink(missing_ok=True)


def kit(folder: Path, name: str) -> Path:
    """Where the start-up kit of a party is."""
    return folder / "kits" / f"{name}.zip"


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Make files that are written in this context readable by their owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _provision(project: Project, folder: Path) -> None:
    """Make certificates and FLARE's start-up files for parties that have none yet."""
    from nvflare.lighter.prov_utils import prepare_builders
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    participants: list[dict[str, Any]] = [
        {"name": project.host, "type": "server", "org": project.name, "fed_learn_port": project.port},
        {"name": _email(ADMIN, project), "type": "admin", "org": project.name, "role": "project_admin"},
    ]
    for name, role in project.parties.items():
        site = {"name": name, "type": "client", "org": name}
        lead = {"name": _email(name, project), "type": "admin", "org": project.name, "role": "lead"}
        participants.append(site if role == "site" else lead)
    # Names of organisations have no hyphens.
    for participant in participants:
        participant["org"] = participant["org"].replace("-", "_")
    wanted = {
        "api_version": 3,
        "name": project.name,
        "description": "a federation of fedbilevel",
        "participants": participants,
        "builders": [
            {
                "path": "nvflare.lighter.impl.workspace.WorkspaceBuilder",
                "args": {"template_file": ["master_template.yml"]},
            },
            {
                "path": "nvflare.lighter.impl.static_file.StaticFileBuilder",
                "args": {"config_folder": "config", "scheme": "tcp"},
            },
            {"path": "nvflare.lighter.impl.cert.CertBuilder", "args": {"root_valid_days": 3650}},
            {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
        ],
    }
    messages = io.StringIO()
    try:
        with contextlib.redirect_stdout(messages), contextlib.redirect_stderr(messages):
            made = Provisioner(str(folder / "authority"), prepare_builders(wanted)).provision(prepare_project(wanted))
    except Exception as error:
        raise FedbilevelError(f"the certificates could not be created: {error}") from error
    result = Path(made["current_prod_dir"])
    server = folder / "server"
    if not server.exists():
        shutil.move(result / project.host, server)
        _restrict(server, ALLOWED_AT_SERVER)
        _keep_inside(server)
        shutil.move(result / _email(ADMIN, project), folder / ADMIN)
    for name, role in project.parties.items():
        path, source = kit(folder, name), result / (name if role == "site" else _email(name, project))
        if path.exists() or name in project.revoked:
            continue
        if role == "site":
            _restrict(source, ALLOWED_AT_SITES)
        about = {
            "federation": project.name,
            "party": name,
            "role": role,
            "host": project.host,
            "port": project.port,
            "experiment": project.experiment,
            "fedbilevel": version("fedbilevel"),
        }
        (source / "kit.json").write_text(json.dumps(about, indent=1))
        pack(source, path)
    shutil.rmtree(result)


def _email(name: str, project: Project) -> str:
    return f"{name}@{project.name}.org"


def _restrict(folder: Path, classes: tuple[str, ...]) -> None:
    """Allow only our installed classes: no other component, and no job that brings code."""
    local = folder / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_list_enforcement_mode"] = "enforce"
    resources["class_allow_list"] = list(classes)
    resources["allow_log_streaming"] = False
    resources.get("client", {}).pop("compression", None)  # floats do not get smaller
    resources["components"] = [c for c in resources["components"] if "log_streamer" not in c["id"]]
    (local / "resources.json").write_text(json.dumps(resources, indent=1))
    rights = json.loads((local / "authorization.json.default").read_text())
    everything = {"submit_job": "any", "manage_job": "any", "view": "any", "download_job": "any", "clone_job": "none"}
    nothing = {"byoc": "none", "shell_commands": "none", "operate": "none", "server-predeployed-flwr": "none"}
    rights["permissions"] = {
        "project_admin": {**everything, **nothing, "operate": "any"},
        "lead": {**everything, **nothing},
        "org_admin": {"view": "any"},
        "member": {"view": "any"},
    }
    (local / "authorization.json").write_text(json.dumps(rights, indent=1))


def _keep_inside(server: Path) -> None:
    """Keep FLARE's jobs and snapshots in the server's folder, not in a folder that all users share."""
    path = server / "local" / "resources.json"
    resources = json.loads(path.read_text())
    resources["servers"][0]["heart_beat_timeout"] = 20
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(server.resolve() / "snapshots")
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(server.resolve() / "jobs")
        if component["id"] == "job_scheduler":
            component["args"] |= {"max_jobs": 1, "min_schedule_interval": 1.0, "max_schedule_interval": 5.0}
    path.write_text(json.dumps(resources, indent=1))


def pack(source: Path, path: Path) -> None:
    """Write a folder to a zip file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for part in sorted(source.rglob("*")):
            if part.is_file():
                file.write(part, part.relative_to(source))
    path.chmod(0o600)


def unpack(path: Path, folder: Path) -> dict[str, Any]:
    """Unpack a kit into its party's folder, unless it is there already. Returns what the kit says."""
    try:
        with zipfile.ZipFile(path) as file:
            about = json.loads(file.read("kit.json"))
            names = file.namelist()
            if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
                raise FedbilevelError(f"{path} is not a start-up kit: it would write outside its folder.")
            if (folder / "kit.json").exists():
                if (folder / "startup" / "client.crt").read_bytes() != file.read("startup/client.crt"):
                    raise FedbilevelError(f"{folder} belongs to another kit: choose another folder with --folder.")
                return about
            with _private():
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o700)
                file.extractall(folder)
                for part in {folder / above for name in names for above in [Path(name), *Path(name).parents[:-1]]}:
                    part.chmod(0o700 if part.is_dir() else 0o600)
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise FedbilevelError(f"{path} is not a start-up kit: {error}.") from None
    return about
