"""What NVIDIA FLARE starts from, written from this package before every start.

FLARE takes much from files: which classes it makes when it starts, which a job may name, who may do what, how it logs,
and folders with code. So nothing that lies in its folder is trusted. It is replaced by what follows, and only names,
addresses and certificates come from elsewhere.

FLARE finds three of these files by their name *anywhere* below its folder, jobs included. In that search, the top of
the folder comes first: that is why they are there, too.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation.kits import CERTIFICATE, KEY, ROOT, STARTUP, Kit
from fedbilevel.federation.project import ADMIN, LONGEST_COMMON_NAME, SERVER, Project
from fedbilevel.storage.files import private_folder, write_privately

FLARE = "flare"
"""FLARE's folder in that of a party."""
AUDIT = "audit.log"
ALLOWED_AT_SITES = ("nvflare.collab.runtime.executor.CollabExecutor", "fedbilevel.federation.site.Site")
ALLOWED_AT_SERVER = ("nvflare.collab.runtime.controller.CollabController", "fedbilevel.federation.server.Server")
_AWKWARD = frozenset(" \t\n\r'\"\\#")

Files = Mapping[str, "bytes | dict[str, Any]"]


def site(folder: Path, kit: Kit) -> Path:
    """Write FLARE's folder of a site, whatever is there now. Returns it."""
    identity = kit.host[:LONGEST_COMMON_NAME]
    client = {
        "format_version": 2,
        "servers": [{"name": kit.federation, "service": _service(kit), "identity": identity}],
        "client": {**_files_of("client"), "fqsn": kit.party, "is_leaf": True, "connection_security": "mtls"},
    }
    resources = {**_resources(ALLOWED_AT_SITES, "client"), "client": {"retry_timeout": 30}}
    return _replace(folder, _credentials(folder / STARTUP), "fed_client.json", client, resources)


def administrator(folder: Path, kit: Kit) -> Path:
    """Write FLARE's folder of an administrator: for its console, or its API. Returns it."""
    project = Project(kit.federation, kit.host, kit.port, {}, "")
    return _administrator(folder / FLARE, _credentials(folder / STARTUP), project, kit.party)


def coordinator(folder: Path, project: Project) -> None:
    """Write FLARE's folders of the server and of the coordinator's own administrator."""
    _server(folder / SERVER, project)
    _administrator(folder / ADMIN, _credentials(folder / ADMIN / STARTUP), project, ADMIN)


def _server(folder: Path, project: Project) -> None:
    place = folder.resolve()
    check_place(place)
    service = _service(project)
    server = {
        "format_version": 2,
        "servers": [
            {
                "name": project.name,
                "service": service,
                "admin_server": project.host,
                "admin_port": project.port,
                **_files_of("server"),
                "connection_security": "mtls",
            }
        ],
    }
    # FLARE's jobs and snapshots stay in the server's folder; by default, they would be in one that all users share.
    store = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
    resources = _resources(ALLOWED_AT_SERVER, "server")
    resources["servers"] = [
        {"admin_storage": "transfer", "max_num_clients": 100, "heart_beat_timeout": 20, "admin_timeout": 10.0}
    ]
    resources["snapshot_persistor"] = {
        "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
        "args": {
            "uri_root": "/",
            "storage": {"path": store, "args": {"root_dir": str(place / "snapshots"), "uri_root": "/"}},
        },
    }
    resources["components"] += [
        {
            "id": "job_scheduler",
            "path": "nvflare.app_common.job_schedulers.job_scheduler.DefaultJobScheduler",
            "args": {"max_jobs": 1, "min_schedule_interval": 1.0, "max_schedule_interval": 5.0},
        },
        {
            "id": "job_manager",
            "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
            "args": {"uri_root": str(place / "jobs"), "job_store_id": "job_store"},
        },
        {"id": "job_store", "path": store},
    ]
    start = _credentials(folder / STARTUP, ("server.key", "server.crt", ROOT))
    _write(folder, start, "fed_server.json", server, resources)


def _administrator(folder: Path, credentials: Files, project: Project, name: str) -> Path:
    about = {
        "format_version": 1,
        "admin": {
            "project_name": project.name,
            "username": project.user(name),
            "server_identity": project.host[:LONGEST_COMMON_NAME],
            "scheme": "tcp",
            "host": project.host,
            "port": project.port,
            "connection_security": "mtls",
            "uid_source": "user_input",
            "with_file_transfer": True,
            "upload_dir": "transfer",
            "download_dir": "transfer",
            "client_key": KEY,
            "client_cert": CERTIFICATE,
            "ca_cert": ROOT,
        },
    }
    _write(folder, credentials, "fed_admin.json", about, {"format_version": 1})
    return folder


def _service(address: Kit | Project) -> dict[str, str]:
    return {"target": f"{address.host}:{address.port}", "scheme": "tcp"}


def _files_of(kind: str) -> dict[str, str]:
    return {"ssl_private_key": f"{kind}.key", "ssl_cert": f"{kind}.crt", "ssl_root_cert": ROOT}


def _resources(allowed: tuple[str, ...], kind: str) -> dict[str, Any]:
    """Only our installed classes: no other component, no job that brings code."""
    launcher = f"{kind.title()}ProcessJobLauncher"
    components: list[dict[str, Any]] = [
        {
            "id": "process_launcher",
            "path": f"nvflare.app_common.job_launcher.{kind}_process_launcher.{launcher}",
            "args": {},
        }
    ]
    if kind == "client":
        place = "nvflare.app_common.resource"
        none = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300}
        components += [
            {
                "id": "resource_manager",
                "path": f"{place}_managers.gpu_resource_manager.GPUResourceManager",
                "args": none,
            },
            {
                "id": "resource_consumer",
                "path": f"{place}_consumers.gpu_resource_consumer.GPUResourceConsumer",
                "args": {},
            },
        ]
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": list(allowed),
        "allow_log_streaming": False,
        "components": components,
    }


def _authorization() -> dict[str, Any]:
    everything = {"submit_job": "any", "manage_job": "any", "view": "any", "download_job": "any", "clone_job": "none"}
    nothing = {"byoc": "none", "shell_commands": "none", "operate": "none", "server-predeployed-flwr": "none"}
    permissions = {
        "project_admin": {**everything, **nothing, "operate": "any"},
        "lead": {**everything, **nothing},
        "org_admin": {"view": "any"},
        "member": {"view": "any"},
    }
    return {"format_version": "1.0", "permissions": permissions}


def _credentials(folder: Path, names: tuple[str, ...] = (KEY, CERTIFICATE, ROOT)) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in names}
    except OSError as error:
        raise FedbilevelError(
            f"{error.filename} cannot be read ({error.strerror}): restore it from a backup."
        ) from None


def check_place(folder: Path) -> None:
    """Refuse a folder whose name FLARE would take apart when it starts a job."""
    if awkward := sorted(set(str(folder)) & _AWKWARD):
        raise FedbilevelError(f"FLARE cannot work in {folder}: choose a folder without {awkward[0]!r} in its path.")


def _replace(folder: Path, credentials: Files, name: str, startup: dict[str, Any], resources: dict[str, Any]) -> Path:
    """A new folder for FLARE instead of the one that is there, in which a process may still be at work."""
    place, draft = folder.resolve() / FLARE, folder.resolve() / f".{FLARE}.new"
    old = place.with_name(f".{FLARE}.old-{time.time_ns()}")
    check_place(place)
    _remove(draft)
    private_folder(draft)
    _write(draft, credentials, name, startup, resources)
    if os.path.lexists(place):
        if (place / AUDIT).is_file() and not place.is_symlink() and not (place / AUDIT).is_symlink():
            os.replace(place / AUDIT, draft / AUDIT)
        os.replace(place, old)
    os.replace(draft, place)
    for path in place.parent.glob(f".{FLARE}.old-*"):
        with contextlib.suppress(OSError):  # if something is still written there, it goes the next time
            _remove(path)
    return place


def _write(folder: Path, credentials: Files, name: str, startup: dict[str, Any], resources: dict[str, Any]) -> None:
    """The files of a party in FLARE's folder; whatever else lies in the folders from which it starts is removed."""
    from nvflare.fuel.utils.log_utils import default_log_dict

    wire = {"comm_driver_path": "", "allow_adhoc_conns": False}
    local = {
        "resources.json": resources,
        "authorization.json": _authorization(),
        "log_config.json": default_log_dict,
    }
    top = {name: startup, "resources.json": resources, "comm_config.json": wire}
    if (folder / STARTUP).is_symlink():
        _remove(folder / STARTUP)
    private_folder(folder / STARTUP)
    for path in (*(folder / STARTUP).iterdir(), folder / "local"):
        if path.name not in credentials:  # which are never missing, not even for a moment
            _remove(path)
    for place, files in ((STARTUP, {**credentials, name: startup}), ("local", local), ("", top)):
        private_folder(folder / place)
        for file, content in files.items():
            if (folder / place / file).is_dir():
                _remove(folder / place / file)
            plain = content if isinstance(content, bytes) else json.dumps(content, indent=1).encode()
            write_privately(folder / place / file, plain)


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
