"""The verdict on an experiment: it follows from the claims about the paper's own method, and from nothing else."""

from collections import Counter
from collections.abc import Mapping, Sequence

from fedbilevel.reproduction.claims import Judge, Judged
from fedbilevel.reproduction.curves import Reproduced
from fedbilevel.reproduction.decisions import Outcome
from fedbilevel.reproduction.files import PARAMETERS

NAMES = {
    Outcome.HOLDS: "Holds",
    Outcome.UNDECIDED: "Undecided",
    Outcome.FAILS: "Does not hold",
    Outcome.NOT_RUN: "Not run",
}


def judged(done: Reproduced) -> dict[str, list[Judged]]:
    """All claims, by the parameters of the rows that they were judged by."""
    kinds = list(dict.fromkeys(method.parameters for method in done.reproduction.methods))
    return {kind: [Judge(done, kind).claim(claim) for claim in done.reproduction.claims] for kind in kinds}


def verdict(done: Reproduced) -> str:
    """Reproduced, reproduced with other parameters, partly reproduced (k of n), or not reproduced; undecided if nothing
    holds and nothing fails.
    """
    if done.reproduction.smoke:
        return "none, this was a smoke run"
    kind, counts = _deciding(judged(done), "method")
    total, held = counts.total(), counts[Outcome.HOLDS]
    if held == total:
        printed = "" if any(m.parameters == "printed" for m in done.reproduction.methods) else "; the paper prints none"
        return "reproduced" if kind == "printed" else f"reproduced with other parameters ({PARAMETERS[kind]}{printed})"
    if held:
        return f"partly reproduced ({_counted(counts)}; parameters: {PARAMETERS[kind]})"
    return f"{'not reproduced' if counts[Outcome.FAILS] else 'undecided'} ({_counted(counts)})"


def headline(done: Reproduced) -> dict[str, str]:
    """What holds, what is undecided and what does not hold of the claims about the paper's own method, in its words,
    and how many hold of the others.
    """
    by = judged(done)
    kind, _ = _deciding(by, "method")
    lines = {}
    for outcome, name in NAMES.items():
        if words := _words(by[kind], "method", outcome):
            lines[name] = f"{words}."
    for other in by:
        if other != kind:
            lines[f"With parameters: {PARAMETERS[other]}"] = f"{_counted(_count(by[other], 'method'))}."
    if any(claim.about == "baselines" for claim in done.reproduction.claims):
        kind, counts = _deciding(by, "baselines")
        held = _words(by[kind], "baselines", Outcome.HOLDS)
        words = f"{_counted(counts)} (parameters: {PARAMETERS[kind]})"
        lines["Baselines, judged apart"] = f"{words}{': ' if held else ''}{held}."
    return lines


def _words(claims: Sequence[Judged], about: str, outcome: Outcome) -> str:
    """The claims with an outcome, in words, with the conditions if these are not all."""
    some = [each for each in claims if each.claim.about == about]
    return "; ".join(
        f"{each.claim.words}{f' ({under})' if (under := each.under(outcome)) else ''}"
        for each in some
        if any(statement.outcome == outcome for statement in each.statements)
    )


def _deciding(by: Mapping[str, Sequence[Judged]], about: str) -> tuple[str, Counter[Outcome]]:
    """The parameters with which most claims hold, the paper's first, and how many do."""
    counts = {kind: _count(claims, about) for kind, claims in by.items()}
    order = sorted(counts, key=lambda kind: kind != "printed")
    best = max(order, key=lambda kind: (counts[kind][Outcome.HOLDS], counts[kind][Outcome.UNDECIDED]))
    return best, counts[best]


def _count(claims: Sequence[Judged], about: str) -> Counter[Outcome]:
    """The outcomes of all claims of one kind, each under every condition that it is about."""
    return Counter(statement.outcome for each in claims if each.claim.about == about for statement in each.statements)


def _counted(counts: Counter[Outcome]) -> str:
    undecided = f", {counts[Outcome.UNDECIDED]} undecided" if counts[Outcome.UNDECIDED] else ""
    return f"{counts[Outcome.HOLDS]} of {counts.total()} hold{undecided}"
