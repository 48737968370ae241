"""Simulated clients: rows of arrays, visited one after the other (``lax.scan``) or all at once (``vmap``)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedbilevel.core import Carry, Clients, Each, Key, Replies, Step, call, mean_type
from fedbilevel.core.data import Data
from fedbilevel.core.vectors import Vector, is_vector
from fedbilevel.engines.exchanges import Position, ProgramClients
from fedbilevel.engines.participation import Cohort, check_sample
from fedbilevel.engines.program import Program, check_each, split_vectors


class SimulatedReplies(Replies):
    """One loop over the clients computes mean and stack; the compiler removes what the server program does not use."""

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
class CohortMemory:
    """What a cohort remembers: one row per client, shared by all views of the same clients."""

    rows: Any


@dataclass
class Ledger:
    """What all views of a round share while it is traced: how often each exchange was made, and for how many clients.
    ``watch`` is called with the replies to every exchange; loops then make their first iteration only.
    """

    served: Mapping[str, Any]
    calls: Mapping[str, Any]
    watch: "Watch | None" = None

    def count(self, position: Position, clients: int | jax.Array) -> None:
        """One more exchange at this position."""
        name, at = position.take(), position.iterations
        self.calls = {**self.calls, name: self.calls[name].at[at].add(1)}
        self.served = {**self.served, name: self.served[name].at[at].add(clients)}


class SimulatedClients(ProgramClients):
    """The cohort of a round, or some of it (``entries``)."""

    def __init__(
        self,
        program: Program,
        data: Data,
        weights: jax.Array,
        key: Key,
        position: Position,
        cohort: Cohort,
        ledger: Ledger,
        memory: CohortMemory,
        entries: jax.Array | None = None,
    ) -> None:
        super().__init__(program, data, key, position)
        self.data, self.weights, self.whole_cohort, self.entries = data, weights, cohort, entries
        self.cohort = cohort if entries is None else cohort.some(entries)
        self.ledger, self.memory = ledger, memory

    def run(self, step: Step, *broadcast: Any) -> Replies:
        program, key, cohort = self.program, self.next_key(), self.cohort
        if program.participation.resample and self.entries is None:
            cohort = program.participation.draw(program.cohort_key(key), program.layout.clients)
        (ids, times), active = cohort, cohort.active
        self.ledger.count(self.position, len(ids) if active is None else active.sum(dtype=jnp.int32))
        check_each(broadcast, program.participation)
        own_rows = [part.rows for part in broadcast if isinstance(part, Each)]
        is_own = [isinstance(part, Each) for part in broadcast]
        broadcast = tuple(None if own else part for part, own in zip(broadcast, is_own, strict=True))
        parts, structure = split_vectors(program.set_owned(broadcast, False))
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

        visit = jax.jit(visit, inline=True)  # traced once, not for its shapes and again for the loop
        loop = _scan if program.batching == "scan" else _vmap
        memory, kept, mean, stacked = loop(visit, (ids, self._recall(), blocks, own_rows), active, shares)
        self._remember(memory)

        def whole(sent: list[Any]) -> Any:
            own = iter([self._to_owners(block) for block in kept])
            return jax.tree.unflatten(upload_structure[0], [next(own) if part is None else part for part in sent])

        scale = total * program.layout.clients / (len(ids) if times is None else times.sum())
        replies = SimulatedReplies(whole(mean), whole(stacked), scale, cohort, program.layout.clients)
        if self.ledger.watch is not None:
            self.ledger.watch(self, replies)
        return replies

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
        memory = self.memory if self.program.algorithm.remembers == "run" else CohortMemory(None)
        return self._view(self.next_key(), self.position, self.weights, memory, entries)

    def weighted(self, weights: jax.Array) -> "Clients":
        return self._view(self.next_key(), self.position, jnp.asarray(weights), self.memory, self.entries)

    def project_x(self, x: Vector) -> Vector:
        return self.program.problem.nearest(x)

    def _at(self, key: Key, position: Position) -> "SimulatedClients":
        return self._view(key, position, self.weights, self.memory, self.entries)

    def _view(
        self, key: Key, position: Position, weights: jax.Array, memory: CohortMemory, entries: jax.Array | None
    ) -> "SimulatedClients":
        return SimulatedClients(
            self.program, self.data, weights, key, position, self.whole_cohort, self.ledger, memory, entries
        )

    def _loop(self, times: int | jax.Array, iteration: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        """A compiled loop, in whose state are also the counts and what the clients remember."""
        ledger, memory = self.ledger, self.memory
        if ledger.watch is not None:  # for the first exchange only, and nothing that is watched can leave a loop
            return carry if isinstance(times, int) and times == 0 else iteration(0, carry)

        def body(number: jax.Array, state: Any) -> Any:
            carry, memory.rows, ledger.served, ledger.calls = state
            carry = iteration(number, carry)
            return carry, memory.rows, ledger.served, ledger.calls

        rows = memory.rows
        if rows is None and self.program.algorithm.remembers == "round":  # the loop needs its shape beforehand
            state = (carry, None, ledger.served, ledger.calls)
            shapes = jax.eval_shape(body, 0, state)[1]
            rows = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            _, memory.rows, ledger.served, ledger.calls = state
        state = (carry, rows, ledger.served, ledger.calls)
        carry, memory.rows, ledger.served, ledger.calls = lax.fori_loop(0, times, body, state)
        return carry


Watch = Callable[[SimulatedClients, SimulatedReplies], None]


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
