"""Tasks of sites that bring their own rows.

``summarize`` says what a site tells the others before the first round: sums and maxima, nothing of a single row.
``make`` builds the task of one site from its rows and what everybody knows then. The server calls it with blank rows,
and so gets the same problem without any data.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.core import Lookup
from fedbilevel.core.presentation import Presentation, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError, Names
from fedbilevel.federation.schema import Examples
from fedbilevel.models import mlp, outputs
from fedbilevel.tasks import scores
from fedbilevel.tasks.data_cleaning import problem as cleaning_problem
from fedbilevel.tasks.regularization import STEPS, judged, standardised
from fedbilevel.tasks.regularization import problem as strengths_problem

Facts = Mapping[str, np.ndarray]


class OwnTask(NamedTuple):
    """A task that takes the rows of sites. Both functions have the task's options as further arguments."""

    summarize: Callable[..., Facts]
    make: Callable[..., Task]


def together(summaries: list[Facts]) -> Facts:
    """What everybody knows: sums of what is called "sum ...", maxima of what is called "max ...".

    >>> together([{"sum n": np.array(2), "max n": np.array(2)}, {"sum n": np.array(3), "max n": np.array(3)}])
    {'sum n': array(5), 'max n': array(3)}
    """
    join = lambda name: np.sum if name.startswith("sum ") else np.max
    return {name: np.asarray(join(name)([each[name] for each in summaries], axis=0)) for name in summaries[0]}


def parts(examples: Examples, shares: tuple[float, ...], seed: int) -> list[np.ndarray]:
    """The rows for training, validation and test: as the site says, or drawn, of every label the same shares."""
    if examples.parts is not None:
        found = [np.flatnonzero(examples.parts == number) for number in range(3)]
    else:
        # Sites draw for themselves. Other shares are another draw: else two sums would differ by few rows only.
        drawn = hashlib.sha256(f"{seed} {shares} {examples.site}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(drawn))
        pieces: list[list[np.ndarray]] = [[], [], []]
        for label in np.unique(examples.labels):
            rows = rng.permutation(np.flatnonzero(examples.labels == label))
            cuts = np.round(np.cumsum(shares) * len(rows)).astype(int)
            for number, piece in enumerate(np.split(rows, cuts)):
                pieces[number].append(piece)
        found = [np.sort(np.concatenate(piece)) for piece in pieces]
    for name, rows in zip(("training", "validation", "test"), found, strict=True):
        if not len(rows):
            raise FedbilevelError(f"of {len(examples.labels)} rows none is left for {name}: more rows are needed.")
    return found


def _shares(train: float, validation: float) -> tuple[float, float]:
    if not (train > 0 and validation > 0 and train + validation < 1):
        raise FedbilevelError("train and validation are shares above 0 that leave a rest for the test.")
    return train, validation


def regularization_facts(examples: Examples, train: float = 0.5, validation: float = 0.25, seed: int = 0) -> Facts:
    """Of every column of the training rows: how many numbers are known, their sum, and the sum of their squares."""
    known = examples.inputs[parts(examples, _shares(train, validation), seed)[0]].astype(float)
    there = ~np.isnan(known)
    filled = np.where(there, known, 0)
    return {"sum count": there.sum(0), "sum values": filled.sum(0), "sum squares": (filled**2).sum(0)}


def regularization(
    examples: Examples,
    facts: Facts,
    train: float = 0.5,
    validation: float = 0.25,
    start: float = 0.03,
    weakest: float = 0.001,
    strongest: float = 1.0,
    seed: int = 0,
) -> Task:
    """One strength of regularisation for each feature of a logistic regression.

    Args:
        examples: the rows of the site.
        facts: what everybody knows of all sites.
        train: share of every site's rows, of either label, for training.
        validation: share for validation; the rest is for the test.
        start: the strength of all features at the start.
        weakest: least strength.
        strongest: greatest strength.
        seed: of the split.
    """
    if examples.classes != 2:
        raise FedbilevelError("regularization needs a label with two values.")
    if not 0 < weakest <= start <= strongest < np.inf:
        raise FedbilevelError("regularization: start lies between weakest and strongest, all above 0.")
    rows = parts(examples, _shares(train, validation), seed)
    count = np.maximum(facts["sum count"], 1)
    mean = facts["sum values"] / count
    deviation = np.sqrt(np.maximum(facts["sum squares"] / count - mean**2, 0))
    features = standardised(examples.inputs, mean, deviation)
    take = lambda part: {"features": features[part], "label": examples.labels[part].astype(np.float32)}
    tested, truth = features[rows[2]], examples.labels[rows[2]]

    def metrics(x: Any, y: Any) -> dict[str, float]:
        logits, losses = judged(y, tested, truth)
        auc = scores.auc(truth, logits) if 0 < truth.mean() < 1 else float("nan")
        return {"auc": auc, "test_loss": float(losses.mean())}

    return Task(
        strengths_problem(features.shape[1], start, weakest, strongest),
        [{"train": take(rows[0]), "val": take(rows[1])}],
        batch_size=None,
        metrics=metrics,
        name="regularization",
        shown=Presentation(headline={"auc": "mean test AUC", "test_loss": "mean test loss"}),
        suggested=Suggestion("fedbio", 300, hyper={"*": {**STEPS, "lr_upper": 20.0, "local_steps": 1}}),
    )


def data_cleaning_facts(examples: Examples, train: float = 0.6, validation: float = 0.2, seed: int = 0) -> Facts:
    """How many training rows there are at most."""
    return {"max samples": np.asarray(len(parts(examples, _shares(train, validation), seed)[0]))}


def data_cleaning(
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
    """Find wrongly labelled rows; the weights of rows never leave their site.

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
    rows, samples = parts(examples, _shares(train, validation), seed), int(facts["max samples"])
    inputs = examples.inputs if examples.inputs.dtype == np.uint8 else np.nan_to_num(examples.inputs).astype(np.float32)
    labels = examples.labels.astype(np.int32)
    network = mlp(int(np.prod(inputs.shape[1:])), *[hidden] * (layers - 1), examples.classes)
    own = np.arange(len(rows[0]), dtype=np.int32)
    look = lambda part: {"image": Lookup(inputs, part), "label": labels[part]}

    def metrics(x: Any, y: Any) -> dict[str, float]:
        says = outputs(network.apply, y, inputs[rows[2]]).argmax(1)
        return {"accuracy": float(np.mean(says == labels[rows[2]]))}

    steps = {"lr_upper": 20.0, "lr_lower": 0.5, "lr_adjoint": 0.02}
    return Task(
        cleaning_problem(network, samples, 1, l2, "sigmoid", True),
        [{"train": {**look(rows[0]), "weight": own}, "val": look(rows[1])}],
        batch_size={"train": batch_size, "val": None},
        metrics=metrics,
        name="data-cleaning",
        shown=Presentation(headline={"accuracy": "mean test accuracy"}),
        suggested=Suggestion("fedbioacc", 200, hyper={"fedbioacc": steps, "fedbio": steps}),
    )


OWN: Names[OwnTask] = Names(
    "task for data of sites",
    {
        "data-cleaning": OwnTask(data_cleaning_facts, data_cleaning),
        "regularization": OwnTask(regularization_facts, regularization),
    },
)
