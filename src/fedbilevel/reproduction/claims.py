"""Which claims of a paper hold in our runs, under which conditions."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedbilevel.reproduction import decisions
from fedbilevel.reproduction.curves import Reproduced, ending
from fedbilevel.reproduction.decisions import Interval, Outcome, better, finished, together
from fedbilevel.reproduction.files import Claim, Method, Panel, ResultColumn

ACROSS = ("best", "spread", "trend", "approach", "slope")
"""Kinds of claims that compare conditions."""

Numbers = Mapping[int, float]  # by seed; NaN where a run diverged
Part = tuple[Outcome, str]  # of a statement, and a note on it


@dataclass(frozen=True)
class Statement:
    """A claim under one condition, or one that compares conditions: its outcome, and the numbers it follows from."""

    condition: str
    outcome: Outcome
    numbers: str


@dataclass(frozen=True)
class Judged:
    """A claim and its statements."""

    claim: Claim
    statements: Sequence[Statement]

    @property
    def outcome(self) -> Outcome:
        """The outcome of the whole claim."""
        return together(each.outcome for each in self.statements)

    def under(self, outcome: Outcome) -> str:
        """The conditions with this outcome, "" if there is no other."""
        if len({each.outcome for each in self.statements}) == 1:
            return ""
        return ", ".join(each.condition for each in self.statements if each.outcome == outcome)

    @property
    def word(self) -> str:
        """The answer in words."""
        counts = Counter(each.outcome for each in self.statements)
        if len(counts) == 1:
            return str(self.outcome)
        parts = [f"{outcome} under {counts[outcome]}" for outcome in Outcome if counts[outcome]]
        parts[0] += f" of {len(self.statements)} conditions"
        return ", ".join(parts)

    @property
    def numbers(self) -> str:
        """The numbers of all statements, each with its condition and, where they differ, its outcome."""
        mixed = len({each.outcome for each in self.statements}) > 1
        named = lambda each: f"{each.condition} ({each.outcome})" if mixed else each.condition
        parts = [[named(each) if each.condition else "", each.numbers] for each in self.statements]
        return "; ".join(": ".join(filter(None, part)) for part in parts)


class Judge:
    """Judges claims by the rows with these parameters, or, for methods that have none, by their other rows."""

    def __init__(self, done: Reproduced, parameters: str) -> None:
        self.done, self.parameters = done, parameters

    def claim(self, claim: Claim) -> Judged:
        judge = Judge(self.done, claim.parameters or self.parameters)
        panels = [p for p in self.done.reproduction.panels if not claim.panels or p.title in claim.panels]
        kind = getattr(judge, f"_{claim.kind}")
        if claim.kind in ACROSS:
            outcome, numbers = kind(claim, panels) if all(judge._ran(claim, p) for p in panels) else _NOT_RUN
            return Judged(claim, [Statement("", outcome, numbers)])
        parts = {p.title: kind(claim, p) if judge._ran(claim, p) else _NOT_RUN for p in panels}
        return Judged(claim, [Statement(title, outcome, numbers) for title, (outcome, numbers) in parts.items()])

    def _ran(self, claim: Claim, panel: Panel) -> bool:
        return all(self.done.of(panel, self._method(label)) for label in claim.methods)

    def _method(self, label: str) -> Method:
        rows = [method for method in self.done.reproduction.methods if method.label == label]
        return next((method for method in rows if method.parameters == self.parameters), rows[0])

    def _name(self, label: str) -> str:
        """The name of a method, with its parameters if it only has rows with others."""
        method = self._method(label)
        return label if method.parameters == self.parameters else method.title

    def _columns(self, claim: Claim) -> list[ResultColumn]:
        columns = list(self.done.reproduction.columns)
        if claim.target:
            return [column for column in columns if column.title in claim.target]
        if claim.column:
            return [column for column in columns if column.title == claim.column]
        return columns if claim.kind == "near" else columns[-1:]

    def _sign(self, claim: Claim) -> int:
        return -1 if claim.target else self._columns(claim)[0].sign

    def _numbers(self, claim: Claim, panel: Panel, label: str) -> Numbers:
        """The number of every seed: of the column, or, with a ``target``, the distance from it."""
        columns = self._columns(claim)
        each = [self.done.values(panel, self._method(label), column, claim.over) for column in columns]
        if not claim.target:
            return each[-1]
        return {
            seed: sum(abs(of[seed] - claim.target[column.title]) for of, column in zip(each, columns, strict=True))
            for seed in each[0]
        }

    def _shown(self, claim: Claim, panel: Panel, label: str) -> str:
        """A method and its mean over all its seeds, or over those with which it did not diverge."""
        ended = ending(self.done.of(panel, self._method(label))).split(",")[0]
        numbers = finished(self._numbers(claim, panel, label))
        value = self._columns(claim)[0].shown(float(np.mean([*numbers.values()]))) if numbers else ""
        return f"{self._name(label)} {f'{ended} ({value} else)' if ended and value else ended or value}"

    def _near(self, claim: Claim, panel: Panel) -> Part:
        parts: list[Part] = []
        for label in claim.methods:
            printed = self.done.reproduction.printed_of(label).get(panel.title, ())
            for column, text in zip(self.done.reproduction.columns, printed, strict=False):
                if column not in self._columns(claim) or not text:
                    continue
                paper, deviation = _printed(text)
                margin = max(claim.points, deviation)
                numbers = self.done.values(panel, self._method(label), column)
                ours = decisions.mean([*numbers.values()])
                shown = ending(self.done.of(panel, self._method(label))).split(",")[0] or column.shown(ours.number)
                words = f"{self._name(label)}, {column.title}: {shown} against {column.shown(paper)}"
                parts.append((ours.within(paper - margin, paper + margin), words))
        counts = Counter(outcome for outcome, _ in parts)
        rest = [f"{words} ({outcome})" for outcome, words in parts if outcome != Outcome.HOLDS]
        outcome = together(outcome for outcome, _ in parts) if parts else Outcome.FAILS
        return outcome, "; ".join([f"{counts[Outcome.HOLDS]} of {len(parts)} are", *rest])

    def _order(self, claim: Claim, panel: Panel) -> Part:
        return self._compared(claim, panel, [*itertools.pairwise(claim.methods)])

    def _ahead(self, claim: Claim, panel: Panel) -> Part:
        return self._compared(claim, panel, [(claim.methods[0], other) for other in claim.methods[1:]])

    def _compared(self, claim: Claim, panel: Panel, pairs: Sequence[tuple[str, str]]) -> Part:
        """Whether the first of each pair of methods is better than the second; the closest pair is shown."""
        numbers = {label: self._numbers(claim, panel, label) for label in claim.methods}
        compared = [(b, *better(numbers[a], numbers[b], self._sign(claim), claim.points)) for a, b in pairs]
        outcome, note = self._closest(compared, self._columns(claim)[0])
        return outcome, f"{', '.join(self._shown(claim, panel, label) for label in claim.methods)}{note}"

    def _closest(self, compared: Sequence[tuple[str, Outcome, Interval]], column: ResultColumn) -> Part:
        """The outcome of comparisons with several others, and the one that decides it."""
        if not compared:
            return Outcome.UNDECIDED, ""
        outcome = together(each for _, each, _ in compared)
        deciding = [(label, lead) for label, each, lead in compared if each == outcome]
        label, lead = min(deciding, key=lambda each: math.inf if math.isnan(each[1].number) else each[1].number)
        if math.isnan(lead.number):
            return outcome, ""
        return outcome, f" ({lead.shown(column)}{f' against {label}' if len(compared) > 1 else ''})"

    def _level(self, claim: Claim, panel: Panel) -> Part:
        first, *others = (self._numbers(claim, panel, label) for label in claim.methods)
        gaps = [
            decisions.mean([first[seed] - other[seed] for seed in sorted(first.keys() & other.keys())])
            for other in others
        ]
        outcome = together(gap.within(-claim.points, claim.points) for gap in gaps)
        widest = max(gaps, key=lambda gap: abs(gap.number))
        note = "" if math.isnan(widest.number) else f" ({widest.shown(self._columns(claim)[0])})"
        return outcome, f"{', '.join(self._shown(claim, panel, label) for label in claim.methods)}{note}"

    def _bound(self, claim: Claim, panel: Panel) -> Part:
        low = -math.inf if claim.least is None else claim.least
        high = math.inf if claim.most is None else claim.most
        parts = []
        for label in claim.methods:
            ours = decisions.mean([*self._numbers(claim, panel, label).values()])
            column = self._columns(claim)[0]
            note = "" if math.isinf(ours.high) else f" [{column.shown(ours.low)}, {column.shown(ours.high)}]"
            parts.append((ours.within(low, high), f"{self._shown(claim, panel, label)}{note}"))
        return together(outcome for outcome, _ in parts), ", ".join(words for _, words in parts)

    def _steady(self, claim: Claim, panel: Panel) -> Part:
        """Whether the first method deviates least over seeds, in every column asked for."""
        parts = [self._deviations(claim, panel, column) for column in self._columns(claim)]
        return together(outcome for outcome, _ in parts), "; ".join(words for _, words in parts)

    def _deviations(self, claim: Claim, panel: Panel, column: ResultColumn) -> Part:
        numbers = {label: self.done.values(panel, self._method(label), column) for label in claim.methods}
        alone = {label: [*finished(of).values()] for label, of in numbers.items()}
        diverged = {label for label, of in numbers.items() if len(alone[label]) < len(of)}
        shown = [
            f"{self._name(label)} {column.shown(float(np.std(of, ddof=1))) if len(of) > 1 else 'unknown'}"
            + (" (diverged)" if label in diverged else "")
            for label, of in alone.items()
        ]
        first, *others = claim.methods
        compared: list[tuple[str, Outcome, Interval]] = []
        for label in others:
            ratio = decisions.deviations(alone[first], alone[label])
            outcome = Outcome.UNDECIDED if math.isnan(ratio.number) else ratio.within(least=1.0)
            if first in diverged:
                outcome = Outcome.FAILS
            elif label in diverged and not ratio.number <= 1:
                outcome = Outcome.HOLDS  # what diverges varies most
            compared.append((label, outcome, ratio))
        outcome = together(each for _, each, _ in compared)
        label, ratio = min(((b, ratio) for b, each, ratio in compared if each == outcome), key=lambda each: each[1].low)
        times = f"{label} {ratio.number:.1f} [{ratio.low:.1f}, {ratio.high:.1f}] times that of {first}"
        note = f" ({times})" if math.isfinite(ratio.high) else ""
        return outcome, f"{column.title}, deviation: {', '.join(shown)}{note}"

    def _best(self, claim: Claim, panels: Sequence[Panel]) -> Part:
        (label,) = claim.methods
        first, *others = ((panel, self._numbers(claim, panel, label)) for panel in panels)
        compared = [(panel.title, *better(first[1], of, self._sign(claim), claim.points)) for panel, of in others]
        outcome, note = self._closest(compared, self._columns(claim)[0])
        shown = (f"{panel.title}: {self._shown(claim, panel, label)}" for panel in panels)
        return outcome, f"{', '.join(shown)}{note}"

    def _spread(self, claim: Claim, panels: Sequence[Panel]) -> Part:
        """Whether the first method varies least over the conditions, seed by seed; the ratios of spreads decide."""
        column = self._columns(claim)[0]
        spreads: dict[str, dict[int, float]] = {}
        for label in claim.methods:
            each = [self._numbers(claim, panel, label) for panel in panels]
            seeds = set.intersection(*({*of} for of in each))
            spreads[label] = {seed: float(np.ptp([of[seed] for of in each])) for seed in seeds}  # NaN if one is
        logarithms = {
            label: {
                seed: math.log(max(number, 1e-12)) if not math.isnan(number) else number for seed, number in of.items()
            }
            for label, of in spreads.items()
        }
        first, *others = claim.methods
        compared = [(label, *better(logarithms[first], logarithms[label], -1, 0.0)) for label in others]
        outcome = together(each for _, each, _ in compared)
        label, lead = min(((b, lead) for b, each, lead in compared if each == outcome), key=lambda each: each[1].low)
        low, ratio, high = (math.exp(number) for number in (lead.low, lead.number, min(lead.high, 700.0)))
        note = f" ({label} {ratio:.1f} [{low:.1f}, {high:.1f}] times that of {first})" if lead.high < math.inf else ""
        shown = []
        for label, of in spreads.items():
            known = [*finished(of).values()]
            words = [column.shown(float(np.mean(known)))] if known else []
            shown.append(" ".join([self._name(label), *words, *(["diverged"] if len(known) < len(of) else [])]))
        return outcome, f"{', '.join(shown)}{note}"

    def _slope(self, claim: Claim, panels: Sequence[Panel]) -> Part:
        """Whether a number goes like a power of the number of the condition, by a line for every seed."""
        low = -math.inf if claim.least is None else claim.least
        high = math.inf if claim.most is None else claim.most
        across, parts = np.log([panel.number for panel in panels]), []
        for label in claim.methods:
            each = [self._numbers(claim, panel, label) for panel in panels]
            seeds = sorted(set.intersection(*({*of} for of in each)))
            with np.errstate(divide="ignore", invalid="ignore"):
                heights = np.log([[of[seed] for seed in seeds] for of in each])
            centred = across - across.mean()
            ours = decisions.mean(centred @ heights / (centred @ centred))
            note = "" if math.isinf(ours.high) else f" [{ours.low:.2f}, {ours.high:.2f}]"
            parts.append((ours.within(low, high), f"{self._name(label)} {ours.number:.2f}{note}"))
        return together(outcome for outcome, _ in parts), ", ".join(words for _, words in parts)

    def _trend(self, claim: Claim, panels: Sequence[Panel]) -> Part:
        return self._along(claim, panels, 1 if claim.direction == "rising" else -1, self._differences(claim, panels))

    def _approach(self, claim: Claim, panels: Sequence[Panel]) -> Part:
        distances = [{seed: abs(of) for seed, of in each.items()} for each in self._differences(claim, panels)]
        return self._along(claim, panels, -1, distances)

    def _differences(self, claim: Claim, panels: Sequence[Panel]) -> list[dict[int, float]]:
        """The first method minus the second, or the first alone, for every condition and seed."""
        found = []
        for panel in panels:
            first, *second = (self._numbers(claim, panel, label) for label in claim.methods)
            other = second[0] if second else dict.fromkeys(first, 0.0)
            found.append({seed: first[seed] - other[seed] for seed in first.keys() & other.keys()})
        return found

    def _along(self, claim: Claim, panels: Sequence[Panel], sign: int, each: Sequence[Mapping[int, float]]) -> Part:
        """Whether numbers rise, or fall, from each condition to the next."""
        column = self._columns(claim)[0]
        shown = ", ".join(
            f"{panel.title}: {column.shown(float(np.mean([*finished(of).values()]))) if finished(of) else 'unknown'}"
            + (" (diverged)" if len(finished(of)) < len(of) else "")
            for panel, of in zip(panels, each, strict=True)
        )
        first = [self._numbers(claim, panel, claim.methods[0]) for panel in panels]
        if any(len(finished(of)) < len(of) for of in first):
            return Outcome.FAILS, shown
        if any(len(finished(of)) < len(of) for of in each):
            return Outcome.UNDECIDED, shown
        steps = [
            decisions.mean([sign * (b[seed] - a[seed]) for seed in sorted(a.keys() & b.keys())])
            for a, b in itertools.pairwise(each)
        ]
        if not steps:
            return Outcome.UNDECIDED, shown
        least = min(steps, key=lambda step: step.number)
        return together(step.within(least=0.0) for step in steps), f"{shown} (least step {least.shown(column)})"


_NOT_RUN: Part = (Outcome.NOT_RUN, "")


def _printed(text: str) -> tuple[float, float]:
    """A printed number and its deviation.

    >>> _printed("97.12 ± 0.07"), _printed("~2e-4")
    ((97.12, 0.07), (0.0002, 0.0))
    """
    parts = [float(part) for part in re.findall(r"-?[\d.]+(?:e[+-]?\d+)?", text)]
    return parts[0], parts[1] if len(parts) > 1 else 0.0
