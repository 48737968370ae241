"""Server and clients in one process that share nothing but serialized messages.

The same algorithm files as in the simulator, executed as a real federation would: a client holds its own data and
memory, looks up the method by its name in its own copy of the algorithm, and answers with named arrays. A failure is
an answer, too. What a client has been sent it holds until the end of the round, so that nothing is sent twice; blocks
of a private x stay where they are, and the server handles them by name only.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Algorithm, Carry, Clients, Each, Key, Objective, Replies, Step, mean_type
from fedbilevel.engines.messages import decode, encode, named_leaves, rebuild
from fedbilevel.engines.participation import Everyone, Participation, check_sample
from fedbilevel.engines.plan import (
    Exchange,
    Program,
    check_each,
    resample,
    round_keys,
    server_objective,
    split_vectors,
    trace,
    without,
)
from fedbilevel.errors import FedbilevelError
from fedbilevel.task import Data, Task
from fedbilevel.vectors import Scalar, Vector


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


def all_finite(tree: Any) -> bool:
    """Whether all numbers of a tree are finite."""
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(tree))


class Failure(NamedTuple):
    """A client that did not answer an exchange, and why."""

    round: int
    method: str
    client: int
    reason: str


@partial(jax.jit, static_argnames=("program", "method"))
def _call(
    program: Program, method: str, data: Data, id: jax.Array, key: Key, memory: Any, broadcast: Any
) -> tuple[Any, Any]:
    client = replace(program.layout.client(program.problem, data, 0, data.weights[0]), id=id)
    return getattr(program.algorithm, method)(client, memory, jax.random.fold_in(key, id), *broadcast)


class Party:
    """One client: its data, its memory, its blocks of a private x. Its only door is :meth:`handle`."""

    def __init__(self, task: Task, algorithm: Algorithm, id: int, weight: float, clients: int) -> None:
        self.id = id
        self.program = Program(task.problem, algorithm, task.layout._replace(clients=clients), Everyone())
        self.data = task.data._replace(weights=jnp.asarray([weight]))
        self.plan = trace(self.program, self.data)
        self.memory: dict[str, Any] = {}  # by scope: a sub-cohort of one exchange may have a memory of its own
        self.blocks: dict[str, Any] = {}
        self.committed: dict[str, Any] = {}
        self.round, self.before = 0, (0, self.committed)  # the last committed round, and the one before with its blocks
        self.held: dict[str, np.ndarray] = {}

    def handle(self, message: bytes) -> bytes:
        """Answer a message; whatever goes wrong is an answer with the reason."""
        try:
            header, arrays = decode(message)
            actions = {"join": self._join, "run": self._run, "commit": self._commit, "reveal": self._reveal}
            if header["action"] not in actions:
                raise FedbilevelError(f"there is no action '{header['action']}'.")
            return encode({}, actions[header["action"]](header, arrays))
        except Exception as error:  # a client must answer, whatever its code or data do
            return encode({"error": f"{type(error).__name__}: {error}"}, {})

    def _join(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Set up the own block and memory: nothing of them is ever sent."""
        x, y = self.program.problem.start(jax.random.wrap_key_data(jnp.asarray(arrays["key"])))
        if header["given_x"]:
            x = Vector(rebuild({"x": x.tree}, arrays)["x"], "x")
        if header["given_y"]:
            y = Vector(rebuild({"y": y.tree}, arrays)["y"], "y")
        x, y = (self.program.problem.nearest(v) for v in (x, y))
        self.memory = {"run": self.program.algorithm.memory(x, y)}
        self.blocks = self.committed = {"start": x.tree}
        return {}

    def _run(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        exchange = self.plan.all[header["exchange"]]
        if exchange.method != header["method"]:
            raise FedbilevelError(
                f"exchange {header['exchange']} is '{exchange.method}' here, but '{header['method']}' was asked for."
            )
        self._project(header["projections"])
        self.held.update({header["serials"][name]: array for name, array in arrays.items() if name != "key"})
        received = {name: self.held[serial] for name, serial in header["serials"].items()}
        broadcast = self._with_blocks(exchange.broadcast, received, header["blocks"])
        scope = "run" if self.program.algorithm.remembers == "run" else header["scope"]
        key = jax.random.wrap_key_data(jnp.asarray(arrays["key"]))
        memory, upload = _call(
            self.program, exchange.method, self.data, jnp.asarray(self.id), key, self.memory.get(scope), broadcast
        )
        for number, part in enumerate(split_vectors(upload)[0]):
            if self.program.private(part):
                self.blocks[f"{header['slot']}.{number}"] = part.tree
        self.memory[scope] = memory
        return named_leaves(without(upload, self.program.private))

    def _with_blocks(self, shapes: Any, received: dict[str, np.ndarray], blocks: dict[str, dict[str, float]]) -> Any:
        """The broadcast, with the own blocks where the server has names only."""
        parts, structure = split_vectors(shapes)
        public = iter(split_vectors(rebuild(without(shapes, self.program.private), received))[0])
        own = lambda number: Vector(self._combine(blocks[str(number)]), "x")
        whole = [own(n) if self.program.private(part) else next(public) for n, part in enumerate(parts)]
        return jax.tree.unflatten(structure, whole)

    def _project(self, projections: dict[str, dict[str, float]]) -> None:
        """Blocks that the server defined as the projection of others, in the order of their definition."""
        for name, terms in projections.items():
            if name not in self.blocks:
                self.blocks[name] = self.program.problem.nearest(Vector(self._combine(terms), "x")).tree

    def _combine(self, terms: dict[str, float]) -> Any:
        """The value of a combination; blocks from exchanges that this client was not asked in, or failed in, are 0."""
        zero = jax.tree.map(jnp.zeros_like, next(iter(self.blocks.values())))
        for name, factor in terms.items():
            if name in self.blocks:
                zero = jax.tree.map(
                    lambda total, a, factor=factor: total + jnp.asarray(factor, a.dtype) * a, zero, self.blocks[name]
                )
        return zero

    def _commit(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """The end of a round: keep what the server's state refers to, forget the rest."""
        self._project(header["projections"])
        blocks = {name: self._combine(terms) for name, terms in header["blocks"].items()}
        self.before, self.blocks = (self.round, self.committed), blocks
        self.round, self.committed = header["round"], blocks
        self.held = {serial: self.held[serial] for serial in header["held"] if serial in self.held}
        self.memory = {"run": self.memory.get("run")}
        return {"finite": np.asarray(all_finite((blocks, self.memory)))}

    def _reveal(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Blocks and memory, for whoever runs all parties in one process and wants to see the result."""
        # The server may ask for the state before a round that went wrong.
        self.blocks = self.before[1] if self.before[0] <= header["round"] < self.round else self.committed
        blocks = {name: self._combine(terms) for name, terms in header["blocks"].items()}
        self.blocks = self.committed
        return named_leaves({"blocks": blocks, "memory": self.memory.get("run")})


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
        self.projections: dict[str, dict[str, float]] = {}


class _Clients(Clients):
    """The cohort of a round as the server sees it: addresses."""

    def __init__(
        self,
        engine: "Local",
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
        }
        uploads = engine.exchange(header, exchange, broadcast, key, cohort.ids, scope.round)
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
        return server_objective(self.engine.program, self.engine.task.data)

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


class Local:
    """Runs an algorithm on a task by messages; the same numbers as
    :class:`~fedbilevel.engines.simulation.Simulation`.
    """

    def __init__(self, task: Task, algorithm: Algorithm, participation: Participation | None = None) -> None:
        self.task = task
        self.program = Program(task.problem, algorithm, task.layout, participation or Everyone())
        self.plan = trace(self.program, task.data)
        weights, sees_upper = task.normalised_weights, algorithm.upper_at == "clients"
        self.parties = [
            Party(task.only(m, sees_upper), algorithm, m, float(weights[m]), len(weights))
            for m in range(len(task.clients))
        ]
        self.failures: list[Failure] = []
        self.bytes_down = self.bytes_up = 0
        # Arrays that clients may hold, by their id; they are kept so that the id stays taken.
        self._serials: dict[int, tuple[str, Any]] = {}
        self._numbers = itertools.count()
        self._held: list[set[str]] = [set() for _ in self.parties]

    def _send(
        self, client: int, header: Mapping[str, Any], arrays: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        message = encode(header, arrays)
        answer = self.parties[client].handle(message)
        self.bytes_down, self.bytes_up = self.bytes_down + len(message), self.bytes_up + len(answer)
        return decode(answer)

    def _serial(self, leaf: Any) -> str:
        if id(leaf) not in self._serials:
            self._serials[id(leaf)] = (str(next(self._numbers)), leaf)
        return self._serials[id(leaf)][0]

    def exchange(
        self, header: dict[str, Any], exchange: Exchange, broadcast: Any, key: Key, ids: list[int], round: int
    ) -> dict[int, Any]:
        """Send one message to each client, with what it does not hold yet, and gather the answers; failures are left
        out and noted.
        """
        shapes = without(exchange.upload, self.program.private)
        uploads: dict[int, Any] = {}
        for position, client in enumerate(ids):
            if not all(part.alive is None or part.alive[position] for part in broadcast if isinstance(part, Each)):
                continue
            message = tuple(part.row(position) if isinstance(part, Each) else part for part in broadcast)
            blocks = {str(n): part.terms for n, part in enumerate(split_vectors(message)[0]) if is_block(part)}
            arrays = named_leaves(without(message, is_block))
            serials = {name: self._serial(leaf) for name, leaf in arrays.items()}
            header = {**header, "serials": serials, "blocks": blocks}
            new = {k: np.asarray(jnp.asarray(a)) for k, a in arrays.items() if serials[k] not in self._held[client]}
            answer, reply = self._send(client, header, {**new, "key": np.asarray(jax.random.key_data(key))})
            try:
                if "error" in answer:
                    raise FedbilevelError(answer["error"])
                uploads[client] = rebuild(shapes, reply)
                self._held[client].update(serials.values())
            except FedbilevelError as error:
                self._held[client].clear()  # who knows what arrived
                self.failures.append(Failure(round, header["method"], client, str(error)))
        if not uploads:
            reason = self.failures[-1]
            raise FedbilevelError(
                f"round {round}: no client answered '{reason.method}'; client {reason.client} said: {reason.reason}"
            )
        return uploads

    def start(self, seed: int, x: Any = None, y: Any = None) -> State:
        """Every party joins; then the algorithm's ``init``."""
        key, program = jax.random.key(seed), self.program
        init_key = jax.random.fold_in(key, 0)
        x0, y0 = program.problem.start(init_key)
        private = program.problem.private_x
        for m in range(len(self.parties)):
            own = jax.tree.map(lambda a, m=m: a[m], x) if private else x
            given = named_leaves({name: tree for name, tree in (("x", own), ("y", y)) if tree is not None})
            header = {"action": "join", "given_x": x is not None, "given_y": y is not None}
            answer, _ = self._send(
                m,
                header,
                {**{k: np.asarray(v) for k, v in given.items()}, "key": np.asarray(jax.random.key_data(init_key))},
            )
            if "error" in answer:
                raise FedbilevelError(f"client {m} could not join: {answer['error']}")
        nearest = program.problem.nearest
        first_x: Any = Blocks({"start": 1.0}) if private else nearest(x0 if x is None else Vector(x, "x"))
        first_y = nearest(y0 if y is None else Vector(y, "y"))
        counts = np.zeros(len(self.plan.all), np.int64)
        start_key = jax.random.fold_in(key, 1)
        cohort = self.cohort(program.first_participation, start_key)
        scope = _Scope(0, 0, self.plan.loops[0], counts, counts)
        server = program.algorithm.init(
            _Clients(self, start_key, cohort, self.task.normalised_weights, scope), first_x, first_y
        )
        return self._commit(State(key, server, 0, True, scope.served, scope.calls), cohort.ids, scope)

    def cohort(self, participation: Participation, key: Key) -> _Cohort:
        """Who takes part."""
        ids, times = participation.draw(key, len(self.parties))
        drawn = {int(m): int(n) for m, n in zip(ids, times if times is not None else [1] * len(ids), strict=True) if n}
        return _Cohort(list(drawn), drawn, len(ids))

    def forget(self) -> None:
        """Other clients are asked next, who hold nothing."""
        self._held = [set() for _ in self.parties]

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
            "round": state.round,
            "blocks": {name: part.terms for name, part in lasting.items()},
            "projections": scope.projections,
            "held": sorted(kept),
        }
        answers = [self._send(m, header, {})[1] for m in sorted({*ids, *scope.asked})]
        finite = all(bool(answer.get("finite", True)) for answer in answers) and all_finite(public)
        renamed = [Blocks({f"state.{n}": 1.0}) if is_block(part) else part for n, part in enumerate(parts)]
        return state._replace(server=jax.tree.unflatten(structure, renamed), finite=finite)

    def advance(self, state: State, rounds: int) -> State:
        """So many rounds more; stops after a round whose result is not finite."""
        for _ in range(rounds):
            if not state.finite:
                break
            draw, work = round_keys(state.key, state.round)
            cohort = self.cohort(self.program.participation, draw)
            scope = _Scope(state.round + 1, len(self.plan.start), self.plan.loops[1], state.served, state.calls)
            server = self.program.algorithm.round(
                _Clients(self, work, cohort, self.task.normalised_weights, scope), state.server
            )
            state = State(state.key, server, state.round + 1, True, scope.served, scope.calls)
            state = self._commit(state, cohort.ids, scope)
        return state

    def solution(self, state: State) -> tuple[Any, Any]:
        """The current x and y in the user's structure; private blocks and local y are gathered from the clients of
        this process.
        """
        remembers = self.program.algorithm.remembers == "run"
        if not remembers and not any(is_block(part) for part in split_vectors(state.server)[0]):
            x, y = self.program.algorithm.solution(state.server, None)
            return x.tree, y.tree
        parts, structure = split_vectors(state.server)
        blocks = {str(n): part.terms for n, part in enumerate(parts) if is_block(part)}
        answers = [
            self._send(m, {"action": "reveal", "blocks": blocks, "round": state.round}, {})[1]
            for m in range(len(self.parties))
        ]
        stacked = {name: jnp.stack([answer[name] for answer in answers]) for name in answers[0]}
        x0, y0 = jax.eval_shape(self.program.problem.start, state.key)
        memory = jax.eval_shape(self.program.algorithm.memory, x0, y0) if remembers else None
        shapes = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((len(self.parties), *s.shape), s.dtype),
            {"blocks": dict.fromkeys(blocks, x0.tree), "memory": memory},
        )
        seen = rebuild(shapes, stacked)
        whole = [
            Vector(seen["blocks"][str(n)], "x", owned=True) if is_block(part) else part for n, part in enumerate(parts)
        ]
        x, y = self.program.algorithm.solution(jax.tree.unflatten(structure, whole), seen["memory"])
        return x.tree, y.tree

    def arrays(self, state: State) -> dict[str, np.ndarray]:
        """Not here: memories and blocks are with the clients."""
        raise FedbilevelError("checkpoints need engine='simulation': here clients keep a part of the state.")

    def restore(self, arrays: Mapping[str, np.ndarray]) -> State:
        """Not here, see ``arrays``."""
        raise FedbilevelError("checkpoints need engine='simulation': here clients keep a part of the state.")
