"""Models as pairs of functions on pytrees: ``init(key) -> parameters`` and ``apply(parameters, inputs) -> outputs``."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Key, Tree


class Model(NamedTuple):
    """Any pair of this kind will do; nothing else in the library looks inside."""

    init: Callable[[Key], Tree]
    apply: Callable[[Tree, jax.Array], jax.Array]


@cache  # equal models are the same object, so that tasks made twice share their compiled code
def mlp(*widths: int) -> Model:
    """Fully connected layers of these widths, inputs and outputs included, with ReLU in between (He initialisation).

    >>> net = mlp(64, 32, 10)
    >>> net.apply(net.init(jax.random.key(0)), jnp.ones((5, 64))).shape
    (5, 10)
    """

    def init(key: Key) -> list[dict[str, jax.Array]]:
        layers = zip(jax.random.split(key, len(widths) - 1), widths[:-1], widths[1:], strict=True)
        return [{"w": jax.random.normal(k, (i, o)) * (2 / i) ** 0.5, "b": jnp.zeros(o)} for k, i, o in layers]

    def apply(parameters: Any, inputs: jax.Array) -> jax.Array:
        *hidden, last = parameters
        for layer in hidden:
            inputs = jax.nn.relu(inputs @ layer["w"] + layer["b"])
        return inputs @ last["w"] + last["b"]

    return Model(init, apply)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross-entropy of every row."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def squared_norm(parameters: Tree) -> jax.Array:
    """The sum of squares of all entries, for L2 regularisation."""
    return jnp.asarray(sum(jnp.vdot(a, a) for a in jax.tree.leaves(parameters)))
