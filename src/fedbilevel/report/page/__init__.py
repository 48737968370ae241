"""The report: one HTML page about one or many runs, finished or still running, that opens without any network."""

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedbilevel.engines.accounting import ORACLES
from fedbilevel.errors import FedbilevelError
from fedbilevel.report.page.series import (
    CHART_AXES,
    SEED_KEYS,
    Series,
    differences,
    exact,
    find,
    flat,
    headline,
    metrics,
    plain,
    short,
    together,
    with_spread,
)
from fedbilevel.runs.plugins import Origin
from fedbilevel.storage.run_folder import Run

HERE = Path(__file__).parent
TEMPLATES = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def breakable(key: str) -> Markup:
    """A long key with line breaks allowed after its dots and underscores."""
    return Markup("<wbr>").join(re.split(r"(?<=[._])", key))


TEMPLATES.filters |= {"exact": exact, "breakable": breakable}


class Content(NamedTuple):
    """What changes while runs are in progress: the texts above and below the chart as HTML, and its numbers."""

    title: str
    above: str
    below: str
    chart: dict[str, Any]


def write(paths: Iterable[Path], out: Path) -> Path:
    """Write the page about all runs at or below the paths."""
    text = render(paths)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FedbilevelError(f"cannot write {out}: {error.strerror}.") from error
    return out


def render(paths: Iterable[Path], live: bool = False) -> str:
    """The page as text; a live one asks its server for news."""
    axes = [
        ("", {"round": CHART_AXES["round"]}),
        ("Traffic", {axis: CHART_AXES[axis] for axis in ("megabytes", "megabytes_down", "megabytes_up")}),
        ("Oracle calls", {axis: CHART_AXES[axis] for axis in ("oracles", *ORACLES, "samples")}),
        ("", {"seconds": CHART_AXES["seconds"]}),
    ]
    return shell(content(paths), axes, live)


def shell(made: Content, axes: Sequence[tuple[str, dict[str, str]]], live: bool = False, style: str = "") -> str:
    """A page as text, around its content.

    Args:
        made: the content.
        axes: what the chart may be drawn against, in groups that may have a name.
        live: whether the page asks its server for news.
        style: more CSS.
    """
    from plotly.offline import get_plotlyjs  # here, because other commands need not wait for it

    scripts = [get_plotlyjs(), (HERE / "page.js").read_text(encoding="utf-8")]
    # Only these scripts may run, whatever the runs are called.
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return TEMPLATES.get_template("page.html").render(
        **made._asdict() | {"chart": embedded(made.chart)},
        style=Markup((HERE / "page.css").read_text(encoding="utf-8") + style),
        scripts=[Markup(script) for script in scripts],
        hashes=hashes,
        live=live,
        axes=axes,
    )


def embedded(value: Any) -> Markup:
    """JSON that is safe inside of a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def content(paths: Iterable[Path]) -> Content:
    """Everything on the page that is about the runs."""
    runs = find(paths)
    series, left_out = together(runs)
    mains = [each for each in series if not each.reference]
    title = _title(mains)
    above = TEMPLATES.get_template("above.html").render(
        title=title,
        facts=_facts(runs),
        headings=_headings(series),
        rows=[_summary(each, series) for each in series],
        several=_several(series),
        failures=_failures(mains),
        code=_unique(f"{said}." for run in runs for said in _trouble(run)),
        left_out=[(older.folder.name, newer.folder.name) for older, newer in left_out],
    )
    below = TEMPLATES.get_template("below.html").render(
        mains=mains,
        pictures=[picture for each in mains for picture in _pictures(each)],
        details=[shown for each in mains if (shown := _details(each)) is not None],
        differences=_differences(mains),
        seeds=_common_seeds(mains),
        runs=[_run(each, index) for each in mains for index in range(len(each.runs))],
        environments=_environments(mains),
        several=_several(series),
    )
    return Content(title, above, below, _chart(series))


def _several(series: Sequence[Series]) -> bool:
    """Whether something is a mean over seeds."""
    return any(len(each.runs) > 1 for each in series)


def _unique(values: Iterable[Any]) -> list[Any]:
    """Each once, in their order."""
    return list({repr(value): value for value in values}.values())


def _title(mains: Sequence[Series]) -> str:
    tasks, titles = _unique(each.task for each in mains), _unique(each.title for each in mains)
    if len(tasks) > 1:
        return f"{len(mains)} configurations on {len(tasks)} tasks"
    if len(titles) == 1 and len(mains) > 1:
        return f"{titles[0]} on {tasks[0]}, {len(mains)} configurations"
    if len(titles) > 4:
        return f"{len(titles)} algorithms on {tasks[0]}"
    return f"{' and '.join(filter(None, [', '.join(titles[:-1]), titles[-1]]))} on {tasks[0]}"


def _facts(runs: Sequence[Run]) -> list[str]:
    """What is the same for all runs, in few words."""

    def values_of(key: str) -> list[Any]:
        return sorted(
            _unique(run.info[key] for run in runs if run.info.get(key) is not None), key=lambda v: (str(type(v)), v)
        )

    facts = [f"{len(runs)} runs"] if len(runs) > 1 else [runs[0].folder.resolve().name]
    for key, word in (("clients", "clients"), ("rounds", "rounds")):
        facts += [f"{values[0]} {word}"] if len(values := values_of(key)) == 1 else []
    seeds = values_of("seed")
    if seeds:
        shown = ", ".join(map(str, seeds)) if len(seeds) < 8 else f"{seeds[0]} to {seeds[-1]}"
        facts.append(f"seed{'s' if len(seeds) > 1 else ''} {shown}")
    started = [_time(value) for value in values_of("started")]
    return facts + ([f"started {started[0]}"] if started else [])


def _time(text: Any) -> str:
    """A time to the minute, as it was written."""
    return str(text)[:16].replace("T", " ") + (" UTC" if str(text).endswith(("+00:00", "Z")) else "")


def _headings(series: Sequence[Series]) -> list[str]:
    return [*headline(series).values(), "rounds", "MB down / up", " / ".join(ORACLES), "seconds"]


def _summary(each: Series, series: Sequence[Series]) -> dict[str, Any]:
    """A row of the table; cells are a value and its deviation over seeds, or nothing."""
    own = each.metrics
    cells = [with_spread(*each.last(metric)) if metric in own else ("-", "") for metric in headline(series)]
    cells.append((_rounds(each), ""))
    cells.append((" / ".join(plain(each.last(way)[0]) for way in ("megabytes_down", "megabytes_up")), ""))
    cells.append((" / ".join(short(each.last(name)[0]) for name in ORACLES), ""))
    cells.append(with_spread(*each.last("seconds")))
    runs = len(each.runs)
    badges = [
        (state, f"{count} of {runs} {state}" if count < runs else f"{runs} {state}" if runs > 1 else state)
        for state, count in Counter(each.states()).items()
    ]
    return {"id": each.id, "name": each.name, "reference": bool(each.reference), "cells": cells, "badges": badges}


def _rounds(each: Series) -> str:
    reached = [history[-1]["round"] if history else 0 for history in each.histories]
    planned = max((run.info.get("rounds") or 0 for run in each.runs), default=0)
    shown = str(reached[0]) if len(set(reached)) == 1 else f"{min(reached)} to {max(reached)}"
    return shown if min(reached) >= planned else f"{shown} of {planned}"


def _failures(mains: Sequence[Series]) -> list[tuple[str, str]]:
    """Who failed, and the sentence that says why."""
    return [
        (f"{each.name}, seed {run.info.get('seed')}", str(run.info.get("failure") or "no reason is recorded"))
        for each in mains
        for run in each.runs
        if run.info.get("status") == "failed"
    ]


def _trouble(run: Run) -> list[str]:
    """What became of other people's code that a run used, as far as this machine can tell."""
    return [said for known in run.info.get("origins", {}).values() if (said := Origin(**known).trouble)]


def _pictures(each: Series) -> list[dict[str, str]]:
    """The pictures that the task drew of the first seed that has some; the chart of the page replaces its curves."""
    for run in each.runs:
        files = sorted(run.folder.glob("*.png"), key=lambda path: (path.stem != "picture", path.name))
        pictures = [
            {
                "name": f"{each.name}, seed {run.info.get('seed')}"
                + ("" if path.stem == "picture" else f": {path.stem}"),
                "source": _data_uri(path, path.stat().st_mtime_ns),
                "alt": f"Picture that the task {each.task} drew of the solution of {each.name}: {path.stem}",
            }
            for path in files
            if path.stem != "curves"
        ]
        if pictures:
            return pictures
    return []


@lru_cache(maxsize=256)
def _data_uri(path: Path, changed: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _details(each: Series) -> dict[str, Any] | None:
    """The task's table about the solution of the first seed that has one."""
    for run in each.runs:
        if details := run.info.get("details"):
            rows = [[plain(cell) for cell in row] for row in details["rows"]]
            return {
                "name": f"{each.name}, seed {run.info.get('seed')}",
                "title": str(details["title"]),
                "headings": [str(heading) for heading in details["headings"]],
                "rows": rows,
            }
    return None


def _differences(mains: Sequence[Series]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same for all runs, with the values of every series."""
    runs = [run for each in mains for run in each.runs]
    configs = [flat(run.config) | flat({"environment": run.info.get("environment") or {}}) for run in runs]
    columns = [number for number, each in enumerate(mains) for _ in each.runs]
    shown = []
    for key, values in differences(configs):
        own = [[exact(v) for v, column in zip(values, columns, strict=True) if column == n] for n in range(len(mains))]
        cells = [", ".join(dict.fromkeys(each)) for each in own]
        # The same seeds everywhere are not a difference.
        if key not in SEED_KEYS or len(mains) == 1 or len(set(cells)) > 1:
            shown.append((key, cells))
    return sorted(shown, key=lambda row: row[1].count("-"))  # what all have first


def _common_seeds(mains: Sequence[Series]) -> str:
    """The seeds, if all configurations have the same several ones."""
    seeds = {tuple(map(str, each.seeds)) for each in mains}
    return ", ".join(next(iter(seeds))) if len(seeds) == 1 and len(mains) > 1 and len(mains[0].seeds) > 1 else ""


def _run(each: Series, index: int) -> dict[str, str]:
    """A row of the list of all run folders."""
    run, history = each.runs[index], each.histories[index]
    return {
        "folder": run.folder.resolve().name,
        "name": each.name,
        "seed": str(run.info.get("seed", "-")),
        "state": each.states()[index],
        "round": str(history[-1]["round"]) if history else "-",
        "seconds": plain(history[-1].get("seconds")) if history else "-",
        "started": _time(run.info.get("started", "-")),
    }


def _environments(mains: Sequence[Series]) -> list[tuple[list[str], dict[str, Any]]]:
    """Where runs were made, with the folders of those made there."""
    places: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for run in (run for each in mains for run in each.runs):
        environment = run.info.get("environment") or {}
        places.setdefault(repr(environment), ([], environment))[0].append(run.folder.resolve().name)
    return list(places.values())


def _chart(series: Sequence[Series]) -> dict[str, Any]:
    """The numbers of the chart."""

    def numbers(values: np.ndarray) -> list[float | None]:
        return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]

    shown = []
    for each in series:
        curves = {metric: each.curve(metric) for metric in each.metrics}
        shown.append(
            {
                "id": each.id,
                "name": each.name,
                "reference": bool(each.reference),
                "seeds": len(each.runs),
                "axes": {axis: numbers(each.curve(axis).mean) for axis in CHART_AXES if axis != "round"}
                | {"round": each.rounds},
                "metrics": {
                    metric: {
                        "seeds": curve.seeds.tolist(),
                        "mean": numbers(curve.mean),
                        "deviation": numbers(curve.deviation),
                    }
                    for metric, curve in curves.items()
                },
            }
        )
    return {"heading": "Curves", "metrics": metrics(series), "axes": CHART_AXES, "series": shown}
