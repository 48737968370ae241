"""What the live pages of a federation share: how they are made, and how they write numbers and times."""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedbilevel.federation.expiry import SOON, days_left
from fedbilevel.report import page
from fedbilevel.report.watch import News

HERE = Path(__file__).parent
TEMPLATES = Environment(
    loader=FileSystemLoader([HERE, page.HERE]), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)
LOOKS = {
    "connected": "finished", "finished": "finished", "running": "running", "setting up": "running",
    "submitted": "running", "waiting": "interrupted", "connecting": "interrupted", "offline": "interrupted",
    "failed": "failed", "not running": "failed", "refused": "failed",
}  # fmt: skip
"""The badge of each state."""

Row = Mapping[str, Any]


class Tile(NamedTuple):
    """A number that can be read from afar; ``share`` of 0 to 1 is drawn as a bar, ``at`` as time passed since then."""

    name: str
    value: str
    unit: str = ""
    note: str = ""
    share: float | None = None
    at: float | None = None


class Live:
    """A page that is made from files, again and again."""

    axes: Mapping[str, str] = {"round": "rounds", "seconds": "seconds"}

    def content(self) -> page.Content:
        """What it shows now."""
        raise NotImplementedError

    def page(self) -> str:
        """The whole page."""
        style = (HERE / "live.css").read_text(encoding="utf-8")
        return page.shell(self.content(), [("", dict(self.axes))], live=True, style=style)

    def news(self) -> News:
        """What changes."""
        content = json.dumps(self.content()._asdict(), allow_nan=False).encode()
        return News(hashlib.sha256(content).hexdigest()[:32], content)

    def part(self, path: str) -> str | None:
        """No other pages, unless there are."""
        return None


def size(count: float) -> str:
    """Bytes as people read them.

    >>> size(0), size(999), size(340_096), size(1.26e9)
    ('0 B', '999 B', '340 kB', '1.26 GB')
    """
    return " ".join(amount(count))


def amount(count: float) -> tuple[str, str]:
    """Bytes as a number and its unit."""
    for each, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.9995 * each:
            return f"{count / each:.3g}", unit
    return f"{count:.0f}", "B"


def lasting(seconds: float) -> str:
    """A time as people say it.

    >>> lasting(0.0123), lasting(0.25), lasting(42), lasting(200), lasting(7300), lasting(200_000)
    ('12 ms', '250 ms', '42 s', '3 min', '2 h', '2 days')
    """
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    for each, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= (2 if each > 60 else 1.5) * each:
            return f"{seconds / each:.0f} {unit}"
    return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"


def clock(at: Any) -> str:
    """A time of this machine, with the date unless it is today."""
    number_ = number(at)
    if number_ is None or not 0 < number_ < 1e11:
        return ""
    local = time.localtime(number_)
    today = time.localtime()
    same = (local.tm_year, local.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if same else "%Y-%m-%d %H:%M", local)


def number(value: Any) -> float | None:
    """A finite number, None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        return None
    return float(value)


def validity(end: float | None) -> tuple[str, str]:
    """How long a certificate is valid, and the look of it.

    >>> validity(None)
    ('-', '')
    """
    days = days_left(end)
    if days is None:
        return "-", ""
    if days < 0:
        return "expired", "bad"
    return f"{days} day{'' if days == 1 else 's'}", "soon" if days < SOON else ""


def look(state: str) -> str:
    """The class of the badge of a state."""
    return LOOKS.get(state, "")


def curves(
    lines: Iterable[tuple[str, Sequence[Row], Mapping[str, str]]],
    metrics: Mapping[str, str],
    heading: str,
    caption: str,
    axes: Mapping[str, str],
    mean: str = "",
) -> dict[str, Any]:
    """The numbers of a chart: for every line its name, its rows, and the column of each metric in them; ``mean`` is the
    name of the line that is the mean of the others.
    """
    series = []
    for name, rows, columns in lines:
        drawn = {
            metric: {"seeds": [1] * len(rows), "mean": [_short(row.get(column)) for row in rows],
                     "deviation": [None] * len(rows)}
            for metric, column in columns.items()
            if any(number(row.get(column)) is not None for row in rows)
        }  # fmt: skip
        if drawn:
            places = {axis: [_short(row.get(axis)) for row in rows] for axis in axes}
            series.append(
                {"id": name, "name": name, "reference": False, "seeds": 1, "axes": places, "metrics": drawn,
                 "mean": name == mean}
            )  # fmt: skip
    shown = {metric: words for metric, words in metrics.items() if any(metric in each["metrics"] for each in series)}
    return {
        "heading": heading if shown else "", "metrics": shown, "axes": axes, "series": series, "caption": caption
    }  # fmt: skip


def _short(value: Any) -> float | None:
    known = number(value)
    return None if known is None else float(f"{known:.7g}")


TEMPLATES.filters |= page.TEMPLATES.filters
TEMPLATES.filters |= {"size": size, "lasting": lasting, "clock": clock, "validity": validity, "look": look}
