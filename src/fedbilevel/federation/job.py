"""A job for FLARE: a folder with the names of installed classes and their arguments, and no code."""

import json
import shutil
from pathlib import Path

from fedbilevel.federation.study import Study


def write_job(package: Path, run: str, sites: list[str], there: list[str], study: Study) -> None:
    """Write a job for FLARE: names of installed classes and their arguments, no code."""
    shutil.rmtree(package, ignore_errors=True)
    config = package / "app" / "config"
    config.mkdir(parents=True)
    meta = {
        "name": run,
        "resource_spec": {},
        "min_clients": min(len(there), study.quorum(len(sites))),  # fewer where a result is delivered
        "deploy_map": {"app": ["server", *there]},
    }
    (package / "meta.json").write_text(json.dumps(meta, indent=1))
    at_server = {
        "format_version": 2,
        "np_download_chunk_size": 0,
        "workflows": [
            {
                "id": "controller",
                "path": "nvflare.collab.runtime.controller.CollabController",
                "args": {"server_obj_id": "server", "sync_task_timeout": 120},
            }
        ],
        "components": [
            {"id": "server", "path": "fedbilevel.federation.server.Server", "args": {"run": run, "sites": sites}}
        ],
    }
    at_site = {
        "format_version": 2,
        "np_download_chunk_size": 0,
        "executors": [
            {
                "tasks": ["*"],
                "executor": {
                    "path": "nvflare.collab.runtime.executor.CollabExecutor",
                    "args": {"client_obj_id": "site"},
                },
            }
        ],
        "components": [{"id": "site", "path": "fedbilevel.federation.site.Site", "args": {}}],
    }
    (config / "config_fed_server.json").write_text(json.dumps(at_server, indent=1))
    (config / "config_fed_client.json").write_text(json.dumps(at_site, indent=1))
