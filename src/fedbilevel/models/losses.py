"""Losses and norms, and the outputs of a model for many rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Tree


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross-entropy of every row."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def outputs(apply: Callable[[Tree, jax.Array], jax.Array], parameters: Tree, inputs: Any) -> np.ndarray:
    """The outputs of a model for many rows, a few hundred at a time, which needs little memory."""
    inputs = jnp.asarray(inputs)
    return np.asarray(_outputs(apply, parameters, inputs))


@partial(jax.jit, static_argnums=0)
def _outputs(apply: Callable[[Tree, jax.Array], jax.Array], parameters: Tree, inputs: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: apply(parameters, row[None])[0], inputs, batch_size=250)


def squared_norm(parameters: Tree) -> jax.Array:
    """The sum of squares of all entries, for L2 regularisation."""
    return jnp.asarray(sum(jnp.vdot(a, a) for a in jax.tree.leaves(parameters)))


def norms(parameters: Tree) -> jax.Array:
    """The sum over arrays of their norms, not squared; its gradient at an array of zeros is zero."""

    def norm(a: jax.Array) -> jax.Array:
        square = jnp.vdot(a, a)
        some = square > 0
        return jnp.where(some, jnp.sqrt(jnp.where(some, square, 1.0)), 0.0)

    return jnp.asarray(sum(norm(a) for a in jax.tree.leaves(parameters)))
