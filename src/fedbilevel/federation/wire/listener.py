"""The server's port, which parties on the internet connect to, and everybody else, too.

FLARE's own listener shakes hands with one connection at a time, in the loop that accepts them, for as long as the other
side likes: one connection that says nothing keeps everybody out. Here, connections do not wait for each other. Each has
seconds to show its certificate and to say its name. There are limits for connections that have not done so, and for
those of one certificate; a connection too many ends the oldest of them, so that nobody is locked out, neither by others
nor by connections of its own that are long dead. There is no limit for an address: many sites may share one.
"""

import contextlib
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvflare.fuel.f3.drivers import net_utils, socket_conn, tcp_driver
from nvflare.fuel.f3.drivers.driver_params import DriverParams

PATIENCE = 10.0  # seconds to show a certificate and to say a name
UNKNOWN = 256  # connections that have not done so
OF_ONE = 8  # connections of one certificate; a site has two, and a third while it reconnects
LARGEST_FRAME = 16 << 20  # bytes; larger messages are sent in several
WAITING = 128  # connections that the system holds until they are accepted
log = logging.getLogger(__name__)


@dataclass
class _Entry:
    """A connection: from where, since when, and whose it is once that is known."""

    address: str
    since: float
    certificate: bytes = b""
    named: bool = False


class Crowd:
    """All connections of a port.

    Args:
        named: gives the connections that have said a name which fits their certificate.
    """

    def __init__(self, named: Callable[[], set[Any]]) -> None:
        self.lock, self.named = threading.Lock(), named
        self.here: dict[Any, _Entry] = {}  # the oldest first

    def enter(self, connection: Any, address: str) -> None:
        """A new connection; one too many ends the oldest unknown one of the address that has most."""
        with self.lock:
            unknown = self._unknown() if len(self.here) >= UNKNOWN else {}
            if len(unknown) >= UNKNOWN:
                most = Counter(entry.address for entry in unknown.values()).most_common(1)[0][0]
                self._end(next(each for each, entry in unknown.items() if entry.address == most))
            self.here[connection] = _Entry(address, time.monotonic())

    def shows(self, connection: Any, certificate: bytes) -> None:
        """It has shown its certificate; one connection too many with it ends the oldest."""
        with self.lock:
            if connection in self.here:
                self.here[connection].certificate = certificate
            same = [each for each, entry in self.here.items() if entry.certificate == certificate]
            if len(same) > OF_ONE:
                log.warning("closing the oldest of %d connections with one certificate", len(same))
                self._end(same[0])

    def leave(self, connection: Any) -> None:
        """It is closed."""
        with self.lock:
            self.here.pop(connection, None)

    def sweep(self) -> None:
        """End connections that took too long to say who they are."""
        with self.lock:
            limit = time.monotonic() - PATIENCE
            for connection in [each for each, entry in self._unknown().items() if entry.since < limit]:
                self._end(connection)

    def _unknown(self) -> dict[Any, _Entry]:
        for connection in self.named() & self.here.keys():
            self.here[connection].named = True
        return {each: entry for each, entry in self.here.items() if not entry.named}

    def _end(self, connection: Any) -> None:
        """End a connection below TLS: the thread that reads from it sees this."""
        del self.here[connection]
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


class Handler(socket_conn.ConnectionHandler):
    """Shakes hands in the connection's own thread, then does as FLARE does."""

    def handle(self) -> None:
        """Until the connection ends."""
        server: Any = self.server
        if server.ssl_context is None:  # the server's own processes, on loopback
            super().handle()
            return
        try:
            self.request = server.ssl_context.wrap_socket(self.request, server_side=True, do_handshake_on_connect=False)
            server.crowd.enter(self.request, self.client_address[0])
            self.request.do_handshake()
            server.crowd.shows(self.request, self.request.getpeercert(binary_form=True) or b"")
            super().handle()
        except (OSError, ssl.SSLError) as error:  # who has no certificate is of no interest
            log.debug("%s: %s", self.client_address, error)
        finally:
            server.crowd.leave(self.request)
            with contextlib.suppress(OSError):
                self.request.close()


class Listener(tcp_driver.TcpStreamServer):
    """FLARE's listener, but it does not wait for anybody."""

    request_queue_size = WAITING
    daemon_threads = True

    def __init__(self, driver: Any, connector: Any) -> None:
        self.driver, self.connector = driver, connector
        self.ssl_context = net_utils.get_ssl_context(connector.params, ssl_server=True)
        self.crowd, self.swept = Crowd(self._named), 0.0
        host, port = (connector.params.get(key.value) for key in (DriverParams.HOST, DriverParams.PORT))
        self.local_addr = f"{host}:{port}"
        socketserver.TCPServer.__init__(self, (host, int(port)), Handler)

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Until the driver shuts down; FLARE's leaves the port open then."""
        with self:
            super().serve_forever(poll_interval)

    def service_actions(self) -> None:
        """Between two connections, and twice a second."""
        if time.monotonic() > self.swept + 1.0:
            self.swept = time.monotonic()
            self.crowd.sweep()

    def _named(self) -> set[Any]:
        """Connections whose names FLARE has accepted."""
        connections = list(self.driver.conn_monitor.sfm_conns.values())
        return {each.conn.sock for each in connections if each.sfm_endpoint is not None}


def install() -> None:
    """Make FLARE, in this process, listen like this, and refuse frames that nobody sends."""
    tcp_driver.TcpStreamServer = Listener
    socket_conn.MAX_FRAME_SIZE = LARGEST_FRAME  # it would take memory for up to 2 GB before the first byte is there
