"""Logs of processes that run for weeks: kept small, and read for what people should see."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fedbilevel.storage.tail import last_lines

LARGEST, KEPT = 10_000_000, 3
FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
"""Of FLARE's logs, and of ours."""
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* - (\S+) - (WARNING|ERROR|CRITICAL) - (?!Traceback)(.*)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTEXT = re.compile(r"^\[[^\]]*\] (- )?")  # who and which job: FLARE repeats it in every line


def rotate(logs: Iterable[Path], largest: int = LARGEST, kept: int = KEPT) -> None:
    """Move the content of logs that are too large to ``NAME.1``, what was there to ``NAME.2``, and so on.

    Their writers keep them open, so the content is copied and the file then cut; all writers append. A line that is
    written in between, within microseconds, is lost. Errors are ignored: they are tried again.
    """
    for log in logs:
        with contextlib.suppress(OSError):
            if log.stat().st_size <= largest:
                continue
            for number in range(kept - 1, 0, -1):
                older = log.with_name(f"{log.name}.{number}")
                if older.exists():
                    os.replace(older, log.with_name(f"{log.name}.{number + 1}"))
            with log.open("r+b") as full, log.with_name(f"{log.name}.1").open("wb") as copy:
                shutil.copyfileobj(full, copy)
                full.truncate(0)


class Warned(NamedTuple):
    """A line of a log that people should see; ``times`` counts the same words."""

    when: str
    level: str
    source: str
    text: str
    times: int


def warnings_of(logs: Iterable[Path], most: int = 20) -> list[Warned]:
    """The newest warnings and errors in these logs, the newest first."""
    found: dict[tuple[str, str, str], Warned] = {}
    for log in logs:
        for line in last_lines(log):
            if match := _LINE.match(_COLOUR.sub("", line)):
                when, source, level, text = match.groups()
                key = (level, source, re.sub(r"\d+", "#", _CONTEXT.sub("", text))[:300])
                times = found[key].times + 1 if key in found else 1
                found[key] = Warned(when, level, source, _CONTEXT.sub("", text)[:500], times)
    return sorted(found.values(), key=lambda warned: warned.when, reverse=True)[:most]
