"""Files that survive a crash: written atomically, locked, or only appended to, line by line."""

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from fedbilevel.errors import FedbilevelError

try:
    import fcntl
except ImportError:  # not on this system: then nothing is locked
    fcntl = None


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file in one step: a reader, even after a crash, sees all of it or the one before.

    ``durable=False`` does not wait for the disk: the file survives the end of the process, but perhaps not that of the
    machine, after which it may be there with other contents. It needs a checksum of its own.
    """
    new = [folder for folder in path.parents if durable and not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync_folder(folder.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def why_unwritable(folder: Path) -> str:
    """Why nothing can be saved in a folder, or "" if it can be: tried with a small file."""
    try:
        write_atomically(folder / ".writable", bytes(1 << 14), durable=False)
        (folder / ".writable").unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write_privately(path: Path, content: bytes) -> None:
    """Write a file in one step that only its owner can read, at any moment."""
    before = os.umask(0o077)
    try:
        write_atomically(path, content)
    finally:
        os.umask(before)


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner can read."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, where the system can do that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def new_folder(name: str, out: Path | None) -> Path:
    """An empty folder for results: the given one, or a new one in runs/."""
    if out is None:
        stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        names = (Path("runs") / (stem + suffix) for suffix in ["", *(f"-{n}" for n in range(2, 100))])
        out = next(path for path in names if not path.exists())
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(not path.name.startswith(".") for path in out.iterdir()):  # a killed process may leave hidden files
            raise FedbilevelError(
                f"the folder {out} is not empty: choose another one with --out, so that nothing is overwritten."
            )
    except OSError as error:
        raise FedbilevelError(f"cannot write to {out}: {error.strerror}.") from error
    return out


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Refuse a folder that another process is using. The lock is held in this context, and the end of the process
    releases it, however it ends.
    """
    if fcntl is None:
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FedbilevelError(f"another process is using {folder}: wait until it ends, or end it.") from None
        yield


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process or thread is reading and rewriting a file. The lock is a file of its own, since the
    file itself is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def plain_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with null for what JSON cannot represent (NaN and infinity)."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


class Appender:
    """Adds lines to a file of JSON objects; every line is handed to the system before the run continues."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a+b")
        if self.file.tell() and not self._ends_with_a_line():
            self.file.write(b"\n")  # after a torn line

    def _ends_with_a_line(self) -> bool:
        self.file.seek(-1, os.SEEK_END)
        return self.file.read(1) == b"\n"

    def append(self, row: Mapping[str, Any]) -> None:
        """One line."""
        self.file.write(json.dumps(plain_json(row)).encode() + b"\n")
        self.file.flush()

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.file.close()


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one per line; lines that are incomplete because the writer was killed are skipped."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                yield row


def process_exists(number: Any) -> bool:
    """Whether there is a process with this id."""
    try:
        os.kill(int(number), 0)
    except (TypeError, ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
