"""What is known about an algorithm: the texts of its class, and its traced costs. Makes docs/algorithms.md."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core import Algorithm, Problem
from fedbilevel.core.task import Task
from fedbilevel.engines.accounting import ORACLES
from fedbilevel.engines.plan import Plan, plan

FACTS = ("citation", "source", "assumes", "exact", "alone", "costs")
"""The fields of :class:`Algorithm` with texts for readers."""
UNKNOWN = "-"


@dataclass(frozen=True)
class Entry:
    """One algorithm: the texts of its class, and its traced cost per round with default hyper-parameters."""

    name: str
    summary: str
    problem: str
    facts: Mapping[str, str]
    exchanges: str
    down: str
    up: str
    oracles: str


def summary(kind: type[Algorithm]) -> str:
    """The first line of its docstring."""
    text = (kind.__doc__ or "").strip()
    written = not text.startswith(f"{kind.__name__}(")  # otherwise it is the signature, which dataclasses put there
    return text.partition("\n")[0] if text and written else UNKNOWN


def facts(kind: type[Algorithm]) -> dict[str, str]:
    """Its texts for readers by name, with a dash for each that it does not have."""
    return {name: " ".join(getattr(kind, name).split()) or UNKNOWN for name in FACTS}


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
    """A cost as people write it; N is how often a loop of random length runs.

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
    where they depend on how often several loops of random length run.
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


def entry(name: str, kind: type[Algorithm]) -> Entry:
    """Everything about one algorithm."""
    return Entry(name, summary(kind), problem_class(kind), facts(kind), **traced(kind))


HEADER = """# Algorithms

Made by `fedbilevel algorithms --markdown` from the code: do not edit. p is the dimension of x, d that of y. Costs are
per round and participating client, with full participation, as tracing the code finds them with default
hyper-parameters (N: how often a loop of random length runs; "random": several such loops); the sections below have the
formulas. Gf, Gg: gradients of the upper and lower loss; J: cross products; H: Hessian products. A vector that a
client holds already is not sent again. A reconstruction was written without the text of the paper.
"""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(*columns: str) -> tuple[str, str]:
    """The head of a table."""
    return _row(*columns), "|" + "---|" * len(columns)


def markdown(algorithms: Mapping[str, type[Algorithm]] = ALGORITHMS) -> str:
    """The text of docs/algorithms.md: a table of costs, a table of limits, then a section for every algorithm."""
    entries = [entry(name, kind) for name, kind in algorithms.items()]
    lines = [HEADER, *_table("name", "problem", "exchanges", "floats down", "floats up", "oracle calls")]
    lines += [_row(f"`{e.name}`", e.problem, e.exchanges, e.down, e.up, e.oracles) for e in entries]
    lines += ["", *_table("name", "assumes", "where clients differ", "with one client", "the code")]
    lines += [
        _row(f"`{e.name}`", *(e.facts[fact] for fact in ("assumes", "exact", "alone", "source"))) for e in entries
    ]
    for e in entries:
        lines += ["", f"## {e.name}", "", e.summary, "", f"{e.facts['citation']}.", "", f"{e.facts['costs']}."]
    return "\n".join(lines) + "\n"
