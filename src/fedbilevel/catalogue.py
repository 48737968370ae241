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
from fedbilevel.engines.plan import Plan, plan
from fedbilevel.task import Task

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
    return "client weighting" if kind.weighting else f"{kind.lower_level} lower level"


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


def _linear(cost: Callable[[int, int], int]) -> str:
    """The formula of a cost that is affine in p and d, found from three evaluations."""
    p, d = 300, 1000
    base = cost(p, d)
    of_p, of_d = cost(p + 1, d) - base, cost(p, d + 1) - base
    terms = [(of_p, "p"), (of_d, "d"), (base - of_p * p - of_d * d, "")]
    texts = [f"{count}{name}" if count != 1 or not name else name for count, name in terms if count]
    return " + ".join(texts).replace("+ -", "- ") or "0"


def traced(kind: type[Algorithm]) -> dict[str, str]:
    """Exchanges, floats and oracle calls per round and participating client, with default hyper-parameters; "random"
    where they depend on how often a loop is made in this round.
    """
    plans: dict[tuple[int, int], Plan] = {}

    def at(p: int, d: int) -> Plan:
        if (p, d) not in plans:
            plans[p, d] = plan(_task(kind, p, d), kind())
        return plans[p, d]

    def text(quantity: Callable[[Plan], int]) -> str:
        first, second = (_linear(lambda p, d, n=n: quantity(at(p, d).at(n))) for n in (1, 2))
        return first if first == second else "random"

    counts = ((name, text(lambda cost, name=name: cost.oracles[name])) for name in ORACLES)
    return {
        "exchanges": text(lambda cost: cost.exchanges),
        "down": text(lambda cost: cost.down),
        "up": text(lambda cost: cost.up),
        "oracles": ", ".join(f"{count} {name}" for name, count in counts if count != "0") or "none",
    }


def _sentences(text: str) -> list[str]:
    """Sentences end with a full stop before a capital letter or a word in code."""
    return re.split(r"(?<=[.)])\s+(?=[A-Z`])", " ".join(text.split()))


def entry(name: str) -> Entry:
    """Everything about one algorithm."""
    kind = ALGORITHMS[name]
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    title = " ".join(paragraphs[0].split()).split(": ", 1)[-1].rstrip(".")
    citation = re.split(r"(?<=\d{4})(?=[.,:]|$)", " ".join(paragraphs[1].split()))[0].strip(".")
    last = _sentences(paragraphs[-1])
    pick = lambda words: next((s for s in last if re.search(words, s)), "")
    return Entry(
        name=name,
        title=title[0].upper() + title[1:],
        citation=citation,
        problem=problem_class(kind),
        formula=last[0].rstrip("."),
        assumes=pick("^Assumes").removeprefix("Assumes ").rstrip("."),
        exactness=pick(r"xact on|xact for|s exact|NOT exact|displaced|limit is|solution").rstrip("."),
        source="reconstruction" if "reconstruction" in paragraphs[-1] else "follows the paper",
        **traced(kind),
    )


HEADER = """# Algorithms

Made by `fedbilevel algorithms --markdown` from the code: do not edit. p is the dimension of x, d that of y. Costs are
per round and participating client, with full participation, as tracing the code finds them with default
hyper-parameters ("random": a loop of random length); the sections below have the formulas. Gf, Gg: gradients of the
upper and lower loss; J: cross products; H: Hessian products. A vector that a client holds already is not sent again.
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
