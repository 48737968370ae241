"""The report while runs are in progress: a page on this machine that shows every new record."""

import hashlib
import json
import threading
import webbrowser
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedbilevel.errors import FedbilevelError
from fedbilevel.report import page
from fedbilevel.storage.run_folder import CONFIG, INFO, RECORDS

HOST = "127.0.0.1"


class Watch(ThreadingHTTPServer):
    """Serves the page and its news to this machine, and nothing else. ``url`` is where."""

    daemon_threads = True

    def __init__(self, path: Path, port: int = 0) -> None:
        self.path = Path(path)
        page.content([self.path])  # refuses what is not a folder of runs
        self._lock = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "there is no such port"
            raise FedbilevelError(
                f"cannot serve on port {port}: {reason}. Choose another one with --port, or leave it out."
            ) from error

    @property
    def url(self) -> str:
        """The address to open."""
        return f"http://{HOST}:{self.server_port}/"

    def is_meant(self, host: str) -> bool:
        """Whether a request asks for this machine by its own name: pages of others can lead their names here."""
        name, _, port = host.partition(":")
        return name in ("127.0.0.1", "localhost") and port in ("", str(self.server_port))

    def mark(self) -> str:
        """Changes whenever a file that is shown does."""
        files = []
        for folder in sorted({file.parent for file in self.path.rglob(INFO)}):
            for file in sorted([*(folder / name for name in (INFO, CONFIG, RECORDS)), *folder.glob("*.png")]):
                if file.exists():
                    about = file.stat()
                    files.append((str(file), about.st_mtime_ns, about.st_size))
        return hashlib.sha256(repr(files).encode()).hexdigest()[:32]

    def news(self, mark: str) -> bytes:
        """What the page shows, made once for every change."""
        with self._lock:
            return _news(self.path, mark)


@lru_cache(maxsize=2)
def _news(path: Path, mark: str) -> bytes:
    return json.dumps(page.content([path])._asdict(), allow_nan=False).encode()


class _Handler(BaseHTTPRequestHandler):
    """Answers two addresses."""

    server: Watch  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """The page, or its news."""
        if not self.server.is_meant(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, b"this page is for this machine only", "text/plain")
            return
        try:
            self._answer(self.path.partition("?")[0])
        except (FedbilevelError, OSError) as error:  # for instance a folder that was removed
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode(), "text/plain")

    def _answer(self, path: str) -> None:
        if path == "/":
            self._send(HTTPStatus.OK, page.render([self.server.path], live=True).encode(), "text/html")
        elif path == "/data":
            mark = self.server.mark()
            if self.headers.get("If-None-Match") == f'"{mark}"':
                self._send(HTTPStatus.NOT_MODIFIED, b"", mark=mark)
            else:
                self._send(HTTPStatus.OK, self.server.news(mark), "application/json", mark)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is nothing here", "text/plain")

    def _send(self, status: HTTPStatus, body: bytes, kind: str | None = None, mark: str | None = None) -> None:
        self.send_response(status)
        if kind is not None:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if mark is not None:
            self.send_header("ETag", f'"{mark}"')
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the page asks every second."""


def serve(path: Path, port: int = 0, open_browser: bool = False) -> None:
    """Serve the page about all runs at or below a path until interrupted; port 0 is any that is free."""
    with Watch(path, port) as server:
        print(f"Watching {path} at {server.url} (Ctrl-C ends it)", flush=True)
        if open_browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
