"""A site's compiled program, in a process of its own: if it crashes or hangs, another one is started.

It reads messages from its standard input and writes answers to its standard output, each behind its length. The first
two messages set it up: ``hello`` (which study? the answer is a summary of the site's rows) and ``prepare`` (what all
sites together are; the answer is a hash of everything that will be exchanged). All others go to
:class:`fedbilevel.engines.party.Party`.
"""

import json
import os
import re
import secrets
import struct
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

SETTINGS, LEDGER, SECRET = "site.json", "served.jsonl", "secret"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")
"""Names of runs: they become folders."""


@dataclass(frozen=True)
class Limits:
    """What a site agrees to; anything else is refused by the site itself."""

    largest_upload: float = 100.0  # megabytes of one answer
    algorithms: tuple[str, ...] = ()  # none: all
    tasks: tuple[str, ...] = ()
    min_clients: int = 2  # parties of the federation
    min_rows: int = 10  # behind every number that is shared: of training, validation, test, and of a batch
    experiment: str = ""  # only this text of an experiment


@dataclass(frozen=True)
class Settings:
    """What a site was started with."""

    name: str
    data: str  # a file, a folder, a function, or "builtin"
    columns: dict[str, str] = field(default_factory=dict)
    limits: Limits = Limits()

    def save(self, folder: Path) -> None:
        """Write it down for the processes of the site."""
        (folder / SETTINGS).write_text(json.dumps(asdict(self), indent=1))

    def source(self, folder: Path) -> str:
        """What rows are dealt out by: the site's name, and something that only the site knows. So the server does not
        know which rows are in which sum, nor in which batch.
        """
        path = folder / SECRET
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(16))
        return f"{self.name} {path.read_text()}"

    @staticmethod
    def load(folder: Path) -> "Settings":
        """As it was written down."""
        known = json.loads((folder / SETTINGS).read_text())
        limits: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in known.pop("limits").items()}
        return Settings(**known, limits=Limits(**limits))


def receive(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (length,) = struct.unpack("<Q", head)
    body = stream.read(length)
    return body if len(body) == length else None


def send(stream: BinaryIO, message: bytes) -> None:
    """Write a message behind its length."""
    stream.write(struct.pack("<Q", len(message)))
    stream.write(message)
    stream.flush()


class Private(Exception):
    """What is wrong with rows of the site: for its own people, not for the server."""


class Worker:
    """The program of a site."""

    def __init__(self, folder: Path, again: bool = False) -> None:
        self.folder, self.settings, self.again = folder, Settings.load(folder), again
        self.study: Any = None
        self.examples: Any = None
        self.party: Any = None
        self.run, self.clients = "", 0

    def handle(self, message: bytes) -> bytes:
        """Answer a message, and note what leaves."""
        from fedbilevel.errors import FedbilevelError
        from fedbilevel.storage.arrays import decode, encode

        try:
            header, arrays = decode(message)
        except FedbilevelError as error:
            return encode({"error": str(error)}, {})
        action, reason = str(header.get("action")), ""
        try:
            said, left = self._answer(action, header, arrays)
            answer = encode(said, left)
        except FedbilevelError as error:
            said = {"error": str(error).replace(f"{self.folder}{os.sep}", "")}
        except Private as error:
            reason, said = str(error), {"error": "its data do not fit the experiment; its own log says where."}
        except Exception as error:  # whatever the site's own data or functions do, the server gets an answer
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            said = {"error": f"{type(error).__name__}; its own log says more."}
        else:
            most = self.settings.limits.largest_upload
            if len(answer) <= most * 1e6:
                self._note(header, message, answer, left, said.get("error", ""))
                return answer
            said = {"error": f"its answer has {len(answer) / 1e6:.1f} MB, but it sends at most {most:g}."}
        answer = encode(said, {})
        self._note(header, message, answer, {}, reason or said["error"])
        return answer

    def _answer(
        self, action: str, header: dict[str, Any], arrays: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        from fedbilevel.errors import FedbilevelError

        if action == "hello":
            return self._hello(header)
        if action == "prepare":
            return self._prepare(header, arrays)
        if action == "echo":  # how fast is the way?
            return {}, arrays
        if self.party is None:
            raise FedbilevelError("it has not been told which study this is.")
        if action == "finish":
            return self._finish(header, arrays)
        if action == "join" and self.again:  # another worker was told this, and has kept something since
            header = {**header, "again": True}
        return self.party.answer(header, arrays)

    def _hello(self, header: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Look at the study, and say what the rows of this site are like."""
        from fedbilevel.errors import FedbilevelError
        from fedbilevel.federation import schema, study

        self.study = self.examples = self.party = None
        if reason := study.difference(header["copy"], study.facts_of_copy()):
            raise FedbilevelError(reason)
        if not RUN_NAME.fullmatch(header["run"]):
            raise FedbilevelError("this is no name of a run.")
        self.run, self.clients = header["run"], header["clients"]
        given = study.from_text(header["study"], self.folder / "runs" / self.run)
        limits, name = self.settings.limits, given.experiment.task
        if limits.experiment and header["study"] != limits.experiment:
            raise FedbilevelError("it takes part in the experiment of its kit only, and this is another one.")
        if limits.tasks and name not in limits.tasks:
            raise FedbilevelError(f"it does not take part in the task '{name}'.")
        if header["clients"] < limits.min_clients:
            raise FedbilevelError(f"it wants at least {limits.min_clients} parties, but there are {header['clients']}.")
        builtin = self.settings.data == "builtin"
        if builtin != (given.schema is None):
            raise FedbilevelError(
                "it was started with --data builtin, but the study has a schema: give the site's own data."
                if builtin
                else "the study has no schema, so it uses the task's own data: start the site with --data builtin."
            )
        if given.schema is None:
            self.study = given
            return {"rows": 0}, {}
        place = self.settings.source(self.folder)
        try:
            examples = schema.load(self.settings.data, given.schema, self.settings.columns, place)
            facts = given.summarize(examples)
        except FedbilevelError as error:
            raise Private(str(error)) from error
        built = given.build(examples, facts)
        self._check_algorithm(built)
        if study.fewest_rows(built, examples) < limits.min_rows:
            raise FedbilevelError(
                f"it shares numbers about at least {limits.min_rows} rows only, and has fewer for training, validation "
                "or test, or batches are smaller."
            )
        self.study, self.examples = given, examples
        return {"rows": int(built.task.layout.longest[0])}, dict(facts)

    def _check_algorithm(self, built: Any) -> None:
        from fedbilevel.errors import FedbilevelError

        allowed = self.settings.limits.algorithms
        if allowed and built.experiment.algorithm not in allowed:
            raise FedbilevelError(f"it does not run the algorithm '{built.experiment.algorithm}'.")

    def _prepare(self, header: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Build the program, knowing what all sites together are."""
        from fedbilevel.engines.messaging.party import Party
        from fedbilevel.errors import FedbilevelError
        from fedbilevel.federation.study import plan_digest, site_task

        if self.study is None or header["clients"] != self.clients:
            raise FedbilevelError("this is not the study it agreed to.")
        own = self.study.schema is not None
        built = self.study.build(self.examples, arrays) if own else self.study.build()
        self._check_algorithm(built)
        task = site_task(built, header["id"], own)
        self.party = Party(
            task,
            built.algorithm,
            header["id"],
            header["weight"],
            header["clients"],
            self.folder / "runs" / self.run / "memory",
            evaluate=task.metrics if own else None,
            reveals=not own,
        )
        return {"plan": plan_digest(self.party.plan, built)}, {}

    def _finish(self, header: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The site keeps the result, with what is its own of it."""
        import numpy as np

        from fedbilevel.engines.messaging.party import TRACED
        from fedbilevel.storage.arrays import encode, named_leaves
        from fedbilevel.storage.files import write_atomically

        x, y = self.party.solution(header["round"], arrays)
        found = {name: np.asarray(leaf) for name, leaf in named_leaves({"x": x, "y": y}).items()}
        write_atomically(
            self.folder / "runs" / self.run / "solution.safetensors", encode({"round": header["round"]}, found)
        )
        write_atomically(self.folder / "runs" / self.run / "compiled.json", json.dumps(TRACED).encode())
        return {}, {}

    def _note(self, header: dict[str, Any], message: bytes, answer: bytes, left: dict[str, Any], error: str) -> None:
        """One line for every message: what came, and what left; the reason of an error as only the site may know it."""
        import numpy as np

        line = {
            "time": time.time(),
            "run": self.run,
            "action": str(header.get("action")),
            "method": header.get("method", ""),
            "round": header.get("committed", header.get("round", -1)),
            "bytes_in": len(message),
            "bytes_out": len(answer),
            "left": {
                name: {"shape": list(a.shape), "type": str(a.dtype), "norm": float(np.sqrt(np.vdot(a, a)))}
                for name, a in left.items()
            },
            "error": error,
        }
        with (self.folder / LEDGER).open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Serve until the site's process ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes to the log
    worker = Worker(Path(sys.argv[1]), again="again" in sys.argv[2:])
    while (message := receive(sys.stdin.buffer)) is not None:
        send(answers, worker.handle(message))


if __name__ == "__main__":
    main()
