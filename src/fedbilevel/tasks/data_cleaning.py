"""Federated data cleaning: find the wrongly labelled training samples of all clients, together.

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

import csv
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import FedAvg
from fedbilevel.core import Lookup, Problem
from fedbilevel.core.presentation import Details, Outcomes, Presentation, Reference, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import box
from fedbilevel.data import DataSet, corrupt, shards
from fedbilevel.errors import FedbilevelError
from fedbilevel.models import Model, cross_entropy, lenet5, mlp, outputs, squared_norm
from fedbilevel.tasks import scores
from fedbilevel.tasks.images import available

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 20  # clients in the table of details
# Steps of x, y and the adjoint up to a share of wrong labels, tuned on MNIST (seed 1, 4500 images per client). The less
# the model knows at the start, the longer the steps of x that pay: with few wrong labels they only take weight from
# right but rare images.
STEPS = {0.5: (3.0, 1.0, 0.1), 0.85: (30.0, 0.5, 0.1), 1.0: (100.0, 0.5, 0.1)}


@cache  # tasks of equal shape share their compiled code, whatever their seed
def problem(model: Model, samples: int, clients: int, l2: float, weights: str, private: bool) -> Problem:
    """The losses of both levels for so many samples per client, at most."""

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
    """Find wrongly labelled samples.

    Args:
        data: "digits", the 1797 handwritten digits of 8 x 8 pixels that ship with scikit-learn; "mnist",
            "fashion-mnist" or "cifar-10" (of which those training batches are used that are there).
        clients: number of clients.
        samples: training images per client, or an equal share of all images where these are fewer.
        corruption: share of the training labels that are drawn again; -1 is 0.4 for digits and 0.8 for others, which
            plain training hardly minds below that.
        reading: how: "wrong", out of the other classes; "uniform", out of all classes.
        partition: of the training images: "iid", or "shards", two label shards for each client.
        validation: clean validation images per client; 0 is 20 for digits and 50 for others.
        validation_classes: "one", all images of client m are of class m mod 10; "own", they are split off from the
            client's part of the data and have its classes.
        test: test images, seen by nobody but the metrics; 0 is 500 of the digits and all test images of others.
        weights: "sigmoid" in a mean, or "raw" in a sum.
        model: "mlp" or "cnn" (LeNet-5, for images of 28 x 28 or 32 x 32 pixels).
        layers: fully connected layers of the mlp; 0 is 2 for digits and 3 for others.
        hidden: width of the hidden layers of the mlp; 0 is logistic regression.
        l2: weight decay: l2/2 |y|^2.
        batch_size: training rows per batch; 0 is 32 for digits and 64 for others.
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
    for name, value, known in (
        ("reading", reading, ("wrong", "uniform")),
        ("partition", partition, ("iid", "shards")),
        ("validation_classes", validation_classes, ("one", "own")),
        ("weights", weights, ("sigmoid", "raw")),
        ("model", model, ("mlp", "cnn")),
    ):
        if value not in known:
            raise FedbilevelError(f"data-cleaning: {name} is '{known[0]}' or '{known[1]}', not '{value}'.")
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

    def client(m: int) -> dict[str, Any]:
        size = len(train[m])
        weight = np.arange(size) + (0 if private else m * longest)
        rows = {"image": Lookup(pixels, train[m]), "label": given[m], "weight": weight.astype(np.int32)}
        if weights == "raw":
            rows["samples"] = np.full(size, size, np.float32)
        return {"train": rows, "val": {"image": Lookup(pixels, val[m]), "label": labels[val[m]]}}

    shape = pixels.shape[1:]
    widths = [hidden] * (layers - 1) if hidden else []
    network = lenet5(shape, classes) if model == "cnn" else mlp(int(np.prod(shape)), *widths, classes)
    tested, of_validation = jnp.asarray(test_images), np.concatenate(val)
    validated = jnp.asarray(pixels[of_validation])

    def metrics(x: Any, y: Any) -> dict[str, float]:
        right = lambda images, labels: float(np.mean(outputs(network.apply, y, images).argmax(1) == labels))
        seen = {"accuracy": right(tested, test_labels)}
        seen["validation_accuracy"] = right(validated, labels[of_validation])
        if 0 < truth[own].mean() < 1:
            seen["auc"] = scores.auc(truth[own], -np.asarray(x).reshape(own.shape)[own])
        return seen

    def findings(results: Outcomes) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """For every client, the weights of its samples as shares of the full weight, and what the model says."""
        x = np.asarray(results["run"].x, float).reshape(own.shape)
        share = 1 / (1 + np.exp(-x)) if weights == "sigmoid" else x * longest
        says = outputs(network.apply, results["run"].y, pixels[np.concatenate(train)]).argmax(1)
        return [row[mine] for row, mine in zip(share, own, strict=True)], np.split(says, np.cumsum(own.sum(1))[:-1])

    def suspects(share: np.ndarray, says: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The samples whose label the model denies, those of least weight first."""
        order = np.argsort(share, kind="stable")
        return order[says[order] != labels[order]]

    def files(results: Outcomes, folder: Path) -> None:
        with (folder / "suspects.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["client", "rank", "sample", "weight", "given_label", "model_says", "index", "really_wrong"])
            for m, (share, says) in enumerate(zip(*findings(results), strict=True)):
                for rank, n in enumerate(suspects(share, says, given[m]), 1):
                    row = [f"{share[n]:.4f}", given[m][n], says[n], train[m][n], "yes" if wrong[m][n] else "no"]
                    table.writerow([m, rank, n, *row])

    def details(results: Outcomes) -> Details:
        rows = []
        for m, (share, says) in enumerate(zip(*findings(results), strict=True)):
            found = wrong[m][suspects(share, says, given[m])]
            auc = scores.auc(wrong[m], -share) if 0 < wrong[m].mean() < 1 else "-"
            precision = float(found.mean()) if len(found) else "-"
            rows.append([m, len(share), int(wrong[m].sum()), len(found), int(found.sum()), precision, auc])
        title = "Suspects: labels that the model denies" + (f" (the first {SHOWN} clients)" if clients > SHOWN else "")
        headings = ("client", "images", "wrong labels", "suspects", "really wrong", "share", "AUC of the weights")
        return Details(title, headings, rows[:SHOWN])

    def picture(results: Outcomes, figure: "Figure") -> None:
        shares, says = (np.concatenate(parts) for parts in findings(results))
        told, is_wrong, index = (np.concatenate(parts) for parts in (given, wrong, train))
        _draw(figure, kind, index, told, says, is_wrong, shares, suspects(shares, says, told))

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
    return Task(
        problem(network, longest, clients, l2, weights, private),
        [client(m) for m in range(clients)],
        batch_size={"train": batch_size, "val": validation_batch or None},
        metrics=metrics,
        name="data-cleaning",
        options={
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
        },
        shown=Presentation(
            headline={"accuracy": "test accuracy", "auc": "AUC of the weights"},
            references=[
                Reference("noisy", "FedAvg on the noisy labels", FedAvg(lr_lower=lr), everything.reshape(blocks)),
                Reference("clean", "FedAvg on the clean labels only", FedAvg(lr_lower=lr), clean.reshape(blocks)),
            ],
            details=details,
            picture=picture,
            files=files,
        ),
        suggested=Suggestion(
            algorithm="fedbioacc" if small else "fedbio",
            rounds=200 if small else 500,
            hyper={"fedbioacc": steps, "fedbio": steps, "simfbo": {**steps, **local, "local_steps": 5}},
        ),
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


def _draw(
    figure: "Figure",
    kind: DataSet,
    index: np.ndarray,
    given: np.ndarray,
    says: np.ndarray,
    wrong: np.ndarray,
    shares: np.ndarray,
    suspects: np.ndarray,
) -> None:
    """The images that are most suspicious, and how the weights of right and wrong labels are distributed."""
    columns, rows = 10, 4
    figure.set_size_inches(13, 5.2)
    halves: Any = figure.subfigures(1, 2, width_ratios=[2.2, 1])
    left, right = halves
    left.suptitle(
        "The most suspicious images: given label → what the model says (red: the label is wrong, blue: right)"
    )
    grid = left.subplots(rows, columns, squeeze=False)
    short = max(map(len, kind.classes)) <= 2
    for axes in grid.flat:
        axes.axis("off")
    for axes, n in zip(grid.flat, suspects, strict=False):
        axes.imshow(kind.train.inputs[index[n]], cmap="gray")
        text = f"{kind.classes[given[n]]}{' → ' if short else chr(10) + '→ '}{kind.classes[says[n]]}"
        axes.set_title(text, fontsize=10 if short else 8, color="tab:red" if wrong[n] else "tab:blue", pad=3)
    axes = right.subplots()
    bins = np.linspace(0, 1, 41)
    for chosen, color, label in ((wrong, "tab:red", "wrong labels"), (~wrong, "tab:blue", "right labels")):
        if chosen.any():
            axes.hist(shares[chosen], bins, color=color, alpha=0.55, label=f"{label} ({chosen.sum()})")
    axes.set_xlabel("weight of a training sample")
    axes.set_ylabel("samples")
    axes.set_title("Weights of all clients' samples")
    axes.margins(y=0.2)  # room for the legend
    axes.legend(frameon=False, loc="upper center")
