"""Federated data cleaning: the clients find their label errors together.

Every client has training samples, some with wrong labels, and a few clean validation samples. x holds one number per
training sample, which gives its weight; y is the model trained with these weights on everybody's samples; x is chosen
so that y does best on everybody's validation samples. The weight is a sigmoid in a mean, or x itself in a sum::

    min_x  1/M sum_m mean_n loss(y_x; val_mn)
    "sigmoid":  y_x = argmin_y  1/M sum_m mean_n sigmoid(x_mn) loss(y; train_mn) + l2/2 |y|^2
    "raw":      y_x = argmin_y  1/M sum_m sum_n  x_mn          loss(y; train_mn) + l2/2 |y|^2,   0 <= x_mn <= 1/N

Li, Huang, Huang: "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level Problems",
NeurIPS 2023 (FedBiOAcc), section 5.1 and appendix B.1, has "raw" and validation samples of one class per client, so
that no client can clean alone. "MeFBO: A Moreau Envelope Based First-order Stochastic Gradient Method for Nonconvex
Federated Bilevel Optimization", section 4.3 and appendices B.3 and F, has "sigmoid", rc |y|^2 (l2 = 2 rc), and
validation samples split off from every client's own part of the data. Client m's block of x concerns only its own
samples: it is private and never sent.

The first paper bounds x nowhere. A negative weight would reward the model for a large loss, which has no bound; and
weights that grow make the steps of y longer and longer. Hence x lies between 0 and 1/N, N being the largest number of
samples of a client: the sum is then at most the mean loss, steps and l2 mean the same in both forms, and both start
with half of the full weight.
"""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import FedAvg
from fedbilevel.core.presentation import Presentation, Reference, Sequel, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.data import DataSet, corrupt, shards
from fedbilevel.errors import FedbilevelError
from fedbilevel.models import lenet5, mlp
from fedbilevel.tasks import folds, scores
from fedbilevel.tasks.cleaning import Labelled, accuracy, cleaning
from fedbilevel.tasks.images import available
from fedbilevel.tasks.suspects import Suspects

# Steps of x, y and the adjoint up to a share of wrong labels, tuned on MNIST (seed 1, 4500 images per client). The less
# the model knows at the start, the longer the steps of x that pay: with few wrong labels they only take weight from
# right but rare images.
STEPS = {0.5: (3.0, 1.0, 0.1), 0.85: (30.0, 0.5, 0.1), 1.0: (100.0, 0.5, 0.1)}


def data_cleaning(
    data: str = "digits",
    clients: int = 10,
    samples: int = 4500,
    corruption: float = -1.0,
    reading: Literal["wrong", "uniform"] = "wrong",
    partition: str = "iid",
    validation: int = 0,
    validation_classes: str = "one",
    test: int = 0,
    weights: str = "sigmoid",
    model: str = "mlp",
    layers: int = 0,
    hidden: int = 64,
    l2: float = 1e-3,
    batch_size: int = 0,
    validation_batch: int = 0,
    private: bool = True,
    seed: int = 0,
) -> Task:
    """Find label errors.

    Args:
        data: "digits", the 1797 handwritten digits of 8 x 8 pixels that ship with scikit-learn; "mnist",
            "fashion-mnist" or "cifar-10" (whose training batches are used as far as they are present).
        clients: number of clients.
        samples: training images per client, or an equal share of all images where these are fewer.
        corruption: share of the training labels that are replaced by random ones; -1 is 0.4 for digits and 0.8 for the
            others, on which plain training tolerates anything less.
        reading: what they are replaced by: "wrong", one of the other classes; "uniform", any class.
        partition: of the training images: "iid", or "shards", two label shards for each client.
        validation: clean validation images per client; 0 is 20 for digits and 50 for the others.
        validation_classes: "one", all images of client m are of class m mod 10; "own", they are split off from the
            client's part of the data and have its classes.
        test: test images, which only the metrics use; 0 is 500 of the digits and all test images of the others.
        weights: "sigmoid" in a mean, or "raw" in a sum.
        model: "mlp" or "cnn" (LeNet-5, for images of 28 x 28 or 32 x 32 pixels).
        layers: fully connected layers of the mlp; 0 is 2 for digits and 3 for the others.
        hidden: width of the hidden layers of the mlp; 0 is logistic regression.
        l2: weight decay: l2/2 |y|^2.
        batch_size: training rows per batch; 0 is 32 for digits and 64 for the others.
        validation_batch: validation rows per batch; 0 is all.
        private: whether every client keeps its sample weights (False: all weights are sent to everybody, as the
            FedBiOAcc paper counts).
        seed: of the split and of the corruption.
    """
    kind, small = available("data-cleaning", data), data == "digits"
    corruption = corruption if corruption != -1 else 0.4 if small else 0.8
    validation = validation or (20 if small else 50)
    layers = layers or (2 if small else 3)
    batch_size = batch_size or (32 if small else 64)
    for name, value, choices in (
        ("reading", reading, ("wrong", "uniform")),
        ("partition", partition, ("iid", "shards")),
        ("validation_classes", validation_classes, ("one", "own")),
        ("weights", weights, ("sigmoid", "raw")),
        ("model", model, ("mlp", "cnn")),
    ):
        if value not in choices:
            raise FedbilevelError(f"data-cleaning: {name} is '{choices[0]}' or '{choices[1]}', not '{value}'.")
    if not 0 <= corruption < 1:
        raise FedbilevelError(f"data-cleaning: corruption is a share from 0 to below 1, not {corruption}.")
    if hidden < 0 or not l2 >= 0 or seed < 0:
        raise FedbilevelError("data-cleaning: hidden, l2 and seed must not be negative.")
    rng = np.random.default_rng(seed)
    pixels, labels, classes = _images(kind), kind.train.labels, len(kind.classes)
    order = rng.permutation(len(pixels))
    if kind.test is None:
        test, most = test or 500, len(pixels) - 1
        test_images, test_labels, pool = pixels[order[:test]], labels[order[:test]], order[test:]
    else:
        test, most = test or len(kind.test.labels), len(kind.test.labels)
        chosen = np.sort(rng.permutation(most)[:test])
        test_images, test_labels, pool = _images(kind, test=True)[chosen], kind.test.labels[chosen], order
    if min(clients, samples, validation, layers) < 1 or validation_batch < 0 or not 1 <= test <= most:
        raise FedbilevelError(
            "data-cleaning: clients, samples, validation and layers must be at least 1, "
            f"validation_batch not negative, and test below {most + 1}."
        )
    train, val = _divide(labels, classes, pool, clients, samples, validation, validation_classes, partition, rng)
    if min(map(len, val)) < validation or min(map(len, train)) < 1:
        raise FedbilevelError(
            f"data-cleaning: {len(pixels)} images are too few for {clients} clients with {validation} validation "
            f"images each and {test if kind.test is None else 0} test images."
        )

    given, wrong = zip(*(corrupt(labels[part], corruption, classes, rng, reading) for part in train), strict=True)
    longest = max(map(len, train))
    # Which entries of the blocks belong to a sample.
    own = np.arange(longest) < np.array([[len(part)] for part in train])
    truth = np.zeros(own.shape, bool)
    truth[own] = np.concatenate(wrong)

    shape = pixels.shape[1:]
    widths = [hidden] * (layers - 1) if hidden else []
    network = lenet5(shape, classes) if model == "cnn" else mlp(int(np.prod(shape)), *widths, classes)
    tested, of_validation = (jnp.asarray(test_images), test_labels), np.concatenate(val)
    validated = jnp.asarray(pixels[of_validation])

    def also(x: Any, y: Any) -> dict[str, float]:
        seen = {"validation_accuracy": accuracy(network, y, validated, labels[of_validation])}
        if 0 < truth[own].mean() < 1:
            seen["auc"] = scores.auc(truth[own], -np.asarray(x).reshape(own.shape)[own])
        return seen

    def shares(x: Any) -> list[np.ndarray]:
        """For every client, the weights of its samples as shares of the full weight."""
        blocks = np.asarray(x, float).reshape(own.shape)
        share = 1 / (1 + np.exp(-blocks)) if weights == "sigmoid" else blocks * longest
        return [row[mine] for row, mine in zip(share, own, strict=True)]

    labelled = [(Labelled(t, label), Labelled(v, labels[v])) for t, label, v in zip(train, given, val, strict=True)]

    def out_of_fold(y: Any) -> np.ndarray:
        return folds.out_of_fold(network, y, pixels[np.concatenate(train)], [len(part) for part in train])

    def of_folds(x: Any, y: Any) -> dict[str, float]:
        """The same metrics of the models that leave out a fold."""
        said = folds.together(network, y, tested[0]).argmax(1)
        seen = {"accuracy": float(np.mean(said == tested[1]))}
        if 0 < truth[own].mean() < 1:
            quality = np.take_along_axis(out_of_fold(y), np.concatenate(given)[:, None], 1)[:, 0]
            seen["auc"] = scores.auc(truth[own], -quality)
        return seen

    def sequel(x: Any, y: Any) -> tuple[Task, FedAvg]:
        """Models that leave out a fold, with the learned weights."""
        task = folds.folds(network, pixels, labelled, shares(x), l2, batch_size, of_folds)
        return task, FedAvg(lr_lower=lr)

    suspects = Suspects(kind, train, given, wrong, shares, out_of_fold)
    # All samples with the full weight, and those with a right label only: sigmoid(20) is 1 and sigmoid(-20) is 0 to
    # nine digits.
    none, full = (-20.0, 20.0) if weights == "sigmoid" else (0.0, 1 / longest)
    everything, clean = (np.where(truth & out, none, full) for out in (False, True))
    blocks = own.shape if private else own.size
    lr = 0.03 if data == "cifar-10" else 0.5 if model == "mlp" else 0.1  # the larger the inputs, the shorter the steps
    # A sample is drawn in a share batch / N of the steps, and its gradient has the factor 1 / batch: for as many
    # rounds, steps of x are proportional to N. Raw weights are 1 / N as large with N times the gradient, and the slope
    # of the sigmoid at the start, 1/4, counts twice.
    noise = next(level for level in STEPS if corruption <= level)
    lr_upper, lr_lower, lr_adjoint = (20.0, 0.5, 0.02) if small else STEPS[noise]
    lr_upper *= (1 if small else longest / 4500) * (1 if weights == "sigmoid" else 1 / (16 * longest**2))
    lr_upper *= 1 if private else clients  # a mean over clients divides by M what one of them says of its samples
    steps = {"lr_upper": lr_upper, "lr_lower": lr_lower * lr / 0.5, "lr_adjoint": lr_adjoint * lr / 0.5}
    local = {f"local_{name}": step for name, step in steps.items()}
    suggested = Suggestion(
        algorithm="fedbioacc" if small else "fedbio",
        rounds=200 if small else 500,
        hyper={"fedbioacc": steps, "fedbio": steps, "simfbo": {**steps, **local, "local_steps": 5}},
    )
    shown = Presentation(
        headline={"accuracy": "test accuracy", "auc": "AUC of detection"},
        references=[
            Reference("noisy", "FedAvg on the noisy labels", FedAvg(lr_lower=lr), everything.reshape(blocks)),
            Reference("clean", "FedAvg on the clean labels only", FedAvg(lr_lower=lr), clean.reshape(blocks)),
        ],
        sequel=Sequel("folds", "out-of-fold models, these weights", sequel, share=0.5),
        details=suspects.details,
        picture=suspects.picture,
        files=suspects.files,
    )
    options = {
        "data": data,
        "clients": clients,
        "samples": samples,
        "corruption": corruption,
        "reading": reading,
        "partition": partition,
        "validation": validation,
        "validation_classes": validation_classes,
        "test": test,
        "weights": weights,
        "model": model,
        "layers": layers,
        "hidden": hidden,
        "l2": l2,
        "batch_size": batch_size,
        "validation_batch": validation_batch,
        "private": private,
        "seed": seed,
    }
    return cleaning(
        network,
        pixels,
        labelled,
        tested=tested,
        samples=longest,
        l2=l2,
        batch_size={"train": batch_size, "val": validation_batch or None},
        suggested=suggested,
        shown=shown,
        weights=weights,
        private=private,
        also=also,
        options=options,
    )


def _images(kind: DataSet, test: bool = False) -> np.ndarray:
    """Images with an axis of channels; those whose white is not 255, which models know, as floats."""
    assert kind.peak is not None
    pixels = kind.test.inputs if test and kind.test is not None else kind.train.inputs
    pixels = pixels if kind.peak == 255 else (pixels / kind.peak).astype(np.float32)
    return pixels if pixels.ndim == 4 else pixels[..., None]


def _divide(
    labels: np.ndarray,
    classes: int,
    pool: np.ndarray,
    clients: int,
    samples: int,
    validation: int,
    validation_classes: str,
    partition: str,
    rng: np.random.Generator,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The training and the validation images of every client, out of a shuffled pool; fewer where it is too small."""

    def parts(members: np.ndarray) -> list[np.ndarray]:
        if partition == "iid":
            return np.array_split(members, clients)
        return [members[part] for part in shards(labels[members], clients, rng)]

    if validation_classes == "own":
        pieces = [rng.permutation(part) for part in parts(pool[: clients * (samples + validation)])]
        return [piece[validation:] for piece in pieces], [piece[:validation] for piece in pieces]
    of_class = [list(pool[labels[pool] == k]) for k in range(classes)]
    val = []
    for m in range(clients):
        own = of_class[m % classes]
        val.append(np.array([own.pop() for _ in range(min(validation, len(own)))], int))
    return parts(rng.permutation(np.concatenate(of_class).astype(int))[: clients * samples]), val
