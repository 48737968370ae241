"""A site's compiled program, in a process of its own: if it crashes or hangs, another one is started.

It reads messages from its standard input and writes answers to its standard output, each behind its length. The first
two messages set it up: ``hello`` (which study? the answer is a summary of the site's rows) and ``prepare`` (what all
sites together are; the answer is a hash of everything that will be exchanged). All others go to
:class:`fedbilevel.engines.party.Party`.
"""

import json
import os
import struct
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

SETTINGS, LEDGER = "site.json", "served.jsonl"


@dataclass(frozen=True)
class Limits:
    """What a site agrees to; anything else is refused by the site itself."""

    largest_upload: float = 100.0  # megabytes of one answer
    algorithms: tuple[str, ...] = ()  # none: all
    tasks: tuple[str, ...] = ()
    min_clients: int = 2  # parties of the federation
    min_rows: int = 10  # training rows of this site, of which sums are shared
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
    return stream.read(length)


def send(stream: BinaryIO, message: bytes) -> None:
    """Write a message behind its length."""
    stream.write(struct.pack("<Q", len(message)))
    stream.write(message)
    stream.flush()


class Worker:
    """The program of a site."""

    def __init__(self, folder: Path, again: bool = False) -> None:
        self.folder, self.settings, self.again = folder, Settings.load(folder), again
        self.study: Any = None
        self.examples: Any = None
        self.built: Any = None
        self.party: Any = None
        self.run = ""

    def handle(self, message: bytes) -> bytes:
        """Answer a message, and note what leaves."""
        from fedbilevel.engines.messages import decode, encode
        from fedbilevel.errors import FedbilevelError

        try:
            header, arrays = decode(message)
        except FedbilevelError as error:
            return encode({"error": str(error)}, {})
        action = str(header.get("action"))
        try:
            if action == "hello":
                answer = encode(*self._hello(header))
            elif action == "prepare":
                answer = encode(*self._prepare(header, arrays))
            elif action == "echo":  # how fast is the way?
                answer = encode({}, arrays)
            elif action == "finish":
                answer = encode(*self._finish(header, arrays))
            elif self.party is None:
                raise FedbilevelError("it has not been told which study this is.")
            elif action == "join" and self.again:  # another worker was told this, and has kept something since
                answer = self.party.handle(encode({**header, "again": True}, arrays))
            else:
                answer = self.party.handle(message)
        except FedbilevelError as error:
            answer = encode({"error": str(error)}, {})
        except Exception as error:  # whatever the site's own data or functions do, the server gets an answer
            answer = encode({"error": f"{type(error).__name__}: {error}"}, {})
        if len(answer) > self.settings.limits.largest_upload * 1e6:
            most = self.settings.limits.largest_upload
            said = f"its answer has {len(answer) / 1e6:.1f} MB, but it sends at most {most:g}."
            answer = encode({"error": said}, {})
        self._note(action, header, message, answer)
        return answer

    def _hello(self, header: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Look at the study, and say what the rows of this site are like."""
        from fedbilevel.errors import FedbilevelError
        from fedbilevel.federation import schema, study

        here = study.facts_of_copy()
        if reason := study.difference(header["copy"], here):
            raise FedbilevelError(reason)
        self.run = header["run"]
        self.study = study.from_text(header["study"], self.folder / "runs" / self.run)
        limits, name = self.settings.limits, self.study.experiment.task
        if limits.experiment and header["study"] != limits.experiment:
            raise FedbilevelError("it takes part in the experiment of its kit only, and this is another one.")
        if limits.tasks and name not in limits.tasks:
            raise FedbilevelError(f"it does not take part in the task '{name}'.")
        if header["clients"] < limits.min_clients:
            raise FedbilevelError(f"it wants at least {limits.min_clients} parties, but there are {header['clients']}.")
        builtin = self.settings.data == "builtin"
        if builtin != (self.study.schema is None):
            raise FedbilevelError(
                "it was started with --data builtin, but the study has a schema: give the site's own data."
                if builtin
                else "the study has no schema, so it uses the task's own data: start the site with --data builtin."
            )
        if builtin:
            return {"rows": 0, "copy": here}, {}
        self.examples = schema.load(self.settings.data, self.study.schema, self.settings.columns, self.settings.name)
        built = self.study.build(self.examples)
        rows = int(built.task.layout.longest[0])
        if rows < limits.min_rows:
            raise FedbilevelError(f"it has {rows} training rows, and shares sums of at least {limits.min_rows} only.")
        return {"rows": rows, "copy": here}, dict(self.study.summarize(self.examples))

    def _prepare(self, header: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Build the program, knowing what all sites together are."""
        from fedbilevel.engines.party import Party
        from fedbilevel.errors import FedbilevelError
        from fedbilevel.federation.study import plan_digest, site_task

        own = self.study.schema is not None
        self.built = self.study.build(self.examples, arrays) if own else self.study.build()
        limits = self.settings.limits
        if limits.algorithms and self.built.experiment.algorithm not in limits.algorithms:
            raise FedbilevelError(f"it does not run the algorithm '{self.built.experiment.algorithm}'.")
        task = site_task(self.built, header["id"], own)
        self.party = Party(
            task,
            self.built.algorithm,
            header["id"],
            header["weight"],
            header["clients"],
            self.folder / "runs" / self.run / "memory",
            evaluate=task.metrics if own else None,
            reveals=not own,
        )
        return {"plan": plan_digest(self.party.plan, self.built)}, {}

    def _finish(self, header: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The site keeps the result, with what is its own of it."""
        import numpy as np

        from fedbilevel.engines.messages import encode, named_leaves
        from fedbilevel.engines.party import TRACED
        from fedbilevel.records import write_atomically

        x, y = self.party.solution(header["round"], arrays)
        found = {name: np.asarray(leaf) for name, leaf in named_leaves({"x": x, "y": y}).items()}
        write_atomically(
            self.folder / "runs" / self.run / "solution.safetensors", encode({"round": header["round"]}, found)
        )
        write_atomically(self.folder / "runs" / self.run / "compiled.json", json.dumps(TRACED).encode())
        return {}, {}

    def _note(self, action: str, header: dict[str, Any], message: bytes, answer: bytes) -> None:
        """One line for every message: what came, and what left."""
        import numpy as np

        from fedbilevel.engines.messages import decode

        said, left = decode(answer)
        line = {
            "time": time.time(),
            "run": self.run,
            "action": action,
            "method": header.get("method", ""),
            "round": header.get("committed", header.get("round", -1)),
            "bytes_in": len(message),
            "bytes_out": len(answer),
            "left": {
                name: {"shape": list(a.shape), "type": str(a.dtype), "norm": float(np.sqrt(np.vdot(a, a)))}
                for name, a in left.items()
            },
            "error": said.get("error", ""),
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
