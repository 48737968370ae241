"""Client weighting on images: which clients help, and how much, when some of them have nothing but noise?

The server has a few clean validation images and looks for the weights x of the clients, in the probability simplex,
for which the model trained with these weights does best on them::

    min_x  loss(y_x; the server's validation images)
    y_x = argmin_y  sum_m x_m loss(y; client m)

Three clients have the images of different classes, seven have random labels: "Efficient Weighting and Optimization in
Federated Learning: A Primal-Dual Approach" (anonymous, under review), section 5.2. Appendix C has five clients with
images of all classes and five with random labels.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import AFL, FedAvg
from fedbilevel.core import Lookup, Problem
from fedbilevel.core.presentation import Details, Outcomes, Presentation, Reference, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.models import Model, cross_entropy, lenet5, mlp, outputs
from fedbilevel.tasks.images import images as load_images
from fedbilevel.tasks.learners import labelled, learner
from fedbilevel.tasks.sites import Bounds, Columns, Examples, Facts, column_bounds, column_facts, divided

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = 10
LABELS = ((0, 1, 2, 3, 4), (5, 6, 7), (8, 9))
# Clients with right labels, clients with random labels, and the images of a client, of 60,000 training images: the
# paper's numbers. With "labels", a good client has all images of its classes.
PARTITIONS = {"labels": (len(LABELS), 7, 5000), "iid": (5, 5, 9000)}
SETS = ("mnist", "fashion-mnist", "digits")
STEP, STEP_OF_WEIGHTS = 0.1, 0.01  # of the model and of x, out of the paper's grid
STEPS = {"lr_upper": STEP_OF_WEIGHTS, "lr_lower": STEP, "lr_adjoint": 0.1, "local_steps": 1, "inner_rounds": 1}


@cache  # tasks of equal shape share their compiled code, whatever their seed
def _problem(model: Model, clients: int) -> Problem:
    def loss(x: Any, y: Any, batch: Any) -> jax.Array:
        # Of sites, not all may judge: then the rows of these have shares.
        return (batch.get("share", 1) * cross_entropy(model.apply(y, batch["image"]), batch["label"])).mean()

    def init(key: jax.Array) -> tuple[Any, Any]:
        return jnp.full(clients, 1 / clients), model.init(key)

    return Problem(loss, loss, init, weighting=True)


def client_weighting(
    data: str = "mnist",
    partition: str = "labels",
    noisy: int = 0,
    samples: int = 0,
    validation: int = 20,
    test: int = 2000,
    model: str = "auto",
    hidden: int = 64,
    batch_size: int = 64,
    seed: int = 0,
) -> Task:
    """Find out which clients have useful data.

    Args:
        data: "mnist", "fashion-mnist", or "digits" (8 x 8 pixels, no files needed).
        partition: "labels", three good clients with the classes 0 to 4, 5 to 7, and 8 and 9; or "iid", five good
            clients with all classes.
        noisy: number of clients with random labels; 0 is 7 for "labels" and 5 for "iid".
        samples: images of a client with random labels, and with "iid" of every client; 0 is 5000 for "labels" and 9000
            for "iid", or the same share of a smaller data set.
        validation: clean images of each class on the server.
        test: number of test images, drawn from the test set, that accuracy is measured on; 0 is all of them.
        model: "lenet5", "mlp" with one hidden layer, or "auto": LeNet-5 for images of 28 x 28 pixels.
        hidden: width of the hidden layer of the mlp.
        batch_size: rows per batch, at the clients and on the server.
        seed: of the partition and of the random labels.
    """
    if partition not in PARTITIONS:
        raise UnknownName("partition for client-weighting", partition, PARTITIONS)
    if min(noisy, samples, test, seed) < 0 or min(validation, hidden, batch_size) < 1:
        raise FedbilevelError(
            "client-weighting: validation, hidden and batch_size must be at least 1; noisy, samples, test and seed not "
            "negative."
        )
    rng = np.random.default_rng(seed)
    if data not in SETS:
        raise UnknownName("data set for client-weighting", data, SETS)
    dataset = load_images("client-weighting", data, rng)
    images, labels = dataset.train[..., None], dataset.labels
    good, many, paper = PARTITIONS[partition]
    clients = good + (noisy or many)
    size = samples or round(paper * len(labels) / 60_000)

    by_class = [rng.permutation(np.flatnonzero(labels == k)) for k in range(CLASSES)]
    fewest = min(map(len, by_class))
    if validation >= fewest:
        raise FedbilevelError(f"client-weighting: validation must be below {fewest}, the images of the rarest class.")
    of_server = np.concatenate([members[:validation] for members in by_class])
    rest = rng.permutation(np.concatenate([members[validation:] for members in by_class]))
    if size * (good if partition == "iid" else 1) > len(rest):
        raise FedbilevelError(
            f"client-weighting: {len(rest)} images are too few for "
            + (f"{good} clients with {size} each." if partition == "iid" else f"a client with {size}.")
        )
    if partition == "iid":
        parts = [np.sort(part) for part in np.split(rest[: good * size], good)]
    else:
        parts = [np.sort(np.concatenate([by_class[k][validation:] for k in group])) for group in LABELS]
    # The good clients have (nearly) all images, so those of the noisy ones are the same images with other labels.
    parts += [np.sort(rng.choice(rest, size, replace=False)) for _ in range(clients - good)]
    given = [labels[part] for part in parts[:good]]
    given += [rng.integers(0, CLASSES, size).astype(labels.dtype) for _ in range(clients - good)]

    def rows(index: np.ndarray, label: np.ndarray) -> dict[str, Any]:
        return {"image": Lookup(images, index.astype(np.int32)), "label": label}

    if model not in ("auto", "lenet5", "mlp"):
        raise UnknownName("model for client-weighting", model, ["auto", "lenet5", "mlp"])
    shape = images.shape[1:]
    small = model == "mlp" or (model == "auto" and shape != (28, 28, 1))
    pixels = int(np.prod(shape))
    network = mlp(pixels, hidden, CLASSES, initial="pytorch") if small else lenet5(shape, initial="pytorch")
    chosen = np.sort(rng.permutation(len(dataset.test_labels))[: test or None])
    tested, right = jnp.asarray(dataset.test[chosen][..., None]), dataset.test_labels[chosen]

    def metrics(x: Any, y: Any) -> dict[str, float]:
        x = np.asarray(x, float)
        says = outputs(network.apply, y, tested).argmax(1)
        weights = {f"weight_{m}": weight for m, weight in enumerate(x)}
        of_noise, off = float(x[good:].sum()), float(np.abs(x - best).sum())
        return {"accuracy": float(np.mean(says == right)), "noise_weight": of_noise, "weight_error": off, **weights}

    best = np.zeros(clients)
    best[:good] = [len(group) / CLASSES for group in LABELS] if partition == "labels" else 1 / good
    ideal = "shares of the classes" if partition == "labels" else "good clients only"
    titles = ["noise" if m >= good else _span(LABELS[m]) if partition == "labels" else "all" for m in range(clients)]

    def details(results: Outcomes) -> Details:
        learned, afl = (np.asarray(results[name].x, float) for name in ("run", "afl"))
        table = [
            [m, "random labels" if m >= good else f"classes {titles[m]}", len(parts[m]), *map(float, weights)]
            for m, *weights in zip(range(clients), learned, best, afl, strict=True)
        ]
        return Details("Weights of the clients", ["client", "data", "samples", "weight", "opt", "AFL"], table)

    def picture(results: Outcomes, figure: "Figure") -> None:
        figure.set_size_inches(11, 4.2)
        bars, curves = figure.subplots(1, 2, width_ratios=[1.1, 1])
        colors = [f"C{m}" if m < good else "0.6" for m in range(clients)]
        learned, everyone = np.asarray(results["run"].x, float), np.arange(clients)
        bars.bar(everyone[:good], learned[:good], color=colors[:good], label="right labels")
        bars.bar(everyone[good:], learned[good:], color="0.6", label="random labels")
        bars.plot(everyone, best, "kD", markersize=5, linestyle="none", label=f"opt: {ideal}")
        for m in everyone:
            top = max(learned[m], best[m]) + 0.012
            bars.text(m, top, f"{learned[m]:.2g}", ha="center", va="bottom", fontsize=8)
        bars.set_ylim(0, 1.15 * max(learned.max(), best.max()))
        bars.set_xticks(everyone, [f"{m}\n{title}" for m, title in enumerate(titles)], fontsize=8)
        bars.set_xlabel("client, and the classes it has")
        bars.set_title("weight of every client")
        bars.legend(frameon=False)
        history = results["run"].history
        rounds = [row["round"] for row in history]
        for m in everyone:
            label = f"client {m} ({titles[m]})" if m < good else "random labels" if m == good else None
            width = 1.8 if m < good else 0.8
            curves.plot(rounds, [row[f"weight_{m}"] for row in history], color=colors[m], linewidth=width, label=label)
        for level in sorted(set(best[:good])):
            curves.axhline(level, color="k", linewidth=0.7, linestyle=":")
        curves.set_ylim(0, 1.4 * max(best.max(), *(row[f"weight_{m}"] for row in history for m in everyone)))
        curves.set_xlabel("round")
        curves.set_title("weights over the rounds (dotted: opt)")
        curves.legend(frameon=False, ncols=2, loc="upper center")

    weights = {f"weight_{m}": f"x of {titles[m]}" for m in range(good)} if partition == "labels" else {}
    return Task(
        _problem(network, clients),
        [{"train": rows(part, label)} for part, label in zip(parts, given, strict=True)],
        batch_size=batch_size,
        metrics=metrics,
        name="client-weighting",
        options={
            "data": data,
            "partition": partition,
            "noisy": noisy,
            "samples": samples,
            "validation": validation,
            "test": test,
            "model": model,
            "hidden": hidden,
            "batch_size": batch_size,
            "seed": seed,
        },
        server=rows(of_server, labels[of_server]),
        shown=Presentation(
            headline={"accuracy": "accuracy", "noise_weight": "x of noise", **weights},
            compare_by=["accuracy", "noise_weight"],
            references=[
                Reference("val", "val", FedAvg(STEP, 1, validation_only=True), None),
                Reference("avg", "avg", FedAvg(STEP, 1), np.full(clients, 1 / clients)),
                Reference("opt", "opt", FedAvg(STEP, 1), best),
                Reference("afl", "AFL", AFL(STEP_OF_WEIGHTS, STEP), None),
            ],
            details=details,
            picture=picture,
        ),
        suggested=Suggestion(
            algorithm="primal-dual",
            rounds=400,
            sample="0.9",
            # RFHO's derivative through one step of the model is shorter by the length of that step.
            hyper={"rfho": {**STEPS, "lr_upper": 10 * STEP_OF_WEIGHTS}, "*": STEPS},
        ),
    )


def _span(group: tuple[int, ...]) -> str:
    """Neighbouring classes in words.

    >>> _span((5, 6, 7))
    '5-7'
    """
    return f"{group[0]}-{group[-1]}"


def client_weighting_facts(
    examples: Examples, train: float = 0.6, validation: float = 0.2, judge: str = "all", seed: int = 0
) -> Facts:
    """Sums over the columns, and whether this site is one of those whose validation rows judge."""
    sums = column_facts(divided(examples, train, validation, seed))
    return {**sums, "number of judges": np.asarray(int(judge == "all" or examples.name in ("", judge)))}


def client_weighting_bounds(facts: Facts, rows: int, columns: Columns) -> Bounds:
    """A site is a judge or not."""
    return {**column_bounds(facts, rows, columns), "number of judges": (0, 1)}


def client_weighting_of_site(
    examples: Examples,
    facts: Facts,
    train: float = 0.6,
    validation: float = 0.2,
    judge: str = "all",
    hidden: int = 64,
    batch_size: int = 64,
    seed: int = 0,
) -> Task:
    """Find out which sites have useful data, on the rows of sites.

    The server has no rows of its own: validation rows of sites judge the model, which these sites should know to be
    right (part in the schema).

    Args:
        examples: the rows of the site.
        facts: what everybody knows of all sites.
        train: share of every site's rows, of every label, for training, if the schema has no part.
        validation: share for validation; the rest is for the test.
        judge: whose validation rows judge the model: "all", or the name of one site.
        hidden: width of the hidden layer; 0 is logistic regression.
        batch_size: rows per batch, at both levels.
        seed: of the split.
    """
    if hidden < 0 or batch_size < 1:
        raise FedbilevelError("client-weighting: batch_size must be at least 1, hidden not negative.")
    judges, clients = int(facts["number of judges"]), int(facts["clients"])
    if not judges:
        raise FedbilevelError(f"client-weighting: judge must be 'all' or the name of a site, not '{judge}'.")
    rows = divided(examples, train, validation, seed)
    inputs, network = learner(rows.examples, facts, [hidden] if hidden else [])
    client, (tested, right) = labelled(inputs, rows)
    # The upper loss is the mean over sites of these shares of their losses: that of the judges alone.
    mine = client_weighting_facts(examples, train, validation, judge, seed)["number of judges"]
    share = np.full(len(rows.validation), clients * mine / judges, np.float32)
    on_device = jnp.asarray(tested)

    def metrics(x: Any, y: Any) -> dict[str, float]:
        logits = outputs(network.apply, y, on_device)
        losses = cross_entropy(jnp.asarray(logits), jnp.asarray(right))
        return {"accuracy": float(np.mean(logits.argmax(1) == right)), "loss": float(np.mean(losses))}

    return Task(
        _problem(network, clients),
        [{"train": client["train"], "val": {**client["val"], "share": share}}],
        batch_size=batch_size,
        metrics=metrics,
        name="client-weighting",
        shown=Presentation(headline={"accuracy": "mean test accuracy", "loss": "mean test loss"}),
        suggested=Suggestion("fedbio", 400, hyper={"*": STEPS}),
    )
