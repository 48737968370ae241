"""Finding label errors at sites that bring their own rows. Every site gets a list of its own suspicious labels.

All rows are for training, in folds that the site deals out with its own secret. What is sent has parts for each fold,
and for trusted rows alone, so a sum over the rows of one fold can be found by subtraction. Hence a fold has no trusted
rows, or at least as many as a number that leaves the site must be about, and so for the others.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.presentation import Presentation, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.core.types import Tree
from fedbilevel.errors import FedbilevelError
from fedbilevel.tasks.efforts import DEFAULT, THOROUGH, design_of, steps
from fedbilevel.tasks.label_errors import Design, Said, label_errors, say
from fedbilevel.tasks.sites import (
    Bounds,
    Columns,
    Examples,
    Facts,
    Judged,
    column_bounds,
    column_facts,
    drawn,
    moments,
    standardised,
    undivided,
)

MOST_FOLDS, MOST_HIDDEN = 20, 1024
FARTHEST = 8.0
"""Deviations from the mean; what is farther away is an outlier, and would dominate a linear model."""


def label_errors_facts(examples: Examples, seed: int = 0) -> Facts:
    """How many rows there are, how many of them are trusted, and sums over the columns."""
    trusted = trusted_rows(examples, seed)
    counts = {"sum rows": np.asarray(len(trusted)), "sum trusted": np.asarray(int(trusted.sum()))}
    return {**counts, **column_facts(undivided(examples))}


def label_errors_bounds(facts: Facts, rows: int, columns: Columns) -> Bounds:
    """A site has exactly its number of rows, and at most so many of them are trusted."""
    return {"sum rows": (rows, rows), "sum trusted": (0, rows), **column_bounds(facts, rows, columns)}


def label_errors_of_site(
    examples: Examples,
    facts: Facts,
    thorough: bool = False,
    folds: int = 5,
    hidden: int = 64,
    seed: int = 0,
) -> Task:
    """Find wrong labels at every site, by models that were not trained on them; the list of suspects stays there.

    Args:
        examples: the rows of the site; if it knows which of their labels are right, say so (trusted in the schema).
        facts: what everybody knows of all sites.
        thorough: more candidates and twice the rounds.
        folds: each row is judged by models that were not trained on its fold.
        hidden: width of the hidden layer of networks.
        seed: of the folds.
    """
    if not 2 <= folds <= MOST_FOLDS or not 1 <= hidden <= MOST_HIDDEN:
        raise FedbilevelError(
            f"label-errors: folds must be from 2 to {MOST_FOLDS}, and hidden from 1 to {MOST_HIDDEN}."
        )
    if examples.parts is not None and examples.site:
        raise FedbilevelError("label-errors uses all rows in folds: leave part out of [schema].")
    design, inputs = _design(examples, facts, thorough, folds, hidden), _inputs(examples, facts)
    trusted, fold = trusted_rows(examples, seed), folds_of_site(examples, folds, seed)
    labels = examples.labels.astype(np.int32)
    own = {"rows": np.arange(len(labels)), "label": labels, "trusted": trusted, "fold": fold}
    task = label_errors(design, inputs, [own], int(facts["sum rows"]), int(facts["sum trusted"]))

    def metrics(x: Tree, y: Tree) -> dict[str, float]:
        right = _say(design, x, y, inputs, labels, fold).right.astype(float)
        loss = -np.log(np.maximum(_at(right, labels), 1e-12))
        hits = (right.argmax(1) == labels)[trusted]
        return {"loss": float(loss.mean()), "trusted_accuracy": float(hits.mean()) if len(hits) else np.nan}

    effort = THOROUGH if thorough else DEFAULT
    return dataclasses.replace(
        task,
        weights=None,
        metrics=metrics,
        shown=Presentation(
            headline={"trusted_accuracy": "accuracy on trusted rows", "loss": "loss on all rows"},
        ),
        suggested=Suggestion("alternating", effort.rounds, hyper={"alternating": steps()}),
    )


def label_errors_judged(
    examples: Examples,
    facts: Facts,
    x: Tree,
    y: Tree,
    thorough: bool = False,
    folds: int = 5,
    hidden: int = 64,
    seed: int = 0,
) -> Judged:
    """What a site finds out about its labels at the end of a run; the options are those of the task."""
    design, labels = _design(examples, facts, thorough, folds, hidden), examples.labels
    trusted, fold = trusted_rows(examples, seed), folds_of_site(examples, folds, seed)
    said = _say(design, x, y, _inputs(examples, facts), labels, fold)
    if not np.all(np.isfinite(said.posterior)):
        raise FedbilevelError("the result has NaN or infinite numbers, which say nothing about labels.")
    wrong = np.where(trusted, 0.0, 1 - _at(said.posterior.astype(float), labels))
    return Judged(trusted, wrong > 0.5, 1 - wrong, said.right.argmax(1), wrong)


def label_errors_parts(task: Task, examples: Examples) -> dict[str, int]:
    """How many rows are trusted, and how many are not; what there is none of is left out."""
    trusted = np.asarray(task.clients[0]["train"]["trusted"]) > 0
    parts = {"that are trusted": int(trusted.sum()), "that are not": int((~trusted).sum())}
    return {words: count for words, count in parts.items() if count}


def trusted_rows(examples: Examples, seed: int) -> np.ndarray:
    """Which rows count as trusted: those with a checked label, unless these or the others are too few to be told of."""
    rows, least = len(examples.labels), examples.least
    trusted = np.zeros(rows, bool) if examples.trusted is None else examples.trusted.copy()
    others = rows - int(trusted.sum())
    if 0 < others < least:  # the rest is as many as need be
        trusted[drawn(f"trusted {seed} {examples.site}").permutation(np.flatnonzero(trusted))[: least - others]] = False
    return trusted if trusted.sum() >= least else np.zeros(rows, bool)


def folds_of_site(examples: Examples, folds: int, seed: int) -> np.ndarray:
    """A fold for every row: each fold has as many rows of each label, but none rather than too few."""
    trusted, fold = trusted_rows(examples, seed), np.zeros(len(examples.labels), np.int32)
    rng = drawn(f"folds {seed} {folds} {examples.site}")
    for kind in (False, True):
        shuffled = rng.permutation(np.flatnonzero(trusted == kind))
        rows = shuffled[np.argsort(examples.labels[shuffled], kind="stable")]
        used = min(folds, max(1, len(rows) // max(examples.least, 1)))
        fold[rows] = rng.permutation(folds)[np.arange(len(rows)) % used]
    return fold


def _design(examples: Examples, facts: Facts, thorough: bool, folds: int, hidden: int) -> Design:
    features = int(np.prod(examples.inputs.shape[1:]))
    found = design_of(features, examples.classes, bool(facts["sum trusted"] > 0), THOROUGH if thorough else DEFAULT)
    return found._replace(folds=folds, hidden=hidden)


def _inputs(examples: Examples, facts: Facts) -> np.ndarray:
    known = undivided(examples).examples.inputs
    table = known.reshape(len(known), -1) / 255 if examples.images else known
    return np.clip(standardised(table, *moments(facts)), -FARTHEST, FARTHEST)


def _say(design: Design, x: Tree, y: Tree, inputs: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> Said:
    x, y = jax.tree.map(jnp.asarray, (x, y))
    return say(design, x, y, inputs, labels.astype(np.int32), fold)


def _at(table: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.take_along_axis(table, labels[:, None].astype(int), 1)[:, 0]
