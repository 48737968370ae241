"""Certificates that were revoked: a file in the server's folder, and the server that refuses them.

FLARE can refuse sites by name only. Here, a certificate is refused by its serial number, whoever has it, and wherever
FLARE looks at it: at the end of a TLS handshake, when a site registers, when an administrator logs in, and in the
signature of a job. Connections that are open when a certificate is revoked are closed within a second.
"""

import contextlib
import functools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbilevel.errors import FedbilevelError
from fedbilevel.storage.files import write_privately

FILE = "revoked.json"
EVERY = 0.5
"""Seconds between two looks at open connections."""

_list: "Revoked | None" = None
_open: dict[socket.socket, bytes] = {}
_opening = threading.Lock()


def load(server: Path) -> frozenset[str]:
    """The serial numbers that were revoked in a server's folder."""
    return frozenset(_read(server / FILE)) if (server / FILE).exists() else frozenset()


def add(server: Path, serials: Mapping[str, str]) -> None:
    """Revoke certificates: whose they are, by their serial number."""
    path = server / FILE
    known = _read(path) if path.exists() else {}
    write_privately(path, json.dumps({**known, **serials}, indent=1).encode())


def _read(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text())
        return {number(int(serial, 16)): str(party) for serial, party in known.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise FedbilevelError(f"the list of revoked certificates {path} cannot be read: {error}.") from None


def number(serial: int) -> str:
    """A serial number as it is written everywhere."""
    return serial.to_bytes(20).hex()


class Revoked:
    """The list of a running server, read again whenever the file changes. If it cannot be read, nobody is let in."""

    def __init__(self, server: Path) -> None:
        self.path = server / FILE
        self.seen: tuple[int, int, int] | None = None
        self.serials: dict[str, str] = {}

    def refusal(self, serial: int) -> str:
        """Why a certificate is refused, or "" if it is not."""
        try:
            stat = self.path.stat()
            if self.seen != (seen := (stat.st_mtime_ns, stat.st_size, stat.st_ino)):
                self.serials, self.seen = _read(self.path), seen
        except (OSError, FedbilevelError) as error:
            self.seen = None
            return f"{error}"
        party = self.serials.get(number(serial))
        return f"the certificate {number(serial)} of {party} was revoked." if party else ""


def refused(certificate: bytes) -> str:
    """Why this server refuses a certificate (DER), or "" if it does not."""
    from cryptography import x509

    if _list is None:
        return ""
    try:
        return _list.refusal(x509.load_der_x509_certificate(certificate).serial_number)
    except ValueError as error:
        return f"the certificate cannot be read: {error}."


def install(server: Path) -> None:
    """Make FLARE's server, in this process, refuse what was revoked."""
    global _list
    from nvflare.fuel.f3.cellnet import cell_cipher
    from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler
    from nvflare.lighter import utils
    from nvflare.private.fed.utils import identity_utils

    _read(server / FILE)  # it must be there
    _list = Revoked(server)
    checked = _checked(utils.verify_cert_chain)
    for module in (utils, identity_utils, cell_cipher):  # each has a name of its own for it
        setattr(module, "verify_cert_chain", checked)  # noqa: B010  (a name that the type of modules does not have)
    ConnectionHandler.handle = _watched(ConnectionHandler.handle)
    threading.Thread(target=_look, daemon=True).start()


def _checked(verify: Callable[..., None]) -> Callable[..., None]:
    """FLARE's check of a certificate, and ours after it."""
    from cryptography.hazmat.primitives.serialization import Encoding

    @functools.wraps(verify)
    def check(leaf_cert: Any, *more: Any, **named: Any) -> None:
        verify(leaf_cert, *more, **named)
        if reason := refused(leaf_cert.public_bytes(Encoding.DER)):
            raise ValueError(reason)

    return check


def _watched(handle: Callable[..., None]) -> Callable[..., None]:
    """FLARE's loop over what comes from a connection, if its certificate is not refused."""

    @functools.wraps(handle)
    def watch(self: Any) -> None:
        # The server's own processes are connected without TLS, on loopback.
        shown = getattr(self.request, "getpeercert", None)
        certificate = shown(binary_form=True) if shown is not None else None
        if not certificate:
            handle(self)
            return
        with _opening:  # before the check, so that a look in between cannot miss it
            _open[self.request] = certificate
        try:
            if reason := refused(certificate):
                logging.getLogger(__name__).warning("refused %s: %s", self.client_address, reason)
            else:
                handle(self)
        finally:
            with _opening:
                _open.pop(self.request, None)

    return watch


def _look() -> None:
    """Close connections whose certificates have been revoked since."""
    while True:
        time.sleep(EVERY)
        with _opening:
            there = list(_open.items())
        for connection, certificate in there:
            if reason := refused(certificate):
                logging.getLogger(__name__).warning("closing a connection: %s", reason)
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS, whose reader then sees the end
