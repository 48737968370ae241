"""Hyper-parameter optimization: how strongly to regularise each feature of a logistic regression of several hospitals.

Hospital m has training, validation and test patients. y = (w, b) is a logistic regression trained on everybody's
training rows; x holds, for each feature j, the logarithm of the strength with which its weight is kept small; x is
chosen so that y does best on everybody's validation rows::

    min_x  1/M sum_m mean_n loss(y_x; val_mn)                    with  log(weakest) <= x_j <= log(strongest)
    y_x = argmin_(w, b)  1/M sum_m mean_n loss(w, b; train_mn) + sum_j exp(x_j) w_j^2

The bias b is free. The losses are logistic, so the lower level is strictly convex. Every batch is all rows: the
algorithms see exact gradients, and with the suggested steps they end at the stationary x. The bounds are there because
a feature that does not help has its best strength at infinity, and one that needs no help at zero.

What it is compared with: one fixed strength for all features (no tuning), and the best of nine shared strengths by the
validation loss (a federated grid search).

Tuning one regularisation parameter per feature by the gradient of a validation loss is as old as Bengio:
"Gradient-Based Optimization of Hyperparameters", Neural Computation 12, 2000. The data are the four hospitals of
Janosi, Steinbrunn, Pfisterer, Detrano: "Heart Disease", UCI 1989.

A federation standardises without showing rows: every hospital sends, for each column, the number, the sum and the sum
of squares of the known values of its training rows. They give everybody the same mean and deviation. A missing number
becomes the mean.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import FedAvg
from fedbilevel.core import Problem
from fedbilevel.core.presentation import Presentation, Reference, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import box
from fedbilevel.data import breast_cancer, heart_disease, iid, natural, split
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.tasks import scores
from fedbilevel.tasks.sites import Examples, Facts, check_shares, column_facts, divided, moments, standardised
from fedbilevel.tasks.strengths import Strengths

GRID = tuple(float(f"{10.0**n:.2g}") for n in np.linspace(-3, 0, 9))
"""The shared strengths of the grid search, in equal ratios from 0.001 to 1."""

# Below 2 / (curvature of the lower level), which is about 0.3 + 2 * strongest.
STEPS = {"lr_lower": 0.6, "lr_adjoint": 0.6}


def _loss(y: Any, batch: Any) -> jax.Array:
    logits = batch["features"] @ y["weights"] + y["bias"]
    return jnp.mean(jax.nn.softplus(logits) - batch["label"] * logits)


@cache  # tasks of equal shape share their compiled code, whatever their seed
def problem(features: int, start: float, weakest: float, strongest: float) -> Problem:
    """The losses of both levels for this number of features; strengths start at ``start``."""

    def upper(x: Any, y: Any, batch: Any) -> jax.Array:
        return _loss(y, batch)

    def lower(x: Any, y: Any, batch: Any) -> jax.Array:
        return _loss(y, batch) + jnp.sum(jnp.exp(x) * y["weights"] ** 2)

    def init(key: jax.Array) -> tuple[Any, Any]:
        return jnp.full(features, np.log(start)), {"weights": jnp.zeros(features), "bias": jnp.zeros(())}

    return Problem(upper, lower, init, project_x=box(float(np.log(weakest)), float(np.log(strongest))))


def _one_column_per_word(table: np.ndarray, names: Sequence[str], words: Mapping[str, Mapping[int, str]]) -> Any:
    """Columns of codes become one column of 0 and 1 for each word; a missing code is 0 in all of them."""
    columns, titles = [], []
    for name, column in zip(names, table.T, strict=True):
        if name in words:
            columns += [(column == code).astype(float) for code in words[name]]
            titles += [f"{name}: {word}" for word in words[name].values()]
        else:
            columns.append(column.astype(float))
            titles.append(name)
    return np.stack(columns, 1), titles


HEART_WORDS = {
    "cp": {1: "typical angina", 2: "atypical angina", 3: "other pain", 4: "no pain"},
    "restecg": {0: "normal", 1: "ST-T", 2: "hypertrophy"},
    "slope": {1: "up", 2: "flat", 3: "down"},
    "thal": {3: "normal", 6: "fixed", 7: "reversible"},
}
"""What the codes of the heart disease data mean (heart-disease.names)."""


def _load(
    data: str, clients: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, list[str], Any, list[str]]:
    """The table, its labels and column names, who has which rows, and what the clients are called."""
    if data == "heart-disease":
        loaded = heart_disease()
        table, names = _one_column_per_word(loaded.train.inputs, loaded.features, HEART_WORDS)
        hospitals = [name.capitalize() if len(name) > 2 else name.upper() for name in loaded.groups["hospital"]]
        return table, loaded.train.labels, names, natural(loaded.train.groups["hospital"]), hospitals
    if data == "breast-cancer":
        loaded = breast_cancer()
        parts = iid(loaded.train.labels, clients, rng)
        called = [f"client {m}" for m in range(clients)]
        return loaded.train.inputs.astype(float), loaded.train.labels, list(loaded.features), parts, called
    raise UnknownName("data set for regularization", data, ["heart-disease", "breast-cancer"])


def judged(y: Any, features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logit and the loss of every row, in double precision."""
    logits = features.astype(float) @ np.asarray(y["weights"], float) + float(y["bias"])
    return logits, np.logaddexp(0, logits) - labels * logits


def _task(
    features: np.ndarray,
    labels: np.ndarray,
    rows: Sequence[Sequence[np.ndarray]],
    strengths: tuple[float, float, float],
    suggested: Suggestion,
    shown: Presentation,
    columns: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    least: int = 1,
) -> Task:
    """The task of clients with rows of a standardised table, whether of a data set or of one site.

    Args:
        features: the table.
        labels: 0 or 1 for each of its rows.
        rows: for training, validation and test, the numbers of every client's rows.
        strengths: at the start, and the smallest and greatest allowed.
        suggested: what to run.
        shown: how the results are shown.
        columns: names of the metrics with every client's AUC; none for a site, which is measured on its test rows only.
        options: how the task was made.
        least: the fewest rows of either label that an AUC may be about.
    """
    seen = slice(None) if columns else rows[2][0]
    loss, of_loss = ("validation_loss", rows[1]) if columns else ("test_loss", rows[2])

    def metrics(x: Any, y: Any) -> dict[str, float]:
        logits, losses = np.zeros((2, len(labels)))
        logits[seen], losses[seen] = judged(y, features[seen], labels[seen])
        enough = lambda part: np.bincount(labels[part].astype(int), minlength=2).min() >= least
        auc = [scores.auc(labels[part], logits[part]) if enough(part) else float("nan") for part in rows[2]]
        mean_loss = float(np.mean([losses[part].mean() for part in of_loss]))
        return {"auc": float(np.mean(auc)), **dict(zip(columns, auc, strict=bool(columns))), loss: mean_loss}

    take = lambda part: {"features": features[part], "label": labels[part].astype(np.float32)}
    return Task(
        problem(features.shape[1], *strengths),
        [{"train": take(train), "val": take(val)} for train, val in zip(rows[0], rows[1], strict=True)],
        batch_size=None,
        metrics=metrics,
        name="regularization",
        options=options or {},
        shown=shown,
        suggested=suggested,
    )


def regularization(
    data: str = "heart-disease",
    clients: int = 4,
    noise_features: int = 0,
    train: float = 0.5,
    validation: float = 0.25,
    untuned: float = 0.001,
    start: float = 0.03,
    weakest: float = 0.001,
    strongest: float = 1.0,
    seed: int = 0,
) -> Task:
    """One strength of regularisation for each feature of a logistic regression.

    Args:
        data: "heart-disease", the four hospitals, or "breast-cancer", which is divided among the clients at random.
        clients: number of clients; heart-disease has four.
        noise_features: number of columns of white noise to add, which carry no information.
        train: share of every client's rows, of either label, for training.
        validation: share for validation; the rest is for the test.
        untuned: the strength of all features in the reference without tuning.
        start: the strength of all features at the start.
        weakest: the smallest strength allowed.
        strongest: the greatest strength allowed.
        seed: of the split and of the noise.
    """
    if data == "heart-disease" and clients != 4:
        raise FedbilevelError(f"regularization: heart-disease has 4 hospitals, not {clients} clients.")
    if noise_features < 0 or seed < 0:
        raise FedbilevelError("regularization: noise_features and seed must not be negative.")
    check_shares(train, validation, "regularization: ")
    if not 0 < weakest <= min(untuned, start) <= max(untuned, start) <= strongest < np.inf:
        raise FedbilevelError("regularization: untuned and start lie between weakest and strongest, all above 0.")
    rng = np.random.default_rng(seed)
    table, labels, names, parts, called = _load(data, clients, rng)
    table = np.concatenate([table, rng.normal(size=(len(table), noise_features))], 1)
    names += [f"noise {n}" for n in range(1, noise_features + 1)]
    # Of either label the same shares: Switzerland has 8 healthy patients only.
    of_label = [part[labels[part] == label] for part in parts for label in (0, 1)]
    pieces = split(of_label, (train, validation, 1 - train - validation), rng)
    rows = [[np.concatenate(piece[2 * m : 2 * m + 2]) for m in range(clients)] for piece in pieces]
    trained_on = table[np.concatenate(rows[0])]
    features = standardised(table, np.nanmean(trained_on, 0), np.nanstd(trained_on, 0))

    forgetting = {"c_upper": 0.0, "c_lower": 0.0, "c_adjoint": 0.0}
    suggested = Suggestion(
        algorithm="fedbio",
        rounds=3000,
        hyper={
            "fedbioacc": {**STEPS, **forgetting, "lr_upper": 15.0, "local_steps": 5},
            "stocbio": {**STEPS, "lr_upper": 50.0, "inner_rounds": 20, "neumann_steps": 60},
            "*": {**STEPS, "lr_upper": 20.0 if data == "heart-disease" else 5.0, "local_steps": 1},
        },
    )
    solution = Strengths(tuple(names), tuple(called), rows, labels, (weakest, strongest))
    shared = lambda strength: np.full(len(names), np.log(strength))
    # One step per round: more would drift apart on hospitals that differ, and the references must be exact, too.
    training = FedAvg(lr_lower=0.6, local_steps=1)
    shown = Presentation(
        headline={"auc": "mean test AUC", "validation_loss": "validation loss"},
        compare_by=["validation_loss", "auc"],
        references=[
            Reference("untuned", "no tuning", training, shared(untuned)),
            Reference(
                "grid", "grid search", training, shared(GRID[0]), [shared(s) for s in GRID[1:]], "validation_loss"
            ),
        ],
        details=solution.details,
        picture=solution.picture,
        files=solution.files,
    )
    options = {
        "data": data,
        "clients": clients,
        "noise_features": noise_features,
        "train": train,
        "validation": validation,
        "untuned": untuned,
        "start": start,
        "weakest": weakest,
        "strongest": strongest,
        "seed": seed,
    }
    bounds = (start, weakest, strongest)
    return _task(features, labels, rows, bounds, suggested, shown, solution.columns, options)


def regularization_facts(examples: Examples, train: float = 0.5, validation: float = 0.25, seed: int = 0) -> Facts:
    """Of every column of the training rows: how many numbers are known, their sum, and the sum of their squares."""
    return column_facts(divided(examples, train, validation, seed))


def regularization_of_site(
    examples: Examples,
    facts: Facts,
    train: float = 0.5,
    validation: float = 0.25,
    start: float = 0.03,
    weakest: float = 0.001,
    strongest: float = 1.0,
    seed: int = 0,
) -> Task:
    """One strength of regularisation for each feature of a logistic regression, on the rows of a site.

    Args:
        examples: the rows of the site.
        facts: what everybody knows of all sites.
        train: share of every site's rows, of either label, for training.
        validation: share for validation; the rest is for the test.
        start: the strength of all features at the start.
        weakest: the smallest strength allowed.
        strongest: the greatest strength allowed.
        seed: of the split.
    """
    if examples.classes != 2:
        raise FedbilevelError("regularization needs a label with two values.")
    if not 0 < weakest <= start <= strongest < np.inf:
        raise FedbilevelError("regularization: start lies between weakest and strongest, all above 0.")
    examples, *parts = divided(examples, train, validation, seed)
    features = standardised(examples.inputs, *moments(facts))
    suggested = Suggestion("fedbio", 300, hyper={"*": {**STEPS, "lr_upper": 20.0, "local_steps": 1}})
    shown = Presentation(headline={"auc": "mean test AUC", "test_loss": "mean test loss"})
    rows, strengths = [[part] for part in parts], (start, weakest, strongest)
    return _task(features, examples.labels, rows, strengths, suggested, shown, least=examples.least)


def regularization_layers(x: Any, y: Any) -> list[dict[str, Any]]:
    """The logistic regression of a solution, as one layer with one output."""
    return [{"w": np.asarray(y["weights"])[:, None], "b": np.asarray(y["bias"])[None]}]
