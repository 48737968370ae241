"""What is known about every algorithm, read from the code itself: docstrings and traced costs. Makes
docs/algorithms.md.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core import Algorithm, Problem
from fedbilevel.core.task import Task
from fedbilevel.engines.plan import Plan, plan

ORACLES = ("Gf", "Gg", "J", "H")


@dataclass(frozen=True)
class Entry:
    """One algorithm: texts from its docstring, and its traced cost per round with default hyper-parameters."""

    name: str
    title: str
    citation: str
    problem: str
    exchanges: str
    down: str
    up: str
    oracles: str
    formula: str
    assumes: str
    exactness: str
    source: str


def problem_class(kind: type[Algorithm]) -> str:
    """What an algorithm solves."""
    if not kind.bilevel:
        return "single level"
    if kind.weighting:
        return "client weighting"
    return f"{kind.lower_level} lower level" + (", client weighting" if kind.upper_at == "either" else "")


def _loss(x: Any, y: Any, batch: Any) -> Any:
    return jnp.sum(x) * jnp.sum(y) + jnp.sum(y**2) * jnp.mean(batch)


def _task(kind: type[Algorithm], p: int, d: int) -> Task:
    """A task of these dimensions on which nothing is ever computed."""
    lower_level: Any = kind.lower_level
    problem = Problem(
        _loss, _loss, lambda key: (np.zeros(p), np.zeros(d)), lower_level=lower_level, weighting=kind.weighting
    )
    clients, rows = p if kind.weighting else 2, np.zeros(1)
    server = rows if kind.upper_at == "server" else None
    return Task(problem, [{"train": rows, "val": rows}] * clients, batch_size=None, server=server)


def _coefficients(cost: Callable[[int, int], int]) -> np.ndarray:
    """Of p, d and 1 in a cost that is affine in p and d, found from three evaluations."""
    p, d = 300, 1000
    base = cost(p, d)
    of_p, of_d = cost(p + 1, d) - base, cost(p, d + 1) - base
    return np.array([of_p, of_d, base - of_p * p - of_d * d])


def _formula(fixed: np.ndarray, repeated: np.ndarray) -> str:
    """A cost as people write it; N is how often a loop of random length is made.

    >>> _formula(np.array([1, 2, 0]), np.array([0, 1, 0]))
    'p + 2d + Nd'
    """
    terms = [
        f"{'' if count == 1 and name else count}{name}"
        for counts, names in ((fixed, ("p", "d", "")), (repeated, ("Np", "Nd", "N")))
        for count, name in zip(counts.tolist(), names, strict=True)
        if count
    ]
    return " + ".join(terms).replace("+ -", "- ") or "0"


def traced(kind: type[Algorithm]) -> dict[str, str]:
    """Exchanges, floats and oracle calls per round and participating client, with default hyper-parameters; "random"
    where they depend on how often several loops of random length are made.
    """
    plans: dict[tuple[int, int], Plan] = {}

    def at(p: int, d: int) -> Plan:
        if (p, d) not in plans:
            plans[p, d] = plan(_task(kind, p, d), kind())
        return plans[p, d]

    def text(quantity: Callable[[Plan], int]) -> str:
        once, twice = (_coefficients(lambda p, d, n=n: quantity(at(p, d).at(n))) for n in (1, 2))
        several = sum(None in e.loops for e in at(300, 1000).round) > 1
        return "random" if several and np.any(once != twice) else _formula(2 * once - twice, twice - once)

    counts = ((name, text(lambda cost, name=name: cost.oracles[name])) for name in ORACLES)
    return {
        "exchanges": text(lambda cost: cost.exchanges),
        "down": text(lambda cost: cost.down),
        "up": text(lambda cost: cost.up),
        "oracles": ", ".join(f"{count} {name}" for name, count in counts if count != "0") or "none",
    }


def _sentences(text: str) -> list[str]:
    """Sentences end with a full stop before a capital letter or a word in code."""
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(text.split()))


def entry(name: str) -> Entry:
    """Everything about one algorithm."""
    kind = ALGORITHMS[name]
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    title = " ".join(paragraphs[0].split()).split(": ", 1)[-1].rstrip(".")
    citation = re.split(r"(?<=\d{4})(?=[,:;]|\.? |\.?$)", _sentences(paragraphs[1])[0])[0].strip(".")
    last = _sentences(next(p for p in paragraphs if "per round" in p and "Assumes" in p))
    pick = lambda words: next((s for s in last if re.search(words, s)), "")
    return Entry(
        name=name,
        title=title[0].upper() + title[1:],
        citation=citation,
        problem=problem_class(kind),
        formula=last[0].rstrip("."),
        assumes=pick("^Assumes").removeprefix("Assumes ").rstrip("."),
        exactness=pick(r"[Ee]xact on|[Ee]xact for|s exact|NOT exact|^Exact|displaced?|limit is").rstrip("."),
        source="reconstruction" if any("reconstruction" in s for s in last) else "follows the paper",
        **traced(kind),
    )


HEADER = """# Algorithms

Made by `fedbilevel algorithms --markdown` from the code: do not edit. p is the dimension of x, d that of y. Costs are
per round and participating client, with full participation, as tracing the code finds them with default
hyper-parameters (N: how often a loop of random length is made; "random": several such loops); the sections below have
the formulas. Gf, Gg: gradients of the upper and lower loss; J: cross products; H: Hessian products. A vector that a
client holds already is not sent again.
"""


def markdown() -> str:
    """The text of docs/algorithms.md: a table of costs, then a section for every algorithm."""
    entries = [entry(name) for name in ALGORITHMS]
    lines = [
        HEADER,
        "| name | problem | exchanges | floats down | floats up | oracle calls |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| `{e.name}` | {e.problem} | {e.exchanges} | {e.down} | {e.up} | {e.oracles} |" for e in entries]
    lines += ["", "| name | assumes | where clients differ | text |", "|---|---|---|---|"]
    lines += [f"| `{e.name}` | {e.assumes} | {e.exactness} | {e.source} |" for e in entries]
    for e in entries:
        lines += ["", f"## {e.name}", "", f"{e.title}.", "", f"{e.citation}.", "", f"{e.formula}."]
    return "\n".join(lines).replace("``", "`") + "\n"
