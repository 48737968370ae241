"""The server's side of an exchange: the clients that take part, and what came back from them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.core.objective import Objective
from fedbilevel.core.types import Carry, Key, Step
from fedbilevel.core.vectors import Vector


def mean_type(kind: Any) -> Any:
    """The type of a mean of numbers of this type."""
    return kind if jnp.issubdtype(kind, jnp.floating) else jnp.result_type(float)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Each:
    """A different message for every client of the cohort, or a reply from each: arrays with a leading axis.

    ``alive`` says which rows are present, where some clients did not reply (None: all).
    """

    rows: Any
    alive: jax.Array | None = None

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.rows, self.alive), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "Each":
        return cls(*children)

    def row(self, number: int | jax.Array) -> Any:
        """One client's part."""
        return jax.tree.map(lambda a: a[number], self.rows)

    def reordered(self, order: jax.Array) -> "Each":
        """The same rows in another order."""
        return jax.tree.map(lambda a: a[order], self)

    def where(self, some: jax.Array, others: "Each") -> "Each":
        """These rows where ``some`` is true, and those of others elsewhere."""
        choose = lambda a, b: jnp.where(some.reshape(-1, *(1,) * (jnp.ndim(a) - 1)), a, b)
        return jax.tree.map(choose, self, others)


class Replies(ABC):
    """What came back from one exchange."""

    @abstractmethod
    def mean(self) -> Any:
        """The mean of the uploads over the clients that replied, with the clients' weights.

        A private x-vector is not averaged: it stays with its owner, and is 0 for owners that did not reply. Upload
        *differences* from what was broadcast, then ``add`` their mean: rounding is then relative to the step, not to
        the point, and a client that does not reply does not move.
        """

    @abstractmethod
    def estimate(self) -> Any:
        """An unbiased estimate of ``sum_m w_m upload_m`` over all n clients: ``n / |C| sum_{m in C} w_m upload_m``.

        The same as ``mean`` if all clients reply or all weights are equal. Private x-vectors stay with their owners.
        """

    @abstractmethod
    def stack(self) -> Any:
        """All uploads, with a leading axis of all clients of the federation, 0 for those that did not reply.

        For small uploads only (losses, inner products).
        """

    @abstractmethod
    def replied(self) -> jax.Array:
        """Which of all clients replied."""

    def share(self) -> jax.Array:
        """The share of all clients that replied, in JAX's default precision (a plain mean of booleans is single)."""
        return jnp.mean(self.replied(), dtype=mean_type(bool))

    @abstractmethod
    def each(self) -> Each:
        """The separate uploads, one row per client of the cohort, to send on (see ``Clients.shuffle``)."""


class Clients(ABC):
    """The clients that take part in a round, as the server program sees them."""

    @abstractmethod
    def run(self, step: Step, *broadcast: Any) -> Replies:
        """One exchange: every client computes ``memory, upload = step(client, memory, key, *broadcast)``.

        If an argument is :class:`Each`, every client receives its own row of it.
        """

    @property
    @abstractmethod
    def holds_upper(self) -> bool:
        """Whether the server has validation rows of its own, and with them the whole upper loss."""

    @property
    @abstractmethod
    def f(self) -> Objective:
        """The upper loss on the server's own validation rows."""

    @abstractmethod
    def adjoint(self, y: Vector) -> Vector:
        """Where the adjoint u starts, for ``init``: what the user gave, or 0 in the space of y."""

    @abstractmethod
    def sample(self, size: int) -> "Clients":
        """A sub-cohort, drawn uniformly without replacement from these clients."""

    @abstractmethod
    def weighted(self, weights: jax.Array) -> "Clients":
        """The same clients with other weights: one entry for each of *all* clients of the federation."""

    @abstractmethod
    def project_x(self, x: Vector) -> Vector:
        """The nearest feasible x. Project the average, not only what is averaged: a mean of projections is biased."""

    @abstractmethod
    def project_y(self, y: Vector) -> Vector:
        """The nearest feasible y."""

    @abstractmethod
    def next_key(self) -> Key:
        """A fresh key for the server's own random choices."""

    def shuffle(self, each: Each) -> Each:
        """Deal the rows out to the clients in random order: every row goes to a client drawn uniformly."""
        size = len(jax.tree.leaves(each.rows)[0])
        return each.reordered(jax.random.permutation(self.next_key(), size))

    @abstractmethod
    def repeat(self, times: int | jax.Array, body: Callable[["Clients", Carry], Carry], carry: Carry) -> Carry:
        """Make exchanges in a loop, ``carry = body(clients, carry)``; ``times`` may be random (an array)."""
