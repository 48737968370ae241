"""What the files of a run and a site's ledger say, kept up to date: only new lines are read, and memory is bounded."""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel.federation.ledger import EXCHANGES
from fedbilevel.federation.watch.live import number
from fedbilevel.storage.run_folder import RECORDS
from fedbilevel.storage.tail import Tail

DRAWN = 300
"""The fewest rows of a long curve that are drawn; twice as many are the most."""
REASONS = 100


class Thinned:
    """Rows by their rounds. Of many, only some are kept, evenly, and the last one."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.last: dict[str, Any] | None = None
        self.seen, self.step = 0, 1

    def add(self, row: dict[str, Any]) -> None:
        """Add a row; those of later rounds are forgotten, as the run went back."""
        while self.rows and self.rows[-1]["round"] >= row["round"]:
            self.rows.pop()
        if self.seen % self.step == 0:
            self.rows.append(row)
        self.last = row
        self.seen += 1
        if len(self.rows) > 2 * DRAWN:
            self.rows, self.step = self.rows[::2], 2 * self.step

    def shown(self) -> list[dict[str, Any]]:
        """The rows to draw."""
        added = [] if self.last is None or self.rows[-1:] == [self.last] else [self.last]
        return [*self.rows, *added]


@dataclass
class Missed:
    """Answers that a site did not give, for one reason."""

    site: str
    reason: str
    times: int
    first: int  # round
    last: int
    at: float


@dataclass
class _Exchanges:
    number: int = 0
    round: int = 0
    recent: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=500))  # when, seconds, round
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
    missed: dict[tuple[str, str], Missed] = field(default_factory=dict)


class RunProgress:
    """A run: its speed, who missed what, and its curves."""

    def __init__(self, folder: Path) -> None:
        self._exchanges, self._records = Tail(folder / EXCHANGES), Tail(folder / RECORDS)
        self.exchanges, self.rows = _Exchanges(), Thinned()

    def update(self) -> None:
        """Read what is new."""
        again, lines = self._exchanges.read()
        if again:
            self.exchanges = _Exchanges()
        for line in lines:
            try:
                self._exchange(line)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError):  # damaged
                continue
        again, lines = self._records.read()
        if again:
            self.rows = Thinned()
        for line in lines:
            if isinstance(line.get("round"), int):
                self.rows.add(line)

    def _exchange(self, line: dict[str, Any]) -> None:
        into, at, round = self.exchanges, float(line["time"]), int(line["round"])
        into.number += 1
        into.round = round
        if line["seconds"]:
            into.recent.append((at, float(line["seconds"]), round))
        into.traffic |= {str(name): (int(down), int(up)) for name, (down, up) in line.get("traffic", {}).items()}
        for site, reason in line["failed"].items():
            key = (str(site), str(reason)[:300])
            known = into.missed.pop(key, None) or Missed(*key, 0, round, round, at)
            known.times, known.last, known.at = known.times + 1, round, at
            into.missed[key] = known  # the newest last
            if len(into.missed) > REASONS:
                del into.missed[next(iter(into.missed))]

    def rate(self) -> float:
        """Exchanges per second: those of the last ten seconds, or the last few where they are slow."""
        recent, now = self.exchanges.recent, time.time()
        fast = [at for at, _, _ in recent if at > now - 10.0]
        if len(fast) >= 6:
            return (len(fast) - 1) / max(now - fast[0], 1e-3)
        few = list(recent)[-6:]
        return (len(few) - 1) / max(now - few[0][0], 1e-3) if len(few) > 1 else 0.0

    def seconds(self) -> float | None:
        """The median time of the last exchanges."""
        last = [seconds for _, seconds, _ in list(self.exchanges.recent)[-100:]]
        return statistics.median(last) if last else None

    def seconds_per_round(self) -> float | None:
        """Over the last rounds."""
        recent = self.exchanges.recent
        rounds = recent[-1][2] - recent[0][2] if recent else 0
        return (recent[-1][0] - recent[0][0]) / rounds if rounds > 0 else None


@dataclass
class Sent:
    """What a site was asked for in one way, and what left it."""

    times: int = 0
    failed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    arrays: tuple[str, ...] = ()


@dataclass
class SiteRun:
    """A run as a site sees it."""

    first: float = 0.0
    last: float = 0.0
    round: int = 0
    asked: dict[str, Sent] = field(default_factory=dict)
    rows: Thinned = field(default_factory=Thinned)


class LedgerProgress:
    """What a site has sent, from its ledger."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._begin()

    def _begin(self) -> None:
        self.runs: dict[str, SiteRun] = {}
        self.refused: dict[tuple[str, str, str], Missed] = {}
        self.messages, self.bytes_in, self.bytes_out, self.last = 0, 0, 0, 0.0
        self.recent: deque[float] = deque(maxlen=500)

    def update(self) -> None:
        """Read what is new."""
        again, lines = self._tail.read()
        if again:
            self._begin()
        for line in lines:
            try:
                self._line(line)
            except (AttributeError, KeyError, TypeError, ValueError):  # damaged
                continue

    def _line(self, line: dict[str, Any]) -> None:
        run, at, what = str(line["run"]), float(line["time"]), f"{line['action']} {line['method']}".strip()
        came, left, error = int(line["bytes_in"]), int(line["bytes_out"]), str(line["error"] or "")
        caller, round = str(line.get("caller", "")), int(line.get("round", -1))
        known = self.runs.setdefault(run, SiteRun(first=at))
        known.last, known.round = at, max(known.round, round)
        sent = known.asked.setdefault(what, Sent())
        sent.times += 1
        sent.failed += bool(error)
        sent.bytes_in += came
        sent.bytes_out += left
        arrays = line["left"] or {}
        if arrays:
            sent.arrays = tuple(
                f"{str(name).replace('.tree', '')}{array['shape'] or ''}" for name, array in arrays.items()
            )
        self.messages += 1
        self.bytes_in += came
        self.bytes_out += left
        self.last = at
        self.recent.append(at)
        if what == "evaluate" and arrays:
            values = {str(name): number(array.get("value", array["norm"])) for name, array in arrays.items()}
            known.rows.add({**values, "round": round, "seconds": at - known.first})
        if error:
            key = (run, f"{what} from {caller}" if caller not in ("", "server") else what, error[:300])
            refused = self.refused.pop(key, None) or Missed(key[1], key[2], 0, round, round, at)
            refused.times, refused.at = refused.times + 1, at
            self.refused[key] = refused
            if len(self.refused) > REASONS:
                del self.refused[next(iter(self.refused))]

    def rate(self) -> float:
        """Messages per second in the last ten seconds."""
        now = time.time()
        return sum(at > now - 10.0 for at in self.recent) / 10.0
