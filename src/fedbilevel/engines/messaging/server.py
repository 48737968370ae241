"""The server of a federation: the same algorithm files as in the simulator, executed by messages to clients.

A client (``party.py``) holds its own data and memory, looks up the method by its name in its own copy of the algorithm,
and answers with named arrays. A failure is an answer, too. A client keeps what it was sent until the end of the round,
so nothing is sent twice. Blocks of a private x stay at the clients, and the server handles them by name only.
"""

import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Each, Key
from fedbilevel.core.data import Data
from fedbilevel.core.vectors import Vector
from fedbilevel.engines.exchanges import Position
from fedbilevel.engines.messaging.blocks import Blocks, is_block
from fedbilevel.engines.messaging.clients import Counts, MessageClients, MessageCohort, Scope
from fedbilevel.engines.messaging.party import all_finite
from fedbilevel.engines.messaging.protocol import Commit, Evaluate, Failed, Join, Post, Reveal, Run, Transport
from fedbilevel.engines.participation import Everyone, Participation
from fedbilevel.engines.plan import Exchange, Plan
from fedbilevel.engines.program import Program, round_keys, split_vectors, without
from fedbilevel.errors import FedbilevelError, NoQuorum
from fedbilevel.storage.arrays import named_leaves, rebuild


class Failure(NamedTuple):
    """Why a client did not answer an exchange."""

    round: int
    method: str
    client: int
    reason: str


class Served(NamedTuple):
    """A record of one exchange: who answered, who did not and why, bytes sent, and seconds taken."""

    round: int
    method: str
    answered: tuple[str, ...]
    failed: dict[str, str]
    bytes_down: int
    bytes_up: int
    seconds: float


class State(NamedTuple):
    """The server's side of a run; memories and blocks are with the clients."""

    key: Key
    server: Any
    round: int
    finite: bool
    served: Counts
    calls: Counts


class Messaging:
    """The server of a federation. It has no data of clients, and reaches them by messages only.

    Args:
        program: the problem, the algorithm, and what is known of the data: shapes.
        plan: its exchanges, as traced.
        weights: of the clients, summing to 1.
        transport: how to reach them.
        server_data: the rows of the server, if the problem has any.
        quorum: the fewest valid answers to an exchange, or all if fewer clients are asked; 0: more than half of those
            asked. With fewer, the run stops.
        run: the name under which clients save their own state.
        names: the clients' names, for messages to users.
        served: called after every exchange.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        weights: np.ndarray,
        transport: Transport,
        server_data: Data | None = None,
        quorum: int = 1,
        run: str = "",
        names: Sequence[str] = (),
        served: Callable[[Served], object] = lambda _: None,
    ) -> None:
        self.served = served
        self.names = list(names) or [f"client {m}" for m in range(len(weights))]
        self.program, self.plan, self.weights, self.post = program, plan, weights, Post(transport)
        self.server_data, self.quorum, self.run = server_data, quorum, run
        self.failures: list[Failure] = []
        self.session = uuid.uuid4().hex[:8]  # attempts of another session are other attempts
        # Arrays that clients may hold, by their id; they are kept so that the id stays taken.
        self._serials: dict[int, tuple[str, Any]] = {}
        self._numbers = itertools.count()
        self._held: list[set[str]] = [set() for _ in weights]
        self._late: dict[int, Commit] = {}  # commits that did not arrive

    def _serial(self, leaf: Any) -> str:
        if id(leaf) not in self._serials:
            self._serials[id(leaf)] = (str(next(self._numbers)), leaf)
        return self._serials[id(leaf)][0]

    def exchange(
        self,
        asked_for: Run,
        exchange: Exchange,
        broadcast: Any,
        key: Key,
        ids: list[int],
        able: list[int],
        scope: Scope,
    ) -> dict[int, Any]:
        """Send one message to each client that is able to answer, with what it does not hold yet, and gather the
        answers; failures are left out and noted.
        """
        round = scope.round
        began, known, down, up = time.perf_counter(), len(self.failures), self.post.bytes_down, self.post.bytes_up
        shapes = without(exchange.upload, self.program.private)
        own_key = {"key": np.asarray(jax.random.key_data(key))}
        questions: dict[int, Run] = {}
        leaves: dict[int, dict[str, Any]] = {}
        asked = 0
        for position, client in enumerate(ids):
            alive = all(part.alive is None or part.alive[position] for part in broadcast if isinstance(part, Each))
            asked += bool(alive)
            if not alive or client not in able:
                continue
            parts = tuple(part.row(position) if isinstance(part, Each) else part for part in broadcast)
            blocks = {str(n): part.terms for n, part in enumerate(split_vectors(parts)[0]) if is_block(part)}
            leaves[client] = named_leaves(without(parts, is_block))
            serials = {name: self._serial(leaf) for name, leaf in leaves[client].items()}
            own = {"answers": scope.answers.get(client, 0), "late": self._late.get(client)}
            questions[client] = dataclasses.replace(asked_for, **own, serials=serials, blocks=blocks)

        def question(client: int) -> tuple[Run, dict[str, Any]]:
            new = {k: a for k, a in leaves[client].items() if self._serial(a) not in self._held[client]}
            return questions[client], {**{k: np.asarray(jnp.asarray(a)) for k, a in new.items()}, **own_key}

        answers = self.post.ask({client: question(client) for client in questions})
        again = [m for m, (answer, _) in answers.items() if isinstance(answer, Failed) and answer.reason == "lost"]
        for client in again:  # it was restarted, and needs everything
            self._held[client].clear()
        answers |= self.post.ask({client: question(client) for client in again}) if again else {}
        uploads: dict[int, Any] = {}
        strange: dict[int, Any] = {}
        for client, (answer, reply) in answers.items():
            try:
                if isinstance(answer, Failed):
                    raise FedbilevelError(answer.error)
                upload = rebuild(shapes, reply)
                self._held[client].update(questions[client].serials.values())
                self._late.pop(client, None)
                (uploads if all_finite(upload) else strange)[client] = upload
            except FedbilevelError as error:
                self._held[client].clear()  # who knows what arrived
                self.failures.append(Failure(round, asked_for.method, client, str(error)))
        if uploads:
            for client in strange:
                reason = "its answer contains NaN or infinite numbers."
                self.failures.append(Failure(round, asked_for.method, client, reason))
        else:
            uploads = strange  # not one client's fault: the run diverges
        scope.answers |= {client: scope.answers.get(client, 0) + 1 for client in uploads}
        scope.failed.update(failure.client for failure in self.failures[known:])
        failed = {self.names[client]: "it failed earlier in this round." for client in ids if client not in able}
        failed |= {self.names[failure.client]: failure.reason for failure in self.failures[known:]}
        answered = tuple(self.names[client] for client in uploads)
        sent = (self.post.bytes_down - down, self.post.bytes_up - up)
        self.served(Served(round, asked_for.method, answered, failed, *sent, time.perf_counter() - began))
        if len(uploads) < max(1, self._quorum(asked)):
            reason = self.failures[-1] if self.failures else Failure(round, asked_for.method, ids[0], "it is offline.")
            raise NoQuorum(
                f"round {round}: {'no client' if not uploads else f'only {len(uploads)} of {asked} clients'} "
                f"answered '{asked_for.method}'; {self.names[reason.client]}: {reason.reason}"
            )
        return uploads

    def _quorum(self, asked: int) -> int:
        return min(self.quorum or asked // 2 + 1, asked)

    def start(self, seed: int, x: Any = None, y: Any = None) -> State:
        """Every party joins; then the algorithm's ``init``."""
        key, program = jax.random.key(seed), self.program
        x0, y0 = program.problem.start(jax.random.fold_in(key, 0))
        self._join(key, x, y, None)
        nearest, private = program.problem.nearest, program.problem.private_x
        first_x: Any = Blocks({"start": 1.0}) if private else nearest(x0 if x is None else Vector(x, "x"))
        first_y = nearest(y0 if y is None else Vector(y, "y"))
        counts = self.plan.no_counts()
        start_key = jax.random.fold_in(key, 1)
        cohort = self.cohort(program.first_participation, start_key)
        scope = Scope(0, counts, counts)
        clients = MessageClients(self, start_key, Position("start"), cohort, self.weights, scope)
        server = program.algorithm.init(clients, first_x, first_y)
        if scope.failed and private:  # it would have no block of x to go on with
            m = min(scope.failed)
            raise NoQuorum(f"the start needs all clients, but {self.names[m]}: {self.failures[-1].reason}")
        return self._commit(State(key, server, 0, True, scope.served, scope.calls), cohort.ids, scope)

    def _join(self, key: Key, x: Any, y: Any, committed: int | None) -> None:
        """Send every client the starting point, and the last committed round if this is not the start."""
        init_key = {"key": np.asarray(jax.random.key_data(jax.random.fold_in(key, 0)))}
        join = Join(self.run, given_x=x is not None, given_y=y is not None, committed=committed)
        messages = {}
        for m in range(len(self.weights)):
            own = jax.tree.map(lambda a, m=m: a[m], x) if self.program.problem.private_x else x
            given = named_leaves({name: tree for name, tree in (("x", own), ("y", y)) if tree is not None})
            messages[m] = (join, {**{k: np.asarray(v) for k, v in given.items()}, **init_key})
        away = {m: answer.error for m, (answer, _) in self.post.ask(messages).items() if isinstance(answer, Failed)}
        # The start needs all clients; later, clients that are offline only fail exchanges.
        if away and (committed is None or len(messages) - len(away) < self._quorum(len(messages))):
            m, reason = next(iter(away.items()))
            raise NoQuorum(f"{self.names[m]} could not join: {reason}")

    def cohort(self, participation: Participation, key: Key) -> MessageCohort:
        """Draw the clients that take part."""
        ids, times = participation.draw(key, len(self.weights))
        drawn = {int(m): int(n) for m, n in zip(ids, times if times is not None else [1] * len(ids), strict=True) if n}
        return MessageCohort(list(drawn), drawn, len(ids))

    def forget(self) -> None:
        """Forget what clients hold: other clients are asked next."""
        self._held = [set() for _ in self.weights]

    def _commit(self, state: State, ids: list[int], scope: Scope) -> State:
        """End a round: give the private parts of the state their lasting names, and let clients forget the rest."""
        parts, structure = split_vectors(state.server)
        lasting = {f"state.{n}": part for n, part in enumerate(parts) if is_block(part)}
        public = without(state.server, is_block)
        alive = {id(leaf) for leaf in jax.tree.leaves(public)}
        same_clients = isinstance(self.program.participation, Everyone)
        self._serials = {k: v for k, v in self._serials.items() if k in alive and same_clients}
        kept = {serial for serial, _ in self._serials.values()}
        self._held = [held & kept for held in self._held]
        commit = Commit(
            attempt=self.attempt(state.round),
            committed=state.round - 1,
            round=state.round,
            answers=0,
            blocks={name: part.terms for name, part in lasting.items()},
            projections=scope.projections,
            held=sorted(kept),
        )
        asked = sorted({*ids, *scope.asked} - scope.failed)
        commits = {m: dataclasses.replace(commit, answers=scope.answers.get(m, 0)) for m in asked}
        answers = self.post.ask({m: (own, {}) for m, own in commits.items()})
        away = {m: answer for m, (answer, _) in answers.items() if isinstance(answer, Failed)}
        if away:  # a client may have lost what it remembered of this round, and users should know
            self._late |= {m: commits[m] for m, answer in away.items() if answer.reason != "stale"}
            there = tuple(self.names[m] for m in answers if m not in away)
            failed = {self.names[m]: answer.error for m, answer in away.items()}
            self.served(Served(state.round, "commit", there, failed, 0, 0, 0.0))
            if self.program.holds and len(there) < max(1, self._quorum(len(answers))):
                # What clients remember would be that of the round before: the round has not ended, and is made again.
                name, reason = next(iter(failed.items()))
                raise NoQuorum(f"round {state.round}: too few clients acknowledged its end; {name}: {reason}")
        finite = all(np.all(reply.get("finite", True)) for _, reply in answers.values()) and all_finite(public)
        renamed = [Blocks({f"state.{n}": 1.0}) if is_block(part) else part for n, part in enumerate(parts)]
        return state._replace(server=jax.tree.unflatten(structure, renamed), finite=finite)

    def attempt(self, round: int) -> str:
        """The name of this attempt at a round."""
        return f"{self.session}.{round}"

    def advance(self, state: State, rounds: int) -> State:
        """Advance by this number of rounds; stops when a result is not finite."""
        for _ in range(rounds):
            if not state.finite:
                break
            draw, work = round_keys(state.key, state.round)
            cohort = self.cohort(self.program.participation, draw)
            scope = Scope(state.round + 1, state.served, state.calls)
            clients = MessageClients(self, work, Position("round"), cohort, self.weights, scope)
            server = self.program.algorithm.round(clients, state.server)
            state = State(state.key, server, state.round + 1, True, scope.served, scope.calls)
            state = self._commit(state, cohort.ids, scope)
        return state

    def arrays(self, state: State) -> dict[str, np.ndarray]:
        """The arrays of the server's side of a state by name, to save them. Of private vectors it only has names."""
        named = named_leaves({**state._asdict(), "key": jax.random.key_data(state.key), "server": self.public(state)})
        return {name: np.asarray(leaf) for name, leaf in named.items()}

    def evaluate(self, state: State) -> dict[int, dict[str, float]]:
        """The metrics of the current solution on each client's own rows, for the clients that answer."""
        public = {k: np.asarray(leaf) for k, leaf in named_leaves(self.public(state)).items()}
        answers = self.post.ask(dict.fromkeys(range(len(self.weights)), (Evaluate(state.round), public)))
        return {
            m: {name: float(value) for name, value in reply.items()}
            for m, (answer, reply) in answers.items()
            if not isinstance(answer, Failed) and all(value.ndim == 0 for value in reply.values())
        }

    def public(self, state: State) -> Any:
        """What the server has of a state."""
        return without(state.server, is_block)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> State:
        """The state that was saved as these arrays; clients go back to its round with their own saved state."""
        shapes = State(
            key=jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))),
            server=without(self.plan.server, self.program.private),
            round=np.zeros((), int),  # pyright: ignore[reportArgumentType]
            finite=np.zeros((), bool),  # pyright: ignore[reportArgumentType]
            served=self.plan.no_counts(),
            calls=self.plan.no_counts(),
        )
        known = rebuild(shapes._asdict(), arrays)
        parts, structure = split_vectors(self.plan.server)
        public = iter(split_vectors(jax.tree.map(jnp.asarray, known["server"]))[0])
        whole = [
            Blocks({f"state.{n}": 1.0}) if self.program.private(part) else next(public) for n, part in enumerate(parts)
        ]
        key = jax.random.wrap_key_data(jnp.asarray(known["key"]))
        round, finite = int(known["round"]), bool(known["finite"])
        self._join(key, None, None, round)
        return State(key, jax.tree.unflatten(structure, whole), round, finite, known["served"], known["calls"])

    def solution(self, state: State) -> tuple[Any, Any]:
        """The current x and y in the user's structure; private blocks and local y are gathered from clients that
        reveal them.
        """
        remembers = self.program.algorithm.remembers == "run"
        if not remembers and not any(is_block(part) for part in split_vectors(state.server)[0]):
            x, y = self.program.algorithm.solution(state.server, None)
            return x.tree, y.tree
        parts, structure = split_vectors(state.server)
        blocks = {str(n): part.terms for n, part in enumerate(parts) if is_block(part)}
        asked = dict.fromkeys(range(len(self.weights)), (Reveal(state.round, blocks), {}))
        answers = []
        for client, (answer, reply) in self.post.ask(asked).items():
            if isinstance(answer, Failed):
                raise NoQuorum(f"{self.names[client]} did not send its part of the solution: {answer.error}")
            answers.append(reply)
        stacked = {name: jnp.stack([answer[name] for answer in answers]) for name in answers[0]}
        x0, y0 = jax.eval_shape(self.program.problem.start, state.key)
        memory = jax.eval_shape(self.program.algorithm.memory, x0, y0) if remembers else None
        shapes = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((len(self.weights), *s.shape), s.dtype),
            {"blocks": dict.fromkeys(blocks, x0.tree), "memory": memory},
        )
        seen = rebuild(shapes, stacked)
        whole = [
            Vector(seen["blocks"][str(n)], "x", owned=True) if is_block(part) else part for n, part in enumerate(parts)
        ]
        x, y = self.program.algorithm.solution(jax.tree.unflatten(structure, whole), seen["memory"])
        return x.tree, y.tree
