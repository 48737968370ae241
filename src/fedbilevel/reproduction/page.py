"""The page about an experiment: the paper's numbers beside ours, the claims, the curves."""

import math
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedbilevel.drawing.curves import over_decades
from fedbilevel.errors import FedbilevelError
from fedbilevel.reproduction import curves
from fedbilevel.reproduction.curves import Reproduced, ending
from fedbilevel.reproduction.decisions import finished
from fedbilevel.reproduction.files import ABOUT, CURVE_AXES, PARAMETERS, Reproduction, Search, read
from fedbilevel.reproduction.verdicts import headline, judged, verdict
from fedbilevel.runs.grid import band

RULES = "../docs/reproduction.md#how-claims-are-judged"


def table(done: Reproduced) -> list[list[str]]:
    """Headings and rows: panel, method, and for each column the paper's number, if it prints any, and ours."""
    made = done.reproduction
    headings = ["condition", "method (parameters)", "seeds"]
    for column in made.columns:
        headings += [f"{column.title}, paper", f"{column.title}, ours"] if made.printed else [column.title]
    rows = [headings]
    for panel in made.panels:
        for method in made.methods:
            if (panel, method) not in made.cases():
                continue
            some, cells = done.of(panel, method), []
            printed = made.printed_of(method.label).get(panel.title)
            for number, column in enumerate(made.columns):
                if made.printed:
                    cells.append(printed[number] if printed else "-")
                values = [*finished(done.values(panel, method, column)).values()]
                number = column.shown(float(np.mean(values))) if values else ""
                deviation = f" ± {column.shown(float(np.std(values, ddof=1)))}" if len(values) > 1 else ""
                cells.append("; otherwise ".join(part for part in (ending(some), number + deviation) if part))
            rows.append([panel.title, method.title, str(len(some)), *cells])
    return rows


def write(done: Reproduced, folder: Path, command: str, keep: bool = True) -> Path:
    """Write ``ID.md``, ``ID.png`` with the curves and, to ``keep`` them, ``ID.csv`` with every curve into a folder."""
    made = done.reproduction
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if keep:
            curves.write(done, folder / f"{made.id}.csv")
            done = curves.read(made, folder / f"{made.id}.csv")  # they give the same page again, to the last digit
        _draw(done).savefig(folder / f"{made.id}.png", dpi=80)
        path = folder / f"{made.id}.md"
        path.write_text(_page(done, command))
    except OSError as error:
        raise FedbilevelError(f"cannot write to {folder}: {error.strerror}.") from error
    return path


def _page(done: Reproduced, command: str) -> str:
    made = done.reproduction
    lines = [
        f"# {made.id}: {made.title}",
        "",
        f"**Verdict: {verdict(done)}.**",
        "",
        *(f"- **{name}**: {words}" for name, words in headline(done).items()),
        "",
        f"How claims are judged: [Reproduction]({RULES}).",
        "",
        f"*The paper*: {made.paper}, {made.where}. {made.claim.strip()}",
        "",
        "*What we ran*:",
        "",
        f"    {command}",
        "",
        f"with `src/fedbilevel/reproduction/experiments/{made.id}.toml`: {_seeds(done)}, {len(done.curves)} runs"
        f"{_cost(done)}, fedbilevel {version('fedbilevel')}.",
    ]
    if made.search is not None:
        lines += ["", "*Search*: " + _searched(made, made.search)]
    if made.differences:
        lines += ["", "*What differs from the paper*: " + made.differences.strip()]
    shares = {column.share or curves.WINDOW for column in made.columns if column.until is None}
    means = (
        f"Means over the last {' or '.join(f'{share:.0%}' for share in sorted(shares))} of the curves"
        if shares
        else "Means"
    )
    means = means.replace("last 10% of", "last tenth of").replace("the last 100% of the curves", "the whole curves")
    lines += ["", "## Numbers", "", f"{means}, with standard deviations over seeds.", ""]
    headings, *rows = table(done)
    lines += [_line(headings), "|---" * len(headings) + "|", *map(_line, rows)]
    by = judged(done)
    for about, heading in ABOUT.items():
        asked = [number for number, claim in enumerate(made.claims) if claim.about == about]
        if not asked:
            continue
        lines += ["", f"## {heading}", ""]
        lines += ["Differences are means over seeds, with 95 % intervals.", ""] if about == "method" else []
        lines += [_line(["claim", *(f"parameters: {PARAMETERS[kind]}" for kind in by)]), "|---" * (1 + len(by)) + "|"]
        for number in asked:
            cells = [f"**{of[number].word}**: {of[number].numbers}" for of in by.values()]
            lines.append(_line([made.claims[number].words, *cells]))
    if made.search is not None and made.found:
        lines += ["", "## Parameters that were found", "", *_found(made)]
    if made.remarks:
        lines += ["", "## Remarks", "", made.remarks.strip()]
    lines += ["", f"![curves]({made.id}.png)", "", f"Every curve of every seed: [{made.id}.csv]({made.id}.csv)", ""]
    return "\n".join(lines)


def _seeds(done: Reproduced) -> str:
    """The seeds that were run, whatever the file asks for."""
    seeds = sorted({curve.seed for curve in done.curves})
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def _cost(done: Reproduced) -> str:
    """How long it took."""
    if math.isnan(done.minutes):
        return ""
    return f", {done.minutes:.0f} minutes of computing (all runs together; they run in parallel)"


def _searched(made: Reproduction, search: Search) -> str:
    """How parameters were found."""
    if search.found:
        of = read(search.found)
        return f"that of {of.id}: " + (_searched(of, of.search) if of.search else "none")
    grid = "; ".join(f"{name} in {', '.join(map(str, values))}" for name, values in search.grid.items())
    ranges = "; ".join(f"{name} from {low:g} to {high:g}" for name, (low, high) in search.ranges.items())
    last = search.seed + search.seeds - 1
    share = f"on {search.held_out:.0%} of the validation rows, which nothing was trained on"
    again = "where there are several conditions, one more with what was found before"
    ended = "stopped after a third of the rounds if they were behind" if search.prune else "each run to the end"
    parts = [
        f"{search.budget} trials{f' ({grid or ranges})' if grid or ranges else ''}",
        "the first of them the printed one where there is one" if ranges else "",
        "except for what is tied to others" if ranges and search.tied else "",
        again if len(search.panels) > 1 and not grid else "",
        *(
            f"{name} of {label} being {' + '.join(_times(factor, other) for other, factor in others.items())}"
            for label, tied in search.tied.items()
            for name, others in tied.items()
        ),
        "" if grid else ended,
        f"of {search.rounds} rounds" if search.rounds else f"of as many rounds as the runs of {made.id} have",
        "for every method marked *found by search*",
        f"under {' and '.join(map(repr, search.panels))}" if search.panels and len(made.panels) > 1 else "",
        f"seed {search.seed}" if search.seeds == 1 else f"seeds {search.seed} to {last}",
        f"by validation loss {share}" if search.held_out else "by validation loss",
    ]
    return ", ".join(part for part in parts if part) + "."


def _found(made: Reproduction) -> list[str]:
    """What was found, as a table."""
    used = {method.label for method in made.methods if method.parameters == "found"}
    rows = [(*key, settings) for key, settings in made.found.items() if key[0] in used]
    return [
        _line(["method", "searched under", "parameters"]),
        "|---|---|---|",
        *(
            _line([label, panel, ", ".join(f"{name} = {_short(value)}" for name, value in settings.items())])
            for label, panel, settings in rows
        ),
    ]


def _times(factor: float, name: str) -> str:
    """A parameter times a factor."""
    return name if factor == 1 else f"{factor:g} {name}"


def _short(value: Any) -> str:
    """A parameter with four digits."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.4g}", str(value))


def _line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def _draw(done: Reproduced) -> Figure:
    """A row for every metric, a column for every condition; bands are one standard deviation to each side, where there
    is room for them. Runs that diverged are dotted lines, up to a cross.
    """
    made = done.reproduction
    if made.across:
        return _draw_across(done)
    metrics = list(made.curves) or [made.columns[-1].metric]
    columns = min(4, len(made.panels))
    down = -(-len(made.panels) // columns) * len(metrics)
    figure = Figure(figsize=(4.0 * columns + 2.2, 3.1 * down), layout="constrained")
    FigureCanvasAgg(figure)
    labels = list(dict.fromkeys(method.label for method in made.methods))
    lines = {"printed": "--", "found": "-", "ours": "-"}
    shown: dict[str, Any] = {}
    for number, (metric, panel) in enumerate(((metric, panel) for metric in metrics for panel in made.panels), 1):
        axes = figure.add_subplot(down, columns, number)
        settled: list[float] = []
        bands: list[tuple[np.ndarray, np.ndarray, np.ndarray, str]] = []
        for method in made.methods:
            colour = f"C{labels.index(method.label) % 10}"
            curves = done.of(panel, method)
            for curve in (curve for curve in curves if not curve.done and curve.history):
                across, values = curve.along(made.against), [row[metric] for row in curve.history]
                (line,) = axes.plot(across, values, ":", color=colour, linewidth=0.9)
                axes.plot(across[-1:], values[-1:], "x", color=colour, markersize=4)
                shown.setdefault(f"{method.title}, diverged", line)
            some = [curve for curve in curves if curve.done]
            if not some:
                continue
            mean, deviation = band([curve.history for curve in some], metric)
            across = np.mean([curve.along(made.against) for curve in some], axis=0)
            (line,) = axes.plot(across, mean, lines[method.parameters], color=colour, linewidth=1.4)
            bands.append((across, mean, deviation, colour))
            shown.setdefault(method.title, line)
            settled += [value for value, at in zip(mean, across, strict=True) if at >= 0.1 * across[-1]]
        finite = [value for value in settled if math.isfinite(value)]
        if over_decades(finite):
            axes.set_yscale("log")
        elif finite:  # the first steps would hide the differences that matter
            margin = 0.08 * (max(finite) - min(finite)) or 0.1
            axes.set_ylim(min(finite) - margin, max(finite) + margin)
        low, high = axes.get_ylim()
        for across, mean, deviation, colour in bands:
            if np.median(deviation) < (high - low) / 4:  # one that fills the picture says nothing
                axes.fill_between(across, mean - deviation, mean + deviation, alpha=0.15, linewidth=0, color=colour)
        axes.set_ylim(low, high)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(CURVE_AXES[made.against])
        axes.set_ylabel(metric)
        axes.grid(alpha=0.3)
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _draw_across(done: Reproduced) -> Figure:
    """Every column against the numbers of the conditions, on logarithmic scales; a dot for every seed."""
    made = done.reproduction
    figure = Figure(figsize=(5.0 * len(made.columns) + 2.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    shown: dict[str, Any] = {}
    for place, column in enumerate(made.columns, 1):
        axes = figure.add_subplot(1, len(made.columns), place)
        for number, method in enumerate(made.methods):
            panels = [panel for panel, each in made.cases() if each == method]
            values = [[*finished(done.values(panel, method, column)).values()] for panel in panels]
            known = [(panel.number, of) for panel, of in zip(panels, values, strict=True) if of]
            colour = f"C{number % 10}"
            means = [float(np.mean(of)) for _, of in known]
            (line,) = axes.plot([at for at, _ in known], means, "-", color=colour, linewidth=1.4)
            for at, of in known:
                axes.plot([at] * len(of), of, ".", color=colour, markersize=4, alpha=0.5)
            shown.setdefault(method.title, line)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(made.across)
        axes.set_title(column.title, fontsize=9)
        axes.grid(alpha=0.3)
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", frameon=False, fontsize=8)
    return figure
