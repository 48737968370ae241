"""Whether the long-running process of a folder is alive, and what it last said: a small file that it writes again and
again, and a lock that it holds.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbilevel.errors import FedbilevelError
from fedbilevel.storage.files import alone, process_exists, write_atomically

COORDINATOR, SITE = "coordinator.json", "joined.json"
SILENT = 90.0
"""Seconds without a word after which a process hangs."""


def note(path: Path, **facts: Any) -> None:
    """Say that this process is alive."""
    write_atomically(path, json.dumps({"pid": os.getpid(), "time": time.time(), **facts}).encode(), durable=False)


def state(path: Path) -> dict[str, Any]:
    """What the process last said."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if isinstance(known := json.loads(path.read_text()), dict):
            return known
    return {}


def when(known: Mapping[str, Any], name: str) -> float:
    """A time that the process has said, 0 if it has not."""
    found = known.get(name)
    return float(found) if isinstance(found, int | float) and abs(found) < 1e11 else 0.0


def pid(path: Path) -> int | None:
    """The id of the process, if it is running."""
    found = state(path).get("pid")
    if not isinstance(found, int) or not process_exists(found):
        return None
    with contextlib.suppress(FedbilevelError, OSError), alone(path.parent):
        return None  # nobody holds the lock: the id belongs to another process by now
    return found
