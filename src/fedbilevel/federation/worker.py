"""A site's compiled program, in a process of its own: if it crashes or hangs, it is restarted.

It reads messages from its standard input and writes answers to its standard output (``wire/pipes.py``). ``site.py`` has
made sure that the server sent them. They have an order: ``hello`` (a study; the answer is a summary of the site's rows,
if the site agrees), ``prepare`` (sums over all sites; the answer is a hash of everything that will be exchanged),
``join``, those of the run, which go to :class:`fedbilevel.engines.messaging.party.Party`, and ``finish``. A message out
of order is refused. A worker serves one run: another ``hello`` is refused.
"""

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbilevel.federation.consent import Consent, Limits, Refusals, check_run_name, digest
from fedbilevel.federation.ledger import LEDGER, Ledger, described, owner
from fedbilevel.federation.wire.pipes import Frame, receive, send

SETTINGS, SECRET = "site.json", "secret"
Arrays = Mapping[str, Any]
Answer = tuple[Any, Arrays]


@dataclass(frozen=True)
class Settings:
    """What a site was started with."""

    name: str
    data: str  # a file, a folder, a function, or "builtin"
    columns: dict[str, str] = field(default_factory=dict)
    id: str = ""  # the site's own column that names its rows
    consent: Consent = field(default_factory=Consent)

    @property
    def limits(self) -> Limits:
        """What holds for every study."""
        return self.consent.limits

    def save(self, folder: Path) -> None:
        """Save the settings for the processes of the site."""
        (folder / SETTINGS).write_text(json.dumps(asdict(self), indent=1))

    def source(self, folder: Path) -> str:
        """What seeds the split of the rows: the site's name and a secret of the site. So the server cannot know which
        rows are in which sum or batch.
        """
        path = folder / SECRET
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(16))
        return f"{self.name} {path.read_text()}"

    @staticmethod
    def load(folder: Path) -> "Settings":
        """The settings that were saved in a folder."""
        known = json.loads((folder / SETTINGS).read_text())
        return Settings(**{**known, "consent": Consent.of(known["consent"])})


class Worker:
    """The program of a site."""

    def __init__(self, folder: Path, again: bool = False) -> None:
        self.folder, self.settings, self.again = folder, Settings.load(folder), again
        self.ledger = Ledger(folder / LEDGER, owner(folder, self.settings.name))
        self.study: Any = None
        self.examples: Any = None
        self.names: list[str] = []  # of its rows, for its own people: no part of what is computed
        self.facts: Arrays = {}  # of all sites
        self.party: Any = None
        self.agreed: Any = None  # the hello that it agreed to
        self.prepared: Any = None
        self.told: tuple[Answer, Answer] = ((None, {}), (None, {}))  # its answers to these two
        self.run, self.clients = "", 0
        self.joined = self.finished = False
        self.caller, self.session = "server", ""  # who sent the message, and for which run

    def serve(self, frame: Frame) -> bytes | None:
        """Answer what came through the pipe; a call that was refused before is only logged."""
        self.caller, self.session = frame.caller, frame.run
        if frame.refused:
            entry = {"action": "", "bytes_in": frame.size, "bytes_out": 0, "left": {}, "error": frame.refused}
            with contextlib.suppress(OSError):
                self.ledger.note({"run": self.session, "method": "", "round": -1, **entry}, self.caller, refused=True)
            return None
        return self.handle(frame.message)

    def handle(self, message: bytes) -> bytes:
        """Answer a message, and note in the ledger what is sent."""
        from fedbilevel.engines.messaging.protocol import Failed, failed, handle

        handled, most = handle(message, self._handlers()), self.settings.limits.largest_upload
        if isinstance(answer := handled.answer, Failed):
            told = replace(answer, error=answer.error.replace(f"{self.folder}{os.sep}", ""))
            handled = failed(handled.message, told, handled.problem)
        elif len(handled.packed) > most * 1e6:
            size = len(handled.packed) / 1e6
            handled = failed(
                handled.message, Failed(f"its answer has {size:.1f} MB, but it sends at most {most:g} MB.")
            )
        try:
            self._noted(handled, len(message))
        except OSError as error:  # nothing leaves that is not in the ledger
            said = f"it cannot write its ledger ({error.strerror}): free space or make its folder writable."
            handled = failed(handled.message, Failed(said))
        return handled.packed

    def _handlers(self) -> dict[Any, Any]:
        """Who answers what, at this point of the order."""
        from fedbilevel.engines.messaging.protocol import Echo, Finish, Hello, Join, Prepare

        known: dict[Any, Any] = {Hello: self._hello}
        if self.agreed is not None:
            known |= {Prepare: self._prepare, Echo: self._echo}
        if self.party is not None:
            known |= {Join: self._join}
            if self.joined:
                known |= {**self.party.handlers, Join: self._join, Finish: self._finish}
        return {Finish: self._finish} if self.finished else known  # the answer to finish may not have arrived

    def _join(self, message: Any, arrays: Arrays) -> Answer:
        """Take part from now on, in the run that it agreed to."""
        from fedbilevel.engines.messaging.protocol import Join
        from fedbilevel.errors import FedbilevelError

        if message.run != self.run:
            raise FedbilevelError("this is not the run it agreed to.")
        assert self.party is not None
        # With "again", another worker was told this, and has kept something since.
        answer = self.party.handlers[Join](replace(message, again=self.again), arrays)
        self.joined = True
        return answer

    def _echo(self, message: Any, arrays: Arrays) -> Answer:
        """Send the arrays back, to measure the network, in a study that says so."""
        from fedbilevel.engines.messaging.protocol import Done
        from fedbilevel.errors import FedbilevelError

        if not self.study.rules.probe:
            raise FedbilevelError("this study does not measure the network.")
        return Done(), arrays

    def _hello(self, message: Any, arrays: Arrays) -> Answer:
        """Look at a study. Every refusal sounds the same to the server; the reason is in the site's own log."""
        from fedbilevel.engines.messaging.protocol import Private
        from fedbilevel.errors import FedbilevelError
        from fedbilevel.federation import study

        if self.agreed is not None:
            if message == self.agreed:  # the answer did not arrive
                return self.told[0]
            raise FedbilevelError("it takes part in another run.")
        if self.session not in ("", message.run):
            raise FedbilevelError("this is not the run of the session.")
        if reason := study.difference(message.copy, study.facts_of_copy()):
            raise FedbilevelError(reason)  # about installed programs only
        refusals = Refusals(self.folder)
        try:
            if refusals.too_many(digest(message.study)):
                raise FedbilevelError("this site has refused too many studies today, and looks at no more.")
            answer = self._agree(message)
            if digest(message.study) not in self.settings.consent.approved:
                refusals.note(digest(message.study))
        except FedbilevelError as error:
            if not refusals.too_many():
                refusals.note()
            raise Private(f"the study of the run {message.run[:60]!r} was refused: {error}") from error
        self.agreed, self.told = message, (answer, self.told[1])
        return answer

    def _agree(self, message: Any) -> Answer:
        """Check a study against what the site agreed to, then its rows against the study, and summarise them."""
        from fedbilevel.engines.messaging.protocol import Facts
        from fedbilevel.errors import FedbilevelError
        from fedbilevel.federation import rows, study
        from fedbilevel.storage.files import write_atomically

        check_run_name(message.run)
        given = self.settings.consent.check(message.study, message.clients)
        if reason := study.packages_differ(study.facts_of_packages(given.packages), message.copy):
            raise FedbilevelError(reason)
        limits, builtin = self.settings.limits, self.settings.data == "builtin"
        if builtin != (given.schema is None):
            raise FedbilevelError(
                "this site was started with --data builtin, but the experiment has a schema: give the site's own data."
                if builtin
                else "the experiment has no schema and uses the task's own data: start the site with --data builtin."
            )
        examples = built = None
        facts: Arrays = {}
        names: list[str] = []
        if given.schema is not None:
            place = self.settings.source(self.folder)
            examples = rows.load(self.settings.data, given.schema, self.settings.columns, place, limits.min_rows)
            facts = given.summarize(examples)
            built = given.build(examples, clients=message.clients)
            self._check_algorithm(built)
            if study.fewest_rows(built, examples) < limits.min_rows:
                raise FedbilevelError(
                    f"this site only sends numbers computed from at least {limits.min_rows} rows, but has fewer for "
                    "training, validation or test, or batches are smaller."
                )
            if given.finds_suspects:
                names = rows.names(self.settings.data, given.schema, self.settings.id)
                if len(names) != len(examples.labels):
                    raise FedbilevelError(f"{self.settings.data} was changed while it was read.")
        self.study, self.examples, self.run, self.clients = given, examples, message.run, message.clients
        self.names = names
        write_atomically(self.folder / "runs" / self.run / "study.toml", message.study.encode())
        return Facts(0 if built is None else int(built.task.layout.longest[0])), dict(facts)

    def _check_algorithm(self, built: Any) -> None:
        from fedbilevel.errors import FedbilevelError

        allowed = self.settings.limits.algorithms
        if allowed and built.experiment.algorithm not in allowed:
            raise FedbilevelError(f"this site does not run the algorithm '{built.experiment.algorithm}'.")

    def _prepare(self, message: Any, arrays: Arrays) -> Answer:
        """Build the program, given the sums over all sites."""
        from fedbilevel.engines.messaging.party import Party
        from fedbilevel.engines.messaging.protocol import Prepared
        from fedbilevel.errors import FedbilevelError
        from fedbilevel.federation.study import plan_digest, site_task

        if self.prepared is not None:
            if message == self.prepared:  # the answer did not arrive
                return self.told[1]
            raise FedbilevelError("it has prepared for the run already.")
        if message.clients != self.clients or not 0 <= message.id < self.clients:
            raise FedbilevelError("this is not the experiment it agreed to.")
        own = self.study.schema is not None
        built = self.study.build(self.examples, arrays, message.clients) if own else self.study.build()
        self._check_algorithm(built)
        task = site_task(built, message.id, own)
        party = Party(
            task,
            built.algorithm,
            message.id,
            message.weight,
            message.clients,
            self.folder / "runs" / self.run / "memory",
            evaluate=task.metrics if own else None,
            reveals=not own,
        )
        largest = max((exchange.bytes_up for exchange in party.plan.by_name.values()), default=0) / 1e6
        if largest > self.settings.limits.largest_upload:  # before anything is computed
            said = f"it would have to send {largest:.1f} MB at once, but it sends at most"
            raise FedbilevelError(f"{said} {self.settings.limits.largest_upload:g} MB.")
        answer = (Prepared(plan_digest(party.plan, built)), {})
        self.party, self.facts = party, arrays
        self.prepared, self.told = message, (self.told[0], answer)
        return answer

    def _finish(self, message: Any, arrays: Arrays) -> Answer:
        """Save the result at the site, with its own part of it."""
        from fedbilevel.engines.messaging.party import TRACED
        from fedbilevel.engines.messaging.protocol import Done
        from fedbilevel.storage.files import write_atomically
        from fedbilevel.storage.run_folder import RunFolder

        self.party.commit(message.commit)
        x, y = self.party.solution(message.round, arrays)
        place = RunFolder(self.folder / "runs" / self.run)
        place.save_solution(x, y, message.round)
        write_atomically(place.path / "compiled.json", json.dumps(TRACED).encode())
        told = self._suspects(x, y) if self.study.finds_suspects else {}
        self.finished = True
        return Done(), told

    def _suspects(self, x: Any, y: Any) -> Arrays:
        """Write the list of suspicious labels, which stays here. Returns what the coordinator may be told of it."""
        from fedbilevel.federation import suspects

        known = {**self.facts, "clients": self.clients}
        found, labels = self.study.judge(self.examples, known, x, y), self.examples.labels
        place, classes = self.folder / "runs" / self.run, self.study.schema.classes
        if not suspects.summary(place):  # the first result of a run counts
            suspects.save(place, self.settings.name, self.names, labels, classes, found)
        limits = self.settings.limits
        if not limits.share_counts:
            return {}
        told = suspects.counts(found, labels, len(classes), limits.min_rows)
        return suspects.once(self.folder, digest(self.agreed.study), self.run, told)

    def _noted(self, handled: Any, bytes_in: int) -> None:
        """A line for one message: what was received and sent, and errors in full, which stay at the site."""
        message = handled.message
        entry = {
            "run": self.run,
            "action": getattr(message, "action", ""),
            "method": getattr(message, "method", ""),
            "round": getattr(message, "committed", getattr(message, "round", -1)),
            "bytes_in": bytes_in,
            "bytes_out": len(handled.packed),
            "left": described(handled.arrays),
            "error": handled.problem,
        }
        self.ledger.note(entry, self.caller, refused=bool(handled.problem))


def main() -> None:
    """Serve until the site's process ends."""
    from fedbilevel.storage import compiled

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes to the log
    compiled.enable()
    worker = Worker(Path(sys.argv[1]), again="again" in sys.argv[2:])
    while (frame := receive(sys.stdin.buffer)) is not None:
        if (answer := worker.serve(frame)) is not None:
            send(answers, answer)


if __name__ == "__main__":
    main()
