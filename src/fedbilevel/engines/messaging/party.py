"""A client of a federation: its data, its memory and its blocks of a private x, reached only by messages."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Algorithm, Key, call
from fedbilevel.core.data import Data
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector
from fedbilevel.engines.messaging import protocol
from fedbilevel.engines.messaging.protocol import Commit, Done, Evaluate, Join, Lost, Reveal, Run, Stale
from fedbilevel.engines.participation import Everyone
from fedbilevel.engines.plan import trace
from fedbilevel.engines.program import Program, check_fits, split_vectors, without
from fedbilevel.errors import FedbilevelError
from fedbilevel.storage.arrays import decode, encode, named_leaves, rebuild
from fedbilevel.storage.files import write_atomically


def all_finite(tree: Any) -> bool:
    """Whether all numbers of a tree are finite."""
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(tree))


Answer = tuple[protocol.Message, Mapping[str, Any]]
Arrays = Mapping[str, np.ndarray]

TRACED: Counter[str] = Counter()
"""How often each method was traced in this process, to be compiled."""


@partial(jax.jit, static_argnames=("method",))
def _call(
    program: Program, method: str, data: Data, id: jax.Array, key: Key, memory: Any, broadcast: Any
) -> tuple[Any, Any]:
    TRACED[method] += 1
    client = replace(program.layout.client(program.problem, data, 0, data.weights[0]), id=id)
    return call(getattr(program.algorithm, method), client, memory, jax.random.fold_in(key, id), *broadcast)


class Kept(NamedTuple):
    """What a client keeps of a committed round: its blocks of a private x, and its memory of the run."""

    round: int
    blocks: dict[str, Any]
    memory: Any


class Party:
    """One client, reached only through :meth:`handle`.

    Everything between two commits is provisional: a message of another attempt at a round starts again from what was
    saved, and if the server went back, so does the client, by one round.

    Args:
        task: with this client's rows only.
        algorithm: this client's own copy.
        id, weight, clients: its number, its weight, and how many clients there are.
        folder: where it saves its state, so that a restarted client can continue from there.
        evaluate: ``evaluate(x, y) -> {name: number}`` on its own rows; the numbers are sent.
        reveals: whether it sends its block and memory on request; only for data that are not private.
    """

    def __init__(
        self,
        task: Task,
        algorithm: Algorithm,
        id: int,
        weight: float,
        clients: int,
        folder: Path | None = None,
        evaluate: Callable[[Any, Any], Mapping[str, float]] | None = None,
        reveals: bool = False,
    ) -> None:
        self.id, self.folder, self.evaluate, self.reveals = id, folder, evaluate, reveals
        self.program = Program(task.problem, algorithm, task.layout._replace(clients=clients), Everyone())
        check_fits(task.problem, algorithm, self.program.layout, self.program.participation)
        self.data = task.data._replace(weights=jnp.asarray([weight]))
        self.plan = trace(self.program, self.data)
        self.run = ""
        self.kept: list[Kept] = []  # the last committed round, and the one before
        self.attempt = ""  # at which round the following belongs to
        self.answers = 0
        self.memory: dict[str, Any] = {}  # by scope: a sub-cohort of one exchange may have a memory of its own
        self.blocks: dict[str, Any] = {}
        self.held: dict[str, np.ndarray] = {}

    @property
    def handlers(self) -> dict[type[protocol.Message], protocol.Handler]:
        """Who answers what."""
        return {
            Join: self._join,
            Run: self._run,
            Commit: self._commit,
            Evaluate: self._evaluate,
            Reveal: self._reveal,
        }

    def handle(self, message: bytes) -> bytes:
        """Answer a message; an error is an answer with the reason."""
        return protocol.handle(message, self.handlers, open_book=self.reveals).packed

    def _join(self, message: Join, arrays: Arrays) -> Answer:
        """Set up its block and memory, of which nothing is ever sent; or continue with those saved for this run."""
        self.run, self.attempt, self.held = message.run, "", {}
        x, y = self.program.problem.start(jax.random.wrap_key_data(jnp.asarray(arrays["key"])))
        if message.given_x:
            x = Vector(rebuild({"x": x.tree}, arrays)["x"], "x")
        if message.given_y:
            y = Vector(rebuild({"y": y.tree}, arrays)["y"], "y")
        x, y = (self.program.problem.nearest(v) for v in (x, y))
        first = Kept(-1, {"start": x.tree}, self.program.algorithm.memory(x, y))
        committed = message.committed
        if committed is None and not message.again:
            self.kept = [first]
            self._save()
            return Done(), {}
        self.kept = self._load(first)
        if not self.kept:
            if self.program.problem.private_x or self.program.algorithm.remembers == "run":
                raise FedbilevelError("its saved state of this run is lost.")
            self.kept = [first]  # nothing of this run is at clients only
        if committed is not None and not message.again:  # a replayed message knows nothing of rounds since
            self._go_back(committed)
        return Done(), {}

    def _run(self, message: Run, arrays: Arrays) -> Answer:
        exchange = self.plan.by_name.get(message.exchange)
        if exchange is None or exchange.method != message.method:
            raise FedbilevelError(
                f"the server asked for '{message.method}' in exchange {message.exchange}, which is another one here."
            )
        if message.late is not None:
            with contextlib.suppress(Stale):
                self._commit(message.late, {})
        self._begin(message)
        if message.answers != self.answers and self.program.holds:
            raise FedbilevelError("it was restarted in the middle of the round, and waits for the next one.")
        self._project(message.projections)
        self.held.update({message.serials[name]: array for name, array in arrays.items() if name != "key"})
        if any(serial not in self.held for serial in message.serials.values()):
            raise Lost("it no longer has what was sent before.")
        received = {name: self.held[serial] for name, serial in message.serials.items()}
        broadcast = self._with_blocks(exchange.broadcast, received, message.blocks)
        scope = "run" if self.program.algorithm.remembers == "run" else message.scope
        key = jax.random.wrap_key_data(jnp.asarray(arrays["key"]))
        memory, upload = _call(
            self.program, exchange.method, self.data, jnp.asarray(self.id), key, self.memory.get(scope), broadcast
        )
        for number, part in enumerate(split_vectors(upload)[0]):
            if self.program.private(part):
                self.blocks[f"{message.slot}.{number}"] = part.tree
        self.memory[scope] = memory
        self.answers += 1
        return Done(), named_leaves(without(upload, self.program.private))

    def _begin(self, message: Run | Commit) -> None:
        """A message of another attempt: forget what was not committed."""
        if message.attempt == self.attempt:
            return
        if not self.kept:
            raise FedbilevelError("it has not joined this run.")
        self._go_back(message.committed)
        self.attempt, self.answers = message.attempt, 0
        self.blocks, self.memory = dict(self.kept[-1].blocks), {"run": self.kept[-1].memory}

    def _go_back(self, committed: int) -> None:
        """Forget rounds that the server does not know to be committed."""
        known = [kept for kept in self.kept if kept.round <= committed]
        if not known:
            raise FedbilevelError(
                f"the server is at round {committed}, but it only has rounds {[kept.round for kept in self.kept]}."
            )
        if len(known) < len(self.kept):
            self.kept = known
            self._save()

    def _with_blocks(self, shapes: Any, received: dict[str, np.ndarray], blocks: dict[str, dict[str, float]]) -> Any:
        """The broadcast, with the client's own blocks where the server only has names."""
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

    def _combine(self, terms: dict[str, float], blocks: dict[str, Any] | None = None) -> Any:
        """The value of a combination; blocks from exchanges that this client was not asked in, or failed in, are 0."""
        blocks = self.blocks if blocks is None else blocks
        zero = jax.tree.map(jnp.zeros_like, next(iter(blocks.values())))
        for name, factor in terms.items():
            if name in blocks:
                zero = jax.tree.map(
                    lambda total, a, factor=factor: total + jnp.asarray(factor, a.dtype) * a, zero, blocks[name]
                )
        return zero

    def _commit(self, message: Commit, arrays: Arrays) -> Answer:
        """The end of a round: keep what the server's state refers to, forget the rest."""
        if self.kept and self.kept[-1].round >= message.round:  # it has done this
            return Done(), {}
        self._begin(message)
        if message.answers != self.answers and self.program.holds:
            raise Stale("it was restarted before the end of the round, and continues from its saved state.")
        self._project(message.projections)
        blocks = {name: self._combine(terms) for name, terms in message.blocks.items()} or self.kept[-1].blocks
        self.kept = [*self.kept[-1:], Kept(message.round, blocks, self.memory.get("run"))]
        self.attempt, self.memory, self.blocks = "", {}, {}
        self.held = {serial: self.held[serial] for serial in message.held if serial in self.held}
        self._save()
        return Done(), {"finite": np.asarray(all_finite(self.kept[-1][1:]))}

    def _save(self) -> None:
        """Save what is kept, each round in its own file; the oldest is removed last."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        names = {f"round {kept.round}" for kept in self.kept}
        for kept in self.kept:
            path = self.folder / f"round {kept.round}"
            if not path.exists() or kept is self.kept[-1]:
                head = {"run": self.run, "round": kept.round, "blocks": sorted(kept.blocks)}
                arrays = named_leaves({"blocks": [kept.blocks[n] for n in sorted(kept.blocks)], "memory": kept.memory})
                write_atomically(path, encode(head, {k: np.asarray(a) for k, a in arrays.items()}))
        for path in self.folder.glob("round *"):
            if path.name not in names:
                path.unlink()

    def _load(self, like: Kept) -> list[Kept]:
        """What was saved of this run."""
        block = next(iter(like.blocks.values()))
        found = []
        for path in sorted(self.folder.glob("round *")) if self.folder is not None else ():
            header, arrays = decode(path.read_bytes())
            if header["run"] == self.run:
                shapes = {"blocks": [block] * len(header["blocks"]), "memory": like.memory}
                kept = jax.tree.map(jnp.asarray, rebuild(shapes, arrays))
                blocks = dict(zip(header["blocks"], kept["blocks"], strict=True))
                found.append(Kept(header["round"], blocks, kept["memory"]))
        return sorted(found, key=lambda kept: kept.round)

    def solution(self, round: int, arrays: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
        """x and y as this client knows them: from the public part of the server's state, its own block and memory."""
        problem, kept = self.program.problem, self._kept_of(round)
        shapes, structure = split_vectors(self.plan.server)
        public = rebuild(without(self.plan.server, self.program.private), arrays)
        shared = iter(split_vectors(jax.tree.map(jnp.asarray, public))[0])
        stacked = lambda tree: jax.tree.map(lambda a: a[None], tree)  # as if there were no other clients
        own = lambda n: Vector(stacked(self._combine({f"state.{n}": 1.0}, kept.blocks)), "x", owned=True)
        whole = [own(n) if self.program.private(part) else next(shared) for n, part in enumerate(shapes)]
        memory = stacked(kept.memory) if self.program.algorithm.remembers == "run" else None
        found = self.program.algorithm.solution(jax.tree.unflatten(structure, whole), memory)
        likes = jax.eval_shape(problem.start, jax.random.key(0))
        x, y = (
            jax.tree.map(lambda a, like: a.reshape(like.shape), v.tree, like.tree)
            for v, like in zip(found, likes, strict=True)
        )
        return x, y

    def _kept_of(self, round: int) -> Kept:
        # The server may ask for the state before a round that went wrong.
        return next((kept for kept in reversed(self.kept) if kept.round <= round), self.kept[0])

    def _evaluate(self, message: Evaluate, arrays: Arrays) -> Answer:
        """Evaluate the current solution on its own rows."""
        if self.evaluate is None:
            return Done(), {}
        numbers = self.evaluate(*self.solution(message.round, arrays))
        return Done(), {name: np.asarray(value, float) for name, value in numbers.items()}

    def _reveal(self, message: Reveal, arrays: Arrays) -> Answer:
        """Send blocks and memory, where one person runs all parties and wants to see the result."""
        if not self.reveals:
            raise FedbilevelError("its private state is not for others.")
        kept = self._kept_of(message.round)
        blocks = {name: self._combine(terms, kept.blocks) for name, terms in message.blocks.items()}
        return Done(), named_leaves({"blocks": blocks, "memory": kept.memory})
