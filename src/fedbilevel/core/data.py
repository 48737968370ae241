"""The rows of all clients, one after the other on the device, and what a compiled program must know about them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.client import Client
from fedbilevel.core.objective import Tally
from fedbilevel.core.problem import Problem
from fedbilevel.core.rows import Lookup, Rows, columns
from fedbilevel.core.sampling import Sampling
from fedbilevel.core.types import Tree
from fedbilevel.errors import FedbilevelError

SPLITS = ("train", "val")


class Shards(NamedTuple):
    """The rows of all clients one after the other: client m has ``rows[m]`` rows from ``start[m]`` on."""

    arrays: Tree
    start: jax.Array
    rows: jax.Array


class Data(NamedTuple):
    """All that enters a compiled round of the simulator, once."""

    train: Shards
    val: Shards
    weights: jax.Array


class Layout(NamedTuple):
    """What a compiled program must know about the data beforehand: sizes, and whether clients differ in them."""

    clients: int
    longest: tuple[int, int]
    ragged: tuple[bool, bool]
    batch_sizes: tuple[int | None, int | None]
    server: bool = False  # whether the validation rows are the server's, the same for all clients
    sampling: Sampling = "replacement"  # how batches are drawn

    def rows(self, data: Data) -> dict[str, float]:
        """How many rows of f and of g a client has; the mean where clients differ."""
        holders = {"f": (data.val, 1 if self.server else self.clients), "g": (data.train, self.clients)}
        return {loss: len(columns(split.arrays)[0][0]) / count for loss, (split, count) in holders.items()}

    def client(
        self, problem: Problem, data: Data, id: jax.Array | int, weight: jax.Array, tally: Tally | None = None
    ) -> Client:
        """Client number ``id`` (an array in a compiled program)."""
        train, val = (
            Rows(shards.arrays, shards.start[id], shards.rows[id], longest, ragged, self.sampling)
            for shards, longest, ragged in zip((data.train, data.val), self.longest, self.ragged, strict=True)
        )
        return Client(problem, train, val, weight, self.batch_sizes, id, self.clients, tally)


class Held(NamedTuple):
    """The rows of one split that one holder has: a client, or the server."""

    holder: str
    rows: Tree

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(columns(self.rows)[0][0])


def held(clients: Sequence[Mapping[str, Tree]], server: Tree, split: str) -> list[Held]:
    """Who holds the rows of a split: the clients, or the server if the validation rows are there."""
    if split == "val" and server is not None:
        return [Held("the server", server)]
    for number, client in enumerate(clients):
        if split not in client:
            raise FedbilevelError(
                f"client {number} has no '{split}' data: give every client {{'train': arrays, 'val': arrays}}."
            )
    return [Held(f"client {number}", client[split]) for number, client in enumerate(clients)]


class Joined:
    """Puts rows of several holders one after the other on the device; a table that lookups share goes there once."""

    def __init__(self) -> None:
        self._tables: dict[int, jax.Array] = {}  # on the device, by what they are copies of

    def shards(self, parts: Sequence[Held], clients: int) -> Shards:
        """The rows of all holders; the server's rows are the same for every client."""
        counts = np.array([part.size for part in parts], np.int32)
        leaves, structures = zip(*(columns(part.rows) for part in parts), strict=True)
        arrays = jax.tree.unflatten(structures[0], [self._join(column) for column in zip(*leaves, strict=True)])
        start = np.cumsum(counts) - counts
        if len(counts) < clients:
            start, counts = (np.repeat(a, clients) for a in (start, counts))
        return Shards(arrays, jnp.asarray(start), jnp.asarray(counts))

    def _join(self, parts: Sequence[Any]) -> Any:
        if not all(isinstance(part, Lookup) for part in parts):
            return jnp.asarray(np.concatenate([part[:] for part in parts]))
        table = parts[0].table
        if any(part.table is not table for part in parts):
            raise FedbilevelError("the lookups of all clients must use the same table.")
        if id(table) not in self._tables:
            # What nobody can change is shared with the device where that is possible, not copied to it.
            fixed = isinstance(table, np.ndarray) and not table.flags.writeable
            self._tables[id(table)] = jax.device_put(table) if fixed else jnp.asarray(table)
        return Lookup(self._tables[id(table)], jnp.asarray(np.concatenate([part.index for part in parts])))
