"""What models that were not trained on a row say about it, after a run of :mod:`fedbilevel.tasks.label_errors`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.tasks import noise_model
from fedbilevel.tasks.label_errors import Design, Kind, calibrated, candidate_logits, log_likelihood, mixed, of_fold

Array = jax.Array
SHIFTS = np.linspace(-4, 4, 33)
SHARPER = np.linspace(-1.5, 1.5, 13)


class Said(NamedTuple):
    """What models that were not trained on a row say about it.

    Args:
        right: the probability of every class, from the inputs alone.
        posterior: the same once the given label is known, too.
    """

    right: np.ndarray
    posterior: np.ndarray


def say(
    design: Design,
    x: Any,
    y: Any,
    inputs: np.ndarray,
    labels: np.ndarray,
    fold: np.ndarray,
    candidate: int | None = None,
) -> Said:
    """What a client knows of its own rows after a run, with its own x; nothing of this is sent. By the mixture, or by
    one candidate alone.
    """
    return Said(*in_chunks(lambda *rows: _say(design, candidate, x, y, *rows), inputs, labels, fold))


def losses(design: Design, y: Any, inputs: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """For every candidate, the sum over a client's rows of -log of the probability of the given label, out of fold; and
    if it were more or less sure (:data:`SHARPER`): (candidates, sharper).
    """
    return summed(partial(_losses, design, y), inputs, labels, fold)


def says(design: Design, y: Any, kind: Kind, inputs: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """The probabilities of the first candidate of a kind, by models that were not trained on the rows."""
    j = [each.kind for each in design.candidates].index(kind)
    return in_chunks(lambda *rows: (_says(design, y, *rows)[:, j],), inputs, fold)[0]


def profile(
    design: Design, x: Any, y: Any, inputs: np.ndarray, labels: np.ndarray, fold: np.ndarray, trusted: np.ndarray
) -> np.ndarray:
    """The log-likelihood of a client's labels if there were more or less noise (:data:`SHIFTS` of its logit) and the
    models were more or less sure (:data:`SHARPER`): (shifts, sharper). The sum over clients says whether noise can be
    told from models that are not sure.
    """
    return summed(partial(_profile, design, x, y), inputs, labels, fold, trusted)


def chunks(*rows: np.ndarray, size: int = 2048) -> Iterator[tuple[int, list[Array]]]:
    """Some rows at a time, and how many: the last ones are filled up to a power of two, so that programs are compiled
    for few lengths.
    """
    for first in range(0, len(rows[0]), size):
        length = min(size, len(rows[0]) - first)
        index = first + np.minimum(np.arange(max(64, 1 << (length - 1).bit_length())), length - 1)
        yield length, [jnp.asarray(a[index]) for a in rows]


def in_chunks(function: Callable[..., Any], *rows: np.ndarray) -> list[np.ndarray]:
    """A function of rows that returns several arrays with an entry for each."""
    parts = [[np.asarray(part)[:length] for part in function(*some)] for length, some in chunks(*rows)]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def summed(function: Callable[..., Any], *rows: np.ndarray) -> np.ndarray:
    """The sum of a function of rows that sums over them, and is given first how often each counts."""
    return np.sum(
        [np.asarray(function(1.0 * (jnp.arange(len(s[0])) < n), *s), float) for n, s in chunks(*rows)], axis=0
    )


@partial(jax.jit, static_argnums=(0, 1))
def _say(
    design: Design, candidate: int | None, x: Any, y: Any, inputs: Array, labels: Array, fold: Array
) -> tuple[Array, Array]:
    logits = of_fold(candidate_logits(design, y, inputs), fold)
    log_right = mixed(y["mixture"], logits) if candidate is None else jax.nn.log_softmax(logits[:, candidate])
    matrix = noise_model.transition(x, y["noise"], design.classes)
    return jnp.exp(log_right), noise_model.posterior(jnp.exp(log_right), labels, matrix)


@partial(jax.jit, static_argnums=0)
def _losses(design: Design, y: Any, counts: Array, inputs: Array, labels: Array, fold: Array) -> Array:
    logits = of_fold(candidate_logits(design, y, inputs), fold)

    def of_one(sharper: Array) -> Array:
        said = jax.nn.log_softmax(jnp.exp(sharper) * logits)
        return -counts @ jnp.take_along_axis(said, labels[:, None, None], 2)[..., 0]

    return jax.lax.map(of_one, jnp.asarray(SHARPER, logits.dtype)).T


@partial(jax.jit, static_argnums=0)
def _says(design: Design, y: Any, inputs: Array, fold: Array) -> Array:
    return jnp.exp(calibrated(y["mixture"], of_fold(candidate_logits(design, y, inputs), fold)))


@partial(jax.jit, static_argnums=0)
def _profile(
    design: Design, x: Any, y: Any, counts: Array, inputs: Array, labels: Array, fold: Array, trusted: Array
) -> Array:
    log_right = mixed(y["mixture"], of_fold(candidate_logits(design, y, inputs), fold))
    batch = {"label": labels, "trusted": trusted}

    def of_one(shift: Array, sharper: Array) -> Array:
        matrix = noise_model.transition({"level": x["level"] + shift}, y["noise"], design.classes)
        return log_likelihood(jax.nn.log_softmax(jnp.exp(sharper) * log_right), batch, matrix) @ counts

    shifts, sharper = jnp.asarray(SHIFTS, log_right.dtype), jnp.asarray(SHARPER, log_right.dtype)
    return jax.lax.map(lambda shift: jax.lax.map(partial(of_one, shift), sharper), shifts)
