"""Models that leave out a fold of the rows: what they say about a row does not depend on its label.

The weights that data cleaning learns come from models that were trained on the very labels in question, and so does the
loss of its model. Here K models are trained at once, with the learned weights, each on all rows but those of its own
fold, and on the clean validation rows. A label is suspicious if the model of its fold gives it a small probability.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Lookup, Problem
from fedbilevel.core.task import Task
from fedbilevel.models import Model, cross_entropy, outputs, squared_norm
from fedbilevel.tasks.cleaning import Labelled

FOLDS = 5


@cache
def problem(model: Model, l2: float) -> Problem:
    """The losses of all folds together; there is nothing to choose on the upper level."""

    def lower(x: Any, y: Any, batch: Any) -> jax.Array:
        losses = jnp.stack([cross_entropy(model.apply(each, batch["image"]), batch["label"]) for each in y], 1)
        used = (batch["fold"][:, None] != jnp.arange(FOLDS)) * batch["share"][:, None]
        return (used * losses).mean(0).sum() * FOLDS / (FOLDS - 1) + l2 / 2 * squared_norm(y)

    def init(key: jax.Array) -> tuple[Any, Any]:
        return jnp.zeros(1), [model.init(each) for each in jax.random.split(key, FOLDS)]

    return Problem(lower, lower, init)


def folds(
    model: Model,
    images: np.ndarray,
    clients: Sequence[tuple[Labelled, Labelled]],
    shares: Sequence[np.ndarray],
    l2: float,
    batch_size: int,
    metrics: Callable[[Any, Any], Mapping[str, float]],
) -> Task:
    """The task of clients with images of a table.

    Args:
        model: the network.
        images: the table.
        clients: training and validation rows of every client.
        shares: the weights of the training rows of every client, from 0 to 1.
        l2: weight decay.
        batch_size: rows per batch.
        metrics: of x and the models.
    """

    def rows(train: Labelled, val: Labelled, share: np.ndarray) -> dict[str, Any]:
        sure = np.ones(len(val.rows), np.float32)
        own = {
            "image": Lookup(images, np.concatenate([train.rows, val.rows])),
            "label": np.concatenate([train.labels, val.labels]),
            "share": np.concatenate([share.astype(np.float32), sure]),
            "fold": np.concatenate([fold_of(len(train.rows)), np.full(len(val.rows), FOLDS, np.int32)]),
        }
        return {"train": own, "val": own}

    data = [rows(train, val, share) for (train, val), share in zip(clients, shares, strict=True)]
    return Task(problem(model, l2), data, batch_size=batch_size, metrics=metrics, name="data-cleaning-folds")


def fold_of(rows: int) -> np.ndarray:
    """The fold of every training row of a client; which rows it has was drawn at random."""
    return np.arange(rows, dtype=np.int32) % FOLDS


def out_of_fold(model: Model, y: Any, images: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """What the model of its fold says of each image: the probability of every class. The images are those of the
    clients one after the other, as many as the sizes say.
    """
    fold = np.concatenate([fold_of(size) for size in sizes])
    said: np.ndarray | None = None
    for k, each in enumerate(y):
        own = np.flatnonzero(fold == k)
        if len(own):
            logits = outputs(model.apply, each, images[own])
            said = np.zeros((len(fold), logits.shape[1])) if said is None else said
            said[own] = _softmax(logits)
    assert said is not None
    return said


def together(model: Model, y: Any, images: Any) -> np.ndarray:
    """The mean of what the models of all folds say."""
    return np.mean([_softmax(outputs(model.apply, each, images)) for each in y], 0)


def _softmax(logits: np.ndarray) -> np.ndarray:
    grown = np.exp(logits - logits.max(1, keepdims=True))
    return grown / grown.sum(1, keepdims=True)
