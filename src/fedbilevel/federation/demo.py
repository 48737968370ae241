"""A whole federation on this machine: a real server, four real sites, mutual TLS. It stops everything it started.

Each site is one hospital of the UCI heart disease data. ``demo_studies.py`` has what they compute.
"""

import secrets
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.markup import escape

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import coordinator, kits, process, project, setup
from fedbilevel.federation.cli.following import follow
from fedbilevel.federation.demo_studies import STUDIES
from fedbilevel.federation.worker import SECRET
from fedbilevel.report import page
from fedbilevel.runs.interrupts import Terminated
from fedbilevel.storage.files import new_folder

SECONDS = 240  # it takes a quarter of this on an idle machine


def run(task: str, out: Path | None, rounds: int | None, console: Console) -> Path:
    """Run the demo, and return the folder of its run."""
    project.needs_flare()
    STUDIES.check(task)
    folder = new_folder("federation-demo", out).resolve()
    shown = STUDIES[task](folder)
    sites, rounds = shown.sites, rounds or shown.rounds
    port = free_port()
    study = {**shown.study, "run": {"rounds": rounds, "every": max(1, rounds // 10)}}
    (folder / "heart.toml").write_text(tomli_w.dumps(study))
    hospitals: dict[str, Any] = {
        "name": "hospitals",
        "host": "localhost",
        "port": port,
        "experiment": "heart.toml",
        "parties": [{"name": name, "role": "site"} for name in sites],
    }
    (folder / "hospitals.toml").write_text(tomli_w.dumps(hospitals))
    console.print(f"{shown.about} Everything is in {folder}.", highlight=False, soft_wrap=True)
    home = folder / "hospitals"
    passphrase = secrets.token_urlsafe()  # of an authority that nobody needs any more after this
    setup.create(project.read(folder / "hospitals.toml"), home, passphrase)
    for name in sites:
        setup.approve(home, kits.request(folder / name, name), passphrase)
    console.print("Created certificates and start-up kits. Starting a server and four sites ...", highlight=False)
    children: list[subprocess.Popen[bytes]] = []
    try:
        children.append(child(["start", str(home)], folder / "server.log"))
        for name, data in sites.items():
            (folder / name / SECRET).write_text("demo")  # so that two demos deal out the rows alike
            kit = [str(project.kit(home, name)), "--data", str(data), "--folder", str(folder / name), *shown.options]
            children.append(child(["join", *kit, "--approve"], folder / f"{name}.log"))
        _wait(lambda: coordinator.pid(home) is not None, 60, children, "the server did not start")
        place = coordinator.want(home, folder / "heart.toml", "demo")
        limit = time.monotonic() + SECONDS + rounds

        def check() -> None:
            if ended := [child for child in children if child.poll() is not None]:
                raise FedbilevelError(f"a process ended with exit code {ended[0].returncode}: see {folder}/*.log.")
            if time.monotonic() > limit:
                raise FedbilevelError(f"the demo took too long and was stopped: see {folder}/*.log.")

        follow(place, check)
    except KeyboardInterrupt as interrupt:
        console.print("Interrupted: stopping everything ...")
        raise SystemExit(143 if isinstance(interrupt, Terminated) else 130) from None
    finally:
        process.end(*children, seconds=15.0)
    shown.end(folder, console)
    written = page.write([place], folder / "report.html")
    console.print(f"Report in [bold]{escape(str(written))}[/bold]", soft_wrap=True, highlight=False)
    console.print(
        f"What left a site: fedbilevel federation log {folder / next(iter(sites))}", soft_wrap=True, highlight=False
    )
    return place


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def child(arguments: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """One of the commands that people type, in a process of its own that ends with this one."""
    return process.start("fedbilevel", ["federation", *arguments], log)


def _wait(ready: Any, seconds: float, children: Sequence[Any], otherwise: str) -> None:
    for _ in range(int(seconds / 0.1)):
        if ready():
            return
        if any(child.poll() is not None for child in children):
            break
        time.sleep(0.1)
    raise FedbilevelError(f"{otherwise}: see its log in the folder of the demo.")
