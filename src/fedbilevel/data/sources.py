"""The files of a data set: found on disk or downloaded, and always verified.

A file is looked for in this order:

1. in the folders that `FEDBILEVEL_DATA` names (several, separated as in `PATH`);
2. in the cache: `FEDBILEVEL_CACHE`, or `fedbilevel` in the user's cache folder;
3. at its canonical address, from which it is downloaded into the cache. `FEDBILEVEL_MIRROR` names another place to
   download from, which holds the same folders and files.

Every folder has one folder for each data set: `mnist/train-images-idx3-ubyte.gz`. A file that is not the expected one
is named and refused, wherever it comes from. A failed download leaves nothing behind: it goes to a temporary file next
to its place, and is renamed only when it is complete and verified.

A few small files are part of the package itself (`packaged`); they are verified, too, and not looked for anywhere else.
"""

import hashlib
import http.client
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from fedbilevel.cache import cache_folder
from fedbilevel.errors import FedbilevelError

CHUNK = 1 << 18


@dataclass(frozen=True)
class Source:
    """One file of a data set: its name, its addresses and how to recognise it.

    Args:
        folder: the folder of the data set.
        name: the name of the file in that folder.
        addresses: where to download it; each is tried in turn. Empty: it cannot be downloaded.
        size: in bytes.
        sha256: checksum.
        md5: checksum, for files that are published with this one only.
        contents: reads what an archive contains, for archives that people repack: the checksum of the archive may then
            differ, and what `contents` finds must equal `holds`.
        holds: what `contents` must find.
    """

    folder: str
    name: str
    addresses: tuple[str, ...] = ()
    size: int | None = None
    sha256: str | None = None
    md5: str | None = None
    contents: Callable[[Path], object] | None = None
    holds: object = None

    @property
    def checksum(self) -> str:
        """The checksum as text, for messages."""
        return f"sha256 {self.sha256}" if self.sha256 else f"md5 {self.md5}" if self.md5 else "no known checksum"


def folders() -> list[Path]:
    """The folders that `FEDBILEVEL_DATA` names, then the cache."""
    named = [Path(entry).expanduser() for entry in os.environ.get("FEDBILEVEL_DATA", "").split(os.pathsep) if entry]
    for folder in named:
        if not folder.is_dir():
            raise FedbilevelError(f"FEDBILEVEL_DATA names {folder}, which is not a folder: correct or unset it.")
    return [*named, cache_folder()]


def present(source: Source) -> Path | None:
    """The file, verified, if it is in one of the folders; nothing is downloaded."""
    for folder in folders():
        path = folder / source.folder / source.name
        if path.is_file():
            if fault := examine(path, source):
                raise FedbilevelError(f"{path} {fault}: remove it or replace it with the original ({source.checksum}).")
            return path
    return None


def packaged(source: Source) -> Path:
    """A file that is part of this package, verified."""
    path = Path(__file__).parent / source.folder / source.name
    fault = examine(path, source) if path.is_file() else "is missing"
    if fault:
        raise FedbilevelError(f"{path} {fault}: install fedbilevel again ({source.checksum}).")
    return path


def find(
    source: Source, *, mirror: str | None = None, timeout: float = 20.0, waits: Sequence[float] = (1.0, 4.0)
) -> Path:
    """The file, verified: from one of the folders, or downloaded into the cache.

    Args:
        source: which file.
        mirror: download from here, not from the canonical address. Default: `FEDBILEVEL_MIRROR`, if set.
        timeout: seconds without a response or new bytes after which an attempt counts as failed.
        waits: seconds to wait before the second attempt, the third attempt and so on.
    """
    if path := present(source):
        return path
    mirror = mirror or os.environ.get("FEDBILEVEL_MIRROR")
    addresses = (f"{mirror.rstrip('/')}/{source.folder}/{source.name}",) if mirror else source.addresses
    place = cache_folder() / source.folder
    reason = "it has no public address"
    for address in addresses:
        try:
            return _download(source, address, place, timeout, waits)
        except _Failed as failure:
            reason = str(failure)
    address = f" from {addresses[0]}" if addresses else ""
    raise FedbilevelError(
        f"{source.name} could not be downloaded{address} ({reason}): get it some other way and put it into {place}, "
        f"or into {source.folder} in a folder that FEDBILEVEL_DATA names ({source.checksum})."
    )


def examine(path: Path, source: Source) -> str:
    """The fault of a file, as words that follow its name, or "" if it is the expected one."""
    known = path.stat()
    return _examined(path, source, known.st_size, known.st_mtime_ns)


@lru_cache(maxsize=100)  # a file that has not changed is read once
def _examined(path: Path, source: Source, size: int, modified: int) -> str:
    repacked = source.contents is not None
    if source.size is not None and size != source.size and not repacked:
        # The size first, because "truncated" says more than "another checksum".
        return f"is {'truncated' if size < source.size else 'too long'} ({size} bytes, not {source.size})"
    for kind, expected in (("sha256", source.sha256), ("md5", source.md5)):
        if expected:
            found = _checksum(path, kind)
            if found == expected:
                return ""
            if not repacked:
                return f"is not the expected file ({kind} {found}, not {expected})"
            break
    if source.contents is not None:
        try:
            found = source.contents(path)
        except FedbilevelError as error:
            return f"cannot be read ({error})"
        if found != source.holds:
            return f"is not the expected archive (it contains {found}, not {source.holds})"
    return ""


def _checksum(path: Path, kind: str) -> str:
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class _Failed(Exception):
    """One attempt at a download failed; `again` says whether another attempt at the same address may help."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again


def _download(source: Source, address: str, place: Path, timeout: float, waits: Sequence[float]) -> Path:
    """Download from one address, in several attempts."""
    for wait in (*waits, None):
        try:
            return _try(source, address, place, timeout)
        except _Failed as failure:
            if wait is None or not failure.again:
                raise
            time.sleep(wait)
    raise AssertionError  # the last round of the loop returns or raises


def _try(source: Source, address: str, place: Path, timeout: float) -> Path:
    # A name of its own, so that two processes may download the same file at once.
    temporary = place / f".{source.name}.{secrets.token_hex(6)}.part"
    try:
        place.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                _receive(source, address, file, timeout)
            if fault := examine(temporary, source):
                raise _Failed(f"the downloaded file {fault}", again="truncated" in fault)
            os.replace(temporary, place / source.name)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FedbilevelError(
            f"{source.name} cannot be written to {place} ({error.strerror or error}): free some space, or set "
            "FEDBILEVEL_CACHE to another folder."
        ) from None
    return place / source.name


def _receive(source: Source, address: str, file: BinaryIO, timeout: float) -> None:
    """Read an address into a file, with a progress bar on a terminal."""
    # Here because most runs download nothing.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    request = urllib.request.Request(address, headers={"User-Agent": "fedbilevel"})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        raise _Failed(f"the server responded {error.code} {error.reason}", again=error.code in _PASSING) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Failed(_in_words(error, timeout), again=not isinstance(error, ValueError)) from None
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    announced = response.headers.get("Content-Length")
    total = int(announced) if announced and announced.isdigit() else None
    with (
        response,
        Progress(*columns, console=Console(stderr=True), disable=not sys.stdout.isatty(), transient=True) as progress,
    ):
        shown = progress.add_task(source.name, total=total or source.size)
        received = 0
        while True:
            try:
                chunk = response.read1(CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise _Failed(_in_words(error, timeout), again=True) from None
            if not chunk:
                break
            file.write(chunk)
            received += len(chunk)
            progress.update(shown, completed=received)
            # A wrong file may have any size: do not fill the disk with it.
            if source.size is not None and received > source.size and source.contents is None:
                raise _Failed(f"the downloaded file is longer than {source.size} bytes", again=False)
    if total is not None and received < total:
        raise _Failed(f"the connection broke after {received} of {total} bytes", again=True)


_PASSING = (408, 425, 429, 500, 502, 503, 504)  # responses of a server that may work a moment later


def _in_words(error: Exception, timeout: float) -> str:
    cause = getattr(error, "reason", error)
    if isinstance(cause, TimeoutError):
        return f"no response within {timeout:g} seconds"
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)
