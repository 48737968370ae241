"""The way of a message: FLARE's cells, a site's process and its worker, and who else calls."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("nvflare")

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessagePropKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message

from fedbilevel.engines.messaging.protocol import Echo, Facts, Failed, Hello, pack, unpack
from fedbilevel.federation.consent import Consent, Limits, digest
from fedbilevel.federation.demo import free_port
from fedbilevel.federation.site import MOST_REFUSED, SITE_FOLDER, Site
from fedbilevel.federation.study import Study, facts_of_copy
from fedbilevel.federation.wire import callers, channel, pipes
from fedbilevel.federation.wire.channel import CHANNEL, HEADER, PART, WINDOW, Channel, Packet
from fedbilevel.federation.wire.pipes import Frame
from fedbilevel.federation.wire.signing import Party, ServersEnd, SitesEnd
from fedbilevel.federation.wire.sites import Sites
from fedbilevel.federation.worker import LEDGER, Settings
from parties import HOST, Authority

NAMES = ("server", "north", "east")


@pytest.fixture(scope="module")
def cells() -> Iterator[dict[str, CoreCell]]:
    """Cells of FLARE in one process, which hand messages over without a network."""
    url = f"tcp://localhost:{free_port()}"
    made = {name: CoreCell(name, root_url=url, secure=False, credentials={}) for name in NAMES}
    for cell in made.values():
        cell.start()
    try:
        yield made
    finally:
        for cell in made.values():
            cell.stop()


def both(seconds: float) -> dict[str, float]:
    return dict.fromkeys(("north", "east"), seconds)


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, (WINDOW + 3) * PART])
def test_messages_of_any_size_come_whole(cells: dict[str, CoreCell], size: int) -> None:
    asks = Channel(cells["server"])
    Channel(cells["north"], "server", lambda packet: packet._replace(kind="north", head=packet.head * 2))
    Channel(cells["east"], "server", lambda packet: Packet("east"))
    body = os.urandom(size)
    found = asks.ask(dict.fromkeys(("north", "east"), Packet("what", b"head", body)), both(30))
    assert found == {"north": Packet("north", b"headhead", body), "east": Packet("east")}
    assert asks.asked == asks.leaving == asks.arriving == {}


def test_who_does_not_answer_keeps_nobody_else_waiting(cells: dict[str, CoreCell]) -> None:
    asks, held = Channel(cells["server"]), threading.Event()
    Channel(cells["north"], "server", lambda packet: Packet("north"))

    def slow(packet: Packet) -> Packet:
        held.wait(30)
        return Packet("late", body=packet.body)

    Channel(cells["east"], "server", slow)
    began = time.monotonic()
    found = asks.ask(dict.fromkeys(("north", "east"), Packet("one")), {"north": 30.0, "east": 0.5})
    assert found == {"north": Packet("north"), "east": "it did not answer in time."}
    assert time.monotonic() - began < 5
    waiting = threading.Timer(0.3, held.set)
    waiting.start()
    assert asks.ask({"east": Packet("two", body=b"two")}, {"east": 30.0}) == {"east": Packet("late", body=b"two")}
    assert asks.ask({"nobody": Packet("what")}, {"nobody": 5.0})["nobody"].startswith("it cannot be reached")
    ended = threading.Event()
    held.clear()
    threading.Timer(0.2, ended.set).start()
    assert asks.ask({"east": Packet("three")}, {"east": 60.0}, ended.is_set) == {"east": "it did not answer."}
    held.set()


def test_frames_of_nobody_who_was_asked_are_refused(cells: dict[str, CoreCell]) -> None:
    """Answers that nobody waits for, questions of those who may not ask, and parts that cannot be."""
    asks, release = Channel(cells["server"]), threading.Event()

    def answer(packet: Packet) -> Packet:
        release.wait(30)
        return Packet("north")

    north = Channel(cells["north"], "server", answer)
    found: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: found.update(asks.ask({"north": Packet("what")}, {"north": 30.0})))
    thread.start()
    while not asks.asked:
        time.sleep(0.01)
    number = asks.asked["north"].number

    def says(who: str, whom: str, topic: str, about: Any, body: bytes = b"") -> Any:
        request = Message({HEADER: about}, body)
        return (
            cells[who].send_request(CHANNEL, topic, whom, request, timeout=5).get_header(MessageHeaderKey.RETURN_CODE)
        )

    for who, whom, topic, about in (
        ("east", "server", "answer", [number, "answer", b"", 0, 1]),  # it was not asked
        ("north", "server", "answer", ["another", "answer", b"", 0, 1]),
        ("north", "server", "answer", [number, "answer", b"", 1, 1]),
        ("north", "server", "answer", [number, "answer", b"", 0, 10**9]),
        ("north", "server", "answer", [number, "answer", b"", -1, 2]),
        ("north", "server", "question", [number, "what", b"", 0, 1]),
        ("east", "north", "question", [number, "what", b"", 0, 1]),
        ("server", "north", "nothing", [number, "what", b"", 0, 1]),
    ):
        assert says(who, whom, topic, about) == ReturnCode.INVALID_REQUEST, (who, topic, about)
    for about in (None, 3, [], ["x"] * 6, [[]] * 5):
        assert says("north", "server", "answer", about) in (ReturnCode.INVALID_REQUEST, ReturnCode.PROCESS_EXCEPTION)
    assert says("north", "server", "answer", [number, "a", b"", 0, 2], bytes(PART + 1)) == ReturnCode.INVALID_REQUEST
    for each in range(20):  # messages that never become whole
        about = {HEADER: [f"{each}", "what", b"", 0, 2]}
        cells["server"].fire_and_forget(CHANNEL, "question", "north", Message(about, b""))
    assert len(north.arriving) == channel.AT_ONCE
    release.set()
    thread.join(30)
    assert found == {"north": Packet("north")}


def quadratic(folder: Path) -> Study:
    """A study of which the site sends nothing about rows."""
    tables = {"task": {"name": "quadratic", "clients": 3}, "algorithm": {"name": "fedbio"}, "run": {"rounds": 1}}
    (folder / "study.toml").write_text(tomli_w.dumps(tables))
    return Study.read(folder / "study.toml")


class Refusals:
    """A site with a real worker, in this process, and what its own people learn."""

    def __init__(self, folder: Path, cells: dict[str, CoreCell], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.study, self.cells = folder / "north", quadratic(folder), cells
        self.folder.mkdir()
        self.channel = Channel(cells["server"])
        consent = Consent((digest(self.study.text),), None, Limits())
        Settings("north", "builtin", consent=consent).save(self.folder)
        monkeypatch.setenv(SITE_FOLDER, str(self.folder))
        monkeypatch.setenv("JAX_ENABLE_X64", "1")  # for the worker
        self.authority = Authority(folder)
        self.site = Site()
        end = SitesEnd(Party(self.authority.party("north"), "client"), HOST, "north", "job 1")
        self.site.listen(cells["north"], "server", end)

    def sites(self, job: str = "job 1", run: str = "heart") -> Sites:
        """The server's side."""
        session = ServersEnd(Party(self.authority.server(), "server"), run, job, "north")
        return Sites(["north"], {"north": session}, {"north": "north"}, self.channel, 60.0, 120.0)

    def ledger(self, count: int) -> list[tuple[str, str, str]]:
        path = self.folder / LEDGER
        limit = time.monotonic() + 120
        while not path.exists() or path.read_text().count("\n") < count:
            assert time.monotonic() < limit
            time.sleep(0.05)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [(line["caller"], line["action"], line["error"]) for line in lines]

    def end(self) -> None:
        self.site.end_worker()


@pytest.fixture
def north(tmp_path: Path, cells: dict[str, CoreCell], monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusals]:
    found = Refusals(tmp_path, cells, monkeypatch)
    try:
        yield found
    finally:
        found.end()
        for cell in cells.values():
            cell.set_message_interceptor(lambda message: None)


def test_a_site_answers_the_server_and_nobody_else(north: Refusals) -> None:
    """Another site gets a refusal, whatever it tries; the run is unharmed, and the site's log names who it was."""
    run = north.sites()
    hello = Hello("heart", north.study.text, facts_of_copy(), 3)
    east = north.cells["east"]
    seal = run.sessions["north"].seal
    body = pack(hello, {})
    attempts: list[tuple[str, str, Any]] = [
        (CHANNEL, "question", {HEADER: ["n", "greet", b"", 0, 1]}),
        (CHANNEL, "question", {HEADER: ["n", "message", b"", 0, 1]}),
        (CHANNEL, "question", {HEADER: ["n", "message", seal.close(b"down", 7, body, {"seconds": 9}), 0, 1]}),
        (CHANNEL, "answer", {HEADER: ["n", "answer", b"", 0, 1]}),
        ("sm__STREAM", "sm__DATA", {}),
        ("collab", "call", {}),
    ]
    for place, topic, headers in attempts:
        reply = east.send_request(place, topic, "north", Message(dict(headers), body), timeout=10)
        assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.UNAUTHENTICATED
        assert not reply.payload
    answer = run.ask({0: body}, "hello")[0]
    assert isinstance(answer, bytes), answer
    assert unpack(answer)[0] == Facts(0)
    told = north.ledger(len(attempts) + 1)
    assert told[:-1] == [("east", "", "only the server may call a site.")] * len(attempts)
    assert told[-1] == ("server", "hello", "")


def test_no_cell_of_a_site_listens_to_another_from_its_first_moment(
    cells: dict[str, CoreCell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of FLARE's client as well, which takes commands to shut down or to begin a job."""
    noted: list[tuple[str, str, int]] = []
    monkeypatch.setattr(CoreCell, "start", CoreCell.start)  # is put back
    callers.install_at_site(lambda *facts: noted.append(facts))
    west = CoreCell("west", root_url=cells["server"].root_url, secure=False, credentials={})
    west.register_request_cb(CellChannel.CLIENT_MAIN, "*", lambda message: make_reply(ReturnCode.OK))
    west.start()
    try:
        codes = {}
        for who in ("server", "east"):
            asked = Message({}, b"stop")
            reply = cells[who].send_request(CellChannel.CLIENT_MAIN, "train.shutdown", "west", asked, timeout=10)
            codes[who] = reply.get_header(MessageHeaderKey.RETURN_CODE)
    finally:
        west.stop()
    assert codes == {"server": ReturnCode.OK, "east": ReturnCode.UNAUTHENTICATED}
    assert noted == [("east", callers.ONLY_THE_SERVER, 4)]


def test_the_server_passes_nothing_on_in_a_false_name() -> None:
    """FLARE does not compare names where it has forgotten the token of who sends."""

    def refused(connection: str, origin: str) -> bool:
        message = Message({MessageHeaderKey.ORIGIN: origin}, b"")
        message.set_prop(MessagePropKey.ENDPOINT, Endpoint(connection))
        return callers.false_names_refused(message) is not None

    assert not any(refused(name, name) for name in ("east", "east.job", "server.job", "_admin_1"))
    assert not refused("east", "east.job")
    for origin in ("server", "server.job", "north", "north.job", "eastern", ""):
        assert refused("east", origin), origin


def test_what_the_server_did_not_sign_is_refused_and_named(north: Refusals, tmp_path: Path) -> None:
    """Though FLARE says that the server sent it: messages without a session, with a wrong seal, of other servers."""
    hello = pack(Hello("heart", north.study.text, facts_of_copy(), 3), {})

    def says(kind: str, head: bytes = b"", body: bytes = hello) -> str:
        answer = north.channel.ask({"north": Packet(kind, head, body)}, {"north": 60.0})["north"]
        assert isinstance(answer, Packet)
        assert answer.kind == "refused"
        return bytes(answer.body).decode()

    assert "there is no session yet" in says("message")
    impostor = Authority(tmp_path / "other").server()
    session = ServersEnd(Party(impostor, "server"), "heart", "job 1", "north")
    greeting = north.channel.ask({"north": Packet("greet")}, {"north": 60.0})["north"]
    assert isinstance(greeting, Packet)
    assert "not of this federation" in says("session", body=session.statement_for(bytes(greeting.body)))
    assert north.sites(job="job 2").refused == {"north": "it is meant for another job."}
    run = north.sites()
    assert "does not carry the seal" in says("message", session.question(hello, {"seconds": 9.0, "setup": True}))
    assert isinstance(run.ask({0: hello}, "hello")[0], bytes)
    again = run.sessions["north"]
    again.seal.number = 0  # the same message once more
    assert "was here before, or is older" in says("message", again.question(hello, {"seconds": 9.0, "setup": True}))
    reasons = [reason for caller, action, reason in north.ledger(6) if not action and caller == "server"]
    assert len(reasons) == 5
    assert "does not carry the seal" in reasons[3]


def test_a_restarted_worker_is_set_up_again_by_the_site_alone(north: Refusals) -> None:
    run = north.sites()
    hello = pack(Hello("heart", north.study.text, facts_of_copy(), 3), {})
    assert isinstance(run.ask({0: hello}, "hello")[0], bytes)
    assert north.site.process is not None
    north.site.process.kill()
    north.site.process.wait()
    echo = run.ask({0: pack(Echo(), {})}, "echo")[0]  # it is in order only after a hello
    assert isinstance(echo, bytes)
    assert unpack(echo)[0] == Failed("this study does not measure the network.")
    assert [action for _, action, _ in north.ledger(3)] == ["hello", "hello", "echo"]


def test_a_site_notes_only_so_many_refusals(north: Refusals) -> None:
    request = {HEADER: ["n", "greet", b"", 0, 1]}
    for _ in range(MOST_REFUSED + 20):
        north.cells["east"].send_request(CHANNEL, "question", "north", Message(dict(request), b""), timeout=10)
    time.sleep(0.2)
    told = north.ledger(MOST_REFUSED)
    assert len(told) == MOST_REFUSED
    assert "Further refused calls of this job are not noted." in told[-1][2]


ECHO = """
import sys, time, os
from fedbilevel.federation.wire.pipes import receive, send
answers = os.fdopen(1, "wb")
while (frame := receive(sys.stdin.buffer)) is not None:
    if frame.message == b"hang": time.sleep(60)
    if frame.message == b"end": os._exit(1)
    send(answers, frame.message + frame.caller.encode())
"""


def test_a_process_that_does_not_answer_is_noticed() -> None:
    """When it hangs before it has read everything, when it hangs later, and when it ends."""

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pipesize=1 << 16
        )

    process: Any = started()
    try:
        soon = time.monotonic() + 60
        for body in (b"", os.urandom(3_000_000)):
            pipes.write(process.stdin, Frame(body, "east").parts(), soon)
            assert pipes.read(process.stdout, soon) == body + b"east"
        pipes.write(process.stdin, Frame(b"hang").parts(), soon)
        with pytest.raises(TimeoutError):
            pipes.read(process.stdout, time.monotonic() + 0.1)
        with pytest.raises(TimeoutError):
            pipes.write(process.stdin, Frame(bytes(3_000_000)).parts(), time.monotonic() + 0.1)
    finally:
        process.kill()
        process.communicate()
    process = started()
    pipes.write(process.stdin, Frame(b"end").parts(), time.monotonic() + 60)
    with pytest.raises(EOFError):
        pipes.read(process.stdout, time.monotonic() + 60)
    process.communicate()
