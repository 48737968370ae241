"""The simulator: clients are rows of arrays, and one round or many in a row are one compiled program.

Clients are visited one after the other with a running sum (``lax.scan``), which is fastest and needs the least memory
on a CPU, or all at once (``vmap``), which suits a GPU. Only the cohort of a round is touched: its rows of the
clients' memories and of a private x are taken out at the start of the round and put back at its end, so that a round
costs the same among a hundred clients and among ten thousand.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedbilevel.core import Algorithm, Key
from fedbilevel.core.data import Data
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector, is_vector
from fedbilevel.engines.exchanges import Position
from fedbilevel.engines.participation import Everyone, Participation
from fedbilevel.engines.plan import trace
from fedbilevel.engines.program import Program, split_vectors
from fedbilevel.engines.simulated import CohortMemory, Ledger, SimulatedClients, SimulatedReplies, Watch
from fedbilevel.errors import UnknownName
from fedbilevel.storage.arrays import named_leaves, rebuild

Batching = Literal["auto", "scan", "vmap"]
BATCHINGS = get_args(Batching)
Counts = Mapping[str, Any]
"""Arrays by the name of an exchange."""


class State(NamedTuple):
    """The whole state of a run: pass it to ``advance`` to continue. ``served`` counts client calls for every exchange
    of the plan, ``calls`` counts exchanges, by name and iteration (see ``engines/exchanges.py``).
    """

    key: Key
    server: Any
    memory: Any
    round: jax.Array
    finite: jax.Array
    served: Counts
    calls: Counts


def _finite(server: Any) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(server)]))


def _strong(tree: Any) -> Any:
    """Remove the "weak" types that Python numbers leave behind: the same round would be compiled again for them."""
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


def start(program: Program, counts: Counts, data: Data, key: Key, x: Any, y: Any, u: Any = None) -> State:
    """The state before the first round; compiled as :data:`compiled_start`."""
    traces.append("start")
    problem, algorithm, everyone = program.problem, program.algorithm.at(0), program.layout.clients
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
    start_key = program.start_key(key)
    cohort = program.first_participation.draw(start_key, everyone)
    ledger, kept = Ledger(counts, counts), CohortMemory(_rows(memory, cohort.ids))
    clients = SimulatedClients(program, data, data.weights, start_key, Position("start"), cohort, ledger, kept)
    clients.given_u = None if u is None else Vector(u, "y")
    server = algorithm.init(clients, x, y)
    if memory is not None:
        memory = _put_back(memory, cohort.ids, kept.rows)
    server, memory = _strong((server, memory))
    return State(key, server, memory, jnp.asarray(0), _finite((server, memory)), ledger.served, ledger.calls)


def _next_cohort(
    program: Program, data: Data, state: State, watch: Watch | None = None
) -> tuple[SimulatedClients, Any]:
    """Who takes part in the next round, and the server's state with their blocks of a private x only."""
    draw, work = program.round_keys(state.key, state.round)
    cohort = program.participation.draw(draw, program.layout.clients)
    server, memory = state.server, state.memory
    if not isinstance(program.participation, Everyone):
        server, memory = _each_owned(lambda v: _rows(v, cohort.ids), server), _rows(memory, cohort.ids)
    ledger, kept = Ledger(state.served, state.calls, watch), CohortMemory(memory)
    return SimulatedClients(program, data, data.weights, work, Position("round"), cohort, ledger, kept), server


def advance(program: Program, data: Data, state: State, rounds: jax.Array) -> State:
    """Advance by this number of rounds; compiled as :data:`compiled_advance`."""
    traces.append("advance")

    def one_round(state: State) -> State:
        algorithm = program.algorithm.at(state.round)
        clients, server = _next_cohort(program, data, state)
        server = algorithm.round(clients, server)
        server, memory = _strong((server, clients.memory.rows if algorithm.remembers == "run" else None))
        finite = _finite((server, memory))
        if not isinstance(program.participation, Everyone):
            ids = clients.cohort.ids
            server = _each_owned(lambda old, new: _put_back(old, ids, new), state.server, server)
            memory = _put_back(state.memory, ids, memory)
        ledger = clients.ledger
        return State(state.key, server, memory, state.round + 1, finite, ledger.served, ledger.calls)

    last = state.round + rounds
    return lax.while_loop(lambda s: (s.round < last) & s.finite, one_round, state)


compiled_start, compiled_advance = jax.jit(start), jax.jit(advance)


def _spread_of(clients: SimulatedClients, replies: SimulatedReplies) -> dict[str, jax.Array]:
    """The weighted mean squared distance of uploads from their mean, for every vector of them."""
    weights = clients.weights[clients.cohort.ids]
    weights = weights if clients.cohort.active is None else jnp.where(clients.cohort.active, weights, 0)
    parts, _ = jax.tree_util.tree_flatten_with_path(replies.of_cohort, is_leaf=is_vector)
    spread = {}
    for (path, each), mean in zip(parts, split_vectors(replies.mean())[0], strict=True):
        if is_vector(each) and not each.owned:
            squares = jax.tree.map(
                lambda a, b: jnp.sum((a - b) ** 2, axis=tuple(range(1, a.ndim))), each.tree, mean.tree
            )
            name = jax.tree_util.keystr(path, simple=True, separator=".") or each.space
            spread[name] = jnp.sum(weights / weights.sum() * sum(jax.tree.leaves(squares)))
    return spread


@jax.jit
def _first_spread(program: Program, data: Data, state: State) -> dict[str, jax.Array]:
    spreads: list[dict[str, jax.Array]] = []

    def watch(clients: SimulatedClients, replies: SimulatedReplies) -> None:
        if not spreads:
            spreads.append(_spread_of(clients, replies))

    program.algorithm.at(state.round).round(*_next_cohort(program, data, state, watch))
    return spreads[0] if spreads else {}


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
        self.program = Program.checked(task.problem, algorithm, task.layout, participation, batching)
        self.plan = trace(self.program, task.data)

    def start(self, seed: int, x: Any = None, y: Any = None, u: Any = None) -> State:
        """The state before the first round; x and y replace what the problem's ``init`` gives, u the first adjoint."""
        return compiled_start(self.program, self.plan.no_counts(), self.task.data, jax.random.key(seed), x, y, u)

    def advance(self, state: State, rounds: int) -> State:
        """Advance by this number of rounds in one call; stops when a result is not finite (``state.finite``)."""
        return compiled_advance(self.program, self.task.data, state, jnp.asarray(rounds))

    def memory(self) -> int | None:
        """Bytes that a compiled round needs at once: data, state, and what it works with; None if not known."""
        state = jax.eval_shape(partial(self.start, 0))
        arguments = (self.program, self.task.data, state, jnp.asarray(1))
        needs = compiled_advance.lower(*arguments).compile().memory_analysis()
        if needs is None:
            return None
        return needs.argument_size_in_bytes + needs.temp_size_in_bytes + needs.output_size_in_bytes

    def arrays(self, state: State) -> dict[str, np.ndarray]:
        """All arrays of a state by name, to save them."""
        plain = state._replace(key=jax.random.key_data(state.key))
        return {name: np.asarray(leaf) for name, leaf in named_leaves(plain._asdict()).items()}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> State:
        """The state that was saved as these arrays; refuses arrays that do not fit this run."""
        shapes = jax.eval_shape(partial(self.start, 0))
        shapes = shapes._replace(key=jax.eval_shape(jax.random.key_data, shapes.key))
        state = State(**jax.tree.map(jnp.asarray, rebuild(shapes._asdict(), arrays)))
        return state._replace(key=jax.random.wrap_key_data(state.key))

    def spread(self, state: State) -> dict[str, jax.Array]:
        """The weighted mean squared distance of the clients' first uploads of the next round from their mean."""
        return _first_spread(self.program, self.task.data, state)

    def solution(self, state: State) -> tuple[Any, Any]:
        """The current x and y in the user's structure."""
        x, y = self.program.algorithm.solution(state.server, state.memory)
        return x.tree, y.tree

    def metrics(self, state: State) -> Mapping[str, Any]:
        """What the task measures."""
        return self.task.measured(*self.solution(state))
