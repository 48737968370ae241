"""The coordinator's process: keeps FLARE's server alive, and takes every requested run to its end.

Other commands talk to it through files in the folder of the federation: a requested run is a folder in ``runs`` whose
``run.json`` says so. If FLARE's server dies, it is restarted. If a run's job ends before the run does, the job is
submitted again, and continues from the last checkpoint. If this process dies, restarting it has the same effect.
"""

import contextlib
import errno
import io
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import flare_files, logs, presence, process, project, service
from fedbilevel.federation.attendance import Attendance
from fedbilevel.federation.consent import check_run_name, digest
from fedbilevel.federation.job import write_job
from fedbilevel.federation.server import STUDY
from fedbilevel.federation.study import Study
from fedbilevel.federation.wire.sites import FEDERATION_FOLDER
from fedbilevel.storage.files import alone
from fedbilevel.storage.run_folder import INFO, UNDER_WAY, RunFolder

STATE = presence.COORDINATOR
SERVER = "fedbilevel.federation.server_train"
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def check_port(port: int) -> None:
    """Refuse a port that is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise FedbilevelError(
                f"port {port} cannot be used ({error.strerror}): free it, or create the federation with another port."
            ) from None


def pid(folder: Path) -> int | None:
    """The process id of the coordinator, if it is running."""
    return presence.pid(folder / STATE)


def state(folder: Path) -> dict[str, Any]:
    """What the coordinator last saw."""
    return presence.state(folder / STATE)


class Coordinator:
    """Serves a federation until it is asked to stop."""

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        self.folder, self.say = folder.resolve(), say
        self.project = project.load(folder)
        self.server: Any = None
        self.session: Any = None
        self.job: tuple[str, str, frozenset[str]] | None = None  # its id, its run, who is in it
        self.excluded: frozenset[str] = frozenset()
        self.seen: list[str] = []
        self.attendance = Attendance()
        self.since: dict[str, float] = {}  # when a site came or went
        self.began = time.time()
        self.waiting_since: dict[str, float] = {}  # of runs
        self.paused_until: dict[str, float] = {}
        self.next_look = 0.0
        self.reported: set[str] = set()  # problems that the user has been told about
        self.obstacle = ""  # why nothing can be written, if that is so

    def serve(self) -> None:
        """Until Ctrl-C or SIGTERM."""
        project.needs_flare()
        handler = logging.FileHandler(self.folder / "coordinator.log")  # FLARE's messages
        handler.setFormatter(logging.Formatter(logs.FORMAT))
        logging.getLogger().addHandler(handler)
        with alone(self.folder):
            check_port(self.project.port)
            try:
                while True:
                    self._step()
                    time.sleep(0.5)
            finally:
                self._end()

    def _step(self) -> None:
        try:
            if self.server is None or self.server.poll() is not None:
                self._start_server()
                self._note()
            self._supervise()
            self._note()
            if self.obstacle:
                self.say("the folder can be written again: going on.")
                self.obstacle = ""
        except FedbilevelError:
            raise
        except Exception as error:  # look again: a coordinator serves for weeks
            if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
                self._cannot_write(str(error.strerror))
            else:
                self._report(error)
                self._close()

    def _start_server(self) -> None:
        if self.server is not None:
            self.say("the server stopped unexpectedly; restarting it.")
        self._close()
        self.attendance.forget()
        self.job = None
        flare_files.coordinator(self.folder, self.project)
        self.server = process.start(
            SERVER,
            ["-m", str(self.folder / "server"), "-s", "fed_server.json", "--set", "secure_train=true",
             f"org={self.project.name.replace('-', '_')}", "config_folder=config"],
            self.folder / "server.log",
            {FEDERATION_FOLDER: str(self.folder)},
        )  # fmt: skip
        self.say(f"the server is listening on {self.project.host}:{self.project.port}.")
        project.note(self.folder, "server started", process=self.server.pid)

    def _cannot_write(self, why: str) -> None:
        """Say it once."""
        if self.obstacle != why:
            self.obstacle, place = why, f"nothing can be saved in {self.folder} ({why})"
            self.say(f"{place}: free space, or make the folder writable. Runs go on when that is done.")

    def _report(self, error: Exception) -> None:
        """Log an error; show it once, unless it only means that FLARE's server is starting or gone."""
        expected = isinstance(error, OSError) or type(error).__module__.startswith("nvflare")
        logging.getLogger(__name__).warning("%s", error, exc_info=None if expected else error)
        problem = f"{type(error).__name__}: {error}"
        if not expected and problem not in self.reported:
            self.reported.add(problem)
            self.say(f"unexpected error ({problem}); the traceback is in coordinator.log. Trying again.")

    def _note(self) -> None:
        facts = {"server": self.server.pid, "connected": self.seen, "since": self.since, "began": self.began}
        presence.note(self.folder / STATE, **facts)
        logs.rotate(self.folder.glob("*.log"))
        service.alive()

    def _supervise(self) -> None:
        if self.session is None:
            if not self._listens():
                return
            self.session = self._connect()
        self.project = project.load(self.folder)
        for name in self.project.excluded - self.excluded:  # it is cut off; here, FLARE is to forget it at once
            with contextlib.suppress(Exception):
                self.session.remove_client(name)
        self.excluded = self.project.excluded
        info = self.session.get_system_info()
        connected = sorted(client.name for client in info.client_info)
        for name in connected:
            if name not in self.seen:
                self.since[name] = time.time()
                self.say(f"{name} is connected.")
        for name in self.seen:
            if name not in connected:
                self.since[name] = time.time()
                self.say(f"{name} is offline.")
        self.seen = connected
        self.attendance.see(connected)
        if self.job is not None:
            self._watch(*self.job)
            return
        for run in wanted_runs(self.folder):
            try:
                if self._submit(run):
                    return
            except FedbilevelError as error:  # of this run; others go on
                RunFolder(self.folder / "runs" / run).fail(error)
                self.say(f"{run} failed: {error}")
        for run, missing in undelivered(self.folder):
            if self._deliver(run, missing):
                return

    def _listens(self) -> bool:
        """Whether the server has opened its port yet. FLARE's session would log errors about it until then."""
        with contextlib.suppress(OSError):
            socket.create_connection((self.project.host, self.project.port), 5.0).close()
            return True
        return False

    def _connect(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        with contextlib.redirect_stdout(io.StringIO()):
            return new_secure_session(self.project.user(project.ADMIN), str(self.folder / project.ADMIN), timeout=5.0)

    def _watch(self, job: str, run: str, members: frozenset[str]) -> None:
        """Has the job ended? Should it, because somebody is back or was revoked?"""
        folder = RunFolder(self.folder / "runs" / run)
        word = str(self.session.get_job_status(job))
        known = folder.info().get("status")
        if known == "stopped" and not word.startswith("FINISHED"):
            self.session.abort_job(job)
            return
        if word.startswith("FINISHED") or word in ("FAILED_TO_RUN", "None"):
            self.job = None
            project.note(self.folder, "job ended", run=run, job=job, status=word)
            self.waiting_since[run] = time.monotonic()
            if known == "finished":
                missing = ", ".join(folder.info().get("undelivered", []))
                self.say(f"{run} has finished." + (f" Without its result so far: {missing}." if missing else ""))
            elif known == "failed":
                self.say(f"{run} failed: {folder.info().get('failure')}")
            elif known == "stopped":
                self.say(f"{run} was stopped.")
            elif folder.enter("waiting"):
                self._pause(run, folder.info())
                self.say(f"the job of {run} ended ({word}); the run continues with a new one.")
            return
        if known != "running" or time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + 2.0
        info = folder.info()
        for name in members.intersection(info.get("unable", ())):  # not in this job, but perhaps in the next one
            self.attendance.missed(name)
            members -= {name}
            self.job = (job, run, members)
        allowed, sites = set(self.project.sites), set(info.get("sites", ()))
        idle = {each["client_name"] for each in self.session.get_client_job_status() if each.get("status") == "no_jobs"}
        steady = {name for name in self.seen if self.attendance.steady(name)}
        back = allowed & sites & steady & (idle | (steady - members))
        gone = members - allowed
        if back or gone:
            who = ", ".join(sorted(back or gone))
            word = "is back" if back else "was revoked"
            self.say(f"{who} {word}: {run} continues from its last round with a new job.")
            self.session.abort_job(job)
            self.next_look = time.monotonic() + 30.0  # that takes a while

    def _pause(self, run: str, info: dict[str, Any]) -> None:
        """Wait before the next job of a run, longer each time if the one before did not get anywhere."""
        place = RunFolder(self.folder / "runs" / run)
        round = place.checkpoints().round
        stuck = info.get("stuck", 0) + 1 if round == info.get("round_before", -2) else 0
        self.paused_until[run] = time.monotonic() + (min(60.0, 2.0**stuck) if stuck else 0.0)
        place.note(stuck=stuck, round_before=round)

    def _submit(self, run: str) -> bool:
        """Start a job with all sites, or, after a while, with those that are connected. It waits for sites that took
        part before, at the start of a run for all. Returns whether it did.
        """
        folder = self.folder / "runs" / run
        study = Study.read(folder / STUDY)
        place = RunFolder(folder)
        known = place.info()
        # The numbers of the sites stay what they were when the run began.
        sites = known.get("sites") or self.project.sites
        allowed = set(self.project.sites)
        quorum = study.quorum(len(sites))
        if len(allowed.intersection(sites)) < quorum:
            gone = ", ".join(name for name in sites if name not in allowed)
            raise FedbilevelError(
                f"the run needs {quorum} sites, and too few are left: {gone} cannot take part any more."
            )
        there = self._counted_on([name for name in sites if name in allowed], quorum)
        began = self.waiting_since.setdefault(run, time.monotonic())
        waits = [name for name in sites if name not in there and name in allowed]
        before = [name for name in waits if name in known.get("there", sites) and self.attendance.awaited(name)]
        enough = len(there) >= quorum
        if time.monotonic() < self.paused_until.get(run, 0.0):
            return False
        if not enough or (before and time.monotonic() - began < study.rules.patience):
            said = f"waiting for {', '.join(before if enough else waits)}."
            if known.get("waits") != said:
                place.note(waits=said)
                self.say(f"{run}: {said}")
            return False
        self._start_job(run, sites, there, study)
        place.enter("submitted", sites=sites, waits="", submitted=known.get("submitted", 0) + 1)
        self.say(f"{run}: started a job with {', '.join(there)}.")
        return True

    def _counted_on(self, sites: list[str], quorum: int) -> list[str]:
        """The sites for a job: those that are likely to stay, and others only if it cannot be done without them."""
        there = {name for name in sites if self.attendance.steady(name)}
        since = self.attendance.since
        others = sorted((name for name in sites if name in since and name not in there), key=lambda name: since[name])
        return [name for name in sites if name in there or name in others[: max(0, quorum - len(there))]]

    def _start_job(self, run: str, sites: list[str], there: list[str], study: Study) -> None:
        package = self.folder / "jobs" / run
        write_job(package, run, sites, there, study)
        self.job = (self.session.submit_job(str(package)), run, frozenset(there))
        project.note(self.folder, "job submitted", run=run, job=self.job[0], sites=there)
        self.waiting_since.pop(run, None)

    def _deliver(self, run: str, missing: list[str]) -> bool:
        """Give the result of a run that has finished to sites that were not there at its end."""
        place = RunFolder(self.folder / "runs" / run)
        known = place.info()
        tried = dict(known.get("deliveries", {}))
        there = [name for name in missing if self.attendance.steady(name) and tried.get(name, 0) < 3]
        if not there:
            return False
        place.note(deliveries={**tried, **{name: tried.get(name, 0) + 1 for name in there}})
        self._start_job(run, known["sites"], there, Study.read(place.path / STUDY))
        self.say(f"{run}: giving its result to {', '.join(there)}.")
        return True

    def _close(self) -> None:
        if self.session is not None:
            with contextlib.suppress(Exception):
                self.session.close()
        self.session = None

    def _end(self) -> None:
        self._close()
        if self.server is not None:
            process.end(self.server)
        (self.folder / STATE).unlink(missing_ok=True)


def runs(folder: Path) -> list[Path]:
    """The folders of all runs, in the order in which they were asked for."""
    asked: dict[Path, float] = {}
    for path in (folder / "runs").glob(f"*/{INFO}"):
        with contextlib.suppress(FedbilevelError):  # what cannot be read is not a run
            asked[path.parent] = RunFolder(path.parent).info().get("asked", 0)
    return sorted(asked, key=asked.__getitem__)


def wanted_runs(folder: Path) -> Iterator[str]:
    """Runs that have not ended."""
    return (run.name for run in runs(folder) if RunFolder(run).info().get("status") in UNDER_WAY)


def undelivered(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Runs that have finished, and the sites that do not have the result yet."""
    for run in runs(folder):
        info = RunFolder(run).info()
        if info.get("status") == "finished" and info.get("undelivered"):
            yield run.name, info["undelivered"]


def want(folder: Path, study: Path, name: str) -> Path:
    """Request a run, and return its folder."""
    check_run_name(name)
    Study.read(study).quorum(len(project.load(folder).sites))  # refuses what is wrong
    run = folder / "runs" / name
    if run.exists():
        raise FedbilevelError(f"there is already a run {name}: choose another name, or continue it with --resume.")
    run.mkdir(parents=True)
    shutil.copy(study, run / STUDY)
    last = max((RunFolder(other).info().get("asked", 0.0) for other in runs(folder)), default=0.0)
    # The last one in the queue, even if the clock was set back.
    RunFolder(run).enter("wanted", asked=max(time.time(), last + 1e-3), name=name)
    project.note(folder, "run requested", run=name, study=digest((run / STUDY).read_text()))
    return run


def stop(folder: Path) -> bool:
    """Stop the coordinator of a folder, and with it the server. Returns whether one was running."""
    found = pid(folder)
    if found is None:
        return False
    os.kill(found, signal.SIGTERM)
    for _ in range(300):
        if pid(folder) is None:
            return True
        time.sleep(0.1)
    raise FedbilevelError(f"the coordinator (process {found}) did not stop: end this process yourself.")
