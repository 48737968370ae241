"""A server of files on this machine that answers well or badly."""

import hashlib
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fedbilevel as fb
from helpers import REAL

GOOD = bytes(range(256)) * 4000  # about 1 MB: more than one chunk
QUICK: dict[str, Any] = {"timeout": 0.5, "waits": (0.0, 0.0)}


class Server(ThreadingHTTPServer):
    """Serves what the path asks for, well or badly; `asked` lists the paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.release = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The kinds of answers; the first folder of the path chooses."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        kind = self.path.split("/")[1]
        if kind == "missing" or (kind == "twice" and len(self.server.asked) <= 2):
            self.send_error(404 if kind == "missing" else 503)
            return
        body = {"wrong": GOOD[::-1], "long": GOOD + b"more"}.get(kind, GOOD)
        if kind == "files":
            body = (Path(REAL.split(os.pathsep)[0]) / self.path.removeprefix("/files/")).read_bytes()
        self.send_response(200)
        if kind != "quiet":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind in ("truncated", "quiet", "stalled"):
            self.wfile.write(body[: len(body) // 2])
            if kind == "stalled":
                self.wfile.flush()
                self.server.release.wait(10)
        elif kind == "slow":
            for start in range(0, len(body), 300_000):
                self.wfile.write(body[start : start + 300_000])
                self.wfile.flush()
                self.server.release.wait(0.2)
        else:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def source(server: Server, *kinds: str) -> fb.data.Source:
    addresses = tuple(f"{server.address}/{kind}/things.bin" for kind in kinds)
    return fb.data.Source("things", "things.bin", addresses, len(GOOD), hashlib.sha256(GOOD).hexdigest())


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]
