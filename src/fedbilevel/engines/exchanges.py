"""Exchanges by name: their position in a server program, in every engine, and how often they are made.

A server program is a tree: a block is a sequence of exchanges and loops, and the body of a loop is a block of its own.
An exchange is named by its path through this tree: "round.0" is the first of a round, "round.1.0" the first in the loop
that follows it. Counts and costs are kept by this name, with one axis for every enclosing loop: its first iteration,
and all later ones, in which clients hold more and are sent less. No engine keeps a running index, so none can count
differently from the plan.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.core import Carry, Clients, Key, Objective
from fedbilevel.core.data import Data
from fedbilevel.core.sampling import advance
from fedbilevel.core.vectors import Vector
from fedbilevel.engines.program import Program
from fedbilevel.errors import FedbilevelError


class Position:
    """How far a server program has come in one of its blocks.

    ``lengths`` are those of the loops around it (None: random); ``iterations`` say of each whether this is its first
    iteration (0) or a later one (1).

    >>> position = Position("round")
    >>> with position.loop(3)(2) as body:
    ...     body.take(), body.lengths, body.iterations
    ('round.0.0', (3,), (1,))
    >>> position.take()
    'round.1'
    """

    def __init__(self, block: str, lengths: tuple[int | None, ...] = (), iterations: tuple[Any, ...] = ()) -> None:
        self.block, self.lengths, self.iterations = block, lengths, iterations
        self._taken = 0
        self._in_loop = False

    def check(self) -> None:
        """Refuse to use the clients of this block inside one of its loops: they are not those of the loop."""
        if self._in_loop:
            raise FedbilevelError("inside clients.repeat, use the clients that the body is given.")

    def take(self) -> str:
        """The name of the next exchange or loop of the block."""
        self._taken += 1
        return f"{self.block}.{self._taken - 1}"

    def loop(self, times: int | jax.Array) -> Callable[[Any], Any]:
        """The next loop: for the number of an iteration, the position at the start of its body."""
        name, length = self.take(), times if isinstance(times, int) else None

        @contextmanager
        def iteration(number: int | jax.Array) -> Iterator["Position"]:
            later = min(number, 1) if isinstance(number, int) else jnp.minimum(number, 1)
            self._in_loop = True
            try:
                yield Position(name, (*self.lengths, length), (*self.iterations, later))
            finally:
                self._in_loop = False

        return iteration


class ProgramClients(Clients):
    """What the clients of all engines have in common: keys, names of exchanges, loops, and the server's own rows."""

    def __init__(self, program: Program, server_data: Data | None, key: Key, position: Position) -> None:
        self.program, self.server_data, self.key, self.position = program, server_data, key, position
        self._keys_taken = 0
        self.given_u: Vector | None = None
        self.starts_u = False  # whether the program asked where an adjoint starts

    def next_key(self) -> Key:
        self.position.check()
        self._keys_taken += 1
        return jax.random.fold_in(self.key, self._keys_taken - 1)

    @property
    def holds_upper(self) -> bool:
        return self.program.layout.server

    @property
    def f(self) -> Objective:
        assert self.server_data is not None
        return self.program.server_objective(self.server_data)

    def adjoint(self, y: Vector) -> Vector:
        self.starts_u = True
        return 0 * y if self.given_u is None else self.given_u

    def project_y(self, y: Vector) -> Vector:
        return self.program.problem.nearest(y)

    def repeat(self, times: int | jax.Array, body: Callable[[Clients, Carry], Carry], carry: Carry) -> Carry:
        key, iteration = self.next_key(), self.position.loop(times)

        def run(number: Any, carry: Carry) -> Carry:
            with iteration(number) as position:
                return body(self._at(advance(key, number, times), position), carry)

        return self._loop(times, run, carry)

    @abstractmethod
    def _at(self, key: Key, position: Position) -> "ProgramClients":
        """The same clients, with other keys, at another position."""

    @abstractmethod
    def _loop(self, times: int | jax.Array, iteration: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        """``carry = iteration(i, carry)`` for i = 0 .. times - 1."""
