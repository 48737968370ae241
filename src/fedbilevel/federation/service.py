"""Run for weeks: units for systemd, a file for containers, and the sign of life that a service manager waits for."""

import contextlib
import os
import socket


def alive() -> None:
    """Tell systemd, if it started this process, that it is ready and does not hang."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(b"READY=1\nWATCHDOG=1", f"\0{address[1:]}" if address.startswith("@") else address)
