"""What a round costs, found by tracing the algorithm on shapes: exchanges, floats, oracle calls. Nothing is run.

A vector counts once per client: what a client was sent, it holds until the end of the round, and what it was sent
last is held until the next one if the same clients take part (full participation). Blocks of a private x are never
sent. Scalars that only steer (a time, a flag) are not counted as floats, but their bytes are.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Carry, Clients, Each, Key, Objective, Problem, Replies, Step, Tally, call
from fedbilevel.core.data import Data, Layout
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector, is_vector
from fedbilevel.engines.participation import Everyone, Independent, Participation, check_sample
from fedbilevel.errors import FedbilevelError


@dataclass(frozen=True)
class Program:
    """Everything a compiled round depends on besides numbers. Equal programs share their compiled code."""

    problem: Problem
    algorithm: Algorithm
    layout: Layout
    participation: Participation

    def __post_init__(self) -> None:
        if self.algorithm.lower_level != self.problem.lower_level:
            raise FedbilevelError(
                f"{type(self.algorithm).__name__} is for problems with a {self.algorithm.lower_level} lower level, "
                f"but this one's is {self.problem.lower_level}."
            )
        name, weighting = type(self.algorithm).__name__, self.problem.weighting
        for wanted, value in self.problem.needs:
            if getattr(self.algorithm, wanted, None) != value:
                raise FedbilevelError(
                    f"this problem needs an algorithm with {wanted} = {value}, which {name} does not have: "
                    "its results would mean nothing."
                )
        if self.algorithm.weighting and not weighting:
            raise FedbilevelError(
                f"{name} weighs clients: it needs a problem with weighting=True, whose x is the clients' weights."
            )
        if self.algorithm.upper_at == "server" and not self.layout.server:
            server_objective(self, None)
        if weighting:
            shapes = jax.tree.map(jnp.shape, jax.eval_shape(self.problem.start, jax.random.key(0))[0].tree)
            if shapes != (self.layout.clients,):
                raise FedbilevelError(
                    f"with weighting=True, x is one array with a weight for each of the {self.layout.clients} clients, "
                    f"but init gives the shape {shapes}."
                )
        chosen = self.participation
        if self.holds and (chosen.resample or getattr(chosen, "replacement", False)):
            raise FedbilevelError(
                f"the clients of {name} keep something here, so that they must be the same for all exchanges of a "
                "round: sample without resample and without replacement."
            )

    @property
    def holds(self) -> bool:
        """Whether clients keep something from one exchange to the next."""
        return self.algorithm.remembers != "nothing" or self.problem.private_x

    @property
    def first_participation(self) -> Participation:
        """Who takes part in ``init``: a private x needs everybody, to set up the blocks."""
        return Everyone() if self.problem.private_x else self.participation

    def private(self, vector: Any) -> bool:
        """Whether this is a vector that stays with its client."""
        return self.problem.private_x and is_vector(vector) and vector.space == "x"


@dataclass(frozen=True)
class Exchange:
    """One call of ``clients.run`` in the server program."""

    method: str
    down: int
    up: int
    bytes_down: int
    bytes_up: int
    oracles: Counter[str]
    times: int | None = 1  # how often per round; None: as often as a loop of random length says
    later: bool = False  # in a loop: the iterations after the first, where clients hold more
    cohort: int | None = None  # a sub-cohort of this size
    broadcast: Any = field(default=None, repr=False)  # shapes, for those who must rebuild messages
    upload: Any = field(default=None, repr=False)


class Plan(NamedTuple):
    """The exchanges of ``init`` and of every later round, per participating client; ``once`` are bytes down in the
    first round only.
    """

    p: int
    d: int
    start: tuple[Exchange, ...]
    round: tuple[Exchange, ...]
    once: int = 0
    # Exchanges in the bodies of loops, of init and of a round.
    loops: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    server: Any = None  # shapes of the server's state

    def at(self, repeats: int) -> "Plan":
        """The plan of a round whose loops of random length run so often."""
        number = lambda e: max(0, repeats - 1) if e.later else min(1, repeats)
        known = (replace(e, times=number(e)) if e.times is None else e for e in self.round)
        return self._replace(round=tuple(known))

    @property
    def all(self) -> tuple[Exchange, ...]:
        """The exchanges of ``init``, then those of a round: as they are numbered."""
        return *self.start, *self.round

    def total(self, quantity: Callable[[Exchange], int]) -> int:
        """A sum over the exchanges of a round; loops of random length run once (see ``at``)."""
        return sum(quantity(e) * (e.times or 0) for e in self.at(1).round)

    @property
    def exchanges(self) -> int:
        return self.total(lambda e: 1)

    @property
    def down(self) -> int:
        """Floats to each client."""
        return self.total(lambda e: e.down)

    @property
    def up(self) -> int:
        """Floats from each client."""
        return self.total(lambda e: e.up)

    @property
    def oracles(self) -> Counter[str]:
        """Oracle calls of each client."""
        result: Counter[str] = Counter()
        for e in self.at(1).round:
            for name, count in e.oracles.items():
                result[name] += count * (e.times or 0)
        return +result


def split_vectors(tree: Any) -> tuple[list[Any], Any]:
    """The vectors and scalars of a state or message, vectors whole."""
    return jax.tree.flatten(tree, is_leaf=is_vector)


def without(tree: Any, left_out: Callable[[Any], bool]) -> Any:
    """A state or message without some of its vectors: None stands in their place."""
    parts, structure = split_vectors(tree)
    return jax.tree.unflatten(structure, [None if left_out(part) else part for part in parts])


def round_keys(run: Key, round: int | jax.Array) -> tuple[Key, Key]:
    """The keys of a round, for drawing its cohort and for its work: the same in every engine."""
    draw, work = jax.random.split(jax.random.fold_in(jax.random.fold_in(run, 2), round))
    return draw, work


def resample(exchange: Key, program: Program) -> tuple[Key, int]:
    """What draws the cohort of an exchange, if every exchange has its own: the same in every engine."""
    return jax.random.fold_in(exchange, program.layout.clients), program.layout.clients


def set_owned(program: Program, tree: Any, owned: bool) -> Any:
    """Mark private vectors as owned (the server's view) or not (their owner's view)."""
    parts, structure = split_vectors(tree)
    return jax.tree.unflatten(structure, [Vector(v.tree, "x", owned) if program.private(v) else v for v in parts])


def server_objective(program: Program, data: Any) -> Objective:
    """The upper loss on the server's own rows; refuses where there are none."""
    if not program.layout.server:
        raise FedbilevelError(
            f"{type(program.algorithm).__name__} evaluates the upper loss on the server: "
            "give the task validation rows there."
        )
    return program.layout.client(program.problem, data, 0, data.weights[0]).f


def check_each(broadcast: tuple[Any, ...], chosen: Participation) -> None:
    """Refuse messages for each client where it is not known beforehand how many take part."""
    if any(isinstance(part, Each) for part in broadcast) and (
        isinstance(chosen, Independent) or getattr(chosen, "replacement", False)
    ):
        raise FedbilevelError(
            "this algorithm sends every client a message of its own: sample a fixed number of clients, without "
            "replacement."
        )


class _PlannedReplies(Replies):
    def __init__(self, upload: Any, everyone: int, cohort: int) -> None:
        self._upload, self._everyone, self._cohort = upload, everyone, cohort

    def mean(self) -> Any:
        return self._upload

    estimate = mean

    def stack(self) -> Any:
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (self._everyone, *jnp.shape(a))), self._upload)

    def replied(self) -> jax.Array:
        return jnp.ones(self._everyone, bool)

    def each(self) -> Each:
        return Each(jax.tree.map(lambda a: jnp.broadcast_to(a, (self._cohort, *jnp.shape(a))), self._upload))


class _PlannedClients(Clients):
    """Runs every client function once, on shapes, and writes down what it took."""

    def __init__(self, program: Program, data: Data, cohort: int, memory: Any, held: dict[int, Any]) -> None:
        self.program, self.data, self.cohort = program, data, cohort
        self.memory, self.held = memory, held
        self.exchanges: list[Exchange] = []
        self.loops: list[int] = []
        self.times: int | None = 1
        self.later = False
        self.sub: int | None = None

    def run(self, step: Step, *broadcast: Any) -> Replies:
        program, tally = self.program, Tally()
        if program.participation.resample and self.sub is None:
            self.held.clear()  # others than before
        check_each(broadcast, program.participation)
        broadcast = tuple(part.row(0) if isinstance(part, Each) else part for part in broadcast)
        client = program.layout.client(program.problem, self.data, 0, self.data.weights[0], tally)
        key = jax.random.key(0)
        self.memory, upload = call(step, client, self.memory, key, *set_owned(program, broadcast, False))
        down, bytes_down = self._size(broadcast, self.held)
        up, bytes_up = self._size(upload, {})
        shapes = [
            jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), t)
            for t in (broadcast, upload)
        ]
        self.exchanges.append(
            Exchange(
                step.__name__,
                down,
                up,
                bytes_down,
                bytes_up,
                Counter(tally),
                self.times,
                self.later,
                self.sub,
                broadcast=shapes[0],
                upload=shapes[1],
            )
        )
        return _PlannedReplies(set_owned(program, upload, True), program.layout.clients, self.cohort)

    def _size(self, message: Any, held: dict[int, Any]) -> tuple[int, int]:
        """Floats and bytes of what is new in a message; remembers it as held."""
        floats = size = 0
        for part in split_vectors(message)[0]:
            if self.program.private(part):
                continue
            for leaf in jax.tree.leaves(part):
                if id(leaf) in held:
                    continue
                held[id(leaf)] = leaf  # the leaf itself is kept so that its id stays taken
                size += jnp.size(leaf) * jnp.result_type(leaf).itemsize
                if is_vector(part) or jnp.ndim(leaf) > 0:
                    floats += jnp.size(leaf)
        return floats, size

    def sample(self, size: int) -> "Clients":
        check_sample(size, self.cohort)
        memory = self.memory if self.program.algorithm.remembers == "run" else None
        child = _PlannedClients(self.program, self.data, size, memory, dict(self.held))
        child.exchanges, child.loops, child.times, child.later = self.exchanges, self.loops, self.times, self.later
        child.sub = size
        return child

    def weighted(self, weights: jax.Array) -> "Clients":
        return self

    @property
    def holds_upper(self) -> bool:
        return self.program.layout.server

    @property
    def f(self) -> Objective:
        return server_objective(self.program, self.data)

    def project_x(self, x: Vector) -> Vector:
        # There is no axis of clients here, so that a block is projected as its owner would.
        return Vector(self.program.problem.nearest(Vector(x.tree, x.space)).tree, x.space, x.owned)

    def project_y(self, y: Vector) -> Vector:
        return self.program.problem.nearest(y)

    def next_key(self) -> Key:
        return jax.random.key(0)

    def repeat(self, times: int | jax.Array, body: Callable[[Clients, Carry], Carry], carry: Carry) -> Carry:
        """The body is traced twice: in later iterations clients hold what they got in the first."""
        outside, was_later, first, number = self.times, self.later, len(self.exchanges), len(self.loops)
        self.loops.append(0)
        start, held = carry, dict(self.held)
        for later in (False, True):
            this = (times - 1 if later else 1) if isinstance(times, int) else None
            self.times = None if this is None or outside is None else outside * (this if times else 0)
            self.later = later
            inner = len(self.loops)
            carry = body(self, carry)
            if later:
                del self.loops[inner:]  # loops inside the body are numbered once
            else:
                self.loops[number] = len(self.exchanges) - first
        self.times, self.later = outside, was_later
        if isinstance(times, int) and times == 0:  # nothing was sent
            self.held.clear()
            self.held.update(held)
            return start
        return carry


def trace(program: Program, data: Data) -> Plan:
    """The plan of a program. ``data`` may be arrays or shapes."""
    leaves, structure = jax.tree.flatten(data)
    return _trace(program, structure, tuple((jnp.shape(a), jnp.result_type(a)) for a in leaves))


@lru_cache(maxsize=256)
def _trace(program: Program, structure: Any, shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> Plan:
    data = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    found: list[Plan] = []
    same_clients = isinstance(program.participation, Everyone)

    def dry_run(data: Data) -> None:
        key = jax.random.key(0)
        x, y = program.problem.start(key)
        memory = program.algorithm.memory(x, y)

        def clients(participation: Participation, held: dict[int, Any]) -> _PlannedClients:
            cohort = participation.draw(key, program.layout.clients).ids.shape[0]
            return _PlannedClients(program, data, cohort, memory, held if same_clients else {})

        at_start = clients(program.first_participation, {})
        server = program.algorithm.init(at_start, set_owned(program, x, True), y)
        first = clients(program.participation, at_start.held)
        server = program.algorithm.round(first, server)
        later = clients(program.participation, first.held)  # the second round is like all later ones
        program.algorithm.round(later, server)
        once = sum(e.bytes_down for e in first.exchanges) - sum(e.bytes_down for e in later.exchanges)
        plan = Plan(x.size, y.size, tuple(at_start.exchanges), tuple(later.exchanges), once)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), server)
        found.append(plan._replace(loops=(tuple(at_start.loops), tuple(later.loops)), server=shapes))

    jax.eval_shape(dry_run, data)
    return found[0]


def plan(task: Task, algorithm: Algorithm, participation: Participation | None = None) -> Plan:
    """What a round of this algorithm on this task costs each client.

    >>> from fedbilevel import FedBiO, tasks
    >>> cost = plan(tasks.quadratic(p=4, d=6), FedBiO(local_steps=3))
    >>> cost.exchanges, cost.down, cost.up, cost.oracles["H"]
    (1, 16, 16, 3)
    """
    return trace(Program(task.problem, algorithm, task.layout, participation or Everyone()), task.data)


def shared_accounting(task: Task, algorithm: Algorithm, participation: Participation | None = None) -> tuple[int, int]:
    """Floats down and up per round if all blocks of a private x were sent to and from everybody, as papers count."""
    private = plan(task, algorithm, participation)
    problem = replace(task.problem, private_x=False)
    shared = trace(Program(problem, algorithm, task.layout, participation or Everyone()), task.data)
    sent = len(task.clients)  # every vector of x has one block per client
    return private.down + sent * (shared.down - private.down), private.up + sent * (shared.up - private.up)
