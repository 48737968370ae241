"""The run folder on disk: records that only grow, ``run.json`` that says what it is, and how to read both.

A run can be killed at any moment: ``records.jsonl`` is only appended to, line by line, and everything else is put in
its place in one step. So the last line may be torn, and a run that went on from a checkpoint may say a round twice:
the reader knows both.
"""

import contextlib
import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from fedbilevel.errors import FedbilevelError

RECORDS, INFO, CONFIG = "records.jsonl", "run.json", "config.toml"


def plain_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with null for what JSON cannot say (NaN and infinity)."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def write_atomically(path: Path, content: bytes) -> None:
    """Put a file in its place in one step: whoever reads it, even after a crash, sees all of it or the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Refuse to work in a folder in which another process does; its end, whatever it is, frees the folder."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FedbilevelError(f"another process is at work in {folder}: wait for its end, or end it.") from None
        yield


class Appender:
    """Adds lines to ``records.jsonl``; every line is with the system before the run goes on."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / RECORDS).open("a+b")
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
    """The tables of a file that has one in each line; lines that were torn when the writer was killed are left out."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                yield row


def read(folder: Path | str) -> list[dict[str, Any]]:
    """The rows of a run folder in the order of their rounds; of a round that was run twice the later one."""
    found = json_lines(Path(folder) / RECORDS)
    rows = {(row["run"], row["round"]): row for row in found if "run" in row and "round" in row}
    order = {label: n for n, label in enumerate(dict.fromkeys(label for label, _ in rows))}
    return [rows[entry] for entry in sorted(rows, key=lambda entry: (order[entry[0]], entry[1]))]


@dataclass(frozen=True)
class Run:
    """A run folder: ``info`` is its ``run.json``, ``config`` its ``config.toml``, ``rows`` its records."""

    folder: Path
    info: Mapping[str, Any]

    @property
    def status(self) -> str:
        """ "finished", "failed", "interrupted", "running", or "killed": it was running, and its process is no more."""
        status = self.info.get("status", "running")
        return "killed" if status == "running" and not _alive(self.info.get("process")) else status

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            return tomllib.loads((self.folder / CONFIG).read_text()) if (self.folder / CONFIG).exists() else {}
        except (OSError, ValueError) as error:
            raise FedbilevelError(f"{self.folder / CONFIG} cannot be read ({error}).") from error

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return read(self.folder)


def _alive(process: Any) -> bool:
    """Whether a process of this number exists."""
    try:
        os.kill(int(process), 0)
    except (TypeError, ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def runs(path: Path | str) -> list[Run]:
    """All run folders at or below a path, those below in the order of their names."""
    path = Path(path)
    if not path.is_dir():
        raise FedbilevelError(f"{path} is not a folder: give a run folder, or a folder of run folders.")
    found = [run for file in sorted(path.rglob(INFO)) if (run := run_in(file.parent)) is not None]
    if not found:
        raise FedbilevelError(f"there are no runs in {path}: give a folder that 'fedbilevel run' has written.")
    return found


def run_in(folder: Path) -> Run | None:
    """The run of this very folder, None if it holds none."""
    return Run(folder, _info(folder / INFO)) if (folder / INFO).exists() else None


def _info(path: Path) -> dict[str, Any]:
    try:
        info = json.loads(path.read_text())
        if not isinstance(info, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise FedbilevelError(
            f"{path} cannot be read ({error}): it is not written by fedbilevel, or damaged."
        ) from None
    return info


def load(path: "Path | str | Sequence[Path | str]", kind: Literal["pandas", "polars"] = "pandas") -> Any:
    """The records of one or many run folders as a table: a row for every evaluation.

    Args:
        path: a run folder, a folder of run folders (a comparison, ``runs/``), or several of them.
        kind: "pandas" or "polars", which must be installed.

    Returns:
        A data frame: ``folder``, ``task``, ``algorithm``, ``seed``, ``run`` (the algorithm itself or a reference),
        ``round``, ``exchanges``, ``megabytes_down``, ``megabytes_up``, ``megabytes``, ``floats``, the oracle counts
        ``Gf``, ``Gg``, ``J``, ``H``, ``seconds``, and the metrics of the task.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    rows = []
    for run in (run for each in paths for run in runs(each)):
        known = {name: run.info.get(name) for name in ("task", "algorithm", "seed")}
        rows += [{"folder": str(run.folder), **known, **row} for row in run.rows]
    if kind not in ("pandas", "polars"):
        raise FedbilevelError(f"records load as a table of 'pandas' or 'polars', not of '{kind}'.")
    try:
        if kind == "polars":
            import polars  # pyright: ignore[reportMissingImports]

            return polars.DataFrame(rows, infer_schema_length=None)
        import pandas  # pyright: ignore[reportMissingImports]

        return pandas.DataFrame(rows)
    except ImportError:
        raise FedbilevelError(f"{kind} is not installed: pip install {kind}.") from None
