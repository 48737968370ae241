"""Ledgers: what a site sent and to whom, what a coordinator did, and the exchanges of a run. Changes to them show.

A ledger is a file with a JSON object per line. Every line has a number and the hash of the line before, so a line that
was changed, removed or inserted breaks the chain. A second file, ``NAME.last``, has the number and the hash of the last
line, so lines that were removed at the end are missed, too. A full file is renamed to ``NAME.NUMBER.jsonl``, with the
number of its first line; the chain goes on in the next one.

There is no secret in it: whoever may write to the folder can write a whole new ledger. To notice that as well, keep the
last hash, which ``verify`` tells, in another place, and compare it later.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.errors import FedbilevelError
from fedbilevel.storage.files import locked

LEDGER, DONE, EXCHANGES = "served.jsonl", "ledger.jsonl", "exchanges.jsonl"
"""The ledgers: in the folder of a site, in that of a coordinator, and in that of a run at the coordinator."""
FULL = 16 << 20
"""Bytes of a file after which the next one begins."""
SYNCED_EVERY = 1.0
"""Seconds after which lines are on the disk; with the system they are at once."""
MOST_REFUSED = 200
"""A process writes so many lines about what it refused, and then one a minute, so that nobody can fill the disk."""
NOTHING = "0" * 64
"""The hash before the first line."""


class End(NamedTuple):
    """The last line of a ledger: its number, from 0, and its hash."""

    number: int = -1
    hash: str = NOTHING


class Verified(NamedTuple):
    """What is known of a ledger that is intact. ``remarks`` are sentences about what was repaired."""

    lines: int
    since: float
    end: End
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return " ".join([f"intact, {self.lines} lines since {when}; the last hash is {self.end.hash}.", *self.remarks])


class Ledger:
    """A ledger that several processes may add to.

    Args:
        path: of the file, which ends with ".jsonl".
        owner: whose it is; the first line says so.
    """

    def __init__(self, path: Path, owner: str) -> None:
        self.path, self.owner, self._last = path, owner, path.with_name(f"{path.name}.last")
        self._synced = -math.inf
        self._refused, self._left_out, self._next = 0, 0, 0.0

    def note(self, entry: Mapping[str, Any], caller: str = "", refused: bool = False) -> None:
        """Add a line.

        Args:
            entry: plain values by name.
            caller: who asked for this, as far as that was checked.
            refused: nothing was done and nothing left; there may be very many of these.
        """
        if refused and self._spared():
            return
        with locked(self.path):
            torn = _cut_torn_line(self.path)
            end, lost = self._end()
            line = {"n": end.number + 1, "before": end.hash, "time": time.time(), "caller": caller, **entry}
            if end == End():
                line["ledger"] = self.owner
                _write_last(self._last, end)  # it is there before the first line: one that is missing was removed
            if torn:
                line["repaired"] = f"{torn} bytes of an incomplete line were removed: a process had ended writing it."
            if lost:
                line["lost"] = True
            if self._left_out:
                line["left_out"] = self._left_out
            data = json.dumps(line).encode()
            self.path.touch(mode=0o600)
            with self.path.open("ab") as file:
                file.write(data + b"\n")
                file.flush()
                if time.monotonic() - self._synced > SYNCED_EVERY:
                    os.fsync(file.fileno())
                    self._synced = time.monotonic()
                full = file.tell() >= FULL
            _write_last(self._last, End(end.number + 1, _hash(data)))
            if full:
                self.path.rename(self._archive(end.number + 1))
        self._left_out = 0

    def _spared(self) -> bool:
        self._refused += 1
        if self._refused <= MOST_REFUSED or time.monotonic() >= self._next:
            self._next = time.monotonic() + 60.0
            return False
        self._left_out += 1
        return True

    def _archive(self, last: int) -> Path:
        with self.path.open("rb") as file:
            first = _parsed(file.readline())
        number = last if first is None else first["n"]
        return self.path.with_name(f"{self.path.stem}.{number:010}{self.path.suffix}")

    def _end(self) -> tuple[End, bool]:
        """The line to continue from, and whether the note of the last hash is lost. The chain goes on from the last
        line that was ever written, even if that was removed, so that this shows for good.
        """
        noted, written = _read_last(self._last), End()
        for path in reversed(_files(self.path)):
            if (line := _parsed(data := _last_line(path))) is not None:
                written = End(line["n"], _hash(data))
                break
        if noted is None:
            return written, written != End()
        return max(noted, written, key=lambda end: end.number), False


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a ledger, the oldest first, over all its files; what cannot be read is skipped."""
    for _, data in _numbered(_files(path)):
        if (line := _parsed(data)) is not None:
            yield line


def verify(path: Path, owner: str = "") -> Verified:
    """Check a ledger; refuses one in which something was changed, and says where.

    Args:
        path: of its file.
        owner: whose it should be; "" does not check that.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # on a medium that cannot be written, nobody else writes either
            held.enter_context(locked(path))
        files, last = _files(path), path.with_name(f"{path.name}.last")
        if not files:
            raise FedbilevelError(f"there is no ledger {path}.")
        noted = _read_last(last)
        if noted is None:
            raise FedbilevelError(f"{last}, with the last hash, is missing or damaged: lines may have been removed.")
        end, since, remarks, before = End(), 0.0, [], ""
        for place, data in _numbered(files):
            if not data.endswith(b"\n"):
                remarks.append("The last line is incomplete: a process ended while it was writing.")
                break
            line = _checked(data, end, place, before)
            if end == End():
                since = line["time"]
                if owner and line.get("ledger") != owner:
                    raise FedbilevelError(f"{place} says that this is the ledger of {line.get('ledger')!r:.100}.")
            if said := line.get("repaired"):
                remarks.append(f"{place}: {said}")
            end, before = End(line["n"], _hash(data.rstrip(b"\n"))), place
            if noted.number == end.number and noted != end:
                raise FedbilevelError(f"{place} was changed after it was written.")
    if noted.number > end.number:
        raise FedbilevelError(
            f"{path} ends with number {end.number}, but {noted.number} was written: lines at the end were removed, or "
            "the machine stopped before they were on its disk."
        )
    return Verified(end.number + 1, since, end, tuple(remarks))


def _checked(data: bytes, end: End, place: str, before: str) -> dict[str, Any]:
    """A line that follows on the one before."""
    line = _parsed(data)
    if line is None:
        raise FedbilevelError(f"{place} is damaged: it is not what was written.")
    if line["n"] != end.number + 1:
        raise FedbilevelError(
            f"{place} has the number {line['n']}, but {end.number + 1} should follow: lines were removed, repeated or "
            "moved."
        )
    if line["before"] != end.hash:
        raise FedbilevelError(f"{before or place} was changed after it was written.")
    if line.get("lost"):
        raise FedbilevelError(f"{place} says that the last hash was missing: lines before it may have been removed.")
    return line


def _numbered(files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """The lines of some files, and where each is."""
    for file in files:
        with file.open("rb") as content:
            for number, data in enumerate(content, 1):
                yield f"{file}, line {number}", data


def owner(folder: Path, name: str) -> str:
    """Whose ledger it is: a name and the fingerprint of the certificate of the federation's authority, which, unlike
    the certificate of a party, stays the same.
    """
    for place in (folder / "startup", folder / "server" / "startup"):
        with contextlib.suppress(OSError):
            return f"{name} {hashlib.sha256((place / 'rootCA.pem').read_bytes()).hexdigest()[:32]}"
    return name


def described(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays that leave, without their numbers: shapes, types and norms; and the value of what is one number, such as
    a metric."""
    import numpy as np  # here, as few processes need it

    # Not np.linalg.norm: it copies, and wakes the threads of BLAS, which took longer than all the rest of an exchange.
    square = lambda array: np.einsum("i,i", array, array, dtype=float, casting="unsafe")
    norm = lambda array: float(np.sqrt(square(np.ravel(array))))
    one = lambda array: {} if array.ndim else {"value": float(array)}
    with np.errstate(over="ignore"):  # then the norm is infinite
        return {
            name: {"shape": list(a.shape), "type": str(a.dtype), "norm": norm(a), **one(a)}
            for name, a in arrays.items()
        }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _files(path: Path) -> list[Path]:
    """The files of a ledger, the oldest first."""
    old = re.compile(re.escape(path.stem) + r"\.\d{10,}" + re.escape(path.suffix))
    found = sorted(each for each in path.parent.glob(f"{path.stem}.*{path.suffix}") if old.fullmatch(each.name))
    return [*found, path] if path.exists() else found


def _parsed(data: bytes) -> dict[str, Any] | None:
    """A line; None if it is none of a ledger."""
    with contextlib.suppress(ValueError, RecursionError):
        line = json.loads(data)
        if isinstance(line, dict) and type(line.get("n")) is int and isinstance(line.get("time"), float):
            return line if isinstance(line.get("before"), str) else None
    return None


def _last_line(path: Path) -> bytes:
    """The last line of a file that ends with one."""
    with path.open("rb") as file:
        size, back = file.seek(0, os.SEEK_END), 1 << 12
        while True:
            file.seek(max(0, size - back))
            tail = file.read().rstrip(b"\n")
            if b"\n" in tail or back >= size:
                return tail.rpartition(b"\n")[2]
            back *= 4


def _cut_torn_line(path: Path) -> int:
    """Remove what follows the last whole line. Returns how many bytes that were."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return 0
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return 0
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        return size - whole
    return 0


def _write_last(path: Path, end: End) -> None:
    """Overwrite a few bytes in place, which no crash can tear."""
    record = f"{end.number:012} {end.hash}\n".encode()
    number = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.write(number, record)
    finally:
        os.close(number)


def _read_last(path: Path) -> End | None:
    """The last line that was written, as noted; None if that is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        number, digest = path.read_text().split()
        return End(int(number), digest)
    return None
