"""The server of a federation: the same algorithm files as in the simulator, executed by messages to clients.

A client (``party.py``) holds its own data and memory, looks up the method by its name in its own copy of the algorithm,
and answers with named arrays. A failure is an answer, too. A client keeps what it was sent until the end of the round,
so nothing is sent twice. Blocks of a private x stay at the clients, and the server handles them by name only.

A round has ended when a quorum of its clients has acknowledged the commit, which travels with their next message. Until
then, all can go back to the round before: :class:`RoundLost` says when.
"""

import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from fedbilevel.engines.messaging.commits import Commits, Returns
from fedbilevel.engines.messaging.holdings import Holdings
from fedbilevel.engines.messaging.party import all_finite
from fedbilevel.engines.messaging.post import Answers, Post, Transport
from fedbilevel.engines.messaging.protocol import Commit, Done, Evaluate, Failed, Finish, Join, Reveal, Run
from fedbilevel.engines.messaging.records import Failure, Served
from fedbilevel.engines.participation import Everyone, Participation
from fedbilevel.engines.plan import Exchange, Plan
from fedbilevel.engines.program import Program, split_vectors, without
from fedbilevel.errors import FedbilevelError, NoQuorum
from fedbilevel.storage.arrays import named_leaves, rebuild


class State(NamedTuple):
    """The server's side of a run; memories and blocks are with the clients."""

    key: Key
    server: Any
    round: int
    finite: bool
    served: Counts
    calls: Counts
    commits: Commits


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
        self.session = ""  # attempts of another session are other attempts
        self._attempts = itertools.count(1)
        self.returns = Returns(self.names)
        self.unjoined: dict[int, tuple[Join, dict[str, Any]]] = {}  # who was away when the others joined
        self.finished: dict[str, Mapping[str, np.ndarray]] = {}
        self._holdings = Holdings(len(weights))

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
            leaves[client] = named_leaves(without(parts, is_block))
            questions[client] = dataclasses.replace(
                asked_for,
                base=scope.commits.base(client),
                answers=scope.answers.get(client, 0),
                serials={name: self._holdings.serial(leaf) for name, leaf in leaves[client].items()},
                blocks={str(n): part.terms for n, part in enumerate(split_vectors(parts)[0]) if is_block(part)},
                commit=scope.commits.pending.get(client),
            )

        def question(client: int) -> tuple[Run, dict[str, Any]]:
            new = {k: a for k, a in leaves[client].items() if not self._holdings.has(client, a)}
            return questions[client], {**{k: np.asarray(jnp.asarray(a)) for k, a in new.items()}, **own_key}

        most = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        answers = self.post.ask({client: question(client) for client in questions}, most)
        again = [m for m, (answer, _) in answers.items() if isinstance(answer, Failed) and answer.reason == "lost"]
        for client in again:  # it was restarted, and needs everything
            self._holdings.forget(client)
        answers |= self.post.ask({client: question(client) for client in again}, most) if again else {}
        scope.commits, answers = self.returns.heard(scope.commits, answers, round - 1)
        uploads: dict[int, Any] = {}
        strange: dict[int, Any] = {}
        for client, (answer, reply) in answers.items():
            try:
                if isinstance(answer, Failed):
                    raise FedbilevelError(answer.error)
                upload = rebuild(shapes, reply)
                self._holdings.add(client, questions[client].serials.values())
                finite = isinstance(answer, Done) and answer.finite and all_finite(upload)
                (uploads if finite else strange)[client] = upload
            except FedbilevelError as error:
                self._holdings.forget(client)  # who knows what arrived
                self.failures.append(Failure(round, asked_for.method, client, str(error)))
        if uploads:
            for client in strange:
                self.failures.append(Failure(round, asked_for.method, client, "its numbers are NaN or infinite."))
        else:
            uploads = strange  # not one client's fault: the run diverges
            scope.diverged = bool(strange)
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

    def start(self, seed: int, x: Any = None, y: Any = None, u: Any = None) -> State:
        """The parties join; then the algorithm's ``init``."""
        key, program = jax.random.key(seed), self.program
        x0, y0 = program.problem.start(jax.random.fold_in(key, 0))
        self._join(key, x, y)
        nearest, private = program.problem.nearest, program.problem.private_x
        first_x: Any = Blocks({"start": 1.0}) if private else nearest(x0 if x is None else Vector(x, "x"))
        first_y = nearest(y0 if y is None else Vector(y, "y"))
        counts = self.plan.no_counts()
        start_key = program.start_key(key)
        cohort = self.cohort(program.first_participation, start_key)
        scope = Scope(0, next(self._attempts), counts, counts, Commits())
        clients = MessageClients(self, start_key, Position("start"), cohort, self.weights, scope)
        clients.given_u = None if u is None else Vector(u, "y")
        server = program.algorithm.at(0).init(clients, first_x, first_y)
        return self._end_round(key, server, cohort.ids, scope)

    def _join(self, key: Key, x: Any, y: Any, committed: int | None = None, commits: Commits | None = None) -> None:
        """Send every client the starting point, and the last committed round if this is not the start."""
        self.session = uuid.uuid4().hex[:8]
        init_key = {"key": np.asarray(jax.random.key_data(jax.random.fold_in(key, 0)))}
        join = Join(self.run, self.session, given_x=x is not None, given_y=y is not None, committed=committed)
        messages = {}
        for m in range(len(self.weights)):
            own = jax.tree.map(lambda a, m=m: a[m], x) if self.program.problem.private_x else x
            given = named_leaves({name: tree for name, tree in (("x", own), ("y", y)) if tree is not None})
            base = -1 if commits is None else commits.acknowledged.get(m, -1)
            arrays = {**{k: np.asarray(v) for k, v in given.items()}, **init_key}
            messages[m] = (dataclasses.replace(join, base=base), arrays)
        away = {m: answer.error for m, (answer, _) in self.post.ask(messages).items() if isinstance(answer, Failed)}
        self.unjoined = {m: messages[m] for m in away if m in self.post.absent}
        self._note_join(committed or 0, messages.keys() - away.keys(), away)
        quorum = self._quorum(len(messages))
        if len(messages) - len(away) < quorum:  # the others only fail exchanges, until they are there
            m, reason = next(iter(away.items()))
            may_come = len(messages) - len(away) + len(self.post.absent) >= quorum
            raise (NoQuorum if may_come else FedbilevelError)(f"{self.names[m]} could not join: {reason}")

    def _join_later(self, round: int) -> None:
        """Who was away when the others joined may be there by now."""
        answers = self.post.ask(self.unjoined) if self.unjoined else {}
        joined = {m for m, (answer, _) in answers.items() if not isinstance(answer, Failed)}
        self.unjoined = {m: message for m, message in self.unjoined.items() if m not in joined}
        if joined:
            self._note_join(round, joined, {})

    def _note_join(self, round: int, there: Iterable[int], away: Mapping[int, str]) -> None:
        self.failures += [Failure(round, "join", m, reason) for m, reason in away.items()]
        names = tuple(self.names[m] for m in sorted(there))
        self.served(Served(round, "join", names, {self.names[m]: reason for m, reason in away.items()}))

    def cohort(self, participation: Participation, key: Key) -> MessageCohort:
        """Draw the clients that take part."""
        ids, times = participation.draw(key, len(self.weights))
        drawn = {int(m): int(n) for m, n in zip(ids, times if times is not None else [1] * len(ids), strict=True) if n}
        return MessageCohort(list(drawn), drawn, len(ids))

    def forget(self) -> None:
        """Forget what clients hold: other clients are asked next."""
        self._holdings.forget_all()

    def _end_round(self, key: Key, server: Any, ids: list[int], scope: Scope) -> State:
        """End a round: give the private parts of the state their lasting names. Clients forget the rest with the next
        message they get.
        """
        round, commits = scope.round, self._acknowledged(scope.commits, scope.round - 1)
        parts, structure = split_vectors(server)
        lasting = {f"state.{n}": part for n, part in enumerate(parts) if is_block(part)}
        public = without(server, is_block)
        same_clients = isinstance(self.program.participation, Everyone)
        held = self._holdings.keep(jax.tree.leaves(public) if same_clients else [])
        commit = Commit(
            session=self.session,
            attempt=scope.attempt,
            round=round,
            answers=0,
            blocks={name: part.terms for name, part in lasting.items()},
            projections=scope.projections,
            held=held,
        )
        # The start names the blocks of everybody, whoever was there.
        everybody = range(len(self.weights)) if round == 0 and self.program.lasting else ()
        asked = {*everybody, *({*ids, *scope.asked} - scope.failed)}
        answers = {m: 0 if m in scope.failed else scope.answers.get(m, 0) for m in asked}
        commits = commits.add({m: dataclasses.replace(commit, answers=answers[m]) for m in sorted(asked)})
        renamed = [Blocks({f"state.{n}": 1.0}) if is_block(part) else part for n, part in enumerate(parts)]
        finite = not scope.diverged and all_finite(public)
        whole = jax.tree.unflatten(structure, renamed)
        return State(key, whole, round, finite, scope.served, scope.calls, commits)

    def _acknowledged(self, commits: Commits, round: int) -> Commits:
        """Send the commit of a round to clients that got no message since, and see that a quorum has it."""
        late = {m: commit for m, commit in commits.pending.items() if commit.round == round}
        if not late or not self.program.lasting:
            return commits
        answers = self.post.ask({m: (commit, {}) for m, commit in late.items()})
        commits, answers = self.returns.heard(commits, answers, round)
        away = {self.names[m]: answer.error for m, (answer, _) in answers.items() if isinstance(answer, Failed)}
        there = tuple(self.names[m] for m in answers if self.names[m] not in away)
        self.served(Served(round, "commit", there, away))
        done, wanted = commits.of_round(round)
        if done < max(1, self._quorum(wanted)):
            name, reason = next(iter(away.items()))
            raise NoQuorum(f"round {round}: too few clients acknowledged its end; {name}: {reason}")
        return commits

    def advance(self, state: State, rounds: int) -> State:
        """Advance by this number of rounds; stops when a result is not finite."""
        for _ in range(rounds):
            if not state.finite:
                break
            self._join_later(state.round)
            draw, work = self.program.round_keys(state.key, state.round)
            cohort = self.cohort(self.program.participation, draw)
            scope = Scope(state.round + 1, next(self._attempts), state.served, state.calls, state.commits)
            clients = MessageClients(self, work, Position("round"), cohort, self.weights, scope)
            server = self.program.algorithm.at(state.round).round(clients, state.server)
            state = self._end_round(state.key, server, cohort.ids, scope)
        return state

    def arrays(self, state: State) -> dict[str, np.ndarray]:
        """The arrays of the server's side of a state by name, to save them. Of private vectors it only has names."""
        parts = {**state._asdict(), "key": jax.random.key_data(state.key), "server": self.public(state)}
        parts["commits"] = state.commits.array()
        return {name: np.asarray(leaf) for name, leaf in named_leaves(parts).items()}

    def _tell(self, state: State, message: Evaluate | Reveal | Finish, most: int = 0, public: bool = True) -> Answers:
        """Send everybody a message about a state: with what is pending, and with what the server has of the state."""
        arrays = {k: np.asarray(leaf) for k, leaf in named_leaves(self.public(state)).items()} if public else {}
        own = lambda m: dataclasses.replace(message, commit=state.commits.pending.get(m))
        return self.post.ask({m: (own(m), arrays) for m in range(len(self.weights))}, most)

    def evaluate(self, state: State) -> dict[int, dict[str, float]]:
        """The metrics of the current solution on each client's own rows, for the clients that answer."""
        answers = self._tell(state, Evaluate(state.round))
        self.returns.heard(state.commits, answers, state.round)
        return {
            m: {name: float(value) for name, value in reply.items()}
            for m, (answer, reply) in answers.items()
            if not isinstance(answer, Failed) and all(value.ndim == 0 for value in reply.values())
        }

    def finish(self, state: State, most: int = 0) -> dict[str, str]:
        """Give every client the result. Returns who could not be given it, and why; ``finished`` has what the others
        sent with their answer, at most so many bytes of it.
        """
        answers = self._tell(state, Finish(state.round), most)
        self.finished = {self.names[m]: reply for m, (answer, reply) in answers.items() if isinstance(answer, Done)}
        return {self.names[m]: answer.error for m, (answer, _) in answers.items() if isinstance(answer, Failed)}

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
            commits=None,  # pyright: ignore[reportArgumentType]
        )
        known = rebuild(shapes._asdict(), arrays)
        parts, structure = split_vectors(self.plan.server)
        public = iter(split_vectors(jax.tree.map(jnp.asarray, known["server"]))[0])
        whole = [
            Blocks({f"state.{n}": 1.0}) if self.program.private(part) else next(public) for n, part in enumerate(parts)
        ]
        key, server = jax.random.wrap_key_data(jnp.asarray(known["key"])), jax.tree.unflatten(structure, whole)
        round, commits = int(known["round"]), Commits.of(arrays["commits"])
        self._join(key, None, None, round, commits)
        return State(key, server, round, bool(known["finite"]), known["served"], known["calls"], commits)

    @property
    def reveals(self) -> bool:
        """Whether clients send private parts of the solution when they are asked."""
        return True

    def solution(self, state: State) -> tuple[Any, Any]:
        """The current x and y in the user's structure."""
        remembers = self.program.algorithm.remembers == "run"
        if not remembers and not any(is_block(part) for part in split_vectors(state.server)[0]):
            x, y = self.program.algorithm.solution(state.server, None)
            return x.tree, y.tree
        try:
            return self._gathered(state, remembers)
        except NoQuorum as reason:
            return self.incomplete(state, reason)

    def incomplete(self, state: State, reason: NoQuorum) -> tuple[Any, Any]:
        """What stands for a solution whose private parts are missing."""
        raise reason

    def _gathered(self, state: State, remembers: bool) -> tuple[Any, Any]:
        """The solution with private blocks and local y of all clients."""
        if not self.reveals:
            raise NoQuorum("the clients keep their parts of the solution")
        parts, structure = split_vectors(state.server)
        blocks = {str(n): part.terms for n, part in enumerate(parts) if is_block(part)}
        answers = []
        told = self._tell(state, Reveal(state.round, blocks), most=1 << 40, public=False)
        self.returns.heard(state.commits, told, state.round)
        for client, (answer, reply) in told.items():
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
