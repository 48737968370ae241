"""How far a run is: a live display on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedbilevel.engines.accounting import COUNTED

SHOWN = 3  # metrics


@dataclass
class _Pace:
    """How fast a run is, from its rows. The first row is before the first round, and the second includes compiling."""

    first: Mapping[str, Any] | None = None
    last: Mapping[str, Any] | None = None

    def tell(self, row: Mapping[str, Any]) -> None:
        self.first = row if self.first is None or self.first["round"] == 0 else self.first
        self.last = row

    @property
    def rate(self) -> float:
        """Rounds per second; 0 while it is not known."""
        if self.first is None or self.last is None or self.last["round"] == self.first["round"]:
            return 0.0
        passed = self.last["seconds"] - self.first["seconds"]
        return (self.last["round"] - self.first["round"]) / passed if passed > 0 else 0.0

    def words(self, rounds: int) -> tuple[str, str, str, str]:
        """Rounds per second, time left, what was sent, the metrics."""
        assert self.last is not None
        left = (rounds - self.last["round"]) / self.rate if self.rate else None
        metrics = [
            f"{name} {value:.3g}"
            for name, value in self.last.items()
            if name not in COUNTED and isinstance(value, int | float)
        ]
        return (
            f"{self.rate:.3g}/s" if self.rate else "",
            "" if left is None else f"{int(left) // 60}:{int(left) % 60:02} left",
            sent(self.last["megabytes"]),
            "  ".join(metrics[:SHOWN]),
        )


def sent(megabytes: float) -> str:
    """A volume as people say it.

    >>> sent(0.0123), sent(1234.5)
    ('12.3 kB', '1.23 GB')
    """
    for size, unit in ((1e3, "GB"), (1.0, "MB")):
        if megabytes >= size:
            return f"{megabytes / size:.3g} {unit}"
    return f"{1000 * megabytes:.3g} kB"


class Display:
    """Shows the progress of runs; ``with Display(console) as progress: run(..., progress=progress)``."""

    def __init__(self, console: Console) -> None:
        self.live = console.is_terminal
        self.console = console
        texts = (TextColumn(f"{{task.fields[{name}]}}") for name in ("rate", "left", "sent", "seen"))
        self.bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(20),
            TextColumn("round {task.completed}/{task.total}"),
            *texts,
            console=console,
            disable=not self.live,
        )
        self.tasks: dict[str, Any] = {}
        self.paces: dict[str, _Pace] = {}
        self.said = 0.0

    def __enter__(self) -> "Display":
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bars.stop()

    def __call__(self, label: str, rounds: int, row: Mapping[str, Any] | None) -> None:
        if row is None:
            self.paces[label] = _Pace()
            self.tasks[label] = self.bars.add_task(label, total=rounds, rate="", left="", sent="", seen="compiling ...")
            self._say(f"{label}: {rounds} rounds")
            return
        pace = self.paces[label]
        pace.tell(row)
        rate, left, sent, seen = pace.words(rounds)
        self.bars.update(self.tasks[label], completed=row["round"], rate=rate, left=left, sent=sent, seen=seen)
        # Lines stay: one every few seconds is enough, and the last one of a run.
        if row["round"] >= rounds or time.monotonic() - self.said > 5:
            self.said = time.monotonic()
            words = [f"round {row['round']}/{rounds}", rate, left, sent, seen]
            self._say(f"{label}: " + ", ".join(word for word in words if word))

    def _say(self, line: str) -> None:
        if not self.live:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            self.console.file.flush()
