"""Real processes on loopback: FLARE's server and sites with mutual TLS, ended in the middle, refused, revoked."""

import contextlib
import csv
import itertools
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tomli_w

import fedbilevel as fb
from fedbilevel.storage.arrays import decode, named_leaves
from fedbilevel.storage.run_folder import RunFolder

pytest.importorskip("nvflare")

from admission import PASSPHRASE
from fedbilevel.federation import coordinator, kits, process, project, setup
from fedbilevel.federation.cli.following import missing
from fedbilevel.federation.demo import child, free_port
from fedbilevel.federation.join import administrator, obstacle
from fedbilevel.federation.kits import Kit
from fedbilevel.federation.ledger import EXCHANGES
from fedbilevel.federation.rows import load
from fedbilevel.federation.study import Study
from fedbilevel.tasks.sites import together
from helpers import INTERRUPTIBLE

SITES = ("north", "east", "south")


def status(run: Path) -> dict[str, Any]:
    return RunFolder(run).info()


def quadratic(**more: Any) -> dict[str, Any]:
    return {
        "task": {"name": "quadratic", "clients": len(SITES)} | more.get("task", {}),
        "algorithm": more["algorithm"],
        "run": {"rounds": 4, "every": 2} | more.get("run", {}),
        "federation": {"quorum": 2, "patience": 30.0} | more.get("federation", {}),
    }


class Running:
    """A federation of three sites, each with a client of the quadratic problem."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "hospitals"
        (folder / "study.toml").write_text(tomli_w.dumps(quadratic(algorithm={"name": "fedbio"})))
        parties = [{"name": name} for name in SITES]
        described = {"name": "hospitals", "host": "localhost", "port": free_port(), "experiment": "study.toml"}
        (folder / "hospitals.toml").write_text(tomli_w.dumps({**described, "parties": parties}))
        setup.create(project.read(folder / "hospitals.toml"), self.home, PASSPHRASE)
        for name in SITES:
            self.admit(name)
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.children["server"] = child(["start", str(self.home)], self.folder / "server.log")
        for name in SITES:
            self.join(name, project.kit(self.home, name))
        wait(lambda: self.connected() == sorted(SITES), 240, lambda: (self.folder / "server.log").read_text())

    def admit(self, name: str, new_key: bool = False) -> Path:
        return setup.approve(self.home, kits.request(self.folder / name, name, new_key=new_key), PASSPHRASE)

    def join(self, name: str, kit: Path) -> None:
        (self.folder / "rules.toml").write_text('tasks = ["quadratic"]\n')
        arguments = ["join", str(kit), "--data", "builtin", "--folder", str(self.folder / name)]
        arguments += ["--rules", str(self.folder / "rules.toml")]
        self.children[name] = child(arguments, self.folder / f"{name}.log")

    def connected(self) -> list[str]:
        return coordinator.state(self.home).get("connected", [])

    def want(self, study: dict[str, Any], name: str) -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(tomli_w.dumps(study))
        return coordinator.want(self.home, path, name)

    def finished(self, run: Path, seconds: float = 180) -> Path:
        wait(lambda: status(run).get("status") in ("finished", "failed"), seconds, lambda: json.dumps(status(run)))
        assert status(run)["status"] == "finished", status(run).get("failure")
        return run

    def at_round(self, run: Path, number: int) -> None:
        """Wait until a run is there."""
        wait(lambda: rounds(run)[-1:] >= [number], 180, lambda: json.dumps(status(run)))

    def process(self, text: str) -> int:
        """The one process of this federation whose command has these words."""
        found = subprocess.run(["pgrep", "-f", text], capture_output=True, text=True, check=False).stdout.split()
        return int(found[0])

    def end(self) -> None:
        process.end(*self.children.values(), seconds=15.0)


def wait(ready: Callable[[], Any], seconds: float, otherwise: Callable[[], str]) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if ready():
                return
        time.sleep(0.2)
    pytest.fail(f"not in {seconds} seconds: {otherwise()}")


def processes(folder: Path) -> list[str]:
    return subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout.split()


def gone(folder: Path) -> None:
    """No process of a federation is left, at the latest when the jobs have noticed that their site is gone."""
    wait(lambda: not processes(folder), 60, lambda: "processes: " + " ".join(processes(folder)))


def exchanges(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / EXCHANGES).read_text().splitlines() if line.endswith("}")]


def rounds(run: Path) -> list[int]:
    return [each["round"] for each in exchanges(run)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    os.environ["JAX_ENABLE_X64"] = "1"  # for the processes to come
    found = Running(tmp_path_factory.mktemp("federation"))
    try:
        found.start()
        yield found
    finally:
        found.end()
        del os.environ["JAX_ENABLE_X64"]
        gone(found.folder)


def simulated(run: Path) -> dict[str, np.ndarray]:
    built = Study.read(run / "study.toml").build()
    experiment = built.experiment
    with jax.enable_x64(True):
        result = fb.solve(
            built.task, built.algorithm, experiment.rounds or 1, experiment.seed, experiment.participation(),
            every=experiment.every,
        )  # fmt: skip
        return {name: np.asarray(leaf) for name, leaf in named_leaves({"x": result.x, "y": result.y}).items()}


def same(run: Path, tolerance: float = 1e-10) -> None:
    """The federation came to the simulator's numbers."""
    _, found = decode((run / "solution.safetensors").read_bytes())
    expected = simulated(run)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float64
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance)


CASES = {
    "fedbioacc": quadratic(algorithm={"name": "fedbioacc"}),
    "fednest": quadratic(algorithm={"name": "fednest"}, run={"rounds": 2}),
    "fedbioacc-local": quadratic(algorithm={"name": "fedbioacc-local"}, task={"variant": "T4"}, run={"sample": "2"}),
    "primal-dual": quadratic(algorithm={"name": "primal-dual"}, task={"variant": "T5"}, run={"sample": "0.7"}),
}


FAST = [pytest.param(name, marks=() if name == "fedbioacc-local" else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", FAST)
def test_real_processes_give_the_simulators_numbers(running: Running, name: str) -> None:
    run = running.finished(running.want(CASES[name], name))
    same(run)
    assert not any(each["failed"] for each in exchanges(run))
    log = (running.folder / "north" / "served.jsonl").read_text().splitlines()
    served = [json.loads(line) for line in log]
    assert any(line["run"] == name and line["left"] and line["bytes_out"] for line in served)


LONG = quadratic(
    algorithm={"name": "fedbioacc-local"},
    task={"variant": "T4"},
    run={"rounds": 120, "every": 40},
    federation={"deadline": 30.0},
)


def kill(running: Running, whom: str) -> None:
    if whom == "worker":
        os.kill(int((running.folder / "east" / "worker.pid").read_text()), signal.SIGKILL)
    elif whom == "site":
        os.kill(running.process(f"client_train -m {(running.folder / 'south').resolve()}"), signal.SIGKILL)
    else:
        os.kill(running.process(f"server_train -m {(running.home / 'server').resolve()}"), signal.SIGKILL)


def survives(running: Running, run: Path, whom: list[str]) -> None:
    """The run comes to the right answer by itself, whoever is killed in the middle of it."""
    at = 5
    for each in whom:
        running.at_round(run, at)
        kill(running, each)
        at += 30
    running.finished(run, 300)
    lost = [each for each in exchanges(run) if each["failed"]]
    # A worker costs one answer, if any; who is killed otherwise has the round repeated.
    assert len({each["round"] for each in lost}) <= 1, lost
    same(run, 0.05 if lost else 1e-10)
    assert status(run)["submitted"] == 1 + len(set(whom) - {"worker"})
    seen = rounds(run)
    again = [number for before, number in itertools.pairwise(seen) if number < before]
    assert len(again) <= len(whom)
    assert all(before - number <= 1 for before, number in itertools.pairwise(seen))


@pytest.mark.slow
def test_a_run_in_which_everybody_is_killed_once_comes_to_its_end(running: Running) -> None:
    """Of an algorithm whose clients remember: they go on from the last committed round."""
    survives(running, running.want(LONG, "all-killed"), ["worker", "site", "server"])


@pytest.mark.slow
def test_a_worker_that_hangs_costs_few_answers_and_is_started_again(running: Running) -> None:
    study = quadratic(
        algorithm={"name": "fedbio"},
        run={"rounds": 60, "every": 60},
        federation={"deadline": 3.0, "setup_deadline": 60.0},
    )
    run = running.want(study, "worker-hangs")
    running.at_round(run, 5)
    hanging = int((running.folder / "east" / "worker.pid").read_text())
    os.kill(hanging, signal.SIGSTOP)
    running.finished(run)
    lost = [each for each in exchanges(run) if each["failed"]]
    assert len(lost) <= 30  # none, if it was between two exchanges
    assert all(list(each["failed"]) == ["east"] for each in lost)
    assert sum(missed for missed, _ in missing(run).values()) == len(lost)
    assert exchanges(run)[-1]["answered"] == list(SITES)
    assert int((running.folder / "east" / "worker.pid").read_text()) != hanging
    same(run, 0.05)


@pytest.mark.slow
def test_the_coordinators_command_may_be_interrupted(running: Running) -> None:
    path = running.folder / "interrupted.toml"
    path.write_text(tomli_w.dumps(quadratic(algorithm={"name": "fedbio"}, run={"rounds": 150, "every": 10})))
    command = [*INTERRUPTIBLE, "federation", "run"]
    where = ["--federation", str(running.home)]
    first = subprocess.Popen(
        [*command, str(path), "--name", "interrupted", *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = running.home / "runs" / "interrupted"
    running.at_round(run, 3)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "The run continues on the server" in said
    again = subprocess.run([*command, "--resume", *where], capture_output=True, text=True, timeout=180, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Results in" in again.stdout
    same(run)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["worker", "site", "server"])
@pytest.mark.parametrize("name", CASES)
def test_whoever_is_killed_comes_back(running: Running, name: str, whom: str) -> None:
    study = CASES[name] | {"run": CASES[name]["run"] | {"rounds": 60, "every": 60}}
    survives(running, running.want(study, f"{name}-{whom}-killed"), [whom])


@pytest.mark.slow
def test_a_run_starts_without_a_site_which_joins_later_and_another_gets_its_result_later(running: Running) -> None:
    """East is not there at the start; south leaves before the end, and gets the result when it is back."""
    process.end(running.children["east"], seconds=15.0)
    wait(lambda: "east" not in running.connected(), 60, lambda: str(running.connected()))
    study = LONG | {"federation": {"quorum": 2, "patience": 3.0}, "run": {"rounds": 400, "every": 100}}
    run = running.want(study, "comes-later")
    running.at_round(run, 5)
    assert exchanges(run)[-1]["answered"] == ["north", "south"]
    running.join("east", project.kit(running.home, "east"))
    wait(lambda: exchanges(run)[-1]["answered"] == list(SITES), 120, lambda: str(exchanges(run)[-1]))
    process.end(running.children["south"], seconds=15.0)
    running.finished(run, 300)
    assert status(run)["undelivered"] == ["south"]
    assert (running.folder / "east" / "runs" / "comes-later" / "solution.safetensors").exists()
    running.join("south", project.kit(running.home, "south"))
    mine = running.folder / "south" / "runs" / "comes-later" / "solution.safetensors"
    wait(mine.exists, 120, lambda: json.dumps(status(run)))
    wait(lambda: status(run)["undelivered"] == [], 30, lambda: json.dumps(status(run)))
    wait(lambda: running.connected() == sorted(SITES), 60, lambda: str(running.connected()))


# Their jobs start, as those that are refused do not.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("a driver", "another list")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what FLARE calls
@pytest.mark.parametrize("brought", ["code", "another class", *SLOW])
def test_a_job_that_brings_code_is_refused(running: Running, tmp_path: Path, brought: str) -> None:
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    study = Study.read(running.folder / "study.toml")
    marker = tmp_path / "was here"
    evil = f"open({str(marker)!r}, 'w')\n\n\nclass Site:\n    pass\n"
    package = tmp_path / "evil"
    coordinator.write_job(package, "evil", list(SITES), list(SITES), study)
    config, wanted = package / "app" / "config", {}
    if brought == "code":
        (package / "app" / "custom").mkdir()
        (package / "app" / "custom" / "evil.py").write_text(evil)
        wanted = {"path": "evil.Site"}
    elif brought == "a driver":  # FLARE looks for this file in all that is below its folder
        (config / "comm_config.json").write_text(json.dumps({"comm_driver_path": "."}))
        (config / "evil.py").write_text(evil)
    else:
        wanted = {"path": "subprocess.Popen", "args": {"args": ["touch", str(marker)]}}
        if brought == "another list":
            (config / "resources.json").write_text(json.dumps({"class_allow_list": ["*"], "components": []}))
    known = json.loads((config / "config_fed_client.json").read_text())
    known["components"][0] |= wanted
    (config / "config_fed_client.json").write_text(json.dumps(known))
    session = new_secure_session("coordinator@hospitals.org", str(running.home / "coordinator"), timeout=10.0)
    try:
        job = session.submit_job(str(package))
        wait(lambda: _ended(session, job), 150, lambda: str(session.get_job_meta(job)))
        assert "COMPLETED" not in str(session.get_job_status(job))
        assert not marker.exists()
    finally:
        session.close()


def _ended(session: Any, job: str) -> bool:
    word = str(session.get_job_status(job))
    return word.startswith("FINISHED") or word == "FAILED_TO_RUN"


def test_who_has_no_valid_kit_cannot_join(running: Running, tmp_path: Path) -> None:
    """A kit of another federation, which knows where our server is."""
    other = Running(tmp_path)  # has the same names, and its own authority
    place = tmp_path / "north"
    kit = replace(Kit.read(project.kit(other.home, "north")), port=project.load(running.home).port)
    kit.write(tmp_path / "north.zip")
    kit.keep(place)
    assert "has no certificate of this federation" in obstacle(place)
    context = ssl.create_default_context(cafile=str(running.home / "server" / "startup" / "rootCA.pem"))  # trusts it
    context.load_cert_chain(place / "startup" / "client.crt", place / "startup" / "client.key")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        talk(running, context)
    other.join("north", tmp_path / "north.zip")
    try:
        log = tmp_path / "north.log"
        wait(lambda: "has no certificate of this federation" in log.read_text(), 60, log.read_text)
    finally:
        other.end()


def test_a_revoked_site_is_cut_off_and_comes_back_with_a_new_key(running: Running) -> None:
    """Within seconds, without the others; its old key stays useless when the name has a new one."""
    setup.add(running.home, "west")
    first = running.admit("west")
    running.join("west", first)
    log = running.folder / "west.log"
    try:
        wait(lambda: "west" in running.connected(), 120, log.read_text)
        setup.revoke(running.home, "west")
        wait(lambda: obstacle(running.folder / "west"), 10, lambda: "still let in")
        wait(lambda: running.connected() == sorted(SITES), 10, lambda: str(running.connected()))
        process.end(running.children["west"], seconds=15.0)
        running.join("west", first)
        wait(lambda: "closes the connection: the certificate was revoked" in log.read_text(), 90, log.read_text)
        process.end(running.children["west"], seconds=15.0)
        stolen = running.folder / "stolen"
        shutil.copytree(running.folder / "west" / "startup", stolen / "startup")
        running.join("west", running.admit("west", new_key=True))
        wait(lambda: "west" in running.connected(), 120, log.read_text)
        assert "revoked" in obstacle(stolen)
    finally:
        process.end(running.children.pop("west"), seconds=15.0)
        setup.revoke(running.home, "west")  # other tests have three sites


@pytest.mark.slow
def test_a_run_goes_on_without_a_site_that_is_revoked(running: Running) -> None:
    setup.add(running.home, "south-west")
    running.join("south-west", running.admit("south-west"))
    try:
        wait(lambda: "south-west" in running.connected(), 120, lambda: str(running.connected()))
        study = quadratic(algorithm={"name": "fedbio"}, task={"clients": 4}, run={"rounds": 120, "every": 40})
        run = running.want(study, "revoked")
        running.at_round(run, 3)
        assert exchanges(run)[-1]["answered"] == [*SITES, "south-west"]
        setup.revoke(running.home, "south-west")
        wait(lambda: exchanges(run)[-1]["answered"] == list(SITES), 240, lambda: str(exchanges(run)[-1]))
        running.finished(run, 300)
    finally:
        process.end(running.children.pop("south-west"), seconds=15.0)
        setup.revoke(running.home, "south-west")


ASK = """
import os, sys, time
from nvflare.fuel.flare_api.flare_api import new_secure_session

try:
    session = new_secure_session("anna@hospitals.org", sys.argv[1], timeout=float(sys.argv[2]))
    while True:
        print("connected:", len(session.get_system_info().client_info), flush=True)
        time.sleep(0.2)
except Exception:
    print("cut off", flush=True)
os._exit(0)  # FLARE would try to connect for ever
"""
"""An administrator who asks who is connected, again and again."""


def test_a_revoked_administrator_is_cut_off(running: Running, tmp_path: Path) -> None:
    def admitted(new_key: bool) -> str:
        request = kits.request(tmp_path / "anna", "anna", "coordinator", new_key)
        kit = Kit.read(setup.approve(running.home, request, PASSPHRASE))
        return str(administrator(kit, tmp_path / "anna"))

    def ask(place: str, seconds: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", ASK, place, str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def first_words(asking: "subprocess.Popen[str]") -> str:
        assert asking.stdout is not None
        return next(line for line in asking.stdout if line.startswith(("connected", "cut off")))

    setup.add(running.home, "anna", "coordinator")
    place = admitted(new_key=False)
    with ask(place, 60) as asking:
        assert first_words(asking) == f"connected: {len(SITES)}\n"
        setup.revoke(running.home, "anna")
        asking.communicate(timeout=60)  # it ends as soon as it has no answer
    assert "of anna was revoked" in (running.home / "server.log").read_text()
    with ask(place, 5) as asking:
        assert first_words(asking) == "cut off\n"
    assert running.connected() == sorted(SITES)
    with ask(admitted(new_key=True), 60) as asking:
        assert first_words(asking).startswith("connected")
        asking.kill()


def _fails(ask: Callable[[], Any]) -> bool:
    try:
        ask()
    except Exception:
        return True
    return False


def talk(running: Running, context: ssl.SSLContext) -> None:
    """Say something to the server; a refusal comes with the first answer at the latest."""
    plain = socket.create_connection(("localhost", project.load(running.home).port), 10)
    with context.wrap_socket(plain, server_hostname="localhost") as wire:
        wire.sendall(b"x" * 100)
        wire.recv(1)


def test_who_has_no_certificate_is_not_even_heard(running: Running) -> None:
    context = ssl.create_default_context(cafile=str(running.home / "server" / "startup" / "rootCA.pem"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        talk(running, context)


def test_the_servers_certificate_is_not_one_of_a_party(running: Running) -> None:
    start = running.home / "server" / "startup"
    context = ssl.create_default_context(cafile=str(start / "rootCA.pem"))
    context.load_cert_chain(start / "server.crt", start / "server.key")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        talk(running, context)


def test_a_party_cannot_pose_as_the_server(running: Running) -> None:
    """Even where names are not compared, as in FLARE."""
    party = running.folder / "north" / "startup"
    serving, asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=party / "rootCA.pem")
    serving.load_cert_chain(party / "client.crt", party / "client.key")
    asking.check_hostname = False
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=_fails, args=(lambda: serving.wrap_socket(ours, server_side=True),))
        thread.start()
        with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
            asking.wrap_socket(theirs)
        thread.join(10)


@pytest.mark.slow
def test_the_demo_ends_with_a_report_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedbilevel", "federation", "demo", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "demo" / "report.html").stat().st_size > 1e5
    assert "all, mean" in done.stdout
    assert not processes(tmp_path / "demo")


@pytest.mark.slow
def test_the_demo_finds_wrong_labels_as_the_simulator_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hospitals as processes, and their rows in one place."""
    monkeypatch.setenv("JAX_ENABLE_X64", "1")  # for the processes to come
    folder, rounds = tmp_path / "demo", 20
    command = [sys.executable, "-m", "fedbilevel", "federation", "demo", "--task", "clean", "--rounds", str(rounds)]
    done = subprocess.run([*command, "--out", str(folder)], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong among them" in done.stdout
    assert not processes(folder)
    with jax.enable_x64(True):
        _compare_lists(folder, rounds, done.stdout)


def _compare_lists(folder: Path, rounds: int, said: str) -> None:
    study = Study.read(folder / "hospitals" / "runs" / "demo" / "study.toml")
    assert study.schema is not None
    names = [path.stem for path in sorted(folder.glob("*.csv")) if path.stem != "planted"]
    examples = [load(str(folder / f"{name}.csv"), study.schema, {}, f"{name} demo", 10) for name in names]
    facts = together([study.summarize(each) for each in examples])
    built = [study.build(each, facts, len(names)) for each in examples]
    own = [each.task.clients[0] for each in built]
    plain = [{part: {k: a[:] for k, a in columns.items()} for part, columns in each.items()} for each in own]
    everybody = fb.Task(built[0].task.problem, plain, batch_size=None, weights="size")
    expected = fb.solve(everybody, built[0].algorithm, rounds, seed=0, metrics=False)
    for m, name in enumerate(names):
        path = folder / name / "runs" / "demo" / "suspects.csv"
        assert f"Suspects: {path}" in said
        block = jax.tree.map(lambda a, m=m: a[m], expected.x)
        judged = study.judge(examples[m], facts, block, expected.y)
        with path.open(newline="") as file:
            listed = {row["row"]: float(row["probability_wrong"]) for row in csv.DictReader(file)}
        found = [listed[f"{name}-{number:03}"] for number in range(1, len(judged.wrong) + 1)]
        np.testing.assert_allclose(found, judged.wrong, rtol=1e-5, atol=1e-6)  # six digits are written
        assert len(set(found)) > 50
        assert "probably wrong. See " in (folder / f"{name}.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_ended_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "demo"
    command = [*INTERRUPTIBLE, "federation", "demo", "--out", str(folder), "--rounds", "5000"]
    demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = folder / "hospitals" / "runs" / "demo"
    wait(lambda: rounds(run)[-1] >= 3, 180, lambda: "no rounds")
    assert len(processes(folder)) > 10
    demo.send_signal(number)
    demo.wait(60)
    gone(folder)
