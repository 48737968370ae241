"""Federated data cleaning: find the wrongly labelled training samples of all clients, together.

Every client has training samples, some with wrong labels, and a few clean validation samples. x holds one number per
training sample, whose sigmoid is the weight of that sample; y is the model trained with these weights on everybody's
samples; x is chosen so that y does best on everybody's validation samples::

    min_x  1/M sum_m mean_n loss(y_x; val_mn)
    y_x = argmin_y  1/M sum_m mean_n sigmoid(x_mn) loss(y; train_mn) + l2/2 |y|^2

Client m's validation samples all come from one class, so that no client can clean alone (Li, Huang, Huang:
"Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level Problems", NeurIPS 2023,
section 5.1). Client m's block of x concerns only its own samples: it is private and never sent.
"""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

from fedbilevel.algorithms import FedAvg
from fedbilevel.core import Problem
from fedbilevel.data import corrupt
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.models import Model, cross_entropy, mlp, squared_norm
from fedbilevel.task import Reference, Task

CLASSES = 10


@cache  # tasks of equal shape share their compiled code, whatever their seed
def _problem(model: Model, samples: int, clients: int, l2: float, private: bool) -> Problem:
    def upper(x: Any, y: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply(y, batch["image"]), batch["label"]).mean()

    def lower(x: Any, y: Any, batch: Any) -> jax.Array:
        losses = cross_entropy(model.apply(y, batch["image"]), batch["label"])
        return (jax.nn.sigmoid(x[batch["weight"]]) * losses).mean() + l2 / 2 * squared_norm(y)

    def init(key: jax.Array) -> tuple[Any, Any]:
        return jnp.zeros(samples if private else samples * clients), model.init(key)

    return Problem(upper, lower, init, private_x=private)


def data_cleaning(
    data: str = "digits",
    clients: int = 10,
    corruption: float = 0.4,
    validation: int = 20,
    test: int = 500,
    hidden: int = 64,
    l2: float = 1e-3,
    batch_size: int = 32,
    private: bool = True,
    seed: int = 0,
) -> Task:
    """Find wrongly labelled samples.

    Args:
        data: "digits", the 1797 handwritten digits of 8 x 8 pixels that ship with scikit-learn.
        clients: number of clients.
        corruption: share of the training labels that are wrong.
        validation: clean validation images per client, all of class (client number mod 10).
        test: test images, seen by nobody but the metrics.
        hidden: width of the hidden layer of the model; 0 is logistic regression.
        l2: weight decay.
        batch_size: training rows per batch (validation rows are always all used).
        private: whether every client keeps its sample weights (False: all weights are sent to everybody, as the paper
            counts).
        seed: of the split and of the corruption.
    """
    if data != "digits":
        raise UnknownName("data set for data-cleaning", data, ["digits"])
    if not 0 <= corruption < 1:
        raise FedbilevelError(f"data-cleaning: corruption is a share from 0 to below 1, not {corruption}.")
    if hidden < 0 or not l2 >= 0 or seed < 0:
        raise FedbilevelError("data-cleaning: hidden, l2 and seed must not be negative.")
    digits: Any = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(images))
    if clients < 1 or validation < 1 or not 1 <= test < len(images):
        raise FedbilevelError("data-cleaning: clients, validation and test must be at least 1, and test below 1797.")
    tested, rest = order[:test], order[test:]
    of_class = [list(rest[labels[rest] == k]) for k in range(CLASSES)]
    val = [
        [of_class[m % CLASSES].pop() for _ in range(min(validation, len(of_class[m % CLASSES])))]
        for m in range(clients)
    ]
    train = rng.permutation(np.concatenate(of_class))
    if min(map(len, val)) < validation or len(train) < clients:
        raise FedbilevelError(
            f"data-cleaning: {len(images)} images are too few for {clients} clients with {validation} validation "
            f"images each and {test} test images."
        )

    parts = np.array_split(train, clients)
    longest = len(parts[0])
    given, wrong = zip(*(corrupt(labels[part], corruption, CLASSES, rng) for part in parts), strict=True)
    own = np.arange(longest) < np.array(
        [[len(part)] for part in parts]
    )  # which entries of the blocks belong to a sample
    truth = np.zeros(own.shape, bool)
    truth[own] = np.concatenate(wrong)

    def client(m: int) -> dict[str, Any]:
        weight = np.arange(len(parts[m])) + (0 if private else m * longest)
        return {
            "train": {"image": images[parts[m]], "label": given[m], "weight": weight.astype(np.int32)},
            "val": {"image": images[val[m]], "label": labels[val[m]]},
        }

    model = mlp(64, *([hidden] if hidden else []), CLASSES)
    predict = jax.jit(lambda y, inputs: model.apply(y, inputs).argmax(1))

    def metrics(x: Any, y: Any) -> dict[str, float]:
        blocks = np.asarray(x).reshape(own.shape)
        seen = {"accuracy": float(np.mean(np.asarray(predict(y, images[tested])) == labels[tested]))}
        if 0 < truth[own].mean() < 1:
            seen["auc"] = float(roc_auc_score(truth[own], -blocks[own]))
        return seen

    def files(results: Mapping[str, Any], folder: Path) -> None:
        x, y = results["run"].x, results["run"].y
        path = folder / "suspects.csv"
        weights = 1 / (1 + np.exp(-np.asarray(x, float).reshape(own.shape)))
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(
                ["client", "rank", "sample", "weight", "given_label", "model_says", "digits_index", "really_wrong"]
            )
            for m, part in enumerate(parts):
                says = np.asarray(predict(y, images[part]))
                order = np.argsort(weights[m, : len(part)], kind="stable")
                suspects = [n for n in order if says[n] != given[m][n]]
                for rank, n in enumerate(suspects, 1):
                    row = [f"{weights[m, n]:.4f}", given[m][n], says[n], part[n], "yes" if wrong[m][n] else "no"]
                    table.writerow([m, rank, n, *row])

    # Weight 1 for all, and for the samples with a right label only: sigmoid(20) is 1 and sigmoid(-20) is 0 to nine
    # digits.
    shape = own.shape if private else own.size
    everything, clean = np.full(own.shape, 20.0), np.where(truth, -20.0, 20.0)
    return Task(
        _problem(model, longest, clients, l2, private),
        [client(m) for m in range(clients)],
        batch_size={"train": batch_size, "val": None},
        metrics=metrics,
        name="data-cleaning",
        options={
            "data": data,
            "clients": clients,
            "corruption": corruption,
            "validation": validation,
            "test": test,
            "hidden": hidden,
            "l2": l2,
            "batch_size": batch_size,
            "private": private,
            "seed": seed,
        },
        references=[
            Reference("noisy", "FedAvg on the noisy labels", FedAvg(), everything.reshape(shape)),
            Reference("clean", "FedAvg on the clean labels only", FedAvg(), clean.reshape(shape)),
        ],
        files=files,
        headline={"accuracy": "test accuracy", "auc": "AUC of the weights"},
    )
