"""Real processes to which anything may happen: kills at random moments, a network that breaks, machines that sleep,
disks that are full. What is here takes minutes to an hour; ``engines/test_faults.py`` has every case in one process.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbilevel.storage.arrays import decode
from helpers import small_disk

pytest.importorskip("nvflare")

from test_real_processes import SITES, Running, exchanges, gone, quadratic, rounds, simulated, status, wait

from fedbilevel.federation import process, project
from fedbilevel.federation.demo import child, free_port

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("FEDBILEVEL_KILLS", "100"))
PATIENT = 900.0
"""Seconds after which a run counts as stuck; on an idle machine a new job takes 30."""
Report = Callable[[str, object], None]


def study(rounds: int, **rules: Any) -> dict[str, Any]:
    """Of clients that remember. All of them are needed, so that nothing may differ from the simulator."""
    return quadratic(
        algorithm={"name": "fedbioacc-local"},
        task={"variant": "T4"},
        run={"rounds": rounds, "every": 20},
        federation={"quorum": 3, "patience": 60.0, "deadline": 60.0, "setup_deadline": 600.0} | rules,
    )


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    found = Running(tmp_path)
    found.start()
    try:
        yield found
    finally:
        found.end()
        gone(found.folder)


@cache
def expected(rounds: int, folder: Path) -> dict[str, np.ndarray]:
    return simulated(folder)


def difference(run: Path, rounds: int) -> float:
    """The largest one from the simulator's numbers."""
    _, found = decode((run / "solution.safetensors").read_bytes())
    return max(float(np.max(np.abs(found[name] - array))) for name, array in expected(rounds, run).items())


def matching(words: str) -> list[int]:
    """The processes whose commands have these words."""
    found = subprocess.run(["pgrep", "-f", "--", words], capture_output=True, text=True, check=False).stdout
    return [int(number) for number in found.split()]


class Killer:
    """Kills any process of a federation, and starts again those that a service manager would start again."""

    def __init__(self, running: Running, seed: int) -> None:
        self.running, self.random, self.killed = running, random.Random(seed), Counter()

    def _places(self) -> dict[str, str]:
        site, home = self.running.folder / self.random.choice(SITES), self.running.home
        return {
            "worker": f"federation.worker {site.resolve()}",
            "site": f"client_train -m {site.resolve()}",
            "job of a site": f"worker_process -m {site.resolve()}",
            "join": f"federation join .*--folder {site}",
            "server": f"server_train -m {home.resolve()}",
            "job of the server": f"runner_process -m {home.resolve()}",
            "coordinator": f"federation start {home}",
        }

    def strike(self) -> bool:
        """Kill something, if it is there now."""
        whom, words = self.random.choice(list(self._places().items()))
        victims = matching(words)
        if not victims:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(victims[0], signal.SIGKILL)
            self.killed[whom] += 1
            return True
        return False

    def revive(self) -> None:
        """As a service manager does, again and again: the port may still be taken."""
        children, folder = self.running.children, self.running.folder
        for name, found in list(children.items()):
            if found.poll() is None:
                continue
            process.end(found)  # closes its end of the pipe
            if name == "server":
                children[name] = child(["start", str(self.running.home)], folder / "server.log")
            else:
                self.running.join(name, project.kit(self.running.home, name))


def test_a_hundred_random_kills(running: Running, record_property: Report) -> None:
    """Of every process there is. All runs come to their end, with the simulator's numbers."""
    killer, length = Killer(running, seed=1), 60
    differences: list[float] = []
    began = time.monotonic()
    for number in itertools.count():
        run = running.want(study(length), f"run-{number}")
        progress, moved = (-1, 0), time.monotonic()
        seen, early, next_strike = 0, False, 0.0
        while status(run).get("status") not in ("finished", "failed"):
            killer.revive()
            time.sleep(0.2)
            done = exchanges(run) if (run / "exchanges.jsonl").exists() else []
            now = (status(run).get("submitted", 0), len(done))
            if now != progress:
                progress, moved = now, time.monotonic()
            assert time.monotonic() - moved < PATIENT, f"stuck: {json.dumps(status(run))}, {killer.killed}"
            # Mostly in the middle of the work, sometimes while others are still being started again. "join" is no work:
            # on a slow machine, all jobs would be ended before their first exchange.
            worked = sum(each["method"] != "join" for each in done)
            at_work = status(run).get("status") == "running" and worked > seen
            if (
                killer.killed.total() < KILLS
                and time.monotonic() > next_strike
                and (at_work or early)
                and killer.strike()
            ):
                seen, early = worked, killer.random.random() < 0.2
                next_strike = time.monotonic() + killer.random.uniform(0.0, 30.0 if early else 3.0)
        assert status(run)["status"] == "finished", status(run).get("failure")
        differences.append(difference(run, length))
        print(
            f"{run.name}: {killer.killed.total()} kills, {time.monotonic() - began:.0f} s, {differences[-1]:.1e}",
            flush=True,
        )
        if killer.killed.total() >= KILLS:
            break
    seconds = time.monotonic() - began
    print(f"{dict(killer.killed)} in {len(differences)} runs, {seconds:.0f} s, difference {max(differences):.1e}")
    record_property("kills", dict(killer.killed))
    record_property("runs", len(differences))
    record_property("seconds", seconds)
    record_property("largest difference", max(differences))
    assert max(differences) < 1e-10


class Wire:
    """What is between the sites and the server: it passes bytes on, and does worse at random."""

    FAULTS = ("delayed", "dropped", "doubled", "reordered", "corrupted", "cut")

    def __init__(self, port: int, to: int, seed: int, seconds: float) -> None:
        self.to, self.random, self.seconds = to, random.Random(seed), seconds
        self.happened, self.next = Counter(), time.monotonic() + 60.0
        self.listener = socket.create_server(("localhost", port), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                try:
                    far = socket.create_connection(("localhost", self.to), 5)
                    far.settimeout(None)
                except OSError:
                    near.close()
                    continue
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                for part in self._passed(data):
                    other.sendall(part)
        except OSError:
            pass
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)  # its own thread closes it
        one.close()

    def _passed(self, data: bytes) -> list[bytes]:
        """These bytes as they arrive."""
        if time.monotonic() < self.next:
            return [data]
        self.next = time.monotonic() + self.random.uniform(0.5, 1.5) * self.seconds
        what, middle = self.random.choice(self.FAULTS), len(data) // 2
        self.happened[what] += 1
        if what == "delayed":
            time.sleep(self.random.uniform(0.5, 5.0))
        if what == "cut":
            raise OSError
        changed = {
            "dropped": [],
            "doubled": [data, data],
            "reordered": [data[middle:], data[:middle]],
            "corrupted": [data[:middle], bytes([data[middle] ^ 4]), data[middle + 1 :]],
        }
        return changed.get(what, [data])


def test_a_network_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Report) -> None:
    """Every few seconds, bytes between the server and its sites are late, lost, doubled, in another order or wrong."""
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    running = Running(tmp_path)
    port, behind = project.load(running.home).port, free_port()
    for place in ("server", "coordinator", "federation.json"):  # the kits have the other port
        path = running.home / place
        for file in path.rglob("*.json") if path.is_dir() else [path]:
            file.write_text(file.read_text().replace(str(port), str(behind)))
    wire = Wire(port, behind, seed=2, seconds=8.0)
    try:
        running.start()
        run = running.want(study(120, deadline=15.0), "bad-network")
        running.finished(run, PATIENT)
        record_property("faults", dict(wire.happened))
        print(f"{dict(wire.happened)}; jobs: {status(run)['submitted']}, difference {difference(run, 120):.1e}")
        assert wire.happened.total() > 5
        assert difference(run, 120) < 1e-10
    finally:
        running.end()
        wire.listener.close()
        gone(running.folder)


def test_an_older_checkpoint_than_the_sites_keep_ends_the_run(running: Running) -> None:
    """Such as one from a backup. It is not tried again and again."""
    run = running.want(study(300), "from-a-backup")
    running.at_round(run, 5)
    backup = running.folder / "backup"
    while not backup.exists() or not list(backup.iterdir()):
        shutil.rmtree(backup, ignore_errors=True)
        with contextlib.suppress(shutil.Error, OSError):  # a checkpoint may be removed now
            shutil.copytree(run / "checkpoints", backup)
    running.at_round(run, rounds(run)[-1] + 20)
    process.end(running.children["server"], seconds=15.0)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(backup, run / "checkpoints")
    running.children["server"] = child(["start", str(running.home)], running.folder / "server.log")
    wait(lambda: status(run)["status"] == "failed", PATIENT, lambda: json.dumps(status(run)))
    assert "could not join: the server is at round" in status(run)["failure"]
    jobs = status(run)["submitted"]
    time.sleep(10)
    assert (status(run)["submitted"], status(run)["status"]) == (jobs, "failed")


def asleep(words: list[str], seconds: float) -> None:
    """Stop processes for a while, as a laptop does."""
    stopped = [number for each in words for number in matching(each)]
    assert stopped
    for number in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGSTOP)
    time.sleep(seconds)
    for number in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGCONT)


@pytest.mark.parametrize("whose", ["site", "server"])
def test_a_machine_that_sleeps_for_longer_than_the_deadline(running: Running, whose: str) -> None:
    length = 150 if whose == "server" else 800  # the others need longer than it sleeps
    run = running.want(study(length, quorum=2, deadline=10.0, patience=20.0), f"{whose}-sleeps")
    running.at_round(run, 5)
    home = running.home
    words = {
        "site": [str((running.folder / "south").resolve())],
        "server": [f"{word} {home.resolve()}" for word in ("federation start", "server_train -m", "runner_process -m")],
    }
    asleep(words[whose], 40.0)
    running.finished(run, PATIENT)
    missed = {name for each in exchanges(run) for name in each["failed"]}
    assert missed == ({"south"} if whose == "site" else set())  # the others did not wait for it
    assert exchanges(run)[-1]["answered"] == list(SITES)
    assert missed or difference(run, 150) < 1e-10


@pytest.mark.parametrize("whose", ["site", "server"])
def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    """Of the server or of a site: a sentence where its people look, and the run goes on when there is space."""
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    with small_disk(tmp_path / "disk", "64m") as disk:
        running = Running(tmp_path)
        if whose == "server":
            shutil.move(running.home, disk.folder / "hospitals")
            running.home.symlink_to(disk.folder / "hospitals")
        else:
            (disk.folder / "south").mkdir()
            (running.folder / "south").symlink_to(disk.folder / "south")
        said = running.folder / ("server.log" if whose == "server" else "south.log")
        try:
            running.start()
            run = running.want(study(150), "full")
            running.at_round(run, 5)
            disk.fill()
            wait(lambda: "(No space left on device)" in said.read_text(), 120, said.read_text)
            time.sleep(15)
            before = rounds(run)[-1]
            time.sleep(5)
            assert rounds(run)[-1] <= before + 1
            disk.free()
            running.finished(run, PATIENT)
            assert "can be written again" in said.read_text()
            assert difference(run, 150) < 1e-10
        finally:
            running.end()
            gone(running.folder)
