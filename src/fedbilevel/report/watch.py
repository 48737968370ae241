"""Live pages: a page on this machine that shows what happens in a folder. The report of runs in progress is one.

Other accounts of this machine and pages of other sites in the same browser do not get it: its address has a secret
part, and requests that ask for this machine by another name are refused. Nothing can be changed through it.
"""

import hashlib
import json
import secrets
import threading
import time
import webbrowser
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple, Protocol

from fedbilevel.errors import FedbilevelError
from fedbilevel.report import page
from fedbilevel.storage.run_folder import CONFIG, INFO, RECORDS

HOST = "127.0.0.1"


class News(NamedTuple):
    """What is shown now, as JSON, and a mark that changes with it."""

    mark: str
    content: bytes


class Shown(Protocol):
    """What a live page is about. It is asked by one thread at a time."""

    def page(self) -> str:
        """The whole page."""
        ...

    def news(self) -> News:
        """What changes."""
        ...

    def part(self, path: str) -> str | None:
        """Another page that this one links to, if there is one at this path."""
        ...


class Runs:
    """The report of all runs at or below a path."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        page.content([self.path])  # refuses what is not a folder of runs

    def page(self) -> str:
        """The report, with a place for news."""
        return page.render([self.path], live=True)

    def news(self) -> News:
        """Made once for every change of a file."""
        mark = self._mark()
        return News(mark, _content(self.path, mark))

    def part(self, path: str) -> str | None:
        """There are no others."""
        return None

    def _mark(self) -> str:
        files = []
        for folder in sorted({file.parent for file in self.path.rglob(INFO)}):
            for file in sorted([*(folder / name for name in (INFO, CONFIG, RECORDS)), *folder.glob("*.png")]):
                if file.exists():
                    about = file.stat()
                    files.append((str(file), about.st_mtime_ns, about.st_size))
        return hashlib.sha256(repr(files).encode()).hexdigest()[:32]


@lru_cache(maxsize=2)
def _content(path: Path, mark: str) -> bytes:
    return json.dumps(page.content([path])._asdict(), allow_nan=False).encode()


class Watch(ThreadingHTTPServer):
    """Serves a live page to whoever on this machine has its address, ``url``, and nothing else."""

    daemon_threads = True

    def __init__(self, shown: Shown, port: int = 0, often: float = 0.0) -> None:
        self.shown, self.secret, self.often = shown, secrets.token_urlsafe(16), often
        self._lock = threading.Lock()
        self._last: tuple[float, News] | None = None
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
        return f"http://{HOST}:{self.server_port}/{self.secret}/"

    def is_meant(self, host: str) -> bool:
        """Whether a request asks for this machine by its own name: pages of others can lead their names here."""
        name, _, port = host.partition(":")
        return name in ("127.0.0.1", "localhost") and port in ("", str(self.server_port))

    def within(self, path: str) -> str | None:
        """The part of a path after the secret, None if it does not have it."""
        start, _, rest = path.removeprefix("/").partition("/")
        known = secrets.compare_digest(start.encode(errors="replace"), self.secret.encode())
        return rest if known else None

    def page(self) -> str:
        """The page."""
        with self._lock:
            return self.shown.page()

    def part(self, path: str) -> str | None:
        """A page that the page links to."""
        with self._lock:
            return self.shown.part(path)

    def news(self) -> News:
        """What changes, looked at most every ``often`` seconds, however many ask."""
        with self._lock:
            if self._last is None or time.monotonic() - self._last[0] >= self.often:
                self._last = (time.monotonic(), self.shown.news())
            return self._last[1]


class _Handler(BaseHTTPRequestHandler):
    """Answers a few addresses; it only reads."""

    server: Watch  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30.0  # of those who connect and say nothing

    def do_GET(self) -> None:
        """The page, its news, or a page that it links to."""
        if not self.server.is_meant(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, b"this page is for this machine only", "text/plain")
            return
        path = self.server.within(self.path.partition("?")[0])
        try:
            if path is None:
                self._send(HTTPStatus.NOT_FOUND, b"there is nothing here", "text/plain")
            else:
                self._answer(path)
        except (FedbilevelError, OSError) as error:  # for instance a folder that was removed
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode(), "text/plain")

    def _answer(self, path: str) -> None:
        if path == "":
            self._send(HTTPStatus.OK, self.server.page().encode(), "text/html")
        elif path == "data":
            news = self.server.news()
            if self.headers.get("If-None-Match") == f'"{news.mark}"':
                self._send(HTTPStatus.NOT_MODIFIED, b"", mark=news.mark)
            else:
                self._send(HTTPStatus.OK, news.content, "application/json", news.mark)
        elif (part := self.server.part(path)) is not None:
            self._send(HTTPStatus.OK, part.encode(), "text/html")
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
        self.send_header("Referrer-Policy", "no-referrer")  # the address is a secret
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")  # the page itself says the rest
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the page asks every second."""


def serve(path: Path, port: int = 0, open_browser: bool = False) -> None:
    """Serve the page about all runs at or below a path until interrupted; port 0 is any that is free."""
    show(Runs(path), str(path), port, open_browser)


def show(shown: Shown, what: str, port: int = 0, open_browser: bool = False, often: float = 0.0) -> None:
    """Serve a live page until interrupted."""
    with Watch(shown, port, often) as server:
        print(f"Watching {what} at {server.url} (Ctrl-C ends it)", flush=True)
        if open_browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
