"""The rows of clients: never padded, never copied, and looked up in a shared table where there is one."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.sampling import Sampling, draw
from fedbilevel.core.types import Key, Tree


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows of a table that is in memory only once, however many clients use it: row i is ``table[index[i]]``.

    Where a row is one image, ``index`` has one axis; where a row is a group of images, such as the samples of a
    few-shot task, it has more.

    >>> images = jnp.arange(12).reshape(4, 3)
    >>> Lookup(images, jnp.array([[2, 0], [0, 3]])).shape
    (2, 2, 3)
    """

    table: Any
    index: Any

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.index.shape, *self.table.shape[1:])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, rows: Any) -> Any:
        return self.table[self.index[rows]]

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.table, self.index), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "Lookup":
        return cls(*children)


def columns(rows: Tree) -> tuple[list[Any], Any]:
    """The arrays and lookups that rows consist of, and their structure."""
    return jax.tree.flatten(rows, is_leaf=lambda part: isinstance(part, Lookup))


def take(rows: Tree, index: Any) -> Tree:
    """Some of the rows, as arrays."""
    return jax.tree.map(lambda a: a[index], rows, is_leaf=lambda part: isinstance(part, Lookup))


def select(rows: Tree, index: Any) -> Tree:
    """Some of the rows; lookups stay lookups."""
    some = lambda a: Lookup(a.table, a.index[index]) if isinstance(a, Lookup) else a[index]
    return jax.tree.map(some, rows, is_leaf=lambda part: isinstance(part, Lookup))


def own_tables(rows: Tree) -> Tree:
    """The same rows, looked up in tables that contain only these rows."""

    def own(part: Any) -> Any:
        if not isinstance(part, Lookup):
            return part
        used, index = np.unique(part.index, return_inverse=True)
        return Lookup(np.asarray(part.table)[used], index.reshape(part.index.shape))

    return jax.tree.map(own, rows, is_leaf=lambda part: isinstance(part, Lookup))


def as_arrays(rows: Tree, known: dict[int, tuple[Any, np.ndarray]]) -> Tree:
    """The same rows with the arrays of other libraries, such as PyTorch's tensors, as those of numpy: not copied where
    both can share the memory. ``known`` keeps what was converted, because lookups may share a table.
    """

    def array(leaf: Any) -> Any:
        if not _foreign(leaf):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = (leaf, np.asarray(leaf))
        return known[id(leaf)][1]

    return jax.tree.map(array, rows) if any(map(_foreign, jax.tree.leaves(rows))) else rows


def _foreign(leaf: Any) -> bool:
    return hasattr(leaf, "__array__") and not isinstance(leaf, np.ndarray | np.generic | jax.Array)


class Rows(NamedTuple):
    """The rows of one client: ``size`` rows of some arrays, from row ``start``. Never padded, never copied."""

    arrays: Tree
    start: jax.Array | int
    size: jax.Array | int
    longest: int  # of all clients: the shape of a full batch
    ragged: bool  # whether clients differ in size
    sampling: Sampling = "replacement"

    def draw(self, key: Key, size: int) -> Tree:
        """A batch of rows; the same key gives the same rows."""
        return self._take(draw(key, size, self.size, self.sampling))

    def all(self) -> Tree:
        """All rows; clients with fewer than the longest repeat their last row."""
        return self._take(jnp.minimum(jnp.arange(self.longest), self.size - 1))

    def _take(self, index: jax.Array) -> Tree:
        return take(self.arrays, self.start + index)
