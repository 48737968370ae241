"""Which claims of a paper hold in our runs, and the verdict that follows from them."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedbilevel.reproduction.curves import Reproduced, ending
from fedbilevel.reproduction.files import PARAMETERS, Claim, Method, Panel, ResultColumn

ACROSS = ("best", "spread", "trend", "approach")
"""Kinds of claims that compare conditions."""
ALONE = ("near", "bound")
"""Kinds of claims that compare nothing with each other."""


@dataclass(frozen=True)
class Judged:
    """A claim, whether it holds, and the numbers it was judged by; ``partly``: it holds under those of its conditions
    that were run.
    """

    claim: Claim
    holds: bool
    numbers: str
    partly: bool = False

    @property
    def word(self) -> str:
        """The answer in words."""
        return "holds" if self.holds else "holds where it was run" if self.partly else "does not hold"


def _number(text: str) -> tuple[float, float]:
    """A printed number and its deviation.

    >>> _number("97.12 ± 0.07"), _number("~2e-4")
    ((97.12, 0.07), (0.0002, 0.0))
    """
    parts = [float(part) for part in re.findall(r"-?[\d.]+(?:e[+-]?\d+)?", text)]
    return parts[0], parts[1] if len(parts) > 1 else 0.0


class Judge:
    """Judges claims by the rows with these parameters, or, for methods that have none, by their other rows."""

    def __init__(self, done: Reproduced, parameters: str) -> None:
        self.done, self.parameters = done, parameters

    def method(self, label: str) -> Method:
        rows = [method for method in self.done.reproduction.methods if method.label == label]
        return next((method for method in rows if method.parameters == self.parameters), rows[0])

    def name(self, label: str) -> str:
        """The name of a method, with its parameters if it only has rows with others."""
        method = self.method(label)
        return label if method.parameters == self.parameters else method.title

    def panels(self, claim: Claim) -> list[Panel]:
        return [p for p in self.done.reproduction.panels if not claim.panels or p.title in claim.panels]

    def columns(self, claim: Claim) -> list[ResultColumn]:
        columns = list(self.done.reproduction.columns)
        if claim.column:
            return [column for column in columns if column.title == claim.column]
        return columns if claim.kind == "near" else columns[-1:]

    def claim(self, claim: Claim) -> Judged:
        judge = Judge(self.done, claim.parameters or self.parameters)
        panels = judge.panels(claim)
        ran = [p for p in panels if all(self.done.of(p, judge.method(label)) for label in claim.methods)]
        whole = len(ran) == len(panels) or not ran or claim.kind in ACROSS
        asked = claim if whole else replace(claim, panels=[panel.title for panel in ran])
        holds, numbers = getattr(judge, claim.kind)(asked)
        if whole:
            return Judged(claim, holds, "; ".join(numbers))
        return Judged(claim, False, "; ".join([*numbers, "not run under the other conditions"]), partly=holds)

    def values(self, panel: Panel, label: str, column: ResultColumn, claim: Claim) -> np.ndarray:
        """One number for each seed that everything compared has: methods under a condition, or conditions as well. NaN
        where a run did not finish, even if its seed is not one of these.
        """
        if claim.kind in ALONE:
            return self.done.values(panel, self.method(label), column, claim.over)
        panels = self.panels(claim) if claim.kind in ACROSS else [panel]
        ran = [{c.seed for c in self.done.of(p, self.method(each))} for p in panels for each in claim.methods]
        common = set.intersection(*(seeds for seeds in ran if seeds)) if any(ran) else set()
        return self.done.values(panel, self.method(label), column, claim.over, common)

    def shown(self, panel: Panel, label: str, column: ResultColumn, value: float) -> str:
        """A mean, or why there is none."""
        ended = ending(self.done.of(panel, self.method(label)))
        return ended.split(" in ")[0] if ended else column.shown(value)

    def near(self, claim: Claim) -> tuple[bool, list[str]]:
        far, all_ = [], 0
        for panel in self.panels(claim):
            for label in claim.methods:
                printed = self.done.reproduction.printed_of(label).get(panel.title, ())
                for column, text in zip(self.done.reproduction.columns, printed, strict=False):
                    if column not in self.columns(claim) or not text:
                        continue
                    paper, deviation = _number(text)
                    ours = float(self.values(panel, label, column, claim).mean())
                    all_ += 1
                    if not abs(ours - paper) <= max(claim.points, deviation):
                        numbers = f"{self.shown(panel, label, column, ours)} against {column.shown(paper)}"
                        far.append(f"{_at(panel)}{self.name(label)}, {column.title}: {numbers}")
        words = f"{all_ - len(far)} of {all_} are"
        return all_ > 0 and not far, [f"{words}; not: {far[0]}", *far[1:]] if far else [words]

    def order(self, claim: Claim) -> tuple[bool, list[str]]:
        return self._compared(claim, lambda count: itertools.pairwise(range(count)))

    def ahead(self, claim: Claim) -> tuple[bool, list[str]]:
        return self._compared(claim, lambda count: ((0, other) for other in range(1, count)))

    def _compared(self, claim: Claim, pairs: Callable[[int], Iterable[tuple[int, int]]]) -> tuple[bool, list[str]]:
        """Whether, under every condition, the first of each pair of methods is better than the second."""
        holds, numbers = True, []
        (column,) = self.columns(claim)
        for panel in self.panels(claim):
            values = [self.values(panel, label, column, claim) for label in claim.methods]
            better = [column.sign * (values[a] - values[b]) for a, b in pairs(len(values))]
            here = all(_positive(difference - claim.points) for difference in better)
            note = f" ({_lead(min(better, key=np.mean), column)})" if here else " (no)"
            numbers.append(f"{_at(panel)}{self._listed(panel, claim, column, values)}{note}")
            holds &= here
        return holds, numbers

    def _listed(self, panel: Panel, claim: Claim, column: ResultColumn, values: Sequence[np.ndarray]) -> str:
        pairs = zip(claim.methods, values, strict=True)
        return ", ".join(f"{self.name(label)} {self.shown(panel, label, column, some.mean())}" for label, some in pairs)

    def level(self, claim: Claim) -> tuple[bool, list[str]]:
        holds, numbers = True, []
        (column,) = self.columns(claim)
        for panel in self.panels(claim):
            values = [self.values(panel, label, column, claim) for label in claim.methods]
            here = all(abs(some.mean() - values[0].mean()) <= claim.points for some in values)
            numbers.append(f"{_at(panel)}{self._listed(panel, claim, column, values)}{'' if here else ' (no)'}")
            holds &= here
        return holds, numbers

    def best(self, claim: Claim) -> tuple[bool, list[str]]:
        (column,) = self.columns(claim)
        holds, numbers = True, []
        for label in claim.methods:
            values = [self.values(panel, label, column, claim) for panel in self.panels(claim)]
            better = [_positive(column.sign * (values[0] - other)) for other in values[1:]]
            holds &= bool(better) and all(better)
            pairs = zip(self.panels(claim), values, strict=True)
            shown = (f"{_at(panel)}{self.shown(panel, label, column, some.mean())}" for panel, some in pairs)
            numbers.append(f"{self.name(label)}, {', '.join(shown)}")
        return holds, numbers

    def bound(self, claim: Claim) -> tuple[bool, list[str]]:
        holds, numbers = True, []
        (column,) = self.columns(claim)
        low = -math.inf if claim.least is None else claim.least
        high = math.inf if claim.most is None else claim.most
        for panel in self.panels(claim):
            for label in claim.methods:
                value = float(self.values(panel, label, column, claim).mean())
                holds &= low <= value <= high
                numbers.append(f"{_at(panel)}{self.name(label)} {self.shown(panel, label, column, value)}")
        return holds, numbers

    def spread(self, claim: Claim) -> tuple[bool, list[str]]:
        (column,) = self.columns(claim)
        spreads, numbers = [], []
        for label in claim.methods:
            values = [float(self.values(panel, label, column, claim).mean()) for panel in self.panels(claim)]
            runs = [self.done.of(panel, self.method(label)) for panel in self.panels(claim)]
            ran = all(runs)
            diverges = ran and any(map(ending, runs))  # then it varies most; without runs nothing is known
            spreads.append(math.inf if diverges else max(values) - min(values) if ran else math.nan)
            shown = "diverges" if diverges else column.shown(spreads[-1]) if ran else "not run"
            numbers.append(f"{self.name(label)} {shown}")
        return all(spreads[0] < other for other in spreads[1:]), numbers

    def trend(self, claim: Claim) -> tuple[bool, list[str]]:
        means = np.array([differences.mean() for differences in self._differences(claim)])
        return self._along(claim, means, 1 if claim.direction == "rising" else -1)

    def approach(self, claim: Claim) -> tuple[bool, list[str]]:
        distances = np.array([np.abs(differences).mean() for differences in self._differences(claim)])
        return self._along(claim, distances, -1)

    def _differences(self, claim: Claim) -> list[np.ndarray]:
        """The first method minus the second, or the first alone, for every condition and seed."""
        (column,) = self.columns(claim)
        each = lambda panel: [self.values(panel, label, column, claim) for label in claim.methods]
        return [first - (second[0] if second else 0.0) for first, *second in map(each, self.panels(claim))]

    def _along(self, claim: Claim, values: np.ndarray, sign: int) -> tuple[bool, list[str]]:
        (column,) = self.columns(claim)
        pairs = zip(self.panels(claim), values, strict=True)
        shown = [f"{_at(panel)}{column.shown(value) if math.isfinite(value) else 'unknown'}" for panel, value in pairs]
        return len(values) > 1 and bool(np.all(np.diff(values) * sign > 0)), shown


def _positive(differences: np.ndarray) -> bool:
    """Whether numbers, one for each seed, are positive in the mean and for most seeds; never with NaN."""
    return bool(differences.mean() > 0 and np.mean(differences > 0) > 0.5)


def _lead(differences: np.ndarray, column: ResultColumn) -> str:
    """How far one is ahead of another: the mean over seeds with its standard error, and for how many seeds it is."""
    count = len(differences)
    if count == 1:
        return f"by {column.shown(differences[0])}, one seed"
    error = differences.std(ddof=1) / math.sqrt(count)
    seeds = int(np.sum(differences > 0))
    most = "" if seeds == count else f", in {seeds} of {count} seeds"
    return f"by {column.shown(differences.mean())} ± {column.shown(error)}{most}"


def _at(panel: Panel) -> str:
    return f"{panel.title}: " if panel.title else ""


def judged(done: Reproduced) -> dict[str, list[Judged]]:
    """All claims, by the parameters of the rows that they were judged by."""
    kinds = list(dict.fromkeys(method.parameters for method in done.reproduction.methods))
    return {kind: [Judge(done, kind).claim(claim) for claim in done.reproduction.claims] for kind in kinds}


def verdict(done: Reproduced) -> str:
    """One of three: it follows from the claims and nothing else."""
    if done.reproduction.smoke:
        return "none, this was a smoke run"
    by = {kind: [each for each in claims if not each.claim.ours] for kind, claims in judged(done).items()}
    if all(each.holds for each in by.get("printed", ())) and "printed" in by:
        return "reproduced"
    for kind, claims in by.items():
        if kind != "printed" and all(each.holds for each in claims):
            printed = "" if "printed" in by else "; the paper prints none"
            return f"reproduced with other parameters ({PARAMETERS[kind]}{printed})"
    held = {kind: sum(each.holds for each in claims) for kind, claims in by.items()}
    best = max(held, key=held.__getitem__)
    return f"not reproduced ({held[best]} of {len(by[best])} claims hold, parameters: {PARAMETERS[best]})"
