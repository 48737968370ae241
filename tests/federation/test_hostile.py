"""Real processes again: a site that calls another, and a port that half the world connects to."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from test_real_processes import LONG, Running, exchanges, gone, same, wait

from admission import admitted
from fedbilevel.federation import project, setup
from fedbilevel.federation.ledger import LEDGER

MALICIOUS = r'''
"""Makes the site that starts with it call another one, in every way that FLARE has."""
import json, os, sys, threading, time


def attack(site, cell, server, session):
    from nvflare.collab.runtime.defs import CALL_PROTOCOL_VERSION, MSG_CHANNEL, MSG_TOPIC, CallHeaderKey, ObjectCallKey
    from nvflare.fuel.f3.cellnet.defs import CellChannel
    from nvflare.fuel.f3.cellnet.utils import new_cell_message
    from nvflare.private.admin_defs import Message as Command
    from nvflare.fuel.f3.message import Message

    job, number = cell.get_fqcn().split(".")[1], 0
    whole = next(each for each in site.everything if getattr(each, "core_cell", None) is cell)
    victim = f"north.{job}"

    def note(how, reply):
        with open(os.environ["NOTES"], "a") as file:
            print(json.dumps([how, reply.get_header("cn__return_code"), repr(reply.payload)[:300]]), file=file)

    while True:
        for kind in ("greet", "session", "message", "answer"):
            topic, head = "answer" if kind == "answer" else "question", b""
            if session.seal is not None:
                head = session.seal.close(b"down", 1 << 40, b"hello", {"seconds": 9, "setup": True})
            about = {"fedbilevel": [f"n{number}", kind, head, 0, 1]}
            note(f"cell {kind}", cell.send_request("fedbilevel", topic, victim, Message(about, b"hello"), timeout=10))
        headers = {
            CallHeaderKey.PROTOCOL_VERSION: CALL_PROTOCOL_VERSION,
            CallHeaderKey.TARGET_NAME: "north",
            CallHeaderKey.METHOD_NAME: "handle",
        }
        payload = {
            ObjectCallKey.CALLER: "server", ObjectCallKey.TARGET_NAME: "north", ObjectCallKey.METHOD_NAME: "handle",
            ObjectCallKey.ARGS: [], ObjectCallKey.KWARGS: {"message": b"hello", "seconds": 9.0, "setup": True},
        }
        request = new_cell_message(headers, payload)
        where = {"channel": MSG_CHANNEL, "target": victim, "topic": MSG_TOPIC}
        note("collab", whole.send_request(**where, request=request, timeout=3.0))
        for command in ("sys.info", "train.abort", "train.shutdown"):  # of an administrator, to FLARE's client there
            where = {"channel": CellChannel.CLIENT_MAIN, "target": "north", "topic": command}
            request = new_cell_message({}, Command(command, ""))
            note("command", whole.send_request(**where, request=request, timeout=3.0))
        number += 1
        time.sleep(0.2)


def patch():
    name = "fedbilevel.federation.site"
    while name not in sys.modules or not hasattr(sys.modules[name], "Site"):
        time.sleep(0.005)
    from nvflare.collab import collab

    module = sys.modules[name]
    listen = module.Site.listen

    def evil(self, cell, server, session):
        self.everything = [collab.fl_ctx.get_engine().get_cell()]
        listen(self, cell, server, session)
        threading.Thread(target=attack, args=(self, cell, server, session), daemon=True).start()

    module.Site.listen = evil


threading.Thread(target=patch, daemon=True).start()
'''


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A federation in which one site, east, runs a program of its own."""
    os.environ["JAX_ENABLE_X64"] = "1"  # for the processes to come
    found = Running(tmp_path_factory.mktemp("hostile"))
    (found.folder / "evil").mkdir()
    (found.folder / "evil" / "sitecustomize.py").write_text(MALICIOUS)
    join = found.join

    def joined(name: str, kit: Path) -> None:
        path = os.environ.get("PYTHONPATH", "")
        if name == "east":
            os.environ["PYTHONPATH"] = f"{found.folder / 'evil'}{os.pathsep}{path}"
            os.environ["NOTES"] = str(found.folder / "notes.jsonl")
        try:
            join(name, kit)
        finally:
            os.environ["PYTHONPATH"] = path

    found.join = joined
    found.start()
    try:
        yield found
    finally:
        found.end()
        del os.environ["JAX_ENABLE_X64"]
        gone(found.folder)


@pytest.mark.slow
def test_a_site_that_calls_another_gets_a_refusal(running: Running) -> None:
    """The other one's run comes to the simulator's numbers, and its log says who called."""
    run = running.finished(running.want(LONG, "called"), 400)
    same(run)
    assert not any(each["failed"] for each in exchanges(run))
    tried = [json.loads(line) for line in (running.folder / "notes.jsonl").read_text().splitlines()]
    kinds = {"cell greet", "cell session", "cell message", "cell answer", "collab", "command"}
    assert {how for how, _, _ in tried} == kinds
    assert len(tried) > 20
    assert {payload for _, _, payload in tried} == {"None"}
    codes = {how: {code for each, code, _ in tried if each == how} for how, _, _ in tried}
    for how in ("collab", "command"):
        assert codes.pop(how) == {"timeout"}  # FLARE's streams are not answered at all
    assert "restarting it" not in (running.folder / "north.log").read_text()
    for found in codes.values():  # before the other one is there, and when its job has ended, there is nobody to ask
        assert "unauthenticated" in found
        assert found <= {"unauthenticated", "process_exception", "comm_error", "target_unreachable"}
    ledger = [json.loads(line) for line in (running.folder / "north" / LEDGER).read_text().splitlines()]
    refused = [line for line in ledger if line["caller"] == "east"]
    assert len(refused) > 20
    assert {line["error"] for line in refused[:20]} == {"only the server may call a site."}
    assert {line["caller"] for line in ledger if line["action"]} == {"server"}
    print(f"{len(tried)} calls of another site, {len(refused)} of them in the log; {len(ledger)} lines")


@pytest.mark.slow
def test_a_run_goes_on_whatever_connects(running: Running) -> None:
    """500 connections of each kind, made again when they are closed; a new site joins in the meantime."""
    study = LONG | {"run": {"rounds": 3000, "every": 1000}}
    run = running.want(study, "attacked")
    running.at_round(run, 20)
    port = project.load(running.home).port

    def rate(seconds: float) -> float:
        began, first = time.monotonic(), len(exchanges(run))
        time.sleep(seconds)
        return (len(exchanges(run)) - first) / (time.monotonic() - began)

    north = running.folder / "north" / "startup"
    guest = running.folder / "new" / "startup"  # a party whose certificate is misused, but not one of the run
    hostile = str(Path(__file__).parents[1] / "hostile.py")
    for kind in ("half-open", "silent", "random", "frames", "slow"):
        before = rate(10)
        command = [sys.executable, hostile, kind, str(port), "500", str(guest if guest.exists() else north)]
        attack: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert attack.stdout.readline() == "all\n"
            during = statistics.median(rate(5) for _ in range(3))
            assert during > 0
            took = ""
            if kind == "half-open":
                began = time.monotonic()
                setup.add(running.home, "new")
                running.join("new", admitted(running.home, "new", running.folder / "new"))
                said = (running.folder / "new.log").read_text
                wait(lambda: "new" in running.connected(), 240, said)
                took = f"; a new site joined after {time.monotonic() - began:.0f} s"
        finally:
            made, _ = attack.communicate("")
        print(f"{kind}: {before:.1f} exchanges per second before, {during:.1f} during, {made.split()[-1]} made{took}")
    assert not any(each["failed"] for each in exchanges(run))
