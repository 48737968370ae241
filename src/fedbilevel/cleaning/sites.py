"""Finding label errors at sites that bring their own rows. Every site gets a list of its own suspicious labels.

All rows are for training, in folds that the site deals out with its own secret. What is sent has parts for each fold,
and for trusted rows alone, so a sum over the rows of one fold can be found by subtraction. Hence a fold has no trusted
rows, or at least as many as a number that leaves the site must be about, and so for the others.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.cleaning.effort import DEFAULT, THOROUGH, Effort, design_of
from fedbilevel.cleaning.judgement import at, halfway, interval
from fedbilevel.cleaning.scaling import MOST
from fedbilevel.core.presentation import Presentation, Suggestion
from fedbilevel.core.schedules import constant
from fedbilevel.core.task import Task
from fedbilevel.core.types import Tree
from fedbilevel.errors import FedbilevelError
from fedbilevel.tasks.label_errors import Design, label_errors, profile, say
from fedbilevel.tasks.sites import (
    Bounds,
    Columns,
    Examples,
    Facts,
    Judged,
    SiteTask,
    column_bounds,
    column_facts,
    drawn,
    moments,
    standardised,
    undivided,
)

MOST_FOLDS, MOST_HIDDEN = 20, 1024
MOST_AT_ONCE = 5000
"""Rows of a site that are used in every step; of a larger site, batches of as many rows are drawn."""
NOTHING_TRUSTED = (
    "No site has trusted rows, so labels are judged by each other only: errors that all sites make alike are not found."
)
NOT_IDENTIFIED = (
    "The share of wrong labels cannot be told from these rows (it may be anything from {low:.0%} to {high:.0%}): they "
    "are ranked, but none is called wrong."
)


class Options(NamedTuple):
    """What a study can choose: the options of :func:`task`."""

    thorough: bool
    folds: int
    hidden: int
    seed: int

    @property
    def effort(self) -> Effort:
        """How much it may cost."""
        return THOROUGH if self.thorough else DEFAULT

    def design(self, examples: Examples, facts: Facts) -> Design:
        """The problem; it is the same at all sites."""
        features = int(np.prod(examples.inputs.shape[1:]))
        found = design_of(features, examples.classes, bool(facts["sum trusted"] > 0), self.effort)
        return found._replace(folds=self.folds or found.folds, hidden=self.hidden)


class Rows(NamedTuple):
    """The rows of a site as models see them."""

    inputs: np.ndarray
    labels: np.ndarray
    fold: np.ndarray
    trusted: np.ndarray

    @classmethod
    def of(cls, examples: Examples, facts: Facts, folds: int, seed: int) -> "Rows":
        """Scaled with what is known of all sites, and in folds."""
        known = undivided(examples).examples.inputs
        table = known.reshape(len(known), -1) / 255 if examples.images else known
        inputs = np.clip(standardised(table, *moments(facts)), -MOST, MOST)
        fold, trusted = folds_of_site(examples, folds, seed), trusted_rows(examples, seed)
        return cls(inputs, examples.labels.astype(np.int32), fold, trusted)


def facts_of_site(examples: Examples, seed: int = 0) -> Facts:
    """How many rows there are, how many of them are trusted, and sums over the columns."""
    trusted = trusted_rows(examples, seed)
    counts = {"sum rows": np.asarray(len(trusted)), "sum trusted": np.asarray(int(trusted.sum()))}
    return {**counts, **column_facts(undivided(examples))}


def bounds(facts: Facts, rows: int, columns: Columns) -> Bounds:
    """A site has exactly its number of rows, and at most so many of them are trusted."""
    return {"sum rows": (rows, rows), "sum trusted": (0, rows), **column_bounds(facts, rows, columns)}


def task(
    examples: Examples, facts: Facts, thorough: bool = False, folds: int = 0, hidden: int = 64, seed: int = 0
) -> Task:
    """Find wrong labels at every site, by models that were not trained on them; the list of suspects stays there.

    Args:
        examples: the rows of the site; if it knows which of their labels are right, say so (trusted in the schema).
        facts: what everybody knows of all sites.
        thorough: more candidates, folds and rounds.
        folds: each row is judged by models that were not trained on its fold; 0: 5 of them, 10 if thorough.
        hidden: width of the hidden layer of networks.
        seed: of the folds.
    """
    if (folds and not 2 <= folds <= MOST_FOLDS) or not 1 <= hidden <= MOST_HIDDEN:
        raise FedbilevelError(
            f"label-errors: folds must be from 2 to {MOST_FOLDS}, and hidden from 1 to {MOST_HIDDEN}."
        )
    if examples.parts is not None and examples.site:
        raise FedbilevelError("label-errors uses all rows in folds: leave part out of [schema].")
    chosen = Options(thorough, folds, hidden, seed)
    design = chosen.design(examples, facts)
    rows = Rows.of(examples, facts, design.folds, seed)
    size = len(rows.labels)
    own = {"rows": np.arange(size), "label": rows.labels, "trusted": rows.trusted, "fold": rows.fold}
    batch_size = None if size <= MOST_AT_ONCE else MOST_AT_ONCE

    def metrics(x: Tree, y: Tree) -> dict[str, float]:
        x, y = _arrays((x, y))
        right = say(design, x, y, rows.inputs, rows.labels, rows.fold).right.astype(float)
        loss = -np.log(np.maximum(at(right, rows.labels), 1e-12))
        hits = (right.argmax(1) == rows.labels)[rows.trusted]
        return {"loss": float(loss.mean()), "trusted_accuracy": float(hits.mean()) if len(hits) else np.nan}

    steps = {"lr_upper": 4.0, "lr_lower": 1.0, "server": "adam", "lr_server": constant(chosen.effort.step)}
    return dataclasses.replace(
        label_errors(design, rows.inputs, [own], int(facts["sum rows"]), int(facts["sum trusted"]), batch_size),
        weights=None,
        metrics=metrics,
        shown=Presentation(headline={"trusted_accuracy": "accuracy on trusted rows", "loss": "loss on all rows"}),
        suggested=Suggestion("alternating", chosen.effort.rounds, hyper={"alternating": steps}),
    )


def judge(
    examples: Examples,
    facts: Facts,
    x: Tree,
    y: Tree,
    thorough: bool = False,
    folds: int = 0,
    hidden: int = 64,
    seed: int = 0,
) -> Judged:
    """What a site finds out about its labels at the end of a run; the options are those of the task.

    Labels that the site has checked are right, even where they are too few to train as trusted ones. Without a trusted
    row at any site, a site calls labels wrong only if its own rows tell how many are.
    """
    design = Options(thorough, folds, hidden, seed).design(examples, facts)
    inputs, labels, fold, trusted = Rows.of(examples, facts, design.folds, seed)
    x, y = _arrays((x, y))
    said = say(design, x, y, inputs, labels, fold)
    if not np.all(np.isfinite(said.posterior)):
        raise FedbilevelError("the result has NaN or infinite numbers, which say nothing about labels.")
    checked = np.zeros(len(labels), bool) if examples.trusted is None else examples.trusted
    wrong = np.where(checked, 0.0, 1 - at(said.posterior.astype(float), labels))
    remarks, identified = [], True
    if not facts["sum trusted"] > 0 and not checked.all():
        share = interval(profile(design, x, y, inputs, labels, fold, trusted), float(wrong[~checked].mean()))
        share = share.or_hard(float(np.mean(said.right.argmax(1) != labels)))
        identified = share.identified(trusted=False)
        remarks = [NOTHING_TRUSTED] + ([] if identified else [NOT_IDENTIFIED.format(low=share.low, high=share.high)])
    quality = at(said.right.astype(float), labels)
    if facts["sum trusted"] > 0:
        quality = halfway(quality, 1 - wrong)
    quality = np.where(checked, 1.0, quality)
    return Judged(checked, (wrong > 0.5) & identified, quality, said.right.argmax(1), wrong, " ".join(remarks))


def parts(task: Task, examples: Examples) -> dict[str, int]:
    """How many rows are trusted, and how many are not; what there is none of is left out."""
    trusted = np.asarray(task.clients[0]["train"]["trusted"]) > 0
    counted = {"that are trusted": int(trusted.sum()), "that are not": int((~trusted).sum())}
    return {words: count for words, count in counted.items() if count}


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


def _arrays(tree: Tree) -> Tree:
    return jax.tree.map(jnp.asarray, tree)


SITE_TASK = SiteTask(facts_of_site, task, bounds, lambda x, y: y["final"], parts, judge)
"""The task ``label-errors`` of a federation."""
