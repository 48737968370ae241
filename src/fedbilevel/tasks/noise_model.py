"""How labels go wrong: the probability of a given label if the right one is known, for every client.

Client m gives a row of class c a wrong label with probability e_mc, and then label k with probability S_ck::

    T_m[c, k] = (1 - e_mc) [c = k] + e_mc S_ck,        e_mc = sigmoid(level + x_m + rate_c)

The client's own deviation x_m is private. The common level, the rates of classes and the matrix S are shared, so that
clients with few rows lean on the others; Gaussian priors keep all of them near "every class alike".
"""

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
MOST_CLASSES = 30  # with a matrix S; with more classes, wrong labels are spread evenly
START = -1.5  # the first common level, as a logit
SPEED = 4.0  # the shared part moves this many times faster than its numbers, which stay small
OWN, RATE, FLIP = 1.0, 0.3, 1.5
"""Prior deviations of a client's level, of the rate of a class, and of the logits of S."""


def start(classes: int, by_class: bool) -> tuple[dict[str, Array], dict[str, Array]]:
    """The first noise model: what is a client's own, and what is shared; with or without differences between classes,
    which only trusted rows can tell from differences between what classes look like.
    """
    shared = {"level": jnp.asarray(START / SPEED)}
    if by_class:
        shared["rate"] = jnp.zeros(classes)
    if by_class and 2 < classes <= MOST_CLASSES:
        shared["flip"] = jnp.zeros((classes, classes))
    return {"level": jnp.asarray(0.0)}, shared


def transition(own: Any, shared: Any, classes: int) -> Array:
    """T, a row for each right class and a column for each given label."""
    shared = jax.tree.map(lambda a: SPEED * a, shared)
    rate, flip = shared.get("rate", jnp.zeros(classes)), shared.get("flip", jnp.zeros((classes, classes)))
    wrong = jax.nn.sigmoid(shared["level"] + own["level"] + rate)[:, None]
    same = jnp.eye(classes, dtype=bool)
    spread = jax.nn.softmax(jnp.where(same, -jnp.inf, flip), 1)
    return jnp.where(same, 1 - wrong, wrong * spread)


def log_given(log_right: Array, labels: Array, matrix: Array) -> Array:
    """The log of the probability of the given labels; ``log_right`` has axes of rows (first) and classes (last)."""
    chosen = jnp.log(matrix.T[labels])  # for each row, of every right class
    middle = (1,) * (log_right.ndim - 2)
    return jax.nn.logsumexp(log_right + chosen.reshape(len(labels), *middle, -1), -1)


def posterior(right: Array, labels: Array, matrix: Array) -> Array:
    """The probability of every class to be the right one, once the given label is known, too."""
    joint = right * matrix.T[labels]
    return joint / jnp.maximum(joint.sum(-1, keepdims=True), 1e-30)


def own_penalty(own: Any) -> Array:
    """Minus the log of the prior of a client's own part."""
    return own["level"] ** 2 / (2 * OWN**2)


def shared_penalty(shared: Any) -> Array:
    """Minus the log of the prior of the shared part."""
    shared = jax.tree.map(lambda a: SPEED * a, shared)
    of = lambda name, deviation: jnp.sum(shared[name] ** 2) / (2 * deviation**2) if name in shared else 0.0
    return jnp.asarray(of("rate", RATE) + of("flip", FLIP))
