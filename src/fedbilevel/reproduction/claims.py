"""Which claims of a paper hold by our runs, and the verdict that follows from them."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedbilevel.reproduction.curves import Reproduced
from fedbilevel.reproduction.files import PARAMETERS, Claim, Column, Method, Panel


@dataclass(frozen=True)
class Judged:
    """A claim, whether it holds, and the numbers it was judged by."""

    claim: Claim
    holds: bool
    numbers: str


def _number(text: str) -> tuple[float, float]:
    """A printed number and its deviation.

    >>> _number("97.12 ± 0.07"), _number("~2e-4")
    ((97.12, 0.07), (0.0002, 0.0))
    """
    parts = [float(part) for part in re.findall(r"[\d.]+(?:e-?\d+)?", text)]
    return parts[0], parts[1] if len(parts) > 1 else 0.0


class Judge:
    """Judges claims by the rows with these parameters, or, of methods that have none, by what there is."""

    def __init__(self, done: Reproduced, parameters: str) -> None:
        self.done, self.parameters = done, parameters

    def method(self, label: str) -> Method:
        rows = [method for method in self.done.reproduction.methods if method.label == label]
        return next((method for method in rows if method.parameters == self.parameters), rows[0])

    def panels(self, claim: Claim) -> list[Panel]:
        return [p for p in self.done.reproduction.panels if not claim.panels or p.title in claim.panels]

    def columns(self, claim: Claim) -> list[Column]:
        columns = list(self.done.reproduction.columns)
        if claim.column:
            return [column for column in columns if column.title == claim.column]
        return columns if claim.kind == "near" else columns[-1:]

    def claim(self, claim: Claim) -> Judged:
        holds, numbers = getattr(self, claim.kind)(claim)
        return Judged(claim, holds, "; ".join(numbers))

    def value(self, panel: Panel, label: str, column: Column, claim: Claim) -> float:
        """The mean over the seeds that all have which are compared: methods under a condition, or conditions, too."""
        panels = self.panels(claim) if claim.kind in ("best", "spread", "trend") else [panel]
        ran = [{c.seed for c in self.done.of(p, self.method(each))} for p in panels for each in claim.methods]
        common = set.intersection(*(seeds for seeds in ran if seeds)) if any(ran) else set()
        return self.done.value(panel, self.method(label), column, claim.over, common)[0]

    def shown(self, panel: Panel, label: str, column: Column, value: float) -> str:
        return f"{label} {column.shown(value) if self.done.of(panel, self.method(label)) else 'not run'}"

    def near(self, claim: Claim) -> tuple[bool, list[str]]:
        far, all_ = [], 0
        for panel in self.panels(claim):
            for label in claim.methods:
                printed = self.method(label).paper.get(panel.title, ())
                for column, text in zip(self.done.reproduction.columns, printed, strict=False):
                    if column not in self.columns(claim) or not text:
                        continue
                    paper, deviation = _number(text)
                    ours = self.value(panel, label, column, claim)
                    all_ += 1
                    if not abs(ours - paper) <= max(claim.points, deviation):
                        numbers = f"{column.shown(ours)} against {column.shown(paper)}"
                        far.append(f"{_at(panel)}{label}, {column.title}: {numbers}")
        return not far, [f"{all_ - len(far)} of {all_} are{', not ' if far else ''}{far[0] if far else ''}", *far[1:]]

    def order(self, claim: Claim) -> tuple[bool, list[str]]:
        def in_order(values: Sequence[float], sign: int) -> bool:
            return all(sign * (a - b) > claim.points for a, b in itertools.pairwise(values))  # never with NaN

        return self._everywhere(claim, in_order)

    def ahead(self, claim: Claim) -> tuple[bool, list[str]]:
        return self._everywhere(claim, lambda v, sign: all(sign * (v[0] - other) > claim.points for other in v[1:]))

    def level(self, claim: Claim) -> tuple[bool, list[str]]:
        return self._everywhere(claim, lambda values, _: all(abs(v - values[0]) <= claim.points for v in values))

    def _everywhere(self, claim: Claim, seen: Callable[[Sequence[float], int], bool]) -> tuple[bool, list[str]]:
        """Whether something is seen of the methods' values under each condition."""
        holds, numbers = True, []
        (column,) = self.columns(claim)
        for panel in self.panels(claim):
            values = [self.value(panel, label, column, claim) for label in claim.methods]
            here = seen(values, column.sign)
            holds &= here
            pairs = zip(claim.methods, values, strict=True)
            shown = ", ".join(self.shown(panel, label, column, value) for label, value in pairs)
            numbers.append(f"{_at(panel)}{shown}{'' if here else ' (no)'}")
        return holds, numbers

    def best(self, claim: Claim) -> tuple[bool, list[str]]:
        (column,) = self.columns(claim)
        holds, numbers = True, []
        for label in claim.methods:
            first, *others = (self.value(panel, label, column, claim) for panel in self.panels(claim))
            holds &= all(column.sign * (first - other) > 0 for other in others)
            panels = [panel.title for panel in self.panels(claim)]
            shown = [f"{at}: {column.shown(v)}" for at, v in zip(panels, [first, *others], strict=True)]
            numbers.append(f"{label} {', '.join(shown)}")
        return holds, numbers

    def bound(self, claim: Claim) -> tuple[bool, list[str]]:
        holds, numbers = True, []
        (column,) = self.columns(claim)
        low = -math.inf if claim.least is None else claim.least
        high = math.inf if claim.most is None else claim.most
        for panel in self.panels(claim):
            for label in claim.methods:
                value = self.value(panel, label, column, claim)
                holds &= low <= value <= high
                numbers.append(f"{_at(panel)}{self.shown(panel, label, column, value)}")
        return holds, numbers

    def spread(self, claim: Claim) -> tuple[bool, list[str]]:
        (column,) = self.columns(claim)
        spreads = {}
        for label in claim.methods:
            values = [self.value(panel, label, column, claim) for panel in self.panels(claim)]
            # A method that diverges under some condition varies most.
            spreads[label] = math.inf if any(map(math.isnan, values)) else max(values) - min(values)
        first, *others = spreads.values()
        return all(first < other for other in others), [f"{k} {column.shown(v)}" for k, v in spreads.items()]

    def trend(self, claim: Claim) -> tuple[bool, list[str]]:
        (column,) = self.columns(claim)
        values = []
        for panel in self.panels(claim):
            first, *second = (self.value(panel, label, column, claim) for label in claim.methods)
            values.append(first - (second[0] if second else 0.0))
        steps = np.diff(values) * (1 if claim.direction == "rising" else -1)
        shown = [f"{_at(p)}{column.shown(v)}" for p, v in zip(self.panels(claim), values, strict=True)]
        return bool(np.all(steps > 0)), shown


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
    best = max(by.values(), key=lambda claims: sum(each.holds for each in claims))
    return f"not reproduced ({sum(each.holds for each in best)} of {len(best)} claims hold)"
