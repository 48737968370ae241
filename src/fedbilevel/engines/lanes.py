"""Settings of one algorithm that share their compiled program: step sizes and other numbers become its arguments.

:class:`Shared` is the simulator for one setting of many: what the first of them compiled, all others use.
:class:`Lanes` runs several settings or seeds at once, as rows of arrays (``vmap``). Both give what :class:`Simulation`
gives, to rounding.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Key
from fedbilevel.core.data import Data
from fedbilevel.core.schedules import Schedule
from fedbilevel.core.task import Task
from fedbilevel.engines.participation import Participation
from fedbilevel.engines.simulation import Batching, Simulation, SimulationProgram, State, _advance, _start

Numbers = tuple[float, ...]


def numeric(algorithm: Algorithm) -> tuple[str, ...]:
    """The hyper-parameters that are numbers, or schedules, whose scale is one."""
    values = ((field.name, getattr(algorithm, field.name)) for field in fields(algorithm))
    return tuple(name for name, value in values if isinstance(value, float | Schedule))


def number(algorithm: Algorithm, name: str) -> float:
    """The value of a numeric hyper-parameter; the scale of a schedule."""
    value = getattr(algorithm, name)
    return value.scale if isinstance(value, Schedule) else value


def with_numbers(algorithm: Algorithm, names: Sequence[str], values: Sequence[Any]) -> Algorithm:
    """The same algorithm with other numbers, which may be traced ones: nothing is checked."""
    changed = copy.copy(algorithm)
    for name, value in zip(names, values, strict=True):
        old = getattr(algorithm, name)
        if isinstance(old, Schedule):
            schedule = copy.copy(old)
            object.__setattr__(schedule, "scale", value)
            value = schedule
        object.__setattr__(changed, name, value)
    return changed


def pattern(algorithm: Algorithm, names: Sequence[str]) -> Algorithm:
    """What settings have in common that differ only in these numbers: equal for all of them."""
    return with_numbers(algorithm, names, [1.0] * len(names))


def _with_numbers(program: SimulationProgram, names: Sequence[str], values: Sequence[Any]) -> SimulationProgram:
    changed = copy.copy(program)
    object.__setattr__(changed, "algorithm", with_numbers(program.algorithm, names, values))
    return changed


# The compiled functions of the simulator before compilation: here their program holds traced numbers.
_start_one, _advance_one = inspect.unwrap(_start), inspect.unwrap(_advance)


@partial(jax.jit, static_argnames=("program", "names", "exchanges"))
def _start_shared(
    program: SimulationProgram, names: tuple[str, ...], exchanges: int, values: Numbers, data: Data, *rest: Any
) -> State:
    return _start_one(_with_numbers(program, names, values), exchanges, data, *rest)


@partial(jax.jit, static_argnames=("program", "names", "first_exchange"))
def _advance_shared(
    program: SimulationProgram, names: tuple[str, ...], first_exchange: int, values: Numbers, data: Data, *rest: Any
) -> State:
    return _advance_one(_with_numbers(program, names, values), first_exchange, data, *rest)


def _each_lane(function: Callable[..., State], settings: Sequence[Numbers], *rows: Any) -> State:
    """All lanes at once. Numbers are stacked here, inside the compiled program: only as Python's own are they "weak",
    and leave vectors in single precision as they are.
    """
    columns = tuple(jnp.stack(column) for column in zip(*settings, strict=True))
    return jax.vmap(function)(columns, *rows)


@partial(jax.jit, static_argnames=("program", "names", "exchanges"))
def _start_lanes(
    program: SimulationProgram, names: tuple[str, ...], exchanges: int, settings: Sequence[Numbers], data: Data,
    keys: Key, x: Any, y: Any,
) -> State:  # fmt: skip
    start = lambda values, key: _start_one(_with_numbers(program, names, values), exchanges, data, key, x, y)
    return _each_lane(start, settings, keys)


@partial(jax.jit, static_argnames=("program", "names", "first_exchange"))
def _advance_lanes(
    program: SimulationProgram, names: tuple[str, ...], first_exchange: int, settings: Sequence[Numbers], data: Data,
    states: State, rounds: jax.Array,
) -> State:  # fmt: skip
    advance = lambda values, state: _advance_one(
        _with_numbers(program, names, values), first_exchange, data, state, rounds
    )
    return _each_lane(advance, settings, states)


class Shared(Simulation):
    """The simulator for one of many settings of an algorithm, which differ in the numbers ``names``: all that have the
    rest in common use the same compiled program. Where an algorithm decides by such a number what to compute (``if
    self.radius == inf``), ``names`` becomes empty, and this is the simulator as always.

    >>> from fedbilevel import FedBiO, tasks
    >>> task, steps = tasks.quadratic("T2"), {"lr_lower": 0.2, "lr_adjoint": 0.2, "local_steps": 1}
    >>> one, other = (Shared(task, FedBiO(lr_upper=lr, **steps), ("lr_upper",)) for lr in (0.1, 0.2))
    >>> one.common == other.common
    True
    >>> round(float(other.solution(other.advance(other.start(seed=0), rounds=2000))[0][0]), 3)
    4.0
    """

    def __init__(
        self,
        task: Task,
        algorithm: Algorithm,
        names: Sequence[str],
        participation: Participation | None = None,
        batching: Batching = "auto",
    ) -> None:
        self.names = tuple(names)
        self.values = tuple(number(algorithm, name) for name in self.names)
        super().__init__(task, pattern(algorithm, self.names), participation, batching)
        self.common = self.program
        self.program = replace(self.program, algorithm=algorithm)
        try:
            states = jax.eval_shape(self.start, 0)
            jax.eval_shape(self.advance, states, 1)
        except jax.errors.JAXTypeError:
            self.names, self.values = (), ()
            super().__init__(task, algorithm, participation, batching)
            self.common = self.program

    def start(self, seed: int, x: Any = None, y: Any = None) -> State:
        if not self.names:
            return super().start(seed, x, y)
        exchanges, key = len(self.plan.all), jax.random.key(seed)
        return _start_shared(self.common, self.names, exchanges, self.values, self.task.data, key, x, y)

    def advance(self, state: State, rounds: int) -> State:
        if not self.names:
            return super().advance(state, rounds)
        first, count = len(self.plan.start), jnp.asarray(rounds)
        return _advance_shared(self.common, self.names, first, self.values, self.task.data, state, count)


class Lanes:
    """Several settings or seeds at once: the states of all are one state, whose arrays have a leading axis. A lane
    whose result is not finite stands still, and the others go on.
    """

    def __init__(self, engines: Sequence[Shared]) -> None:
        first = self.first = engines[0]
        assert all((e.common, e.names) == (first.common, first.names) for e in engines), "settings differ in more"
        self.settings = tuple(engine.values for engine in engines)

    def start(self, seeds: Sequence[int], x: Any = None, y: Any = None) -> State:
        """The states before the first round; one seed for each lane."""
        first, keys = self.first, jnp.stack([jax.random.key(seed) for seed in seeds])
        exchanges = len(first.plan.all)
        return _start_lanes(first.common, first.names, exchanges, self.settings, first.task.data, keys, x, y)

    def advance(self, states: State, rounds: int) -> State:
        """So many rounds more in every lane."""
        first, count = self.first, jnp.asarray(rounds)
        begin = len(first.plan.start)
        return _advance_lanes(first.common, first.names, begin, self.settings, first.task.data, states, count)

    @staticmethod
    def lane(states: State, number: int) -> State:
        """The state of one lane."""
        return jax.tree.map(lambda a: a[number], states)
