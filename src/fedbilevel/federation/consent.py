"""What a site agrees to: studies that it has approved word for word, or any that keep its rules.

Nothing about the rows leaves a site before it has agreed. A study is approved by the hash of its text: another column,
another bound or another number of rounds is another study.
"""

import hashlib
import json
import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.storage.files import write_atomically

if TYPE_CHECKING:
    from fedbilevel.federation.study import Study

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")
"""Names of runs: they become folders."""
LONGEST_STUDY = 1 << 16
REFUSALS = "refusals.json"
MOST_REFUSALS = 30
"""A day. Beyond these, a site does not even read what it is asked."""
DAY = 86_400.0


def check_run_name(name: str) -> None:
    """Refuse what cannot be the name of a run, above all paths."""
    if not RUN_NAME.fullmatch(name) or ".." in name:
        raise FedbilevelError(
            f"{name[:60]!r} is not a valid name for a run: use up to 101 letters, digits, '.', '_' and '-'."
        )


@dataclass(frozen=True)
class Limits:
    """What holds for every study, approved or not; a site refuses anything else."""

    largest_upload: float = 100.0  # megabytes of one answer
    algorithms: tuple[str, ...] = ()  # none: all
    tasks: tuple[str, ...] = ()
    min_clients: int = 2  # parties of the federation
    min_rows: int = 10  # behind every number that is shared: of training, validation, test, and of a batch
    share_counts: bool = False  # how many labels of each class are suspicious, in studies that find wrong ones

    def refusal(self, study: "Study", clients: int) -> str:
        """Why a study is refused, or "" if it is not."""
        name, algorithm = study.experiment.task, study.experiment.algorithm
        if self.tasks and name not in self.tasks:
            return f"this site does not take part in the task '{name}'."
        if self.algorithms and algorithm and algorithm not in self.algorithms:
            return f"this site does not run the algorithm '{algorithm}'."
        if clients < self.min_clients:
            return f"this site needs at least {self.min_clients} parties, but there are {clients}."
        return ""


@dataclass(frozen=True)
class Rules:
    """Which studies a site takes part in without being asked again: the file of ``join --rules``.

    An entry that is left out allows everything, except ``tasks``, which has to be there.
    """

    tasks: tuple[str, ...]
    algorithms: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # features, label, group, part and trusted
    most_rounds: int = 10_000

    @staticmethod
    def read(path: Path) -> "Rules":
        """The rules of a TOML file."""
        try:
            table = tomllib.loads(path.read_text())
        except OSError as error:
            raise FedbilevelError(f"the rules {path} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:
            raise FedbilevelError(f"{path} is not valid TOML: {error}.") from None
        return Rules.of(table, f"{path}: ")

    @staticmethod
    def of(table: Mapping[str, Any], place: str = "") -> "Rules":
        """The rules of a table."""
        known = {each.name: each.type for each in fields(Rules)}
        given: dict[str, Any] = {}
        for key, value in table.items():
            if key not in known:
                raise UnknownName("rule", key, known, place)
            if key == "most_rounds":
                if type(value) is not int or value < 1:
                    raise FedbilevelError(f"{place}most_rounds must be a whole number of at least 1.")
                given[key] = value
            elif not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
                raise FedbilevelError(f"{place}{key} must be a list of names.")
            else:
                given[key] = tuple(value)
        if not given.get("tasks"):
            raise FedbilevelError(f'{place}name the tasks that are allowed, for instance tasks = ["regularization"].')
        return Rules(**given)

    def refusal(self, study: "Study") -> str:
        """Why a study does not keep the rules, or "" if it does."""
        if study.experiment.task not in self.tasks:
            return f"the rules do not allow the task '{study.experiment.task}'."
        experiment, schema = study.build().experiment, study.schema
        if self.algorithms and experiment.algorithm not in self.algorithms:
            return f"the rules do not allow the algorithm '{experiment.algorithm}'."
        if (experiment.rounds or 1) > self.most_rounds:
            return f"the rules allow at most {self.most_rounds} rounds."
        strange = [] if schema is None or not self.columns else sorted(set(schema.columns) - set(self.columns))
        return f"the rules do not allow the column '{strange[0]}'." if strange else ""


def digest(text: str) -> str:
    """The hash by which a study is approved."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Consent:
    """What a site has agreed to: studies by their hash, rules, and limits that hold in any case.

    Rules hold for the schemas that the site's people were shown only. Whoever could send others would find out about
    rows by which of them the rows fit: with a bound halfway each time, the largest value of a column.
    """

    approved: tuple[str, ...] = ()
    rules: Rules | None = None
    limits: Limits = field(default_factory=Limits)
    schemas: tuple[str, ...] = ()  # by their hash
    packages: Mapping[str, str] = field(
        default_factory=dict
    )  # plug-ins that may run here, with the hash of their files

    def check(self, text: str, clients: int) -> "Study":
        """The study of a text that the site takes part in; refuses others, with a reason that stays at the site."""
        if len(text) > LONGEST_STUDY:
            raise FedbilevelError(f"a study has at most {LONGEST_STUDY} characters, but this one has {len(text)}.")
        known = digest(text) in self.approved
        if not known and self.rules is None:
            raise FedbilevelError(
                f"the study {digest(text)[:12]} was not approved: ask the coordinator for its file, and join again "
                "with --study FILE if you want to take part."
            )
        from fedbilevel.federation.study import Study  # here, as it takes seconds, and few processes need it

        study = Study.of(text, f"the study {digest(text)[:12]}", self.packages)
        reason = self.limits.refusal(study, clients)
        if not known and self.rules is not None:
            if not reason and study.schema is not None and digest(repr(study.schema)) not in self.schemas:
                reason = (
                    "the rules hold for the [schema] of the kit's study and of those given with --study only: another "
                    "column, bound or value is asked for here."
                )
            reason = reason or self.rules.refusal(study)
        if reason:
            raise FedbilevelError(reason)
        return study

    def plain(self) -> dict[str, Any]:
        """As plain values, to be saved."""
        return asdict(self)

    @staticmethod
    def of(known: Mapping[str, Any]) -> "Consent":
        """From plain values."""
        rules, limits = known.get("rules"), known.get("limits", {})
        lists: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in limits.items()}
        schemas = tuple(known.get("schemas", ()))
        allowed = None if rules is None else Rules.of(rules)
        return Consent(tuple(known["approved"]), allowed, Limits(**lists), schemas, dict(known.get("packages", {})))


class Refusals:
    """Counts refusals on disk, so that nobody can ask without end: a restarted site remembers them. A study that the
    rules allow counts, too, once, since every other one gives other sums over the same rows.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / REFUSALS

    def _counted(self) -> list[tuple[float, str]]:
        """When, and the hash of a study that was allowed."""
        try:
            known = [(float(when), str(study)) for when, study in json.loads(self.path.read_text())]
        except (OSError, ValueError, TypeError, RecursionError):
            return []
        # A clock that was set back must not lock a site, nor open it for good.
        return [each for each in known if abs(time.time() - each[0]) < DAY]

    def too_many(self, study: str = "") -> bool:
        """Whether the site has looked at enough for today; a study that was allowed today is none more."""
        known = self._counted()
        return len(known) >= MOST_REFUSALS and study not in {allowed for _, allowed in known if allowed}

    def note(self, allowed: str = "") -> None:
        """One more: a refusal, or a study that was allowed."""
        known = self._counted()
        if not allowed or allowed not in {study for _, study in known}:
            write_atomically(self.path, json.dumps([*known, (time.time(), allowed)][-MOST_REFUSALS:]).encode())
