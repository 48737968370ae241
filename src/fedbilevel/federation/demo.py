"""A whole federation on this machine: a real server, four real sites, mutual TLS. It stops everything it started.

Each site is one hospital of the UCI heart disease data. The task is ``regularization``: how strongly to regularise each
feature of a common logistic regression.
"""

import csv
import secrets
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from rich.console import Console
from rich.markup import escape

from fedbilevel.data import heart_disease
from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import coordinator, kits, process, project, setup
from fedbilevel.federation.cli.following import follow
from fedbilevel.federation.worker import SECRET
from fedbilevel.report import page
from fedbilevel.runs.interrupts import Terminated
from fedbilevel.storage.files import new_folder
from fedbilevel.tasks.regularization import HEART_WORDS

SECONDS = 240  # it takes a quarter of this on an idle machine


def run(out: Path | None, rounds: int, console: Console) -> Path:
    """Run the demo, and return the folder of its run."""
    project.needs_flare()
    folder = new_folder("federation-demo", out).resolve()
    sites, schema, about = _data(folder)
    port = free_port()
    study: dict[str, Any] = {
        "task": {"name": "regularization"},
        "run": {"rounds": rounds, "every": max(1, rounds // 10)},
        "federation": {"quorum": 3},
        "schema": schema,
    }
    (folder / "heart.toml").write_text(tomli_w.dumps(study))
    hospitals: dict[str, Any] = {
        "name": "hospitals",
        "host": "localhost",
        "port": port,
        "experiment": "heart.toml",
        "parties": [{"name": name, "role": "site"} for name in sites],
    }
    (folder / "hospitals.toml").write_text(tomli_w.dumps(hospitals))
    console.print(f"{about} Everything is in {folder}.", highlight=False, soft_wrap=True)
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
            kit = [str(project.kit(home, name)), "--data", str(data), "--folder", str(folder / name)]
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


def _data(folder: Path) -> tuple[dict[str, Path], dict[str, Any], str]:
    """A data file for every site, their common schema, and a sentence about the data."""
    loaded = heart_disease()
    groups = loaded.train.groups["hospital"]
    files = {}
    for number, name in enumerate(loaded.groups["hospital"]):
        part = np.flatnonzero(groups == number)
        files[name] = _write(
            folder / f"{name}.csv", loaded.features, loaded.train.inputs[part], loaded.train.labels[part]
        )
    features = {name: {"values": list(HEART_WORDS[name])} if name in HEART_WORDS else {} for name in loaded.features}
    schema = {"label": {"column": "label", "values": [0, 1]}, "features": features}
    return files, schema, "The four hospitals of the UCI heart disease data."


def _write(path: Path, names: Sequence[str], inputs: np.ndarray, labels: np.ndarray) -> Path:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*names, "label"])
        for row, label in zip(inputs, labels, strict=True):
            table.writerow([*("" if np.isnan(value) else f"{value:g}" for value in row), int(label)])
    return path
