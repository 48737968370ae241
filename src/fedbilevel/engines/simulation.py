"""The simulator: clients are rows of arrays, and a whole round, and many rounds in a row, is one compiled program.

Clients are visited one after the other with a running sum (``lax.scan``), which is fastest and needs the least memory
on a CPU, or all at once (``vmap``), which suits a GPU. Only the cohort of a round is touched: its rows of the
clients' memories and of a private x are taken out at the start of the round and put back at its end, so that a round
costs the same among a hundred clients and among ten thousand.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedbilevel.core import Algorithm, Carry, Clients, Each, Key, Objective, Replies, Step, call, mean_type
from fedbilevel.core.data import Data
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector, is_vector
from fedbilevel.engines.participation import Cohort, Everyone, Participation, check_sample
from fedbilevel.engines.plan import (
    Program,
    check_each,
    resample,
    round_keys,
    server_objective,
    set_owned,
    split_vectors,
    trace,
)
from fedbilevel.errors import UnknownName
from fedbilevel.storage.arrays import named_leaves, rebuild

Batching = Literal["auto", "scan", "vmap"]
BATCHINGS = get_args(Batching)


class State(NamedTuple):
    """All of a run: give it back to go on. ``served`` counts client calls for every exchange of the plan, ``calls``
    exchanges.
    """

    key: Key
    server: Any
    memory: Any
    round: jax.Array
    finite: jax.Array
    served: jax.Array
    calls: jax.Array


@dataclass(frozen=True)
class SimulationProgram(Program):
    """A program and how its clients are batched."""

    batching: Literal["scan", "vmap"] = "scan"
    loops: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # of init and of a round, from the plan


class _Replies(Replies):
    """One loop over the clients makes mean and stack; the compiler removes what the server program does not use."""

    def __init__(self, mean: Any, stacked: Any, scale: jax.Array, cohort: Cohort, everyone: int) -> None:
        self._mean, self.of_cohort, self._scale, self._everyone = mean, stacked, scale, everyone
        self._ids = cohort.ids if cohort.active is None else jnp.where(cohort.active, cohort.ids, everyone)

    def mean(self) -> Any:
        return self._mean

    def estimate(self) -> Any:
        scaled = lambda part: part if is_vector(part) and part.owned else jax.tree.map(self._scaled, part)
        return jax.tree.map(scaled, self._mean, is_leaf=is_vector)

    def _scaled(self, a: jax.Array) -> jax.Array:
        return self._scale.astype(a.dtype) * a

    def stack(self) -> Any:
        spread = lambda a: jnp.zeros((self._everyone, *a.shape[1:]), a.dtype).at[self._ids].set(a, mode="drop")
        return jax.tree.map(spread, self.of_cohort)

    def replied(self) -> jax.Array:
        return jnp.zeros(self._everyone, bool).at[self._ids].set(True, mode="drop")

    def each(self) -> Each:
        return Each(self.of_cohort)


@dataclass
class _Memory:
    """What a cohort remembers: one row per client, shared by all views of the same clients."""

    rows: Any


@dataclass
class _Round:
    """What changes while the program of one round is traced: the counts of the plan's exchanges."""

    served: jax.Array
    calls: jax.Array
    exchange: int | jax.Array  # number of the next one in the plan; an array in the later iterations of a loop
    loops: Iterator[int]  # exchanges in the body of the next loop


class _Clients(Clients):
    """The cohort of a round, or some of it (``entries``)."""

    def __init__(
        self,
        program: SimulationProgram,
        data: Data,
        weights: jax.Array,
        key: Key,
        cohort: Cohort,
        round: _Round,
        memory: _Memory,
        entries: jax.Array | None = None,
    ) -> None:
        self.program, self.data, self.weights, self.key = program, data, weights, key
        self.whole_cohort, self.round, self.entries = cohort, round, entries
        self.cohort = cohort if entries is None else cohort.some(entries)
        self.memory = memory
        self.keys_taken = 0

    def next_key(self) -> Key:
        self.keys_taken += 1
        return jax.random.fold_in(self.key, self.keys_taken - 1)

    def run(self, step: Step, *broadcast: Any) -> _Replies:
        program, key, cohort = self.program, self.next_key(), self.cohort
        if program.participation.resample and self.entries is None:
            cohort = program.participation.draw(*resample(key, program))
        (ids, times), active = cohort, cohort.active
        self._count(len(ids) if active is None else active.sum(dtype=jnp.int32))
        check_each(broadcast, program.participation)
        own_rows = [part.rows for part in broadcast if isinstance(part, Each)]
        is_own = [isinstance(part, Each) for part in broadcast]
        broadcast = tuple(None if own else part for part, own in zip(broadcast, is_own, strict=True))
        parts, structure = split_vectors(set_owned(program, broadcast, False))
        private = [program.private(part) for part in parts]
        blocks = self._of_cohort([part for part, mine in zip(parts, private, strict=True) if mine])
        shares = self.weights[ids] if times is None else jnp.where(times > 0, times * self.weights[ids], 0)
        total = shares.sum()
        shares = shares / jnp.where(total > 0, total, 1)  # all weights may be 0
        upload_structure: list[Any] = []

        def visit(id: jax.Array, memory: Any, blocks: list[Any], rows: list[Any]) -> tuple[Any, list[Any], list[Any]]:
            own, own_rows = iter(blocks), iter(rows)
            received = [next(own) if mine else part for part, mine in zip(parts, private, strict=True)]
            client = program.layout.client(program.problem, self.data, id, self.data.weights[id])
            common = jax.tree.unflatten(structure, received)
            arguments = [next(own_rows) if mine else part for part, mine in zip(common, is_own, strict=True)]
            memory, upload = call(step, client, memory, jax.random.fold_in(key, id), *arguments)
            sent, up = split_vectors(upload)
            upload_structure[:] = [up]
            kept = [part for part in sent if program.private(part)]
            return memory, kept, [None if program.private(part) else part for part in sent]

        loop = _scan if program.batching == "scan" else _vmap
        memory, kept, mean, stacked = loop(visit, (ids, self._recall(), blocks, own_rows), active, shares)
        self._remember(memory)

        def whole(sent: list[Any]) -> Any:
            own = iter([self._to_owners(block) for block in kept])
            return jax.tree.unflatten(upload_structure[0], [next(own) if part is None else part for part in sent])

        scale = total * program.layout.clients / (len(ids) if times is None else times.sum())
        return _Replies(whole(mean), whole(stacked), scale, cohort, program.layout.clients)

    def _count(self, clients: int | jax.Array) -> None:
        round = self.round
        round.calls = round.calls.at[round.exchange].add(1)
        round.served = round.served.at[round.exchange].add(clients)
        round.exchange += 1

    def _of_cohort(self, rows: Any) -> Any:
        """These clients' part of arrays with one row for each client of the whole cohort."""
        return rows if self.entries is None else jax.tree.map(lambda a: a[self.entries], rows)

    def _to_owners(self, block: Vector) -> Vector:
        """What the owners uploaded, 0 for those of the whole cohort that were not asked."""

        def spread(a: jax.Array) -> jax.Array:
            a = a if self.cohort.active is None else jnp.where(_column(self.cohort.active, a), a, 0)
            everyone = len(self.whole_cohort.ids)
            return a if self.entries is None else jnp.zeros((everyone, *a.shape[1:]), a.dtype).at[self.entries].set(a)

        return Vector(jax.tree.map(spread, block.tree), "x", owned=True)

    @property
    def _some_of_many(self) -> bool:
        """Whether the memory has rows for the whole cohort, of which only some are these clients'."""
        return self.entries is not None and self.program.algorithm.remembers == "run"

    def _recall(self) -> Any:
        return self._of_cohort(self.memory.rows) if self._some_of_many else self.memory.rows

    def _remember(self, rows: Any) -> None:
        if self._some_of_many:
            rows = jax.tree.map(lambda a, new: a.at[self.entries].set(new), self.memory.rows, rows)
        self.memory.rows = rows

    def sample(self, size: int) -> "Clients":
        ids, active = self.cohort.ids, self.cohort.active
        check_sample(size, len(ids))
        luck = jax.random.uniform(self.next_key(), (len(ids),))
        entries = lax.top_k(luck if active is None else jnp.where(active, luck, -1), size)[1]
        entries = entries if self.entries is None else self.entries[entries]
        memory = self.memory if self.program.algorithm.remembers == "run" else _Memory(None)
        return self._view(self.weights, memory, entries)

    def weighted(self, weights: jax.Array) -> "Clients":
        return self._view(weights, self.memory, self.entries)

    def _view(self, weights: jax.Array, memory: _Memory, entries: jax.Array | None) -> "_Clients":
        key = self.next_key()
        return _Clients(self.program, self.data, weights, key, self.whole_cohort, self.round, memory, entries)

    @property
    def holds_upper(self) -> bool:
        return self.program.layout.server

    @property
    def f(self) -> Objective:
        return server_objective(self.program, self.data)

    def project_x(self, x: Vector) -> Vector:
        return self.program.problem.nearest(x)

    def project_y(self, y: Vector) -> Vector:
        return self.program.problem.nearest(y)

    def repeat(self, times: int | jax.Array, body: Callable[[Clients, Carry], Carry], carry: Carry) -> Carry:
        round, first, loop_key, length = self.round, self.round.exchange, self.next_key(), next(self.round.loops)
        outside = self.key, self.keys_taken

        def iteration(i: jax.Array, state: Any) -> Any:
            carry, self.memory.rows, round.served, round.calls = state
            # The plan lists the exchanges of a loop twice: for the first iteration and for later ones.
            round.exchange = first + jnp.where(i == 0, 0, length)
            self.key, self.keys_taken = jax.random.fold_in(loop_key, i), 0
            carry = body(self, carry)
            return carry, self.memory.rows, round.served, round.calls

        state = (carry, self.memory.rows, round.served, round.calls)
        if self.memory.rows is None and self.program.algorithm.remembers == "round":
            state = self._with_memory_of(iteration, state)
        carry, self.memory.rows, round.served, round.calls = lax.fori_loop(0, times, iteration, state)
        self.key, self.keys_taken = outside
        round.exchange = first + 2 * length
        return carry

    def _with_memory_of(self, iteration: Callable[..., Any], state: Any) -> Any:
        """A loop whose body makes the first memory of the round: the loop needs its shape beforehand."""
        before = self.round.exchange, self.key, self.keys_taken
        self.round.loops, again = itertools.tee(self.round.loops)
        _, memory, _, _ = jax.eval_shape(iteration, 0, state)
        self.round.exchange, self.key, self.keys_taken = before
        self.round.loops = again
        carry, _, served, calls = state
        return carry, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), memory), served, calls


def _column(mask: jax.Array, like: jax.Array) -> jax.Array:
    return mask.reshape(-1, *(1,) * (like.ndim - 1))


def _scan(visit: Callable[..., Any], each: Any, active: jax.Array | None, shares: jax.Array) -> Any:
    """One client after the other, with a running weighted sum; entries of the cohort that are not taken are skipped."""
    shapes = jax.eval_shape(visit, *jax.tree.map(lambda a: a[0], each))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(total: Any, entry: Any) -> tuple[Any, Any]:
        inputs, active, share = entry
        if active is None:
            memory, kept, sent = visit(*inputs)
        else:
            remembers = jax.tree.structure(inputs[1]) == jax.tree.structure(shapes[0])
            skipped = (inputs[1] if remembers else zeros[0], zeros[1], zeros[2])
            memory, kept, sent = lax.cond(active, lambda: visit(*inputs), lambda: skipped)
        total = jax.tree.map(lambda t, u: t + share.astype(t.dtype) * u, total, sent)
        return total, (memory, kept, sent)

    nothing = jax.tree.map(lambda z: z.astype(mean_type(z.dtype)), zeros[2])
    mean, (memory, kept, stacked) = lax.scan(body, nothing, (each, active, shares))
    return memory, kept, mean, stacked


def _vmap(visit: Callable[..., Any], each: Any, active: jax.Array | None, shares: jax.Array) -> Any:
    """All clients at once."""
    memory, kept, stacked = jax.vmap(visit)(*each)
    if active is not None:
        stacked = jax.tree.map(lambda a: jnp.where(_column(active, a), a, 0), stacked)
        if jax.tree.structure(memory) == jax.tree.structure(each[1]):
            memory = jax.tree.map(lambda old, new: jnp.where(_column(active, new), new, old), each[1], memory)
    mean = jax.tree.map(
        lambda a: jnp.tensordot(shares.astype(mean_type(a.dtype)), a.astype(mean_type(a.dtype)), 1), stacked
    )
    return memory, kept, mean, stacked


def _finite(server: Any) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(server)]))


def _strong(tree: Any) -> Any:
    """Python numbers leave "weak" types behind, for which the same round would be compiled once more."""
    return jax.tree.map(lambda a: lax.convert_element_type(a, a.dtype), tree)


def _rows(tree: Any, ids: jax.Array) -> Any:
    return jax.tree.map(lambda a: a.at[ids].get(mode="clip"), tree)


def _put_back(tree: Any, ids: jax.Array, rows: Any) -> Any:
    return jax.tree.map(lambda a, new: a.at[ids].set(new, mode="drop"), tree, rows)


def _each_owned(function: Callable[..., Any], server: Any, *others: Any) -> Any:
    """Apply a function to the private vectors of a server state."""
    change = lambda v, *o: function(v, *o) if is_vector(v) and v.owned else (o[0] if o else v)
    return jax.tree.map(change, server, *others, is_leaf=is_vector)


traces: list[str] = []
"""One entry for every time a program was traced (and compiled): what the tests count."""


@partial(jax.jit, static_argnames=("program", "exchanges"))
def _start(program: SimulationProgram, exchanges: int, data: Data, key: Key, x: Any, y: Any) -> State:
    traces.append("start")
    problem, algorithm, everyone = program.problem, program.algorithm, program.layout.clients
    x0, y0 = problem.start(jax.random.fold_in(key, 0))
    y = problem.nearest(y0 if y is None else Vector(y, "y"))
    if problem.private_x:
        copies = jax.tree.map(lambda a: jnp.broadcast_to(a, (everyone, *a.shape)), x0.tree)
        x = Vector(copies if x is None else x, "x", owned=True)
    else:
        x = x0 if x is None else Vector(x, "x")
    x = problem.nearest(x)
    memory = None
    if algorithm.remembers == "run" and problem.private_x:
        memory = jax.vmap(lambda block: algorithm.memory(Vector(block, "x"), y))(x.tree)
    elif algorithm.remembers == "run":
        memory = jax.tree.map(lambda a: jnp.repeat(a[None], everyone, 0), algorithm.memory(x, y))
    start_key = jax.random.fold_in(key, 1)
    cohort = program.first_participation.draw(start_key, everyone)
    counts = jnp.zeros(exchanges, jnp.int32)
    round = _Round(counts, counts, 0, iter(program.loops[0]))
    kept = _Memory(_rows(memory, cohort.ids))
    server = algorithm.init(_Clients(program, data, data.weights, start_key, cohort, round, kept), x, y)
    if memory is not None:
        memory = _put_back(memory, cohort.ids, kept.rows)
    server, memory = _strong((server, memory))
    return State(key, server, memory, jnp.asarray(0), _finite((server, memory)), round.served, round.calls)


@partial(jax.jit, static_argnames=("program", "first_exchange"))
def _advance(program: SimulationProgram, first_exchange: int, data: Data, state: State, rounds: jax.Array) -> State:
    traces.append("advance")
    algorithm, everyone = program.algorithm, isinstance(program.participation, Everyone)

    def one_round(state: State) -> State:
        draw, work = round_keys(state.key, state.round)
        cohort = program.participation.draw(draw, program.layout.clients)
        server, memory = state.server, state.memory
        if not everyone:
            server, memory = _each_owned(lambda v: _rows(v, cohort.ids), server), _rows(memory, cohort.ids)
        round = _Round(state.served, state.calls, first_exchange, iter(program.loops[1]))
        kept = _Memory(memory)
        server = algorithm.round(_Clients(program, data, data.weights, work, cohort, round, kept), server)
        server, memory = _strong((server, kept.rows if algorithm.remembers == "run" else None))
        finite = _finite((server, memory))
        if not everyone:
            server = _each_owned(lambda old, new: _put_back(old, cohort.ids, new), state.server, server)
            memory = _put_back(state.memory, cohort.ids, memory)
        return State(state.key, server, memory, state.round + 1, finite, round.served, round.calls)

    last = state.round + rounds
    return lax.while_loop(lambda s: (s.round < last) & s.finite, one_round, state)


class _Watched(_Clients):
    """Clients that also keep the spread of their first uploads."""

    spread: dict[str, jax.Array] | None = None

    def run(self, step: Step, *broadcast: Any) -> _Replies:
        replies = super().run(step, *broadcast)
        if self.spread is None:
            weights = self.weights[self.cohort.ids]
            weights = weights if self.cohort.active is None else jnp.where(self.cohort.active, weights, 0)
            mean, (parts, _) = (
                replies.mean(),
                jax.tree_util.tree_flatten_with_path(replies.of_cohort, is_leaf=is_vector),
            )
            self.spread = {}
            for (path, each), middle in zip(parts, split_vectors(mean)[0], strict=True):
                if is_vector(each) and not each.owned:
                    squares = jax.tree.map(
                        lambda a, b: jnp.sum((a - b) ** 2, axis=tuple(range(1, a.ndim))), each.tree, middle.tree
                    )
                    name = jax.tree_util.keystr(path, simple=True, separator=".") or each.space
                    self.spread[name] = jnp.sum(weights / weights.sum() * sum(jax.tree.leaves(squares)))
        return replies


@partial(jax.jit, static_argnames=("program", "first_exchange"))
def _spread(program: SimulationProgram, first_exchange: int, data: Data, state: State) -> dict[str, jax.Array]:
    draw, work = round_keys(state.key, state.round)
    cohort = program.participation.draw(draw, program.layout.clients)
    round = _Round(state.served, state.calls, first_exchange, iter(program.loops[1]))
    memory = _Memory(_rows(state.memory, cohort.ids))
    clients = _Watched(program, data, data.weights, work, cohort, round, memory)
    program.algorithm.round(clients, _each_owned(lambda v: _rows(v, cohort.ids), state.server))
    return clients.spread or {}


class Simulation:
    """Runs an algorithm on a task with simulated clients.

    >>> from fedbilevel import FedBiO, tasks
    >>> engine = Simulation(tasks.quadratic("T2"), FedBiO(lr_upper=0.2, lr_lower=0.2, lr_adjoint=0.2, local_steps=1))
    >>> state = engine.advance(engine.start(seed=0), rounds=2000)
    >>> x, y = engine.solution(state)
    >>> round(float(x[0]), 3)
    4.0
    """

    def __init__(
        self, task: Task, algorithm: Algorithm, participation: Participation | None = None, batching: Batching = "auto"
    ) -> None:
        if batching not in BATCHINGS:
            raise UnknownName("batching", str(batching), BATCHINGS)
        if batching == "auto":
            batching = "scan" if jax.default_backend() == "cpu" else "vmap"
        self.task = task
        self.program = SimulationProgram(task.problem, algorithm, task.layout, participation or Everyone(), batching)
        self.plan = trace(self.program, task.data)
        self.program = replace(self.program, loops=self.plan.loops)

    def start(self, seed: int, x: Any = None, y: Any = None) -> State:
        """The state before the first round; x and y replace what the problem's ``init`` gives."""
        return _start(self.program, len(self.plan.all), self.task.data, jax.random.key(seed), x, y)

    def advance(self, state: State, rounds: int) -> State:
        """So many rounds more, in one call; stops after a round whose result is not finite (``state.finite``)."""
        return _advance(self.program, len(self.plan.start), self.task.data, state, jnp.asarray(rounds))

    def arrays(self, state: State) -> dict[str, np.ndarray]:
        """All of a state by name, to be saved."""
        plain = state._replace(key=jax.random.key_data(state.key))
        return {name: np.asarray(leaf) for name, leaf in named_leaves(plain._asdict()).items()}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> State:
        """The state that was saved; refuses arrays that do not fit this run."""
        shapes = jax.eval_shape(partial(self.start, 0))
        shapes = shapes._replace(key=jax.eval_shape(jax.random.key_data, shapes.key))
        state = State(**jax.tree.map(jnp.asarray, rebuild(shapes._asdict(), arrays)))
        return state._replace(key=jax.random.wrap_key_data(state.key))

    def spread(self, state: State) -> dict[str, jax.Array]:
        """The weighted mean squared distance of the clients' first uploads of the next round from their mean."""
        return _spread(self.program, len(self.plan.start), self.task.data, state)

    def solution(self, state: State) -> tuple[Any, Any]:
        """The current x and y in the user's structure."""
        x, y = self.program.algorithm.solution(state.server, state.memory)
        return x.tree, y.tree

    def metrics(self, state: State) -> Mapping[str, Any]:
        """What the task measures."""
        return self.task.measured(*self.solution(state))
