"""Several settings or seeds of one algorithm at once, as rows of arrays (``vmap``)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.core import Key
from fedbilevel.core.data import Data
from fedbilevel.engines import simulation
from fedbilevel.engines.program import Program
from fedbilevel.engines.simulation import Counts, Simulation, State


def _stacked(programs: Sequence[Program]) -> Program:
    """Merge programs that differ only in numbers into one whose numbers have a leading axis. They are stacked inside
    the compiled program: only Python numbers are "weak" and leave vectors in single precision.
    """
    return jax.tree.map(lambda *numbers: jnp.stack(numbers), *programs)


@jax.jit
def _start(programs: Sequence[Program], counts: Counts, data: Data, keys: Key, x: Any, y: Any) -> State:
    start = lambda program, key: simulation.start(program, counts, data, key, x, y)
    return jax.vmap(start)(_stacked(programs), keys)


@jax.jit
def _advance(programs: Sequence[Program], data: Data, states: State, rounds: jax.Array) -> State:
    advance = lambda program, state: simulation.advance(program, data, state, rounds)
    return jax.vmap(advance)(_stacked(programs), states)


class Lanes:
    """Runs several settings or seeds at once: their states are one state whose arrays have a leading axis. A lane whose
    result is not finite stops, and the others continue.
    """

    def __init__(self, engines: Sequence[Simulation]) -> None:
        self.first, self.programs = engines[0], tuple(engine.program for engine in engines)
        structures = {jax.tree.structure(program) for program in self.programs}
        assert len(structures) == 1, "settings differ in more than numbers"

    def start(self, seeds: Sequence[int], x: Any = None, y: Any = None) -> State:
        """The states before the first round; one seed for each lane."""
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        return _start(self.programs, self.first.plan.no_counts(), self.first.task.data, keys, x, y)

    def advance(self, states: State, rounds: int) -> State:
        """Advance every lane by this number of rounds."""
        return _advance(self.programs, self.first.task.data, states, jnp.asarray(rounds))

    @staticmethod
    def lane(states: State, number: int) -> State:
        """The state of one lane."""
        return jax.tree.map(lambda a: a[number], states)
