"""The server's port under attack: FLARE's own drivers and connections, real TLS, hostile connections from a process."""

import contextlib
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.fuel.f3.cellnet.identity import CellIdentityResolver
from nvflare.fuel.f3.communicator import Communicator
from nvflare.fuel.f3.connection import Connection
from nvflare.fuel.f3.drivers import socket_conn, tcp_driver
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message, MessageReceiver
from nvflare.fuel.f3.sfm.conn_manager import Mode

from fedbilevel.federation.demo import free_port
from fedbilevel.federation.wire import listener
from parties import HOST, Authority

APP = 7
HOSTILE = str(Path(__file__).parents[1] / "hostile.py")


class Talks(MessageReceiver):
    """An end of a connection of FLARE, that answers messages, or waits for answers."""

    def __init__(self, name: str, folder: Path, port: int, server: bool = False) -> None:
        kind = "server" if server else "client"
        paths = {DriverParams.CA_CERT.value: folder / "rootCA.pem"}
        paths[f"{kind}_cert"], paths[f"{kind}_key"] = folder / f"{kind}.crt", folder / f"{kind}.key"
        place = Endpoint(name, {}, {key: str(path) for key, path in paths.items()})
        self.answers, self.came = server, threading.Semaphore(0)
        self.ends = Communicator(place, CellIdentityResolver(name, {"server": HOST}))
        self.ends.register_message_receiver(APP, self)
        self.ends.add_connector(f"tcp://127.0.0.1:{port}", Mode.PASSIVE if server else Mode.ACTIVE, True)
        self.ends.start()

    def process_message(self, endpoint: Endpoint, connection: Connection, app_id: int, message: Message) -> None:
        if self.answers:
            self.ends.send(endpoint, APP, message)
        else:
            self.came.release()

    def connected(self, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if self.ends.find_endpoint("server") is not None:
                return True
            time.sleep(0.02)
        return False

    def exchanges(self, seconds: float) -> float:
        """Messages that went to the server and back, per second."""
        there: Any = self.ends.find_endpoint("server")
        done, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            self.ends.send(there, APP, Message({}, bytes(4000)))
            if not self.came.acquire(timeout=20):
                return 0.0
            done += 1
        return done / (time.monotonic() - began)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def port(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a server that listens as ours does."""
    monkeypatch.setattr(tcp_driver, "TcpStreamServer", tcp_driver.TcpStreamServer)
    monkeypatch.setattr(socket_conn, "MAX_FRAME_SIZE", socket_conn.MAX_FRAME_SIZE)
    monkeypatch.setattr(listener, "PATIENCE", 2.0)
    listener.install()
    yield from serve(authority)


def serve(authority: Authority) -> Iterator[int]:
    number = free_port()
    server = Talks("server", authority.server(), number, server=True)
    try:
        yield number
    finally:
        server.ends.stop()


def attack(kind: str, port: int, count: int, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, HOSTILE, kind, str(port), str(count), str(folder)]
    found = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None
    return found


@pytest.mark.parametrize("kind", ["half-open", "silent", "random", "frames", "slow"])
def test_a_running_server_does_not_notice_an_attack(authority: Authority, port: int, kind: str) -> None:
    """500 connections at a time, made again when they are closed: who is connected goes on, others can connect."""
    north = Talks("north", authority.party("north"), port)
    assert north.connected(20)
    before = north.exchanges(0.5)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hostile = attack(kind, port, 500, authority.party("mallory"))
    try:
        assert hostile.stdout is not None
        assert hostile.stdout.readline() == "all\n"  # 500 were made
        during = north.exchanges(1.0)
        assert during > 0
        east = Talks("east", authority.party("east"), port)
        began = time.monotonic()
        assert east.connected(20)
        took = time.monotonic() - began
        assert east.exchanges(0.2) > 0
        east.ends.stop()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        assert grown < 400_000, "more than 400 MB"
        print(f"{kind}: {before:.0f} exchanges per second before, {during:.0f} during; new party after {took:.2f} s")
        assert sum(thread.name.startswith("Thread-") for thread in threading.enumerate()) < 400
    finally:
        made, _ = hostile.communicate("")
        north.ends.stop()
    print(f"{kind}: {made.split()[-1]} connections made, {grown / 1e3:.0f} MB")


def test_flares_own_listener_still_needs_this(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection that says nothing keeps everybody out: when it no longer does, ours is superfluous."""
    made: list[tcp_driver.TcpStreamServer] = []

    class Flares(tcp_driver.TcpStreamServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(tcp_driver, "TcpStreamServer", Flares)
    assert socket_conn.MAX_FRAME_SIZE > 1 << 30
    with contextlib.contextmanager(serve)(authority) as number:
        address = ("127.0.0.1", number)
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                silent = socket.create_connection(address, 20)
                break
        with silent, socket.create_connection(address, 2) as plain, pytest.raises(TimeoutError):
            authority.client_context("east").wrap_socket(plain)
    for server in made:  # it leaves its port open
        server.server_close()


class Open:
    """Something like a connection."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()

    @property
    def ended(self) -> bool:
        self.far.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            return self.far.recv(1) == b""
        return False

    def close(self) -> None:
        self.near.close()
        self.far.close()


def test_one_connection_too_many_ends_one_of_those_who_have_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one, of whoever did not say who it is; and nobody has many with one certificate."""
    monkeypatch.setattr(listener, "UNKNOWN", 4)
    monkeypatch.setattr(listener, "OF_ONE", 2)
    monkeypatch.setattr(listener, "PATIENCE", 0.2)
    opened = [Open() for _ in range(12)]
    try:
        near = [each.near for each in opened]
        names: set[Any] = {near[0]}
        crowd = listener.Crowd(lambda: names)
        for number, address in enumerate(["a", "b", "c", "c", "c"]):
            crowd.enter(near[number], address)
        assert not any(each.ended for each in opened[:5])  # one has said its name
        crowd.enter(near[5], "d")
        assert [each.ended for each in opened[:6]] == [False, False, True, False, False, False]
        names.update(near[3:6])
        for number in (3, 4, 5):
            crowd.shows(near[number], b"certificate")
        assert [each.ended for each in opened[3:6]] == [True, False, False]
        crowd.leave(near[5])
        crowd.shows(near[4], b"certificate")
        assert not opened[4].ended
        time.sleep(0.3)
        crowd.enter(near[6], "e")
        crowd.sweep()
        assert [each.ended for each in (opened[0], opened[1], opened[4], opened[6])] == [False, True, False, False]
    finally:
        for each in opened:
            each.close()
