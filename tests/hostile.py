"""Connections that nobody wants, in a process of its own: ``python hostile.py KIND PORT COUNT FOLDER``.

Holds them until its standard input closes; whenever the server closes one, it makes another.
"""

import contextlib
import os
import selectors
import socket
import ssl
import struct
import sys
import time
from pathlib import Path


def context(folder: Path) -> ssl.SSLContext:
    """That of a party which has a valid certificate."""
    found = ssl.create_default_context(cafile=str(folder / "rootCA.pem"))
    found.check_hostname = False
    found.load_cert_chain(folder / "client.crt", folder / "client.key")
    return found


def connect(kind: str, port: int, party: ssl.SSLContext) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port), 20)
    if kind == "random":
        plain.sendall(os.urandom(300))
    if kind in ("silent", "frames"):
        plain = party.wrap_socket(plain)
    if kind == "frames":  # the length of a frame, and of its header
        plain.sendall(struct.pack(">IHBBHHHH", 10**9, 0, 1, 0, 0, 1, 0, 0))
    plain.setblocking(False)
    return plain


def main(kind: str, port: int, count: int, folder: Path) -> None:
    party, made = context(folder), 0
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        party.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    first = hello.read()  # of a handshake
    looked, held = selectors.DefaultSelector(), set[socket.socket]()
    looked.register(sys.stdin, selectors.EVENT_READ)
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError, ssl.SSLError):
            while len(held) < count and made < (time.monotonic() - began + 1) * count:
                connection = connect(kind, port, party)
                looked.register(connection, selectors.EVENT_READ)
                held.add(connection)
                made += 1
                if made == count:
                    print("all", flush=True)
        for key, _ in looked.select(0.1):
            if key.fileobj is sys.stdin:
                print(made, flush=True)
                os._exit(0)
            assert isinstance(key.fileobj, socket.socket)
            with contextlib.suppress(ssl.SSLWantReadError):
                try:
                    if key.fileobj.recv(1000):
                        continue
                except ssl.SSLWantReadError:
                    continue
                except OSError:
                    pass
                looked.unregister(key.fileobj)
                held.discard(key.fileobj)
                key.fileobj.close()
        if kind == "slow":  # a byte of its handshake now and then
            for number, connection in enumerate(held):
                place = int((time.monotonic() - began) * 2) % len(first)
                with contextlib.suppress(OSError):
                    connection.send(first[place : place + 1] if number % 2 else first[:1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
