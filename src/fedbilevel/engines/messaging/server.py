"""The server of a federation: the same algorithm files as in the simulator, executed by messages to clients.

A client (``party.py``) holds its own data and memory, looks up the method by its name in its own copy of the algorithm,
and answers with named arrays. A failure is an answer, too. What a client has been sent it holds until the end of the
round, so that nothing is sent twice; blocks of a private x stay where they are, and the server handles them by name
only.
"""

import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Carry, Clients, Each, Key, Objective, Replies, Step, mean_type
from fedbilevel.core.data import Data
from fedbilevel.core.vectors import Scalar, Vector
from fedbilevel.engines.messaging.party import all_finite
from fedbilevel.engines.participation import Everyone, Participation, check_sample
from fedbilevel.engines.plan import (
    Exchange,
    Plan,
    Program,
    check_each,
    resample,
    round_keys,
    server_objective,
    split_vectors,
    without,
)
from fedbilevel.errors import FedbilevelError, NoQuorum
from fedbilevel.storage.arrays import decode, encode, named_leaves, rebuild


class Blocks:
    """A private vector as the server knows it: a linear combination of named blocks that every client holds for
    itself.
    """

    def __init__(self, terms: Mapping[str, float]) -> None:
        self.terms = dict(terms)

    def __add__(self, other: "Blocks") -> "Blocks":
        return Blocks(
            {name: self.terms.get(name, 0.0) + other.terms.get(name, 0.0) for name in {**self.terms, **other.terms}}
        )

    def __mul__(self, scale: Scalar) -> "Blocks":
        return Blocks({name: factor * float(scale) for name, factor in self.terms.items()})

    __rmul__ = __mul__

    def __neg__(self) -> "Blocks":
        return self * -1.0

    def __sub__(self, other: "Blocks") -> "Blocks":
        return self + -other

    def __truediv__(self, scale: Scalar) -> "Blocks":
        return self * (1 / scale)


def is_block(value: object) -> bool:
    """Whether the server knows this vector by name only."""
    return isinstance(value, Blocks)


class Failure(NamedTuple):
    """A client that did not answer an exchange, and why."""

    round: int
    method: str
    client: int
    reason: str


class Served(NamedTuple):
    """One exchange as it went: who answered, who did not and why, what was sent, and how long it took."""

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
    served: np.ndarray
    calls: np.ndarray


class _Replies(Replies):
    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        slot: str,
        uploads: dict[int, Any],
        weights: np.ndarray,
        cohort: "_Cohort",
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
        """The weights of those who replied, times how often they were drawn."""
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


class _Cohort(NamedTuple):
    """Who takes part, how often each was drawn, and of how many at most."""

    ids: list[int]
    times: dict[int, int]
    room: int


class _Scope:
    """What the views of one round share: counts, and numbers for exchanges and sub-cohorts."""

    def __init__(
        self, round: int, exchange: int, loops: tuple[int, ...], served: np.ndarray, calls: np.ndarray
    ) -> None:
        self.round, self.exchange, self.loops = round, exchange, iter(loops)
        self.served, self.calls = served.copy(), calls.copy()
        self.sent, self.scopes = 0, 0
        self.asked: set[int] = set()
        self.answers: dict[int, int] = {}  # how often each client answered in this round
        self.failed: set[int] = set()
        self.projections: dict[str, dict[str, float]] = {}


class _Clients(Clients):
    """The cohort of a round as the server sees it: addresses."""

    def __init__(
        self,
        engine: "Messaging",
        key: Key,
        cohort: _Cohort,
        weights: np.ndarray,
        scope: _Scope,
        memory_scope: str = "round",
    ) -> None:
        self.engine, self.key, self.weights, self.scope, self.cohort = engine, key, weights, scope, cohort
        self.memory_scope, self.keys_taken = memory_scope, 0

    def next_key(self) -> Key:
        self.keys_taken += 1
        return jax.random.fold_in(self.key, self.keys_taken - 1)

    def run(self, step: Step, *broadcast: Any) -> Replies:
        engine, scope, key, cohort = self.engine, self.scope, self.next_key(), self.cohort
        if engine.program.participation.resample and self.memory_scope == "round":
            cohort = engine.cohort(engine.program.participation, resample(key, engine.program)[0])
            engine.forget()
        scope.asked.update(cohort.ids)
        # Who failed does not know what the others know of this round; what is in its memory is of no use before the
        # next one.
        able = [m for m in cohort.ids if m not in scope.failed or not engine.program.holds]
        check_each(broadcast, engine.program.participation)
        number = scope.exchange
        exchange = engine.plan.all[number]
        slot = f"{scope.round}.{scope.sent}"
        header = {
            "action": "run",
            "method": step.__name__,
            "exchange": number,
            "slot": slot,
            "scope": self.memory_scope,
            "projections": scope.projections,
            "attempt": engine.attempt(scope.round),
            "committed": scope.round - 1,
        }
        uploads = engine.exchange(header, exchange, broadcast, key, cohort.ids, able, scope)
        scope.served[number] += len(cohort.ids)
        scope.calls[number] += 1
        scope.exchange += 1
        scope.sent += 1
        return _Replies(engine.program, exchange, slot, uploads, self.weights, cohort)

    def sample(self, size: int) -> "Clients":
        ids, times, room = self.cohort
        check_sample(size, room)
        # The same draw as the simulator's, which has room for the largest cohort.
        luck = jax.random.uniform(self.next_key(), (room,))[: len(ids)]
        chosen = [ids[int(i)] for i in jax.lax.top_k(luck, min(size, len(ids)))[1]]
        self.scope.scopes += 1
        scope_name, cohort = f"sub-cohort {self.scope.scopes}", _Cohort(chosen, times, size)
        return _Clients(self.engine, self.next_key(), cohort, self.weights, self.scope, scope_name)

    def weighted(self, weights: jax.Array) -> "Clients":
        view = (np.asarray(weights), self.scope, self.memory_scope)
        return _Clients(self.engine, self.next_key(), self.cohort, *view)

    @property
    def holds_upper(self) -> bool:
        return self.engine.program.layout.server

    @property
    def f(self) -> Objective:
        return server_objective(self.engine.program, self.engine.server_data)

    def project_x(self, x: Any) -> Any:
        if not isinstance(x, Blocks):
            return self.engine.program.problem.nearest(x)
        if self.engine.program.problem.project_x is None:
            return x
        # The owners do it: with the next message they are told a name for the projection of these terms.
        name = f"{self.scope.round}.projection {len(self.scope.projections)}"
        self.scope.projections[name] = x.terms
        return Blocks({name: 1.0})

    def project_y(self, y: Vector) -> Vector:
        return self.engine.program.problem.nearest(y)

    def repeat(self, times: int | jax.Array, body: Callable[[Clients, Carry], Carry], carry: Carry) -> Carry:
        scope, first, loop_key, length = self.scope, self.scope.exchange, self.next_key(), next(self.scope.loops)
        outside, inner = (self.key, self.keys_taken), scope.loops
        for i in range(int(times)):
            inner, scope.loops = itertools.tee(inner)  # loops inside the body are numbered anew in every iteration
            scope.exchange = first + (length if i else 0)
            self.key, self.keys_taken = jax.random.fold_in(loop_key, i), 0
            carry = body(self, carry)
        self.key, self.keys_taken = outside
        scope.exchange = first + 2 * length
        return carry


class Transport(Protocol):
    """How a server reaches its clients."""

    def ask(self, messages: Mapping[int, bytes], kind: str) -> dict[int, bytes | str]:
        """Send each client its message at the same time; its answer, or why there is none. Messages of one kind are
        answered by the same program.
        """
        ...


class Messaging:
    """The server of a federation. It has no data of clients, and reaches them by messages only.

    Args:
        program: the problem, the algorithm, and what is known of the data: shapes.
        plan: its exchanges, as traced.
        weights: of the clients, summing to 1.
        transport: how to reach them.
        server_data: the rows of the server, if the problem has any.
        quorum: the least number of valid answers of an exchange, or all where fewer are asked; 0: more than half of
            those asked. With fewer, the run stops.
        run: the name under which clients keep what is theirs.
        names: what the clients are called in messages to people.
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
        self.program, self.plan, self.weights, self.transport = program, plan, weights, transport
        self.server_data, self.quorum, self.run = server_data, quorum, run
        self.failures: list[Failure] = []
        self.bytes_down = self.bytes_up = 0
        self.session = uuid.uuid4().hex[:8]  # attempts of another session are other attempts
        # Arrays that clients may hold, by their id; they are kept so that the id stays taken.
        self._serials: dict[int, tuple[str, Any]] = {}
        self._numbers = itertools.count()
        self._held: list[set[str]] = [set() for _ in weights]
        self._late: dict[int, dict[str, Any]] = {}  # commits that did not arrive

    def _ask(
        self, messages: Mapping[int, tuple[Mapping[str, Any], Mapping[str, Any]]]
    ) -> dict[int, tuple[dict[str, Any], dict[str, np.ndarray]]]:
        """Send headers and arrays; answers of clients that cannot be reached are errors, too."""
        encoded = {client: encode(*message) for client, message in messages.items()}
        kinds = (f"{header['action']} {header.get('exchange', '')}".strip() for header, _ in messages.values())
        answers = self.transport.ask(encoded, next(kinds, ""))
        self.bytes_down += sum(map(len, encoded.values()))
        self.bytes_up += sum(len(answer) for answer in answers.values() if isinstance(answer, bytes))
        found = {}
        for client in encoded:
            answer = answers.get(client, "it did not answer.")
            try:
                found[client] = ({"error": answer}, {}) if isinstance(answer, str) else decode(answer)
            except FedbilevelError as error:
                found[client] = ({"error": str(error)}, {})
        return found

    def _serial(self, leaf: Any) -> str:
        if id(leaf) not in self._serials:
            self._serials[id(leaf)] = (str(next(self._numbers)), leaf)
        return self._serials[id(leaf)][0]

    def exchange(
        self,
        header: dict[str, Any],
        exchange: Exchange,
        broadcast: Any,
        key: Key,
        ids: list[int],
        able: list[int],
        scope: _Scope,
    ) -> dict[int, Any]:
        """Send one message to each client that is able to answer, with what it does not hold yet, and gather the
        answers; failures are left out and noted.
        """
        round = scope.round
        began, known, down, up = time.perf_counter(), len(self.failures), self.bytes_down, self.bytes_up
        shapes = without(exchange.upload, self.program.private)
        own_key = {"key": np.asarray(jax.random.key_data(key))}
        headers: dict[int, dict[str, Any]] = {}
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
            late = {"late": self._late[client]} if client in self._late else {}
            answers = {"answers": scope.answers.get(client, 0)}
            headers[client] = {**header, **late, **answers, "serials": serials, "blocks": blocks}

        def message(client: int) -> tuple[dict[str, Any], dict[str, Any]]:
            new = {k: a for k, a in leaves[client].items() if self._serial(a) not in self._held[client]}
            return headers[client], {**{k: np.asarray(jnp.asarray(a)) for k, a in new.items()}, **own_key}

        answers = self._ask({client: message(client) for client in headers})
        again = [client for client, (answer, _) in answers.items() if answer.get("lost")]
        for client in again:  # it was started again, and needs everything
            self._held[client].clear()
        answers |= self._ask({client: message(client) for client in again}) if again else {}
        uploads: dict[int, Any] = {}
        strange: dict[int, Any] = {}
        for client, (answer, reply) in answers.items():
            try:
                if "error" in answer:
                    raise FedbilevelError(answer["error"])
                upload = rebuild(shapes, reply)
                self._held[client].update(headers[client]["serials"].values())
                self._late.pop(client, None)
                (uploads if all_finite(upload) else strange)[client] = upload
            except FedbilevelError as error:
                self._held[client].clear()  # who knows what arrived
                self.failures.append(Failure(round, header["method"], client, str(error)))
        if uploads:
            for client in strange:
                reason = "its answer holds NaN or infinite numbers."
                self.failures.append(Failure(round, header["method"], client, reason))
        else:
            uploads = strange  # not one client's fault: the run diverges
        scope.answers |= {client: scope.answers.get(client, 0) + 1 for client in uploads}
        scope.failed.update(failure.client for failure in self.failures[known:])
        failed = {self.names[client]: "it failed before in this round." for client in ids if client not in able}
        failed |= {self.names[failure.client]: failure.reason for failure in self.failures[known:]}
        answered = tuple(self.names[client] for client in uploads)
        sent = (self.bytes_down - down, self.bytes_up - up)
        self.served(Served(round, header["method"], answered, failed, *sent, time.perf_counter() - began))
        if len(uploads) < max(1, self._quorum(asked)):
            reason = self.failures[-1] if self.failures else Failure(round, header["method"], ids[0], "it is away.")
            raise NoQuorum(
                f"round {round}: {'no client' if not uploads else f'only {len(uploads)} of {asked} clients'} "
                f"answered '{header['method']}'; {self.names[reason.client]}: {reason.reason}"
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
        counts = np.zeros(len(self.plan.all), np.int64)
        start_key = jax.random.fold_in(key, 1)
        cohort = self.cohort(program.first_participation, start_key)
        scope = _Scope(0, 0, self.plan.loops[0], counts, counts)
        server = program.algorithm.init(_Clients(self, start_key, cohort, self.weights, scope), first_x, first_y)
        if scope.failed and private:  # it would have no block of x to go on with
            m = min(scope.failed)
            raise NoQuorum(f"the start needs everybody, but {self.names[m]}: {self.failures[-1].reason}")
        return self._commit(State(key, server, 0, True, scope.served, scope.calls), cohort.ids, scope)

    def _join(self, key: Key, x: Any, y: Any, committed: int | None) -> None:
        """Tell every client the start, and the last committed round if this is not the start."""
        init_key = {"key": np.asarray(jax.random.key_data(jax.random.fold_in(key, 0)))}
        header = {"action": "join", "run": self.run, "given_x": x is not None, "given_y": y is not None}
        header |= {} if committed is None else {"committed": committed}
        messages = {}
        for m in range(len(self.weights)):
            own = jax.tree.map(lambda a, m=m: a[m], x) if self.program.problem.private_x else x
            given = named_leaves({name: tree for name, tree in (("x", own), ("y", y)) if tree is not None})
            messages[m] = (header, {**{k: np.asarray(v) for k, v in given.items()}, **init_key})
        away = {m: answer["error"] for m, (answer, _) in self._ask(messages).items() if "error" in answer}
        # At the start everybody has to be there; later those who are away fail exchanges, no more.
        if away and (committed is None or len(messages) - len(away) < self._quorum(len(messages))):
            m, reason = next(iter(away.items()))
            raise NoQuorum(f"{self.names[m]} could not join: {reason}")

    def cohort(self, participation: Participation, key: Key) -> _Cohort:
        """Who takes part."""
        ids, times = participation.draw(key, len(self.weights))
        drawn = {int(m): int(n) for m, n in zip(ids, times if times is not None else [1] * len(ids), strict=True) if n}
        return _Cohort(list(drawn), drawn, len(ids))

    def forget(self) -> None:
        """Other clients are asked next, who hold nothing."""
        self._held = [set() for _ in self.weights]

    def _commit(self, state: State, ids: list[int], scope: _Scope) -> State:
        """End a round: give the private parts of the state their lasting names, and let clients forget the rest."""
        parts, structure = split_vectors(state.server)
        lasting = {f"state.{n}": part for n, part in enumerate(parts) if is_block(part)}
        public = without(state.server, is_block)
        alive = {id(leaf) for leaf in jax.tree.leaves(public)}
        same_clients = isinstance(self.program.participation, Everyone)
        self._serials = {k: v for k, v in self._serials.items() if k in alive and same_clients}
        kept = {serial for serial, _ in self._serials.values()}
        self._held = [held & kept for held in self._held]
        header = {
            "action": "commit",
            "attempt": self.attempt(state.round),
            "committed": state.round - 1,
            "round": state.round,
            "blocks": {name: part.terms for name, part in lasting.items()},
            "projections": scope.projections,
            "held": sorted(kept),
        }
        headers = {
            m: {**header, "answers": scope.answers.get(m, 0)} for m in sorted({*ids, *scope.asked} - scope.failed)
        }
        answers = self._ask({m: (own, {}) for m, own in headers.items()})
        away = {client: answer["error"] for client, (answer, _) in answers.items() if "error" in answer}
        if away:  # it may have lost what it remembered of this round: that is for people to know
            self._late |= {client: headers[client] for client in away if "stale" not in answers[client][0]}
            there = tuple(self.names[client] for client in answers if client not in away)
            failed = {self.names[client]: reason for client, reason in away.items()}
            self.served(Served(state.round, "commit", there, failed, 0, 0, 0.0))
        finite = all(np.all(reply.get("finite", True)) for _, reply in answers.values()) and all_finite(public)
        renamed = [Blocks({f"state.{n}": 1.0}) if is_block(part) else part for n, part in enumerate(parts)]
        return state._replace(server=jax.tree.unflatten(structure, renamed), finite=finite)

    def attempt(self, round: int) -> str:
        """The name of this attempt at a round."""
        return f"{self.session}.{round}"

    def advance(self, state: State, rounds: int) -> State:
        """So many rounds more; stops after a round whose result is not finite."""
        for _ in range(rounds):
            if not state.finite:
                break
            draw, work = round_keys(state.key, state.round)
            cohort = self.cohort(self.program.participation, draw)
            scope = _Scope(state.round + 1, len(self.plan.start), self.plan.loops[1], state.served, state.calls)
            server = self.program.algorithm.round(_Clients(self, work, cohort, self.weights, scope), state.server)
            state = State(state.key, server, state.round + 1, True, scope.served, scope.calls)
            state = self._commit(state, cohort.ids, scope)
        return state

    def arrays(self, state: State) -> dict[str, np.ndarray]:
        """The server's side of a state by name, to be saved. Of private vectors it has but names."""
        named = named_leaves({**state._asdict(), "key": jax.random.key_data(state.key), "server": self.public(state)})
        return {name: np.asarray(leaf) for name, leaf in named.items()}

    def evaluate(self, state: State) -> dict[int, dict[str, float]]:
        """What every client that answers finds of the current solution, on rows of its own."""
        public = {k: np.asarray(leaf) for k, leaf in named_leaves(self.public(state)).items()}
        header = {"action": "evaluate", "round": state.round}
        answers = self._ask(dict.fromkeys(range(len(self.weights)), (header, public)))
        return {
            m: {name: float(value) for name, value in reply.items()}
            for m, (answer, reply) in answers.items()
            if "error" not in answer and all(value.ndim == 0 for value in reply.values())
        }

    def public(self, state: State) -> Any:
        """What the server has of a state."""
        return without(state.server, is_block)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> State:
        """The state that was saved; clients go back to its round with what they have kept."""
        shapes = State(
            key=jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))),
            server=without(self.plan.server, self.program.private),
            round=np.zeros((), int),  # pyright: ignore[reportArgumentType]
            finite=np.zeros((), bool),  # pyright: ignore[reportArgumentType]
            served=np.zeros(len(self.plan.all), np.int64),
            calls=np.zeros(len(self.plan.all), np.int64),
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
        header = {"action": "reveal", "blocks": blocks, "round": state.round}
        answers = [reply for _, reply in self._ask({m: (header, {}) for m in range(len(self.weights))}).values()]
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
