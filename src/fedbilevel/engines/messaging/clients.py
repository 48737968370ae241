"""The cohort of a round as the server of a federation sees it: addresses, to which it sends messages."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Carry, Clients, Each, Key, Replies, Step, mean_type
from fedbilevel.engines.exchanges import Position, ProgramClients
from fedbilevel.engines.messaging.blocks import Blocks
from fedbilevel.engines.messaging.commits import Commits
from fedbilevel.engines.messaging.protocol import Run
from fedbilevel.engines.participation import check_sample
from fedbilevel.engines.plan import Exchange
from fedbilevel.engines.program import Program, check_each, split_vectors

if TYPE_CHECKING:
    from fedbilevel.engines.messaging.server import Messaging

Counts = dict[str, np.ndarray]


class MessageReplies(Replies):
    """The uploads of the clients that replied."""

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        slot: str,
        uploads: dict[int, Any],
        weights: np.ndarray,
        cohort: "MessageCohort",
    ) -> None:
        self._program, self._exchange, self._slot = program, exchange, slot
        self._uploads, self._weights, self._cohort = uploads, weights, cohort

    def _whole(self, shared: Any) -> Any:
        parts, structure = split_vectors(self._exchange.upload)
        own = iter(split_vectors(shared)[0])
        return jax.tree.unflatten(
            structure,
            [
                Blocks({f"{self._slot}.{n}": 1.0}) if self._program.private(p) else next(own)
                for n, p in enumerate(parts)
            ],
        )

    def _sum(self, weights: dict[int, float]) -> Any:
        result = None
        for m, upload in self._uploads.items():
            share = jax.tree.map(lambda a, w=weights[m]: jnp.asarray(w, mean_type(a.dtype)) * a, upload)
            result = share if result is None else jax.tree.map(jnp.add, result, share)
        return self._whole(result)

    def mean(self) -> Any:
        counted = self._counted()
        total = sum(counted.values()) or 1.0
        return self._sum({m: weight / total for m, weight in counted.items()})

    def estimate(self) -> Any:
        factor = len(self._weights) / sum(self._cohort.times[m] for m in self._uploads)
        return self._sum({m: factor * weight for m, weight in self._counted().items()})

    def _counted(self) -> dict[int, float]:
        """The weights of the clients that replied, times how often they were drawn."""
        return {m: float(self._weights[m]) * self._cohort.times[m] for m in self._uploads}

    def stack(self) -> Any:
        nothing = jax.tree.map(jnp.zeros_like, next(iter(self._uploads.values())))
        everyone = [self._uploads.get(m, nothing) for m in range(len(self._weights))]
        return self._whole(jax.tree.map(lambda *each: jnp.stack(each), *everyone))

    def replied(self) -> jax.Array:
        return jnp.asarray([m in self._uploads for m in range(len(self._weights))])

    def each(self) -> Each:
        nothing = jax.tree.map(jnp.zeros_like, next(iter(self._uploads.values())))
        rows = [self._uploads.get(m, nothing) for m in self._cohort.ids]
        alive = jnp.asarray([m in self._uploads for m in self._cohort.ids])
        return Each(self._whole(jax.tree.map(lambda *each: jnp.stack(each), *rows)), alive)


class MessageCohort(NamedTuple):
    """Who takes part, how often each was drawn, and of how many at most."""

    ids: list[int]
    times: dict[int, int]
    room: int


class Scope:
    """What the views of one attempt at a round share: counts, numbers for exchanges and sub-cohorts, and who has
    acknowledged the rounds before.
    """

    def __init__(self, round: int, attempt: int, served: Counts, calls: Counts, commits: Commits) -> None:
        self.round, self.attempt, self.commits = round, attempt, commits
        self.served, self.calls = ({name: count.copy() for name, count in c.items()} for c in (served, calls))
        self.sent, self.sub_cohorts = 0, 0
        self.asked: set[int] = set()
        self.answers: dict[int, int] = {}  # how often each client answered in this round
        self.failed: set[int] = set()
        self.diverged = False  # nobody's numbers are finite
        self.projections: dict[str, dict[str, float]] = {}


class MessageClients(ProgramClients):
    """The cohort of a round, or a sub-cohort, whose memory of this round has a name of its own."""

    def __init__(
        self,
        engine: "Messaging",
        key: Key,
        position: Position,
        cohort: MessageCohort,
        weights: np.ndarray,
        scope: Scope,
        memory_scope: str = "round",
    ) -> None:
        super().__init__(engine.program, engine.server_data, key, position)
        self.engine, self.weights, self.scope, self.cohort = engine, weights, scope, cohort
        self.memory_scope = memory_scope

    def run(self, step: Step, *broadcast: Any) -> Replies:
        engine, scope, key, cohort = self.engine, self.scope, self.next_key(), self.cohort
        if self.program.participation.resample and self.memory_scope == "round":
            cohort = engine.cohort(self.program.participation, self.program.cohort_key(key))
            engine.forget()
        scope.asked.update(cohort.ids)
        # A client that failed does not know what the others know about this round; its memory is of no use until the
        # next one.
        able = [m for m in cohort.ids if m not in scope.failed or not self.program.holds]
        check_each(broadcast, self.program.participation)
        name, at = self.position.take(), self.position.iterations
        exchange = engine.plan.by_name[name]
        slot = f"{scope.round}.{scope.sent}"
        asked_for = Run(
            exchange=name,
            method=step.__name__,
            slot=slot,
            scope=self.memory_scope,
            session=engine.session,
            attempt=scope.attempt,
            base=-1,
            answers=0,
            projections=scope.projections,
            blocks={},
            serials={},
            time=max(0, scope.round - 1),
        )
        uploads = engine.exchange(asked_for, exchange, broadcast, key, cohort.ids, able, scope)
        scope.served[name][at] += len(cohort.ids)
        scope.calls[name][at] += 1
        scope.sent += 1
        return MessageReplies(self.program, exchange, slot, uploads, self.weights, cohort)

    def sample(self, size: int) -> "Clients":
        ids, times, room = self.cohort
        check_sample(size, room)
        # The same draw as the simulator's, which has room for the largest cohort.
        luck = jax.random.uniform(self.next_key(), (room,))[: len(ids)]
        chosen = [ids[int(i)] for i in jax.lax.top_k(luck, min(size, len(ids)))[1]]
        self.scope.sub_cohorts += 1
        cohort, name = MessageCohort(chosen, times, size), f"sub-cohort {self.scope.sub_cohorts}"
        return MessageClients(self.engine, self.next_key(), self.position, cohort, self.weights, self.scope, name)

    def weighted(self, weights: jax.Array) -> "Clients":
        view = (np.asarray(weights), self.scope, self.memory_scope)
        return MessageClients(self.engine, self.next_key(), self.position, self.cohort, *view)

    def project_x(self, x: Any) -> Any:
        if not isinstance(x, Blocks):
            return self.program.problem.nearest(x)
        if self.program.problem.project_x is None:
            return x
        # The owners do it: with the next message they are told a name for the projection of these terms.
        name = f"{self.scope.round}.projection {len(self.scope.projections)}"
        self.scope.projections[name] = x.terms
        return Blocks({name: 1.0})

    def _at(self, key: Key, position: Position) -> "MessageClients":
        view = (self.cohort, self.weights, self.scope, self.memory_scope)
        return MessageClients(self.engine, key, position, *view)

    def _loop(self, times: int | jax.Array, iteration: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        for number in range(int(times)):
            carry = iteration(number, carry)
        return carry
