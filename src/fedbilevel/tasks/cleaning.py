"""The losses of data cleaning, and its task: of the clients of a data set, or of a site that brings its own rows."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Lookup, Problem
from fedbilevel.core.presentation import Presentation, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import box
from fedbilevel.errors import FedbilevelError
from fedbilevel.models import Model, cross_entropy, mlp, outputs, squared_norm
from fedbilevel.tasks.sites import (
    Bounds,
    Columns,
    Examples,
    Facts,
    column_bounds,
    column_facts,
    divided,
    moments,
    standardised,
)


@cache  # tasks of equal shape share their compiled code, whatever their seed
def problem(model: Model, samples: int, clients: int, l2: float, weights: str, private: bool) -> Problem:
    """The losses of both levels; a client has at most this number of samples."""

    def upper(x: Any, y: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply(y, batch["image"]), batch["label"]).mean()

    def lower(x: Any, y: Any, batch: Any) -> jax.Array:
        losses = cross_entropy(model.apply(y, batch["image"]), batch["label"])
        own = x[batch["weight"]]
        # A sum over the N samples of a client is N times their mean.
        weight = jax.nn.sigmoid(own) if weights == "sigmoid" else batch["samples"] * own
        return (weight * losses).mean() + l2 / 2 * squared_norm(y)

    def init(key: jax.Array) -> tuple[Any, Any]:
        half = 0.0 if weights == "sigmoid" else 0.5 / samples
        return jnp.full(samples if private else samples * clients, half), model.init(key)

    bounds = None if weights == "sigmoid" else box(0.0, 1 / samples)
    return Problem(upper, lower, init, project_x=bounds, private_x=private)


class Labelled(NamedTuple):
    """Some images of a table, by their numbers, and the labels that were given to them."""

    rows: np.ndarray
    labels: np.ndarray


def cleaning(
    network: Model,
    images: np.ndarray,
    clients: Sequence[tuple[Labelled, Labelled]],
    tested: tuple[Any, np.ndarray],
    samples: int,
    l2: float,
    batch_size: Mapping[str, int | None],
    suggested: Suggestion,
    shown: Presentation,
    weights: str = "sigmoid",
    private: bool = True,
    also: Callable[[Any, Any], Mapping[str, float]] = lambda x, y: {},
    options: Mapping[str, Any] | None = None,
) -> Task:
    """The task of clients with images (or other inputs) of a table, whether of a data set or of one site.

    Args:
        network: the model y.
        images: the table.
        clients: training and validation rows of every client.
        tested: images and labels that the accuracy is measured with.
        samples: the largest number of training rows of a client, here and elsewhere.
        l2, batch_size, weights, private: options of the task; batch sizes by split.
        suggested: what to run.
        shown: how the results are shown.
        also: more metrics: what a simulation knows and a site does not.
        options: how the task was made.
    """

    def rows(m: int, train: Labelled, val: Labelled) -> dict[str, Any]:
        size = len(train.rows)
        weight = np.arange(size) + (0 if private else m * samples)
        of_train = {"image": Lookup(images, train.rows), "label": train.labels, "weight": weight.astype(np.int32)}
        if weights == "raw":
            of_train["samples"] = np.full(size, size, np.float32)
        return {"train": of_train, "val": {"image": Lookup(images, val.rows), "label": val.labels}}

    def metrics(x: Any, y: Any) -> dict[str, float]:
        return {"accuracy": accuracy(network, y, *tested), **also(x, y)}

    return Task(
        problem(network, samples, len(clients), l2, weights, private),
        [rows(m, train, val) for m, (train, val) in enumerate(clients)],
        batch_size=batch_size,
        metrics=metrics,
        name="data-cleaning",
        options=options or {},
        shown=shown,
        suggested=suggested,
    )


def accuracy(network: Model, y: Any, images: Any, labels: np.ndarray) -> float:
    """The share of images that a model recognises."""
    return float(np.mean(outputs(network.apply, y, images).argmax(1) == labels))


def data_cleaning_facts(examples: Examples, train: float = 0.6, validation: float = 0.2, seed: int = 0) -> Facts:
    """The largest number of training rows; of tables, also sums over the columns."""
    rows = divided(examples, train, validation, seed)
    return {"max samples": np.asarray(len(rows.train)), **({} if examples.images else column_facts(rows))}


def data_cleaning_bounds(facts: Facts, rows: int, columns: Columns) -> Bounds:
    """A site has exactly its number of training rows."""
    sums = column_bounds(facts, rows, columns) if "sum count" in facts else {}
    return {"max samples": (rows, rows), **sums}


def data_cleaning_of_site(
    examples: Examples,
    facts: Facts,
    train: float = 0.6,
    validation: float = 0.2,
    layers: int = 2,
    hidden: int = 64,
    l2: float = 1e-3,
    batch_size: int = 32,
    seed: int = 0,
) -> Task:
    """Find label errors at a site; the weights of its rows never leave it.

    Args:
        examples: the rows of the site; those for validation and test should have right labels, so say which they are
            (part in the schema).
        facts: what everybody knows of all sites.
        train: share of every site's rows for training, if the schema has no part.
        validation: share for validation; the rest is for the test.
        layers: fully connected layers.
        hidden: width of the hidden layers.
        l2: weight decay: l2/2 |y|^2.
        batch_size: training rows per batch.
        seed: of the split.
    """
    if min(layers, hidden, batch_size) < 1 or l2 < 0:
        raise FedbilevelError("data-cleaning: layers, hidden and batch_size must be at least 1, l2 not negative.")
    examples, *parts = divided(examples, train, validation, seed)
    inputs = examples.inputs if examples.images else standardised(examples.inputs, *moments(facts))
    labels = examples.labels.astype(np.int32)
    network = mlp(int(np.prod(inputs.shape[1:])), *[hidden] * (layers - 1), examples.classes)
    of_train, of_val, of_test = (Labelled(part, labels[part]) for part in parts)
    steps = {"lr_upper": 20.0, "lr_lower": 0.5, "lr_adjoint": 0.02}
    return cleaning(
        network,
        inputs,
        [(of_train, of_val)],
        tested=(inputs[of_test.rows], of_test.labels),
        samples=int(facts["max samples"]),
        l2=l2,
        batch_size={"train": batch_size, "val": None},
        suggested=Suggestion("fedbioacc", 200, hyper={"fedbioacc": steps, "fedbio": steps}),
        shown=Presentation(headline={"accuracy": "mean test accuracy"}),
    )
