"""Checkpoints: the whole state of a run in one file, from which it continues to the same result, bit for bit.

A file is in the safetensors format, which cannot execute code. Its header has the round, the history, the seconds so
far, and a fingerprint of everything that determines the run; a checksum covers header and arrays. It is written
atomically, so a crash leaves the one before.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.errors import FedbilevelError, FedbilevelWarning, NoQuorum
from fedbilevel.storage.arrays import decode, encode
from fedbilevel.storage.files import write_atomically


class Saved(NamedTuple):
    """The contents of a checkpoint."""

    state: Any
    history: list[dict[str, Any]]
    seconds: float


@dataclass
class Checkpoints:
    """Where a run is saved, and how often.

    Args:
        folder: a folder only for the checkpoints of one run.
        seconds: the shortest time between two; 0 saves one after every round. One is always saved at the end of a run
            and when it is interrupted.
        keep: the number of files to keep, the newest ones.
    """

    folder: Path | str
    seconds: float = 30.0
    keep: int = 2
    _last: float = field(default=-float("inf"), init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        check_checkpoints(self.seconds, self.keep)

    def files(self) -> list[Path]:
        """The checkpoints, the newest first."""
        return sorted(Path(self.folder).glob("round-*.safetensors"), reverse=True)

    @property
    def round(self) -> int:
        """The round of the newest one, -1 if there is none."""
        return max((int(path.stem.removeprefix("round-")) for path in self.files()), default=-1)

    def _path(self, round: int) -> Path:
        return Path(self.folder) / f"round-{round:010}.safetensors"

    def due(self) -> bool:
        """Whether it is time for the next one."""
        return time.monotonic() - self._last >= self.seconds

    def save(self, run: str, arrays: Mapping[str, np.ndarray], round: int, saved: Saved) -> Path:
        """Write a checkpoint of the run with this fingerprint, and remove old ones."""
        header = {"run": run, "round": round, "history": saved.history, "seconds": saved.seconds}
        path = self._path(round)
        write_atomically(path, encode(header, arrays))
        self._last = time.monotonic()
        for old in self.files()[self.keep :]:
            old.unlink(missing_ok=True)
        return path

    def newest(
        self, run: str, restore: Callable[[Mapping[str, np.ndarray]], Any], before: int | None = None
    ) -> Saved | None:
        """The newest checkpoint of the run with this fingerprint. One that cannot be used gives a warning, and the one
        before it is tried; if none can be used, that is an error, and nothing is overwritten. If the run goes back, to
        ``before`` a round, later ones are removed, once there is one to go back to.
        """
        self._last = time.monotonic()
        refused, files = "", self.files()
        for path in files if before is None else [path for path in files if path.name < self._path(before).name]:
            try:
                header, arrays = decode(path.read_bytes())
                history, seconds = _checked(header)
                if header["run"] != run:
                    raise FedbilevelError("it belongs to a run with another configuration or other data.")
                state = restore(arrays)
                if before is not None:
                    for later in files[: files.index(path)]:
                        later.unlink(missing_ok=True)
                return Saved(state, history, seconds)
            except NoQuorum:  # not the file's fault
                raise
            except (FedbilevelError, OSError, LookupError, ValueError, TypeError, ArithmeticError) as error:
                said = error if isinstance(error, FedbilevelError | OSError) else f"{type(error).__name__}: {error}."
                refused = f"the checkpoint {path} cannot be used: {said}"
                warnings.warn(f"{refused} Trying the one before.", FedbilevelWarning, stacklevel=2)
        if refused and before is None:
            raise FedbilevelError(f"{refused} There is no other one: remove {self.folder} to start again.")
        return None


def _checked(header: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """The history and the seconds of a checkpoint."""
    history, seconds = header.get("history"), header.get("seconds")
    if (
        "run" not in header
        or not (isinstance(history, list) and all(isinstance(row, dict) for row in history))
        or not (isinstance(seconds, int | float) and 0 <= seconds < 1e12)
    ):
        raise FedbilevelError("it is not a checkpoint of fedbilevel.")
    return history, float(seconds)


def check_checkpoints(seconds: float, keep: int) -> None:
    """Refuse a time between checkpoints, or a number of them to keep, that makes no sense."""
    if seconds < 0 or keep < 1:
        raise FedbilevelError("checkpoints: seconds must not be negative, and the number to keep must be at least 1.")
