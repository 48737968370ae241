"""A client of a federation: its data, its memory and its blocks of a private x, reached only by messages."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Algorithm, Key, call
from fedbilevel.core.data import Data
from fedbilevel.core.sampling import wrapped
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector
from fedbilevel.engines.messaging import protocol
from fedbilevel.engines.messaging.kept import Answered, Kept, Vault
from fedbilevel.engines.messaging.protocol import Commit, Done, Evaluate, Join, Lost, Reveal, Run, Stale
from fedbilevel.engines.plan import Exchange, trace
from fedbilevel.engines.program import Program, split_vectors, without
from fedbilevel.errors import FedbilevelError
from fedbilevel.storage.arrays import named_leaves, rebuild


def all_finite(tree: Any) -> bool:
    """Whether all numbers of a tree are finite."""
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(tree))


def _key(arrays: Mapping[str, np.ndarray]) -> Key:
    """The key for random numbers that travels with a message."""
    with suppress(KeyError, TypeError, ValueError):
        key = wrapped(jnp.asarray(arrays["key"]))
        if key.shape == ():  # not several
            return key
    raise FedbilevelError("this message has no key for random numbers.")


Answer = tuple[protocol.Message, Mapping[str, Any]]
Arrays = Mapping[str, np.ndarray]

TRACED: Counter[str] = Counter()
"""How often each method was traced in this process, to be compiled."""


@partial(jax.jit, static_argnames=("method",))
def _call(
    program: Program, method: str, data: Data, id: jax.Array, time: jax.Array, key: Key, memory: Any, broadcast: Any
) -> tuple[Any, Any]:
    TRACED[method] += 1
    client = replace(program.layout.client(program.problem, data, 0, data.weights[0]), id=id)
    return call(getattr(program.algorithm.at(time), method), client, memory, jax.random.fold_in(key, id), *broadcast)


class Party:
    """One client, reached only through :meth:`handle`.

    Everything between two commits is provisional, and saved before it is answered: a client that is restarted answers
    the same message in the same way. A message of a later attempt at a round starts again from what was committed; if
    the server went back, so does the client, by one round.

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
        self.id, self.evaluate, self.reveals = id, evaluate, reveals
        self.program = Program.checked(task.problem, algorithm, task.layout._replace(clients=clients))
        self.data = task.data._replace(weights=jnp.asarray([weight]))
        self.plan = trace(self.program, self.data)
        self.vault = Vault(folder if self.program.holds else None, self.plan.by_name)
        self.session = ""
        self.kept: list[Kept] = []  # the last committed round, and the one before
        self.wiped = False  # nothing of a run that is under way was found on its disk
        self.attempt = ("", -1)  # session and number: what follows belongs to it
        self.answers: list[Answered] = []
        self.memory: dict[str, Any] = {}  # by scope
        self.blocks: dict[str, Any] = {}
        self.held: dict[str, np.ndarray] = {}

    @property
    def handlers(self) -> dict[type[protocol.Message], protocol.Handler]:
        """Who answers what."""
        return {
            Join: self._join,
            Run: self._run,
            Commit: self._committed,
            Evaluate: self._evaluate,
            Reveal: self._reveal,
        }

    def handle(self, message: bytes) -> bytes:
        """Answer a message; an error is an answer with the reason."""
        return protocol.handle(message, self.handlers, open_book=self.reveals).packed

    def _join(self, message: Join, arrays: Arrays) -> Answer:
        """Set up its block and memory, of which nothing is ever sent; or continue with those saved for this run."""
        if message.session == self.session:  # it has done this
            return Done(), {}
        self.vault.run, self.held = message.run, {}
        x, y = self.program.problem.start(_key(arrays))
        if message.given_x:
            x = Vector(rebuild({"x": x.tree}, arrays)["x"], "x")
        if message.given_y:
            y = Vector(rebuild({"y": y.tree}, arrays)["y"], "y")
        x, y = (self.program.problem.nearest(v) for v in (x, y))
        first = Kept(-1, {"start": x.tree}, self.program.algorithm.memory(x, y))
        if message.committed is None and not message.again:
            self.kept, answers = [first], []
            self.vault.save(self.kept)
        else:
            kept, answers = self.vault.load(first)
            self.kept, self.wiped = kept or [first], not kept
            if not message.again:  # a replayed message knows nothing of rounds since
                self._go_back(message.committed)
                self._check_kept(message.base)
        if self.program.lasting and answers and answers[0].base != self.kept[-1].round:
            answers = []  # they are about another round
        self.session = message.session
        self._begin(*(answers[0].whole_attempt if answers else ("", -1)), answers)
        return Done(), {}

    def _run(self, message: Run, arrays: Arrays) -> Answer:
        exchange = self.plan.by_name.get(message.exchange)
        if exchange is None or exchange.method != message.method:
            raise FedbilevelError(
                f"the server asked for '{message.method}' in exchange {message.exchange}, which is another one here."
            )
        attempt = (message.session, message.attempt)
        self._check_joined()
        if message.session != self.session:
            raise FedbilevelError("it has not joined this session of the run.")
        if self.attempt[0] == message.session and message.attempt < self.attempt[1]:
            raise FedbilevelError("this message belongs to an earlier attempt at a round.")
        if attempt != self.attempt:
            self.commit(message.commit)
            self._start(attempt, message.base)
        elif self.program.lasting and self.kept[-1].round != message.base:
            raise FedbilevelError("this message belongs to a round that has ended.")
        if self.program.holds:
            last = self.answers[-1] if self.answers else None
            if last is not None and (last.number, last.slot) == (message.answers, message.slot):
                return Done(last.finite), last.reply  # its answer did not arrive
            if message.answers != len(self.answers):
                raise FedbilevelError("it does not hold what happened in this round, and waits for the next one.")
        key, sent = _key(arrays), {name: array for name, array in arrays.items() if name != "key"}
        if not sent.keys() <= message.serials.keys():
            raise FedbilevelError("this message has arrays that it does not name.")
        self.held.update({message.serials[name]: array for name, array in sent.items()})
        if any(serial not in self.held for serial in message.serials.values()):
            raise Lost("it no longer has what was sent before.")
        received = {name: self.held[serial] for name, serial in message.serials.items()}
        projected = self._projected(message.projections)
        broadcast = self._with_blocks(exchange.broadcast, received, message.blocks, {**self.blocks, **projected})
        scope = "run" if self.program.algorithm.remembers == "run" else message.scope
        if exchange.before is not None and self.memory.get(scope) is None and not self._may_come_first(exchange):
            raise FedbilevelError(f"'{message.method}' needs what another exchange of this round leaves behind.")
        memory, upload = _call(
            self.program,
            exchange.method,
            self.data,
            jnp.asarray(self.id),
            jnp.asarray(message.time),
            key,
            self.memory.get(scope),
            broadcast,
        )
        parts = split_vectors(upload)[0]
        own = {f"{message.slot}.{n}": part.tree for n, part in enumerate(parts) if self.program.private(part)}
        reply = named_leaves(without(upload, self.program.private))
        if not self.program.holds:
            return Done(), reply
        finite, sent = all_finite((own, memory)), {name: np.asarray(array) for name, array in reply.items()}
        place = (exchange.name, message.slot, scope)
        number = (self.kept[-1].round, len(self.answers))
        answered = Answered(*attempt, *number, *place, memory, {**projected, **own}, finite, sent)
        self.vault.answer(answered)
        self._remember(answered)
        return Done(finite), sent

    def _may_come_first(self, exchange: Exchange) -> bool:
        """Whether only loops, which may be empty, come before this exchange in its block."""
        block = exchange.name.partition(".")[0]
        before = takewhile(lambda each: each is not exchange, self.plan.by_name.values())
        return all(each.loops for each in before if each.name.partition(".")[0] == block)

    def _check_joined(self) -> None:
        if not self.kept:
            raise FedbilevelError("it has not joined this run.")

    def _begin(self, session: str, attempt: int, answers: Sequence[Answered] = ()) -> None:
        """An attempt at a round, from the last committed one, and with what was answered in it before."""
        self.attempt, self.answers = (session, attempt), []
        self.blocks, self.memory = dict(self.kept[-1].blocks), {"run": self.kept[-1].memory}
        for each in answers:
            self._remember(each)

    def _remember(self, answered: Answered) -> None:
        self.answers.append(answered)
        self.memory[answered.scope] = answered.memory
        self.blocks |= answered.blocks

    def _start(self, attempt: tuple[str, int], base: int) -> None:
        """A new attempt: forget what was not committed."""
        if self.program.lasting:
            self._go_back(base)
            self._check_kept(base)
            if self.kept[-1].round != base:
                raise Stale(f"it has lost round {base}.", self.kept[-1].round)
        self._begin(*attempt)

    def _check_kept(self, base: int) -> None:
        """Refuse to begin again in the middle of a run, as if nothing had been before."""
        if self.program.lasting and self.wiped and self.kept[-1].round < base:
            raise FedbilevelError(
                f"its saved state of this run is lost (it should have round {base}): restore its folder from a backup."
            )

    def _go_back(self, committed: int | None) -> None:
        """Forget rounds after a committed one."""
        if committed is None:
            return
        known = [kept for kept in self.kept if kept.round <= committed]
        if not known:
            rounds = " and ".join(str(kept.round) for kept in self.kept)
            raise FedbilevelError(f"the server is at round {committed}, but it only has round {rounds}.")
        if len(known) < len(self.kept):
            self.kept = known
            self.vault.save(known)

    def commit(self, message: Commit | None) -> None:
        """The end of a round: keep what the server's state refers to, forget the rest."""
        self._check_joined()
        if message is None or self.kept[-1].round >= message.round:  # it has done this
            return
        mine = (*self.attempt, len(self.answers)) == (message.session, message.attempt, message.answers)
        if not mine and message.answers and self.program.lasting:
            self._check_kept(message.round - 1)
            raise Stale(f"it has lost what it computed in round {message.round}.", self.kept[-1].round)
        if not mine:
            self._begin(message.session, message.attempt)
        blocks = {**self.blocks, **self._projected(message.projections)}
        lasting = {name: self._combine(terms, blocks) for name, terms in message.blocks.items()}
        kept = [*self.kept[-1:], Kept(message.round, lasting or self.kept[-1].blocks, self.memory.get("run"))]
        self.held = {serial: self.held[serial] for serial in message.held if serial in self.held}
        if self.program.lasting:
            self.vault.save(kept)
        self.kept = kept
        self._begin(*self.attempt)

    def _committed(self, message: Commit, arrays: Arrays) -> Answer:
        self.commit(message)
        return Done(), {}

    def _with_blocks(
        self, shapes: Any, received: dict[str, np.ndarray], own: dict[str, dict[str, float]], blocks: dict[str, Any]
    ) -> Any:
        """The broadcast, with the client's own blocks where the server only has names."""
        parts, structure = split_vectors(shapes)
        public = iter(split_vectors(rebuild(without(shapes, self.program.private), received))[0])
        private = [n for n, part in enumerate(parts) if self.program.private(part)]
        if not {str(n) for n in private} <= own.keys():
            raise FedbilevelError("this message does not say what a private block is.")
        mine = {n: Vector(self._combine(own[str(n)], blocks), "x") for n in private}
        whole = [mine[n] if n in mine else next(public) for n in range(len(parts))]
        return jax.tree.unflatten(structure, whole)

    def _projected(self, projections: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Blocks that the server defined as the projection of others, in the order of their definition."""
        new: dict[str, Any] = {}
        for name, terms in projections.items():
            if name not in self.blocks:
                combined = self._combine(terms, {**self.blocks, **new})
                new[name] = self.program.problem.nearest(Vector(combined, "x")).tree
        return new

    def _combine(self, terms: dict[str, float], blocks: dict[str, Any]) -> Any:
        """The value of a combination; blocks from exchanges that this client was not asked in, or failed in, are 0."""
        zero = jax.tree.map(jnp.zeros_like, next(iter(blocks.values())))
        for name, factor in terms.items():
            if name in blocks:
                zero = jax.tree.map(
                    lambda total, a, factor=factor: total + jnp.asarray(factor, a.dtype) * a, zero, blocks[name]
                )
        return zero

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
        self.commit(message.commit)
        if self.evaluate is None:
            return Done(), {}
        numbers = self.evaluate(*self.solution(message.round, arrays))
        return Done(), {name: np.asarray(value, float) for name, value in numbers.items()}

    def _reveal(self, message: Reveal, arrays: Arrays) -> Answer:
        """Send blocks and memory, where one person runs all parties and wants to see the result."""
        if not self.reveals:
            raise FedbilevelError("its private state is not for others.")
        self.commit(message.commit)
        kept = self._kept_of(message.round)
        blocks = {name: self._combine(terms, kept.blocks) for name, terms in message.blocks.items()}
        return Done(), named_leaves({"blocks": blocks, "memory": kept.memory})
