"""The live page of the coordinator: who is there, the run that is under way, the queue, what has ended, warnings."""

import contextlib
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import expiry, health, logs, presence, project
from fedbilevel.federation.watch import live
from fedbilevel.federation.watch.live import Tile, clock, lasting, number, size
from fedbilevel.federation.watch.progress import Missed, RunProgress
from fedbilevel.report import page
from fedbilevel.storage.run_folder import CONFIG, INFO, RECORDS, UNDER_WAY, RunFolder

ENDED = 50
"""How many of the runs that have ended are listed."""
LOOKED = 30.0
"""Seconds between two looks at the certificates."""


class CoordinatorPage(live.Live):
    """Everything that a coordinator should see of the federation in a folder."""

    axes: Mapping[str, str] = {"round": "rounds", "seconds": "seconds", "megabytes": "megabytes, all sites"}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = project.load(folder)
        self._infos: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._followed: tuple[str, RunProgress] | None = None
        self._certificates: tuple[float, dict[str, float]] = (-LOOKED, {})

    def content(self) -> page.Content:
        """The page as it is now."""
        self.project = project.load(self.folder)
        state = presence.state(self.folder / presence.COORDINATOR)
        command = f"fedbilevel federation start {shlex.quote(str(self.folder))}"
        problems = health.presence_problems(self.folder / presence.COORDINATOR, "the server", command)
        alive, ends, runs = not problems, self._ends(), self._runs()
        problems += health.disk(self.folder)[1]
        problems += [f"the certificate of {who} has expired." for who, end in self._owners(ends).items() if _past(end)]
        run = _followed(runs)
        progress = self._progress(run)
        there, since = state.get("connected"), state.get("since")
        connected = [str(name) for name in there] if alive and isinstance(there, list) else []
        parties = self._parties(connected, since if alive and isinstance(since, dict) else {}, ends, progress)
        sites = self.project.sites
        facts = [
            f"{self.project.host}, port {self.project.port}",
            f"server running since {clock(state.get('began'))}" if alive else "server not running",
        ]
        above = live.TEMPLATES.get_template("coordinator-above.html").render(
            name=self.project.name,
            facts=facts,
            problems=problems,
            run=run,
            tiles=self._tiles(run, progress, [name for name in sites if name in connected], sites),
            parties=parties,
            certificates=[
                (what, *live.validity(end))
                for what, end in (("server", ends.get(self.project.host)), ("authority", ends.get(expiry.AUTHORITY)))
                if end is not None
            ],
        )
        ended = [each for each in reversed(runs) if each["status"] not in UNDER_WAY]
        below = live.TEMPLATES.get_template("coordinator-below.html").render(
            missed=sorted(progress.exchanges.missed.values(), key=lambda each: -each.at) if progress else [],
            run=run,
            waiting=[each for each in runs if each["status"] in UNDER_WAY],
            ended=ended[:ENDED],
            older=len(ended[ENDED:]),
            metrics=_metrics(runs),
            warnings=logs.warnings_of([self.folder / "server.log", self.folder / "coordinator.log"]),
        )
        return page.Content(f"{self.project.name}: federation", above, below, self._chart(run, progress))

    def part(self, path: str) -> str | None:
        """The report of a run."""
        kind, _, name = path.partition("/")
        name = unquote(name)
        if kind != "report" or name not in {each["name"] for each in self._runs() if each["report"]}:
            return None
        return page.render([self.folder / "runs" / name])

    def _ends(self) -> dict[str, float]:
        """When certificates end."""
        if time.monotonic() - self._certificates[0] >= LOOKED:
            with contextlib.suppress(OSError):
                self._certificates = (time.monotonic(), expiry.of_federation(self.folder))
        return self._certificates[1]

    def _owners(self, ends: dict[str, float]) -> dict[str, float | None]:
        """Certificates that are in use, by the words for their owners."""
        parties = {
            name: expiry.of_party(ends, name) for name in self.project.parties if name not in self.project.excluded
        }
        return {"the server": ends.get(self.project.host), "the authority": ends.get(expiry.AUTHORITY), **parties}

    def _runs(self) -> list[dict[str, Any]]:
        """All runs in the order in which they were asked for. Only files that have changed are read."""
        known: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}
        for path in sorted((self.folder / "runs").glob(f"*/{INFO}")):
            with contextlib.suppress(FedbilevelError, OSError):  # damaged, or removed just now
                about = path.stat()
                mark = (about.st_mtime_ns, about.st_size)
                before = self._infos.get(path)
                known[path] = before if before and before[0] == mark else (mark, RunFolder(path.parent).info())
        self._infos = known
        runs = [_run(path.parent, info) for path, (_, info) in known.items() if info]
        return sorted(runs, key=lambda each: (each["asked"], each["name"]))

    def _progress(self, run: dict[str, Any] | None) -> RunProgress | None:
        """Follow a run."""
        if run is None:
            self._followed = None
            return None
        if self._followed is None or self._followed[0] != run["name"]:
            self._followed = (run["name"], RunProgress(self.folder / "runs" / run["name"]))
        self._followed[1].update()
        return self._followed[1]

    def _parties(
        self, connected: list[str], since: dict[str, Any], ends: dict[str, float], progress: RunProgress | None
    ) -> list[dict[str, Any]]:
        """The rows of the table of parties."""
        missed: dict[str, list[Missed]] = {}
        for each in progress.exchanges.missed.values() if progress else ():
            missed.setdefault(each.site, []).append(each)
        traffic = progress.exchanges.traffic if progress else {}
        rows = []
        for name, role in self.project.parties.items():
            revoked, here = role == "site" and name not in self.project.sites, name in connected
            state = "revoked" if revoked else "" if role != "site" else "connected" if here else "offline"
            own = missed.get(name, [])
            last = max(own, key=lambda each: each.at, default=None)
            rows.append(
                {
                    "name": name,
                    "role": "" if role == "site" else "administrator",
                    "state": state,
                    "since": number(since.get(name)) if not revoked else None,
                    "traffic": traffic.get(name),
                    "missed": sum(each.times for each in own) if role == "site" and progress else None,
                    "reason": f"{last.reason} (round {last.last})" if last else "",
                    "certificate": ("-", "") if revoked else live.validity(expiry.of_party(ends, name)),
                }
            )
        return rows

    def _tiles(
        self, run: dict[str, Any] | None, progress: RunProgress | None, there: list[str], sites: list[str]
    ) -> list[Tile]:
        away = [name for name in sites if name not in there]
        note = "everybody is there" if not away else f"offline: {', '.join(away[:3])}{', ...' if away[3:] else ''}"
        tiles = [Tile("Sites connected", str(len(there)), f"of {len(sites)}", note)]
        if run is None or progress is None:
            return [*tiles, Tile("Round", "-", "", "no run was asked for yet")]
        last, going = progress.exchanges, run["status"] == "running"
        round = max(run["round"], last.round)
        pace, left = progress.seconds_per_round(), ""
        if going and pace and run["rounds"]:
            left = f"about {lasting(pace * max(0, run['rounds'] - round))} left"
        share = min(1.0, round / run["rounds"]) if run["rounds"] else None
        rounds = f"of {run['rounds']}" if run["rounds"] else ""
        seconds, rate = progress.seconds(), progress.rate() if going else 0.0
        down = sum(d for d, _ in last.traffic.values()) or run["bytes_down"]
        up = sum(u for _, u in last.traffic.values()) or run["bytes_up"]
        missed = sum(each.times for each in last.missed.values())
        newest = max(last.missed.values(), key=lambda each: each.at, default=None)
        return [
            *tiles,
            Tile("Round", str(round), rounds, left or run["status"], share),
            Tile(
                "Exchanges",
                f"{rate:.3g}" if going else str(last.number),
                "per second" if going else "in all",
                f"{lasting(seconds)} each (median)" if seconds is not None else "none yet",
            ),
            Tile("Sent", *live.amount(down + up), f"{size(down)} to sites, {size(up)} from them"),
            Tile("Missed answers", str(missed), "", f"last: {newest.site}" if newest else "none"),
        ]

    def _chart(self, run: dict[str, Any] | None, progress: RunProgress | None) -> dict[str, Any]:
        """A line for every site, and their mean."""
        if run is None or progress is None:
            return live.curves([], {}, "", "", self.axes)
        rows, sites = progress.rows.shown(), run["sites"]
        columns = dict.fromkeys(key for row in rows for key in row)
        own = {f"{metric}_{site}" for metric in columns for site in sites}
        means = {metric: metric for metric in columns if metric not in own and metric not in _COUNTED}
        headline = {metric: str(words) for metric, words in run["headline"].items() if metric in means}
        lines = [(site, rows, {metric: f"{metric}_{site}" for metric in means}) for site in sites]
        mean = "mean" if any(column in own for column in columns) else "all sites"
        evaluated = progress.rows.seen
        caption = "" if len(rows) >= evaluated else f"Drawn: {len(rows)} of {evaluated} evaluations, evenly spaced."
        metrics = {**headline, **means, **headline}
        drawn = [*lines, (mean, rows, means)]
        return live.curves(drawn, metrics, f"Curves of {run['name']}", caption, self.axes, mean)


_COUNTED = {
    "run", "round", "seconds", "sites", "exchanges", "floats", "megabytes", "megabytes_down", "megabytes_up",
    "oracles", "Gf", "Gg", "J", "H", "samples",
}  # fmt: skip


def _past(end: float | None) -> bool:
    return end is not None and end < time.time()


def _followed(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The run to show: the one that is going on, else the first that waits, else the last one."""
    for wanted in (("running", "setting up", "submitted"), ("waiting", "wanted")):
        if found := [each for each in runs if each["status"] in wanted]:
            return found[0]
    return max(runs, key=lambda each: each["seen"] or each["asked"], default=None)


def _run(folder: Path, info: dict[str, Any]) -> dict[str, Any]:
    """What the page says of a run; whatever is damaged is left out."""
    count = lambda name: int(number(info.get(name)) or 0)
    table = lambda name: value if isinstance(value := info.get(name), dict) else {}
    sites = info.get("sites")
    failure, waits = str(info.get("failure") or ""), str(info.get("waits") or "")
    undelivered = info.get("undelivered") if info.get("status") == "finished" else None
    missing = [str(name) for name in undelivered] if isinstance(undelivered, list) else []
    notes = [failure, waits, f"without its result so far: {', '.join(missing)}." if missing else ""]
    notes += [f"{name} does not take part: {why}" for name, why in table("refused").items()]
    if told := [f"{site} {_counted(numbers)}" for site, numbers in table("suspects").items() if numbers]:
        notes.append(f"suspicious labels by given label, as far as sites tell: {'; '.join(told)}.")
    return {
        "name": folder.name,
        "status": str(info.get("status", "wanted")),
        "task": str(info.get("task", "")),
        "title": str(info.get("title", "")),
        "rounds": count("rounds"),
        "round": count("round"),
        "asked": number(info.get("asked")) or 0.0,
        "seen": number(info.get("seen")),
        "bytes_down": count("bytes_down"),
        "bytes_up": count("bytes_up"),
        "headline": table("headline"),
        "results": {name: number(table("summary").get(name)) for name in table("headline")},
        "sites": [str(site) for site in sites] if isinstance(sites, list) else [],
        "notes": [note for note in notes if note],
        "report": (folder / CONFIG).exists() and (folder / RECORDS).exists(),
    }


def _counted(numbers: Any) -> str:
    """The numbers of a site by class."""
    return ", ".join(f"{label}: {count}" for label, count in numbers.items()) if isinstance(numbers, dict) else "?"


def _metrics(runs: list[dict[str, Any]]) -> dict[str, str]:
    """The headline metrics of all runs, at most three."""
    found = {name: str(words) for run in runs for name, words in run["headline"].items()}
    return dict(list(found.items())[:3])
