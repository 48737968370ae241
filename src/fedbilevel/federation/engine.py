"""The server's engine of a federation: messages to sites, metrics from sites."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector
from fedbilevel.engines.messaging.blocks import is_block
from fedbilevel.engines.messaging.server import Messaging, State
from fedbilevel.engines.program import split_vectors
from fedbilevel.errors import NoQuorum


class Federation(Messaging):
    """A :class:`~fedbilevel.engines.messaging.Messaging` whose clients are sites with names."""

    task: Task | None = None
    """The task, if the server measures: with the task's own data, which are no secret. Otherwise the sites measure."""
    metric_names: frozenset[str] = frozenset()
    """What sites may measure: whatever else they send is ignored."""

    def metrics(self, state: State) -> Mapping[str, Any]:
        """The metrics of every site on its own rows, and their means."""
        if self.task is not None:
            x, y = self.solution(state)
            return self.task.measured(x, y) if jax.tree.leaves(x) and jax.tree.leaves(y) else {}  # somebody is offline
        found = {
            self.names[m]: {name: value for name, value in numbers.items() if name in self.metric_names}
            for m, numbers in self.evaluate(state).items()
        }
        names = dict.fromkeys(name for numbers in found.values() for name in numbers)
        means = {n: _mean([numbers[n] for numbers in found.values() if n in numbers]) for n in names}
        single = {f"{n}_{site}": value for site, numbers in found.items() for n, value in numbers.items()}
        # A mean has its name even if a site is called so that its own metric would have the same.
        return {**single, **means, "sites": len(found)}

    @property
    def reveals(self) -> bool:
        """Only what is no secret."""
        return self.task is not None

    def incomplete(self, state: State, reason: NoQuorum) -> tuple[Any, Any]:
        """x and y, without what stays at real sites, or at sites that are offline: that is an empty tree."""
        parts, structure = split_vectors(state.server)
        nothing = Vector({}, "x", owned=True)
        whole = jax.tree.unflatten(structure, [nothing if is_block(part) else part for part in parts])
        if self.program.algorithm.remembers == "run":
            known = self.program.algorithm.variables(whole)
            return known.get("x", nothing).tree, known.get("y", nothing).tree
        x, y = self.program.algorithm.solution(whole, None)
        return x.tree, y.tree


def metrics_of(task: Task) -> frozenset[str]:
    """The names of what sites measure, found with the server's blank rows."""
    x, y = task.problem.start(jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # blank rows have odd metrics
        return frozenset(task.measured(x.tree, y.tree))


def _mean(values: list[float]) -> float:
    """Of those that are numbers."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
