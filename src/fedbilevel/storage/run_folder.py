"""The folder of a run: the one class that writes its ``run.json``, and the names of all files in it.

A run can be killed at any moment, and several processes may write at the same time: ``records.jsonl`` only grows, line
by line, and everything else is written atomically. So the last line may be incomplete, and a run that continued from a
checkpoint may have a round twice: readers handle both.
"""

import json
import tomllib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from fedbilevel.errors import Diverged, FedbilevelError
from fedbilevel.storage.arrays import encode, named_leaves
from fedbilevel.storage.checkpoints import Checkpoints
from fedbilevel.storage.files import Appender, json_lines, locked, plain_json, process_exists, write_atomically

RECORDS, INFO, CONFIG = "records.jsonl", "run.json", "config.toml"
SOLUTION, FAILURE, CHECKPOINTS, CODE = "solution.safetensors", "failure.txt", "checkpoints", "code"

FORMAT = 1
"""Of the run folders that this version writes. It reads these and older ones, which have no number."""

Status = Literal[
    "wanted", "submitted", "setting up", "running", "waiting", "interrupted", "failed", "stopped", "finished"
]

UNDER_WAY: tuple[Status, ...] = ("wanted", "submitted", "setting up", "running", "waiting")
"""A run of the simulator is "running"; that of a federation is "wanted", "submitted" as a job, "setting up", "running",
and "waiting" for parties or its next job."""

NEXT: Mapping[str, tuple[Status, ...]] = {
    **dict.fromkeys(("", *UNDER_WAY), (*UNDER_WAY, "interrupted", "failed", "stopped", "finished")),
    "interrupted": ("failed",),
    "failed": (),
    "stopped": ("finished",),  # it came to its end before it heard that it should stop
    "finished": (),
}
""" "" is a folder without a ``run.json``. What is not listed is refused: a run that ended begins again only by
``begin``, ``want_again`` and ``forget_failure``."""


class RunFacts(TypedDict, total=False):
    """The contents of ``run.json`` besides its format and status; a run has only those that concern it."""

    name: str  # of the folder
    task: str
    algorithm: str
    title: str  # of the algorithm, for people
    seed: int
    rounds: int | None
    clients: int
    origins: Mapping[str, Mapping[str, str]]  # code of other people: of "task" and "algorithm" where it came from
    only_python: list[str]  # what the run was given from Python, and no word leads to
    headline: Mapping[str, str]  # metrics that matter most, with what people read
    compare_by: list[str]  # metrics that comparisons are drawn by
    main: str  # the label of the run itself in the records
    labels: Mapping[str, str]  # all labels in the records, with what people read
    environment: Mapping[str, Any]
    process: int
    started: str
    failure: str  # a sentence; failure.txt has the traceback of a programming error
    diverged: bool  # it failed because of NaN or infinity: to run it again would give the same
    summary: Mapping[str, Any]
    details: Mapping[str, Any]  # the task's table about the solution: title, headings, rows

    # Of runs of a federation:
    asked: float  # when
    sites: list[str]  # who takes part, in the order of their numbers
    there: list[str]  # who is in the present job
    refused: Mapping[str, str]  # who cannot take part, and why
    unable: list[str]  # who of these may be able to later
    waits: str  # for whom
    submitted: int  # how many jobs there were
    stuck: int  # how many of the last ones did not finish a round
    round_before: int  # where the last one began
    undelivered: list[str]  # the sites that do not have the result yet
    suspects: dict[str, dict[str, int]]  # by site and class, what sites say of it
    deliveries: Mapping[str, int]  # how often it was tried to give it to them
    rules: Mapping[str, Any]
    round: int
    seen: float  # when the last record was written
    bytes_down: int
    bytes_up: int
    traffic: Mapping[str, tuple[int, int]]  # bytes down and up, by site


class RunInfo(RunFacts, total=False):
    """All of ``run.json``."""

    format: int
    status: Status


@dataclass(frozen=True)
class Run:
    """The contents of a run folder at one moment: ``info`` is its ``run.json``, ``config`` its ``config.toml``,
    ``rows`` its records.
    """

    folder: Path
    info: Mapping[str, Any]

    @property
    def status(self) -> str:
        """ "finished", "failed", "interrupted", "running", or "killed": it was running, and its process is gone."""
        status = self.info.get("status", "running")
        return "killed" if status == "running" and not process_exists(self.info.get("process")) else status

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        try:
            return tomllib.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise FedbilevelError(f"{path} cannot be read ({error}).") from error

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return RunFolder(self.folder).rows()


class RunFolder:
    """The folder of one run. Everything that is written here can be read at any moment by any process."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def begun(self) -> bool:
        """Whether it has a run that can be continued."""
        return (self.path / CONFIG).exists()

    def check(self) -> None:
        """Refuse a folder that this version cannot continue."""
        if not self.begun:
            raise FedbilevelError(f"{self.path} is not a run folder: it has no {CONFIG}.")
        self.info()

    # Reading.

    def info(self) -> dict[str, Any]:
        """Its ``run.json``, see :class:`RunInfo`; empty if it has none."""
        path = self.path / INFO
        if not path.exists():
            return {}
        try:
            info = json.loads(path.read_text())
            if not isinstance(info, dict):
                raise ValueError("it is not an object")
        except FileNotFoundError:  # it was there a moment ago
            return {}
        except (OSError, ValueError) as error:
            raise FedbilevelError(
                f"{path} cannot be read ({error}): it is damaged, or was not written by fedbilevel."
            ) from None
        if isinstance(number := info.get("format"), int) and number > FORMAT:
            raise FedbilevelError(
                f"a newer version of fedbilevel wrote {self.path} (format {number}, this one reads up to {FORMAT}): "
                "upgrade fedbilevel."
            )
        return info

    def read(self) -> Run | None:
        """The run as it is now, None if there is none."""
        info = self.info()
        return Run(self.path, info) if info else None

    def rows(self) -> list[dict[str, Any]]:
        """The records in the order of their rounds; for a round that was run twice, the later one."""
        lines = json_lines(self.path / RECORDS)
        rows = {(row["run"], row["round"]): row for row in lines if "run" in row and "round" in row}
        order = {label: n for n, label in enumerate(dict.fromkeys(label for label, _ in rows))}
        return [rows[entry] for entry in sorted(rows, key=lambda entry: (order[entry[0]], entry[1]))]

    # The status of the run.

    def note(self, **facts: Unpack[RunFacts]) -> None:
        """Save some facts; the status does not change."""
        with locked(self.path / INFO):
            self._write({**self.info(), **facts})

    def enter(self, status: Status, **facts: Unpack[RunFacts]) -> bool:
        """Save a status and some facts. If the run has ended, nothing is written, and the answer is False."""
        with locked(self.path / INFO):
            return self._enter(status, facts)

    def finish(self, summary: Mapping[str, Any], details: Mapping[str, Any] | None = None) -> bool:
        """Mark the run as finished."""
        facts = {"summary": plain_json(summary), "failure": ""}
        with locked(self.path / INFO):
            return self._enter("finished", facts if details is None else {**facts, "details": details})

    def fail(self, why: Exception | str, before: str = "", **facts: Unpack[RunFacts]) -> bool:
        """Mark the run as failed, with a sentence; for unexpected errors also with their type and, in ``failure.txt``,
        their traceback.

        Args:
            why: the error, or a sentence.
            before: words to begin the sentence with.
            facts: further facts about the run.
        """
        expected = isinstance(why, str | FedbilevelError)
        sentence = before + (str(why) if expected else f"{type(why).__name__}: {why}")
        with locked(self.path / INFO):
            diverged = isinstance(why, Diverged)
            failed = self._enter("failed", {**facts, "failure": sentence, "diverged": diverged})
            if failed and not (isinstance(why, str) or (expected and why.__cause__ is None)):
                write_atomically(self.path / FAILURE, "".join(traceback.format_exception(why)).encode())
        return failed

    # A run that ended begins again.

    def begin(self, **facts: Unpack[RunFacts]) -> None:
        """Start or continue the run, whatever its status was; only these facts are kept."""
        with locked(self.path / INFO):
            (self.path / FAILURE).unlink(missing_ok=True)
            self._write({**facts, "status": "running"})

    def want_again(self) -> bool:
        """Request a run of a federation again that failed or was stopped; False if it has another status."""
        with locked(self.path / INFO):
            info = self.info()
            if info.get("status") not in ("failed", "stopped"):
                return False
            (self.path / FAILURE).unlink(missing_ok=True)
            self._write({**info, "status": "wanted", "failure": "", "diverged": False})
            return True

    def forget_failure(self) -> None:
        """Make room for another attempt at a run that failed."""
        with locked(self.path / INFO):
            if self.info().get("status") == "failed":
                for name in (INFO, FAILURE):
                    (self.path / name).unlink(missing_ok=True)

    def _enter(self, status: Status, facts: Mapping[str, Any]) -> bool:
        info = self.info()
        before = info.get("status", "")
        if status != before and status not in NEXT.get(before, ()):
            return False
        self._write({**info, **facts, "status": status})
        return True

    def _write(self, info: Mapping[str, Any]) -> None:
        write_atomically(self.path / INFO, json.dumps({"format": FORMAT, **info}, indent=1).encode())

    # Its other files.

    def write_config(self, text: str) -> None:
        """Save the complete experiment as an experiment file."""
        write_atomically(self.path / CONFIG, text.encode())

    def keep_code(self, path: Path) -> None:
        """Save a copy of a file with code that the run uses; nothing ever runs the copy."""
        write_atomically(self.path / CODE / path.name, path.read_bytes())

    def records(self) -> Appender:
        """Adds rows to the records: ``with folder.records() as records: records.append({...})``."""
        return Appender(self.path / RECORDS)

    def checkpoints(self, label: str = "", seconds: float = 30.0, keep: int = 2) -> Checkpoints:
        """Where the run saves its checkpoints, or the run with this label if there are several in the folder."""
        return Checkpoints(self.path / CHECKPOINTS / label, seconds, keep)

    def save_solution(self, x: Any, y: Any, round: int) -> None:
        """Save x and y after a round, in a format that is safe to load."""
        arrays = {name: np.asarray(leaf) for name, leaf in named_leaves({"x": x, "y": y}).items()}
        write_atomically(self.path / SOLUTION, encode({"round": round}, arrays))
