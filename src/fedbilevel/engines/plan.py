"""What a round costs, found by tracing the algorithm on shapes: exchanges, floats, oracle calls, samples.

Nothing is run. A vector counts once per client: a client keeps what it was sent until the end of the round, and what it
was sent last until the next round if the same clients take part (full participation). Blocks of a private x are never
sent. Control scalars (a time, a flag) are not counted as floats, but their bytes are.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Algorithm, Carry, Clients, Each, Key, Replies, Step, Tally, call
from fedbilevel.core.data import Data
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector, is_vector
from fedbilevel.engines.exchanges import Position, ProgramClients
from fedbilevel.engines.participation import Everyone, Participation, check_sample
from fedbilevel.engines.program import Program, check_each, split_vectors
from fedbilevel.errors import FedbilevelError


@dataclass(frozen=True)
class Exchange:
    """One call of ``clients.run`` in the server program: what it costs each client that takes part.

    ``down`` and ``bytes_down`` have an axis for every loop around the exchange: its first iteration, and a later one.
    """

    name: str
    method: str
    loops: tuple[int | None, ...]  # lengths of the loops around it; None: random
    down: np.ndarray
    up: int
    bytes_down: np.ndarray
    bytes_up: int
    oracles: Counter[str]
    samples: float
    cohort: int | None = None  # a sub-cohort of this size
    broadcast: Any = field(default=None, repr=False)  # shapes, for those who must rebuild messages
    upload: Any = field(default=None, repr=False)
    before: Any = field(default=None, repr=False)  # what a client remembers before it, and after it
    memory: Any = field(default=None, repr=False)

    def times(self, repeats: int = 1) -> np.ndarray:
        """How often it is made in a round whose loops of random length run ``repeats`` times, by iteration."""
        often = np.ones((), int)
        for length in self.loops:
            length = repeats if length is None else length
            often = np.multiply.outer(often, [min(1, length), max(0, length - 1)])
        return often


class Plan(NamedTuple):
    """The exchanges of ``init`` ("start...") and of every later round ("round..."), per participating client.

    ``once`` are bytes down in the first round only. Loops of random length run ``repeats`` times (see ``at``).
    """

    p: int
    d: int
    by_name: Mapping[str, Exchange]
    once: int = 0
    server: Any = None  # shapes of the server's state
    repeats: int = 1
    starts_u: bool = False  # whether the user may say where an adjoint starts

    def at(self, repeats: int) -> "Plan":
        """The plan of a round whose loops of random length run ``repeats`` times."""
        return self._replace(repeats=repeats)

    @property
    def start(self) -> tuple[Exchange, ...]:
        """The exchanges of ``init``."""
        return tuple(e for name, e in self.by_name.items() if name.startswith("start."))

    @property
    def round(self) -> tuple[Exchange, ...]:
        """The exchanges of a round."""
        return tuple(e for name, e in self.by_name.items() if name.startswith("round."))

    def no_counts(self) -> dict[str, np.ndarray]:
        """A count of 0 for every exchange, by iteration."""
        return {name: np.zeros(e.down.shape, np.int32) for name, e in self.by_name.items()}

    def total(self, quantity: Callable[[Exchange], Any]) -> int:
        """A sum over the exchanges of a round."""
        return int(sum(np.sum(quantity(e) * e.times(self.repeats)) for e in self.round))

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
    def samples(self) -> int:
        """Rows in the batches of each client's oracle calls, a row once for each call."""
        return self.total(lambda e: e.samples)

    @property
    def oracles(self) -> Counter[str]:
        """Oracle calls of each client."""
        names = dict.fromkeys(name for e in self.round for name in e.oracles)
        return +Counter({name: self.total(lambda e, name=name: e.oracles[name]) for name in names})


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


class _PlannedClients(ProgramClients):
    """Runs every client function once, on shapes, and records its costs."""

    def __init__(
        self,
        program: Program,
        data: Data,
        key: Key,
        position: Position,
        cohort: int,
        memory: list[Any],
        held: dict[int, Any],
        by_name: dict[str, Exchange],
        traced: dict[Any, tuple[Callable[..., Any], Tally]],
        sub_cohort: int | None = None,
    ) -> None:
        super().__init__(program, data, key, position)
        self.data, self.cohort, self.memory, self.sub_cohort = data, cohort, memory, sub_cohort
        self.held, self.by_name, self.traced = held, by_name, traced

    def run(self, step: Step, *broadcast: Any) -> Replies:
        program, key = self.program, self.next_key()
        if program.participation.resample and self.sub_cohort is None:
            self.held.clear()  # others than before
        check_each(broadcast, program.participation)
        broadcast = tuple(part.row(0) if isinstance(part, Each) else part for part in broadcast)
        before = _shapes(self.memory[0])
        function, tally = self._once(step, (self.memory[0], key, *program.set_owned(broadcast, False)))
        self.memory[0], upload = function(self.memory[0], key, *program.set_owned(broadcast, False))
        down, bytes_down = self._size(broadcast, self.held)
        up, bytes_up = self._size(upload, {})
        name, loops, at = self.position.take(), self.position.lengths, self.position.iterations
        nothing = lambda: np.zeros((2,) * len(loops), int)
        made = Exchange(
            name, step.__name__, loops, nothing(), up, nothing(), bytes_up, Counter(tally), tally.samples,
            self.sub_cohort, _shapes(broadcast), _shapes(upload), before, _shapes(self.memory[0]),
        )  # fmt: skip
        exchange = self.by_name.setdefault(name, made)
        exchange.down[at], exchange.bytes_down[at] = down, bytes_down
        return _PlannedReplies(program.set_owned(upload, True), program.layout.clients, self.cohort)

    def _once(self, step: Step, arguments: Any) -> tuple[Callable[..., Any], Tally]:
        """A client function that is traced once for arguments of these shapes, and its oracle calls."""
        leaves, structure = jax.tree.flatten(arguments)
        asked = (step.__name__, structure, tuple((jnp.shape(a), jnp.result_type(a)) for a in leaves))
        if asked not in self.traced:
            tally = Tally()
            tally.rows = self.program.layout.rows(self.data)
            client = self.program.layout.client(self.program.problem, self.data, 0, self.data.weights[0], tally)

            def counted(*arguments: Any) -> Any:
                tally.clear()  # jit may trace again, for a number of weak type for instance
                return call(step, client, *arguments)

            self.traced[asked] = jax.jit(counted), tally
        return self.traced[asked]

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
        memory = self.memory if self.program.algorithm.remembers == "run" else [None]
        view = (self.next_key(), self.position, size, memory, dict(self.held), self.by_name, self.traced)
        return _PlannedClients(self.program, self.data, *view, sub_cohort=size)

    def weighted(self, weights: jax.Array) -> "Clients":
        return self

    def project_x(self, x: Vector) -> Vector:
        # There is no axis of clients here, so that a block is projected as its owner would.
        return Vector(self.program.problem.nearest(Vector(x.tree, x.space)).tree, x.space, x.owned)

    def _at(self, key: Key, position: Position) -> "_PlannedClients":
        view = (key, position, self.cohort, self.memory, self.held, self.by_name, self.traced)
        return _PlannedClients(self.program, self.data, *view, self.sub_cohort)

    def _loop(self, times: int | jax.Array, iteration: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        """The first iteration and a later one, in which clients hold what they got in the first."""
        held = dict(self.held)
        after = iteration(1, iteration(0, carry))
        if isinstance(times, int) and times == 0:  # nothing was sent
            self.held.clear()
            self.held.update(held)
            return carry
        return after


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), tree)


def trace(program: Program, data: Data) -> Plan:
    """The plan of a program, which does not depend on its numbers. ``data`` may be arrays or shapes."""
    leaves, structure = jax.tree.flatten(data)
    shapes = tuple((jnp.shape(a), jnp.result_type(a)) for a in leaves)
    return _trace(jax.tree.structure(program), structure, shapes)


@lru_cache(maxsize=256)
def _trace(program_structure: Any, structure: Any, shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> Plan:
    data = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    program: Program = jax.tree.unflatten(program_structure, [1.0] * program_structure.num_leaves)
    plans: list[Plan] = []
    same_clients = isinstance(program.participation, Everyone)

    def dry_run(program: Program, data: Data) -> None:
        key = jax.random.key(0)
        x, y = program.problem.start(key)
        algorithm = program.algorithm.at(jnp.asarray(0))
        memory = algorithm.memory(x, y)
        traced: dict[Any, Any] = {}

        def clients(block: str, participation: Participation, held: Mapping[int, Any]) -> _PlannedClients:
            cohort = participation.draw(key, program.layout.clients).ids.shape[0]
            held = dict(held) if same_clients else {}
            return _PlannedClients(
                program, data, program.start_key(key), Position(block), cohort, [memory], held, {}, traced
            )

        at_start = clients("start", program.first_participation, {})
        server = algorithm.init(at_start, program.set_owned(x, True), y)
        first = clients("round", program.participation, at_start.held)
        server = algorithm.round(first, server)
        later = clients("round", program.participation, first.held)  # the second round is like all later ones
        algorithm.round(later, server)
        sent = lambda round: sum(int(e.bytes_down.sum()) for e in round.by_name.values())
        by_name = {**at_start.by_name, **later.by_name}
        once = sent(first) - sent(later)
        plans.append(Plan(x.size, y.size, by_name, once, _shapes(server), starts_u=at_start.starts_u))

    try:
        jax.eval_shape(dry_run, program, data)
    except jax.errors.JAXTypeError as error:
        raise _decided_by_numbers(program.algorithm, error) from error
    return plans[0]


def _decided_by_numbers(algorithm: Algorithm, error: Exception) -> FedbilevelError:
    """The error for an algorithm that needs the value of a number while it is compiled."""
    name, reason = type(algorithm).__name__, str(error).strip().splitlines()[0]
    return FedbilevelError(
        f"{name} cannot be compiled ({reason}) If one of its floats decides what is computed, as in 'if self.NAME > "
        "0', declare it with parameter(..., static=True)."
    )


def plan(task: Task, algorithm: Algorithm, participation: Participation | None = None) -> Plan:
    """What a round of this algorithm on this task costs each client.

    >>> from fedbilevel import FedBiO, tasks
    >>> cost = plan(tasks.quadratic(p=4, d=6), FedBiO(local_steps=3))
    >>> cost.exchanges, cost.down, cost.up, cost.oracles["H"]
    (1, 16, 16, 3)
    """
    return trace(Program.checked(task.problem, algorithm, task.layout, participation), task.data)


def shared_accounting(task: Task, algorithm: Algorithm, participation: Participation | None = None) -> tuple[int, int]:
    """Floats down and up per round if all blocks of a private x were sent to and from all clients, as papers count."""
    private = plan(task, algorithm, participation)
    problem = replace(task.problem, private_x=False)
    shared = trace(Program.checked(problem, algorithm, task.layout, participation), task.data)
    sent = len(task.clients)  # every vector of x has one block per client
    return private.down + sent * (shared.down - private.down), private.up + sent * (shared.up - private.up)
