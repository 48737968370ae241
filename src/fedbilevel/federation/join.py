"""A site's process: checks its data, and keeps FLARE's client alive until it is asked to stop."""

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import flare_files, logs, presence, process, project, service, suspects
from fedbilevel.federation.kits import CERTIFICATE, KEY, ROOT, STARTUP, Kit
from fedbilevel.federation.ledger import LEDGER
from fedbilevel.federation.process import SITE_FOLDER
from fedbilevel.federation.worker import Settings
from fedbilevel.storage.files import alone, why_unwritable

REFUSED = "the certificate was revoked, or is from another federation"
CLIENT = "nvflare.private.fed.app.client.client_train"


def unpack(kit: Path, folder: Path | None, data: str, columns: Mapping[str, str]) -> tuple[Path, Settings]:
    """Keep a kit, once all of it was checked: the folder of the site, and its settings, without consent to anything."""
    project.needs_flare()
    found = Kit.read(kit)
    if found.role != "site":
        raise FedbilevelError(f"this kit is for {found.party}, a {found.role}: only sites join with data.")
    if folder is None:
        folder = Path(found.party)
    found.keep(folder)
    path = Path(data)
    place = str(path.resolve()) if path.exists() else data  # the processes of the site work elsewhere
    return folder, Settings(found.party, place, dict(columns))


def administrator(kit: Kit, folder: Path | None) -> Path:
    """Keep the kit of an administrator. Returns the folder from which FLARE's console and API start."""
    place = folder or Path(kit.party)
    kit.keep(place)
    return flare_files.administrator(place, kit)


def about(folder: Path) -> dict[str, Any]:
    """What the kit in a folder says."""
    kit = Kit.installed(folder)
    names = ("federation", "party", "role", "host", "port", "fedbilevel")
    return {**{name: getattr(kit, name) for name in names}, "experiment": kit.study}


def text_of(path: Path) -> str:
    """The text of a study's file."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FedbilevelError(f"the study {path} cannot be read: {error}.") from None


def obstacle(folder: Path) -> str:
    """Why the server cannot be reached with this kit, or "" if it can. FLARE itself retries without saying why."""
    known, start = about(folder), folder / STARTUP
    place = f"{known['host']}:{known['port']}"
    context = ssl.create_default_context(cafile=str(start / ROOT))
    context.load_cert_chain(start / CERTIFICATE, start / KEY)
    try:
        plain = socket.create_connection((known["host"], known["port"]), 5)
        with context.wrap_socket(plain, server_hostname=known["host"]) as wire:
            wire.settimeout(1.0)
            wire.recv(1)  # a server that does not accept the certificate says so now; others wait
    except TimeoutError:
        return ""
    except ssl.SSLCertVerificationError:
        return f"the server at {place} has no certificate of this federation: it is another server, or a proxy."
    except (ssl.SSLError, ConnectionResetError):
        return f"the server at {place} does not accept the certificate of this kit: {REFUSED}."
    except OSError as error:
        why = error.strerror or error
        return f"{place} cannot be reached ({why}): check that the server is running and its port is open."
    return f"the server at {place} closes the connection: {REFUSED}."


class Joined:
    """A site that takes part until it is asked to stop."""

    def __init__(self, folder: Path, settings: Settings, say: Callable[[str], object]) -> None:
        self.folder, self.settings, self.say, self.client = folder.resolve(), settings, say, None
        self.connected, self.changed, self.problem, self.next_look = 0.0, time.time(), "", 0.0

    def serve(self) -> None:
        """Take part until Ctrl-C or SIGTERM; restart FLARE's client if it ends."""
        with alone(self.folder):
            self.settings.save(self.folder)
            try:
                while True:
                    self._reach()
                    kit = Kit.installed(self.folder)
                    place = flare_files.site(self.folder, kit)
                    self.client = process.start(
                        CLIENT,
                        ["-m", str(place), "-s", "fed_client.json", "--set", "secure_train=true",
                         f"uid={kit.party}", f"org={kit.party.replace('-', '_')}", "config_folder=config",
                         "heart_beat_interval=3"],
                        self.folder / "site.log",
                        {SITE_FOLDER: str(self.folder)},
                    )  # fmt: skip
                    self._wait()
                    self.say("FLARE's client stopped; restarting it in 2 seconds.")
                    time.sleep(2)
            finally:
                if self.client is not None:
                    process.end(self.client)
                (self.folder / presence.SITE).unlink(missing_ok=True)

    def _note(self, there: bool) -> None:
        """Say how this site is, for its people and the system."""
        if there != bool(self.connected):
            self.changed = time.time()
            self.connected = self.changed if there else 0.0
        facts = {"connected": self.connected, "changed": self.changed, "problem": self.problem}
        with contextlib.suppress(OSError):  # of a disk that is full, _look_at_disk speaks
            presence.note(self.folder / presence.SITE, **facts)
        logs.rotate(self.folder.glob("*.log"))
        service.alive()

    def _reach(self) -> None:
        """Wait until the server can be reached; say why not, once."""
        said = ""
        while reason := obstacle(self.folder):
            if reason != said:
                self.say(f"{reason} Retrying until you press Ctrl-C.")
                said = reason
            self.problem = reason
            self._note(False)
            time.sleep(2)
        self.problem = ""

    def _wait(self) -> None:
        """Wait until the client ends; report what it logs about the connection."""
        assert self.client is not None
        log, place = self.folder / "site.log", (self.folder / "site.log").stat().st_size
        connected, refused = False, False
        ledger = self.folder / LEDGER
        seen = ledger.stat().st_size if ledger.exists() else 0
        next_look, unwritable = 0.0, ""
        try:
            while self.client.poll() is None:
                time.sleep(0.5)
                if time.monotonic() >= next_look:
                    unwritable, next_look = self._look_at_disk(unwritable), time.monotonic() + 5.0
                seen = self._news(ledger, seen)
                place = place if log.stat().st_size >= place else 0  # it was rotated
                with log.open("rb") as file:
                    file.seek(place)
                    text = file.read().decode(errors="replace")
                    place = file.tell()
                if not connected and "Successfully registered client" in text:
                    connected = True
                    self.say("connected. This site takes part until you press Ctrl-C.")
                if not refused and ("UNAUTHENTICATED" in text.upper() or "is disabled" in text):
                    refused = True
                    self.problem = f"the server refuses this site: {REFUSED}."
                    self.say(self.problem)
                if time.monotonic() >= self.next_look:
                    self.next_look = time.monotonic() + 2.0
                    self._note(connected and not refused and self._has_connection())
        finally:
            self._news(ledger, seen)

    def _has_connection(self) -> bool:
        """Whether FLARE's client has a connection to the server: it does not say when it has lost it."""
        import psutil  # comes with FLARE

        assert self.client is not None
        try:
            found = psutil.Process(self.client.pid).net_connections("tcp")
        except psutil.Error:
            return False
        port = about(self.folder)["port"]
        return any(each.status == psutil.CONN_ESTABLISHED and each.raddr.port == port for each in found)

    def _look_at_disk(self, before: str) -> str:
        """Say once why nothing can be saved, and when it can be again: where a disk is full, logs are silent, too."""
        now = why_unwritable(self.folder)
        if now and now != before:
            self.say(f"nothing can be saved in {self.folder} ({now}): free space, or make the folder writable.")
        if before and not now:
            self.say("the folder can be written again: this site goes on.")
        return now

    def _news(self, ledger: Path, seen: int) -> int:
        """Say why a study was refused, and which labels were found: the server is not told. Returns how far the ledger
        was read.
        """
        size = ledger.stat().st_size if ledger.exists() else 0
        if size == seen:
            return seen
        seen = seen if size > seen else 0  # it was full, and another one has begun
        with ledger.open("rb") as file:
            file.seek(seen)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                if (row := json.loads(line)).get("action") == "hello" and row.get("error"):
                    self.say(row["error"])
                place = self.folder / "runs" / str(row.get("run"))
                if row.get("action") == "finish" and not row.get("error") and (said := suspects.summary(place)):
                    self.say(f"run {row['run']}: {said} See {place / suspects.SUSPECTS}")
        return seen + len(whole)
