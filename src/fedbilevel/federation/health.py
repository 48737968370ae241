"""Is the coordinator, or a site, all right? One look at the files of its folder; nothing is asked over the network."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import expiry, logs, presence, project
from fedbilevel.federation.ledger import EXCHANGES
from fedbilevel.federation.worker import LEDGER, SETTINGS

KITS = ("kit.json", "startup/kit.json")
LEAST_FREE = 500_000_000
PATIENCE = 300.0
"""Seconds that a site may be without a connection."""


@dataclass(frozen=True)
class Health:
    """How somebody is. Without problems, they are healthy."""

    who: str
    problems: tuple[str, ...]
    since: float  # when the server was started, or the site was connected; 0: it is not
    exchanged: float  # when the last message was answered; 0: never
    free: int  # bytes of the disk
    days: int | None  # until the certificate ends
    error: str  # the last one in the logs

    @property
    def healthy(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def line(self) -> str:
        """All of it in one line."""
        facts = [
            f"up since {_time(self.since)}" if self.since else "not connected",
            f"last exchange {_time(self.exchanged)}" if self.exchanged else "no exchange yet",
            f"{self.free / 1e9:.1f} GB free",
            "no certificate" if self.days is None else f"certificate valid for {self.days} days",
            f"last error: {self.error}" if self.error else "no errors",
        ]
        word = "healthy" if self.healthy else "NOT HEALTHY: " + " ".join(self.problems)
        return f"{self.who}: {word} ({'; '.join(facts)})"

    def json(self) -> str:
        """All of it for programs."""
        return json.dumps({"healthy": self.healthy, **asdict(self)})


def of(folder: Path) -> Health:
    """The health of whoever works in a folder."""
    if (folder / project.FILE).is_file():
        return _coordinator(folder)
    if is_site(folder):
        return _site(folder)
    raise FedbilevelError(f"{folder} is neither the folder of a federation nor that of a site.")


def is_site(folder: Path) -> bool:
    """Whether this is the folder of a site."""
    return any((folder / name).is_file() for name in (SETTINGS, *KITS))


def site_facts(folder: Path) -> dict[str, Any]:
    """What a site's folder says about it: of its kit, and what it was started with."""
    facts: dict[str, Any] = {}
    for name in (*KITS, SETTINGS):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if isinstance(known := json.loads((folder / name).read_text()), dict):
                facts |= known
    return facts


def disk(folder: Path) -> tuple[int, list[str]]:
    """The free bytes, and a problem if they are few."""
    free = shutil.disk_usage(folder).free
    return free, ["the disk is almost full: free some space."] if free < LEAST_FREE else []


def certificate(end: float | None) -> list[str]:
    """A problem if a certificate has ended."""
    days = expiry.days_left(end)
    return ["the certificate has expired: renew it."] if days is not None and days < 0 else []


def presence_problems(path: Path, what: str, command: str) -> list[str]:
    """A problem if a process is not running, or hangs."""
    if presence.pid(path) is None:
        return [f"{what} is not running: start it with '{command}'."]
    silent = time.time() - presence.when(presence.state(path), "time")
    return [f"{what} has not said anything for {silent:.0f} seconds."] if silent > presence.SILENT else []


def _coordinator(folder: Path) -> Health:
    known, state, ends = project.load(folder), presence.state(folder / presence.COORDINATOR), {}
    problems = presence_problems(
        folder / presence.COORDINATOR, "the server", f"fedbilevel federation start {folder}"
    )  # fmt: skip
    with contextlib.suppress(OSError):
        ends = expiry.of_federation(folder)
    running = not problems
    free, full = disk(folder)
    end = ends.get(known.host)
    last = max((_changed(path) for path in (folder / "runs").glob(f"*/{EXCHANGES}")), default=0.0)
    error = next(_errors(folder, "server.log", "coordinator.log"), "")
    since = presence.when(state, "began") if running else 0.0
    return Health(
        known.name, (*problems, *full, *certificate(end)), since, last, free, expiry.days_left(end), error
    )  # fmt: skip


def _site(folder: Path) -> Health:
    facts, state = site_facts(folder), presence.state(folder / presence.SITE)
    name = str(facts.get("party") or facts.get("name") or folder.name)
    problems = presence_problems(folder / presence.SITE, "this site", f"fedbilevel federation rejoin {folder}")
    connected = 0.0 if problems else presence.when(state, "connected")
    if not problems and not connected and time.time() - presence.when(state, "changed") > PATIENCE:
        problems.append(str(state.get("problem") or "") or "it has no connection to the server.")
    free, full = disk(folder)
    end = expiry.of_party(expiry.of_site(folder), name)
    error = next(_errors(folder, "site.log", "worker.log"), "")
    return Health(
        name, (*problems, *full, *certificate(end)), connected, _changed(folder / LEDGER), free,
        expiry.days_left(end), error,
    )  # fmt: skip


def _errors(folder: Path, *names: str) -> Iterator[str]:
    """The errors in logs, the newest first."""
    for warned in logs.warnings_of([folder / name for name in names]):
        if warned.level != "WARNING":
            yield f"{warned.text[:160]} ({warned.when})"


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
