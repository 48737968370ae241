"""Ledgers for people: what a site has sent, what a coordinator has done, and whether anybody changed them."""

from collections import defaultdict, deque
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbilevel.errors import FedbilevelError, readable
from fedbilevel.federation.join import about
from fedbilevel.federation.ledger import DONE, EXCHANGES, LEDGER, owner, verify
from fedbilevel.federation.ledger import lines as read
from fedbilevel.federation.project import load


def plain(text: str) -> str:
    """What somebody else wrote, for the terminal: neither it nor rich takes any of it for a command."""
    return escape(readable(text))


def shown(name: str) -> str:
    """The name of an array of a message for users, without the internal names of a vector's parts."""
    return name.replace(".tree", "")


def ledger(folder: Path, console: Console, last: int = 0) -> None:
    """Print tables of what a site has sent, what a coordinator has done, or the exchanges of a run."""
    if (folder / DONE).exists():
        _done(folder, console, last or 30)
        return
    if (folder / EXCHANGES).exists():
        _exchanged(folder, console, last)
        return
    path = folder / LEDGER
    if not path.exists():
        raise FedbilevelError(f"{folder} has sent nothing yet, or is not the folder of a site or a coordinator.")
    lines = list(read(path))
    runs: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0, 0, {}, ""]))
    for line in lines:
        entry = runs[line["run"]][f"{line['action']} {line['method']}".strip()]
        entry[0] += 1
        entry[1] += line["bytes_in"]
        entry[2] += line["bytes_out"]
        entry[3] += bool(line["error"])
        entry[4] = line["left"] or entry[4]
        entry[5] = line["error"] or entry[5]
    for run, totals in runs.items():
        name = plain(run) or "outside of all runs"
        table = Table("asked for", "times", "failed", "bytes in", "bytes out", title=name, title_justify="left")
        table.add_column("what left", overflow="fold")
        for what, (times, came, left, failed, arrays, error) in totals.items():
            shapes = ", ".join(f"{shown(name)}{arrays[name]['shape']}" for name in sorted(arrays))
            more = "; ".join(text for text in (shapes, error and f"last failure: {error}") if text)
            table.add_row(plain(what) or "-", str(times), str(failed), f"{came:,}", f"{left:,}", plain(more))
        console.print(table)
    if last:
        each = Table("time", "by", "request", "bytes out", "what was sent (norm)")
        for line in lines[-last:]:
            arrays = ", ".join(f"{shown(name)} {a['norm']:.3g}" for name, a in sorted(line["left"].items()))
            each.add_row(
                _when(line["time"]),
                plain(line["caller"]),
                plain(f"{line['action']} {line['method']}".strip()),
                f"{line['bytes_out']:,}",
                plain(line["error"] or arrays),
            )
        console.print(each)


def _done(folder: Path, console: Console, last: int) -> None:
    """What a coordinator has done, the last of it."""
    table = Table("time", "by", "what was done")
    for line in deque(read(folder / DONE), last):
        facts = {k: v for k, v in line.items() if k not in ("n", "before", "time", "caller", "action", "ledger")}
        words = ", ".join(f"{name} {_fact(name, value)}" for name, value in facts.items())
        table.add_row(
            _when(line["time"]), plain(line["caller"]), plain(f"{line['action']}: {words}".removesuffix(": "))
        )
    console.print(table)


def _fact(name: str, value: Any) -> str:
    """A value of the coordinator's ledger for people."""
    if name == "until" and isinstance(value, int | float):
        return _when(value)
    return ", ".join(map(str, value)) if isinstance(value, list | dict) else str(value)


def _when(seconds: float) -> str:
    """A time, in the time zone of the reader."""
    return f"{datetime.fromtimestamp(int(seconds)):%Y-%m-%d %H:%M:%S}"


def _exchanged(folder: Path, console: Console, last: int) -> None:
    """The exchanges of a run: how many of each kind, who missed some, and the last ones."""
    lines = [line for line in read(folder / EXCHANGES) if "method" in line]
    kinds: dict[str, list[Any]] = defaultdict(lambda: [0, 0, 0, defaultdict(int)])
    for line in lines:
        entry = kinds[line["method"]]
        entry[0] += 1
        entry[1] += line["bytes_down"]
        entry[2] += line["bytes_up"]
        for name in line["failed"]:
            entry[3][name] += 1
    table = Table(
        "exchange", "times", "bytes down", "bytes up", "missed by", title=plain(folder.name), title_justify="left"
    )
    for method, (times, down, up, missed) in kinds.items():
        who = ", ".join(f"{name} ({count})" for name, count in missed.items())
        table.add_row(plain(method), str(times), f"{down:,}", f"{up:,}", plain(who))
    console.print(table)
    if last:
        each = Table("time", "round", "exchange", "answered", "missed, and why")
        for line in lines[-last:]:
            missed = "; ".join(f"{name}: {reason}" for name, reason in line["failed"].items())
            words = (line["method"], ", ".join(line["answered"]), missed)
            each.add_row(_when(line["time"]), str(line["round"]), *map(plain, words))
        console.print(each)


def check_ledgers(folder: Path, console: Console) -> None:
    """Check every ledger in the folder of a site, of a coordinator or of a run; refuses one that was changed."""
    ours = {folder / LEDGER: folder, folder / EXCHANGES: folder.parent.parent, folder / DONE: folder}
    ours |= dict.fromkeys(sorted(folder.glob(f"runs/*/{EXCHANGES}")), folder)
    found = {
        path: place for path, place in ours.items() if path.with_name(f"{path.name}.last").exists() or path.exists()
    }
    if not found:
        raise FedbilevelError(f"{folder} has no ledger: it is not the folder of a site, a coordinator or a run.")
    broken = 0
    for path, place in found.items():
        try:
            said = str(verify(path, _owner(path, place)))
        except FedbilevelError as error:
            said, broken = f"NOT intact. {error}", broken + 1
        console.print(f"{path}: {said}", highlight=False, soft_wrap=True, markup=False)
    if broken:
        raise FedbilevelError(f"{broken} of {len(found)} ledgers are not intact.")


def _owner(path: Path, place: Path) -> str:
    """Whose ledger it should be, in the folder of a site or a coordinator; "" if the folder does not say."""
    if path.name == EXCHANGES:
        return owner(place, path.parent.name)
    try:
        return owner(place, about(place)["party"] if path.name == LEDGER else load(place).name)
    except (OSError, ValueError, KeyError, FedbilevelError):
        return ""
