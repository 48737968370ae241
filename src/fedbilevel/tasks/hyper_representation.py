"""Federated hyper-representation: learn the features on validation images so that a head trained on training images
does best.

x holds the representation, all layers of a network but the last; y is the head, its last layer::

    min_x  1/M sum_m mean_n loss(x, y_x; val_mn)
    y_x = argmin_y  1/M sum_m mean_n loss(x, y; train_mn) + rc |y|^2

with the cross-entropy as loss. It is the experiment of "MeFBO: A Moreau Envelope Based First-order Stochastic Gradient
Method for Nonconvex Federated Bilevel Optimization", section 4.1 and appendix B.1 (eq. 15), after Tarzanagh, Li,
Thrampoulidis, Oymak: "FedNest: Federated Bilevel, Minimax, and Compositional Optimization", ICML 2022.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import FedAvg
from fedbilevel.core import Algorithm, Client, Clients, Key, Problem, parameter
from fedbilevel.core.presentation import Details, Outcomes, Presentation, Reference, Suggestion
from fedbilevel.core.schedules import constant
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector, add, sub
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.mathematics.hypergradient import Pair
from fedbilevel.models import Model, cross_entropy, mlp, norms, outputs, squared_norm
from fedbilevel.tasks.images import divide, images, of_known, per_class, standardised
from fedbilevel.tasks.learners import labelled, learner
from fedbilevel.tasks.sites import Examples, Facts, column_facts, divided

SHOWN = (4, 8)  # filters in the picture, down and across
# The paper's steps for MeFBO (0.1, 0.1, 0.07, penalty 2.7, prox 0.015) diverge here: with prox 0.015 a step of 0.1 on y
# takes it farther from theta than a step of 0.07 brings theta after it.
MEFBO = {
    "lr_lower": constant(0.1), "local_lr_lower": constant(0.1), "lr_prox": constant(0.2),
    "local_lr_prox": constant(0.2), "penalty": constant(1.0), "prox": 0.1,
}  # fmt: skip
STEP = 0.5  # of the representation, for images of 28 x 28 pixels; the paper has 0.2 for SimFBO
REGULARIZERS = {"squared": squared_norm, "norm": norms}
FEDNEST = {"lr_upper": 0.02, "lr_lower": 0.01, "lr_adjoint": 0.01}  # the paper's


@cache  # tasks of equal shape share their compiled code, whatever their seed
def _problem(model: Model, rc: float, regularizer: str) -> Problem:
    def upper(x: Any, y: Any, batch: Any, key: Key | None = None) -> jax.Array:
        return cross_entropy(model.apply([*x, y], batch["image"], key), batch["label"]).mean()

    def lower(x: Any, y: Any, batch: Any, key: Key | None = None) -> jax.Array:
        return upper(x, y, batch, key) + rc * REGULARIZERS[regularizer](y)

    def init(key: jax.Array) -> tuple[Any, Any]:
        *representation, head = model.init(key)
        return representation, head

    return Problem(upper, lower, init, noise=True)  # without dropout there is none


@dataclass(frozen=True)
class Jointly(Algorithm):
    """FedAvg on one loss for representation and head: the mean over all rows of a client, whichever level they serve.

    It is what people do without bilevel learning, and a reference of this task only.
    """

    bilevel = False

    lr_lower: float = parameter(0.5, "step size of representation and head", above=0)
    local_steps: int = parameter(1, "local steps between averages", least=1)
    validation: float = parameter(0.5, "share of the validation rows", least=0)

    def init(self, clients: Clients, x: Vector, y: Vector) -> Pair:
        return Pair(x, y)

    def round(self, clients: Clients, server: Pair) -> Pair:
        return add(server, clients.run(self.both, *server).mean())

    def both(self, client: Client, key: Key, x: Vector, y: Vector) -> Pair:
        def step(z: Pair, key: Key, _: Any) -> Pair:
            first, second = jax.random.split(key)
            on_f, on_g = client.f.gradients(*z, first), client.g.gradients(*z, second)
            means = [self.validation * f + (1 - self.validation) * g for f, g in zip(on_f, on_g, strict=True)]
            return Pair(*(v - self.lr_lower * mean for v, mean in zip(z, means, strict=True)))

        start = Pair(x, y)
        return sub(client.repeat(self.local_steps, step, start, key), start)

    def solution(self, server: Pair, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y


@cache  # one function for one model: it is compiled once
def _features(model: Model) -> Callable[[Any, jax.Array], jax.Array]:
    """What the head sees."""
    return lambda x, inputs: jax.nn.relu(model.apply(x, inputs))


def _mosaic(filters: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Filters as one picture, each scaled to its own largest weight; with colours, their mean."""
    across = min(SHOWN[1], len(filters))
    tiles = filters.reshape(len(filters), shape[0], shape[1], -1).mean(3)
    tiles = tiles / np.maximum(np.abs(tiles).max((1, 2), keepdims=True), 1e-12)
    tiles = np.pad(tiles, ((0, -len(tiles) % across), (1, 1), (1, 1)), constant_values=1.0)
    high, wide = tiles.shape[1:]
    return tiles.reshape(-1, across, high, wide).swapaxes(1, 2).reshape(-1, across * wide)


def _task(
    model: Model,
    rc: float,
    regularizer: str,
    clients: Sequence[Mapping[str, Any]],
    tested: tuple[Any, np.ndarray],
    classes: int,
    least: int = 1,
    **more: Any,
) -> Task:
    """The task of clients with labelled rows, whether of a data set or of one site.

    Args:
        model: x and y: the last layer is y.
        rc: weight of the regulariser in the lower loss.
        regularizer: of y.
        clients: training and validation rows of every client.
        tested: inputs and labels that the metrics are about.
        classes: number of labels.
        least: the fewest of them that tell something of a class.
        more: arguments of the task.
    """
    inputs, labels = jnp.asarray(tested[0]), tested[1]

    def metrics(x: Any, y: Any) -> dict[str, float]:
        logits = outputs(model.apply, [*x, y], inputs)
        correct = logits.argmax(1) == labels
        return {
            "accuracy": float(correct.mean()),
            "worst": of_known(np.min, per_class(correct, labels, classes, least)),
            "loss": float(np.mean(cross_entropy(jnp.asarray(logits), jnp.asarray(labels)))),
        }

    return Task(_problem(model, rc, regularizer), clients, metrics=metrics, name="hyper-representation", **more)


def hyper_representation(
    data: str = "mnist",
    partition: str = "iid",
    clients: int = 100,
    validation: float = 0.5,
    hidden: int = 200,
    layers: int = 2,
    rc: float = 0.05,
    regularizer: str = "squared",
    dropout: float = 0.0,
    batch_size: int = 64,
    seed: int = 0,
) -> Task:
    """Learn a representation on validation images, for a head that is trained on training images.

    Args:
        data: "mnist", "fashion-mnist", "digits" (500 of the 1797 images are for the test) or "cifar-10".
        partition: "iid"; or "non-iid": sorted by label, cut into two shards for every client, so that most clients
            have two classes.
        clients: number of clients.
        validation: share of every client's images that are validation images.
        hidden: width of every hidden layer.
        layers: of the network; the last one is the head.
        rc: weight of the regulariser in the lower loss.
        regularizer: "squared": |y|^2, as in the paper's eq. 15; or "norm": the norms of the head's weights and of its
            biases, not squared, as in FedNest's code.
        dropout: the probability that a hidden unit is left out in training, at both levels; 0.5 in FedNest's code.
        batch_size: images per batch, at both levels.
        seed: of the partition (the first x and y come from the seed of the run).
    """
    name = "hyper-representation"
    if min(clients, hidden, batch_size) < 1 or layers < 2 or not 0 <= rc < np.inf or seed < 0:
        raise FedbilevelError(
            f"{name}: clients, hidden and batch_size must be at least 1, layers at least 2, rc and seed not negative."
        )
    if regularizer not in REGULARIZERS:
        raise UnknownName("regularizer", regularizer, REGULARIZERS)
    dataset = images(name, data, seed)
    train, val = divide(name, dataset.labels, partition, clients, validation, np.random.default_rng(seed))
    net = mlp(dataset.pixels, *[hidden] * (layers - 1), len(dataset.classes), initial="pytorch", dropout=dropout)
    model = standardised(net, *dataset.spread)
    test, labels = jnp.asarray(dataset.test), dataset.test_labels

    def accuracies(x: Any, y: Any) -> np.ndarray:
        return per_class(outputs(model.apply, [*x, y], test).argmax(1) == labels, labels, len(dataset.classes))

    def details(results: Outcomes) -> Details:
        columns = [accuracies(results[run].x, results[run].y) for run in ("random", "joint", "run")]
        sizes = np.bincount(labels, minlength=len(dataset.classes))
        return Details(
            "Test accuracy of each class",
            ["class", "test images", "random features", "joint training", "this run"],
            [[dataset.classes[k], int(sizes[k]), *(float(c[k]) for c in columns)] for k in range(len(sizes))],
        )

    def picture(results: Outcomes, figure: Any) -> None:
        before, after = results["random"].x, results["run"].x
        figure.set_size_inches(10, 7.6)
        # The filters that matter most to the head after training; before training, the same units.
        matter = np.linalg.norm(np.asarray(results["run"].y["w"] if layers == 2 else after[1]["w"]), axis=1)
        units = np.argsort(-matter)[: SHOWN[0] * SHOWN[1]]
        for column, (title, x) in enumerate((("before", before), ("after", after))):
            axes = figure.add_subplot(2, 2, 1 + column)
            axes.imshow(
                _mosaic(np.asarray(x[0]["w"])[:, units].T, dataset.train.shape[1:]), "gray", interpolation="nearest"
            )
            axes.set_title(f"{len(units)} filters of the first layer, {title}")
            axes.set_axis_off()
            axes = figure.add_subplot(2, 2, 3 + column)
            few = np.random.default_rng(0).permutation(len(labels))[:1500]
            features = outputs(_features(model), x, test[few])
            centred = features - features.mean(0)
            _, values, directions = np.linalg.svd(centred, full_matrices=False)
            across, up = (centred @ directions[:2].T).T
            for k, label in enumerate(dataset.classes):
                of_class = labels[few] == k
                axes.scatter(across[of_class], up[of_class], s=7, color=f"C{k}", label=label, linewidths=0)
            share = (values[:2] ** 2).sum() / (values**2).sum()
            axes.set_title(f"representation of test images, {title}")
            axes.set_xlabel(f"first principal component (both: {share:.0%} of the variance)")
            axes.set_ylabel("second principal component")
            axes.set_xticks([])
            axes.set_yticks([])
        many = 10 if max(map(len, dataset.classes)) < 4 else 5  # long names need two lines
        handles = figure.axes[-1].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=many, markerscale=2.5)

    step, together = STEP * dataset.shorter**2, STEP * dataset.shorter  # MeFBO on CIFAR-10 is not stable with more
    return _task(
        model,
        rc,
        regularizer,
        [{"train": dataset.rows(train[m]), "val": dataset.rows(val[m])} for m in range(clients)],
        (test, labels),
        len(dataset.classes),
        batch_size=batch_size,
        options={
            "data": data,
            "partition": partition,
            "clients": clients,
            "validation": validation,
            "hidden": hidden,
            "layers": layers,
            "rc": rc,
            "regularizer": regularizer,
            "dropout": dropout,
            "batch_size": batch_size,
            "seed": seed,
        },
        shown=Presentation(
            headline={"accuracy": "accuracy", "worst": "worst class", "loss": "loss"},
            references=[
                Reference("random", "random features", FedAvg(lr_lower=0.1, local_steps=1), None),
                Reference("joint", "joint training", Jointly(together, 1, validation=validation), None),
            ],
            details=details,
            picture=picture,
        ),
        suggested=Suggestion(
            algorithm="mefbo",
            rounds=600,
            sample="10" if clients > 10 else "everyone",
            hyper=_steps(step),
        ),
    )


def _steps(step: float) -> dict[str, dict[str, Any]]:
    """Step sizes by algorithm, with this one for x."""
    return {
        "mefbo": {**MEFBO, "lr_upper": constant(step), "local_lr_upper": constant(step)},
        "simfbo": {"lr_upper": step, "local_lr_upper": step, "shared_batch": True},
        "lfednest": FEDNEST,
        "fednest": FEDNEST,
    }


def hyper_representation_facts(examples: Examples, train: float = 0.4, validation: float = 0.4, seed: int = 0) -> Facts:
    """Sums over the columns."""
    return column_facts(divided(examples, train, validation, seed))


def hyper_representation_of_site(
    examples: Examples,
    facts: Facts,
    train: float = 0.4,
    validation: float = 0.4,
    hidden: int = 64,
    layers: int = 2,
    rc: float = 0.05,
    regularizer: str = "squared",
    dropout: float = 0.0,
    batch_size: int = 64,
    seed: int = 0,
) -> Task:
    """Learn a representation on the validation rows of sites, for a head that is trained on their training rows.

    Args:
        examples: the rows of the site.
        facts: what everybody knows of all sites.
        train: share of every site's rows, of every label, for training, if the schema has no part.
        validation: share for validation; the rest is for the test.
        hidden: width of every hidden layer.
        layers: of the network; the last one is the head.
        rc: weight of the regulariser in the lower loss.
        regularizer: "squared": |y|^2; or "norm": the norms of the head's weights and of its biases, not squared.
        dropout: the probability that a hidden unit is left out in training, at both levels.
        batch_size: rows per batch, at both levels.
        seed: of the split.
    """
    if min(hidden, batch_size) < 1 or layers < 2 or not 0 <= rc < np.inf:
        raise FedbilevelError(
            "hyper-representation: hidden and batch_size must be at least 1, layers at least 2, rc not negative."
        )
    if regularizer not in REGULARIZERS:
        raise UnknownName("regularizer", regularizer, REGULARIZERS)
    rows = divided(examples, train, validation, seed)
    inputs, model = learner(rows.examples, facts, [hidden] * (layers - 1), dropout)
    client, tested = labelled(inputs, rows)
    return _task(
        model,
        rc,
        regularizer,
        [client],
        tested,
        examples.classes,
        examples.least,
        batch_size=batch_size,
        shown=Presentation(headline={"accuracy": "accuracy", "worst": "worst class", "loss": "loss"}),
        suggested=Suggestion("mefbo", 600, hyper=_steps(STEP)),
    )
