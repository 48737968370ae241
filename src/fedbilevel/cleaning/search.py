"""Search for label errors in arrays: build the task, run it, and let every client judge its own rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.algorithms import Alternating
from fedbilevel.cleaning.effort import DEFAULT, FEDAVG_ROUNDS, THOROUGH, Effort, design_of, folds_of
from fedbilevel.cleaning.findings import Exchanged, FinalModel, Findings, Noise, Score
from fedbilevel.cleaning.judgement import Interval, at, halfway, interval, noise_of, score, with_interval
from fedbilevel.cleaning.scaling import Scale, Sums
from fedbilevel.core import Algorithm
from fedbilevel.core.schedules import power
from fedbilevel.errors import FedbilevelError
from fedbilevel.runs.solve import Result, solve
from fedbilevel.tasks.label_errors import Design, Kind, Said, label_errors, losses, profile, say, says
from fedbilevel.tasks.noise_model import transition

Array = np.ndarray
MOST_AT_ONCE = 5000
"""Rows of a client that are used in every step; of larger clients, batches of as many rows are drawn."""

EXCHANGED = (
    "Sums over the rows of each client: of the columns, of the gradients of the models, and of the likelihood. No row, "
    "no label and no client's own noise level was sent."
)
NOTHING_TRUSTED = (
    "No rows are trusted, so labels are judged by each other only (federated confident learning): errors that all "
    "clients make alike are not found. Mark even twenty rows per client as trusted to find more."
)
NOT_IDENTIFIED = (
    "The share of wrong labels cannot be told from these rows (it may be anything from {low:.0%} to {high:.0%}): rows "
    "are ranked, but none is called wrong."
)


def clean_arrays(
    inputs: Array,
    labels: Array,
    clients: Array,
    trusted: Array | None = None,
    classes: int | None = None,
    *,
    thorough: bool = False,
    algorithm: Algorithm | None = None,
    seed: int = 0,
    progress: Callable[[int, int], Any] | None = None,
    checkpoint: Path | str | None = None,
) -> Findings:
    """Find wrong labels in the rows of several clients, whose rows are never pooled: only models are exchanged.

    Args:
        inputs: (rows, columns) of numbers, or images (rows, height, width[, colours]).
        labels: the given labels, from 0 to classes - 1.
        clients: the client of each row, numbers or names.
        trusted: which rows are known to have the right label; None if there are none.
        classes: number of classes. Default: the largest label plus 1.
        thorough: ten folds instead of five, more candidates and more rounds, for four to six times the cost.
        algorithm: what solves the task; None for the default.
        seed: of the folds and the first models.
        progress: is called with the number of rounds done and the number of all rounds.
        checkpoint: a folder in which the run is saved, and continued from if it was interrupted.
    """
    inputs, labels, clients = np.asarray(inputs), np.asarray(labels), np.asarray(clients)
    sure = np.zeros(len(labels), bool) if trusted is None else np.asarray(trusted, bool)
    number = _checked(inputs, labels, clients, sure, classes)
    effort = THOROUGH if thorough else DEFAULT
    names = list(dict.fromkeys(clients.tolist()))
    owned = [np.flatnonzero(clients == name) for name in names]

    scale = Scale.fit([Sums.of(inputs[rows]) for rows in owned], images=inputs.ndim > 2)
    table = scale(inputs)
    design = design_of(table.shape[1], number, bool(sure.any()), effort)
    fold = np.zeros(len(labels), np.int32)
    for m, rows in enumerate(owned):
        fold[rows] = folds_of(labels[rows], sure[rows], design.folds, np.random.default_rng([seed, m]))
    result = _run(design, effort, table, labels, sure, fold, owned, algorithm, seed, progress, checkpoint)

    y, own = result.y, [jax.tree.map(lambda a, m=m: a[m], result.x) for m in range(len(owned))]
    matrices = [np.asarray(transition(each, y["noise"], number)) for each in own]
    of = lambda m: (table[owned[m]], labels[owned[m]], fold[owned[m]])

    def judge(candidate: int | None = None) -> tuple[list[Said], list[Noise], float]:
        """What every client says of its rows and of its noise, and the share of wrong labels of all."""
        said = [say(design, own[m], y, *of(m), candidate) for m in range(len(owned))]
        noise = [noise_of(names[m], said[m], labels[r], sure[r], matrices[m]) for m, r in enumerate(owned)]
        return said, noise, sum(each.level * each.rows for each in noise) / max(1, sum(each.rows for each in noise))

    said, noise, level = judge()
    likelihood = sum(profile(design, own[m], y, *of(m), sure[rows]) for m, rows in enumerate(owned))
    overall = interval(np.asarray(likelihood), level)
    identified = overall.identified(bool(sure.any()))
    if not identified and not sure.any():
        # Models that reckon with noise are no help where it is unknown: the best model of the given labels remains.
        total = sum(losses(design, y, *of(m)) for m in range(len(owned)))
        plain = [j for j, each in enumerate(design.candidates) if each.kind == "given"]
        said, noise, level = judge(min(plain, key=np.asarray(total).__getitem__))

    order = np.argsort(np.concatenate(owned))
    together = Said(*(np.concatenate(parts)[order] for parts in zip(*said, strict=True)))
    if not sure.any():
        overall = overall.or_hard(float(np.mean(together.right.argmax(1) != labels)))
        identified = overall.identified(False)
    wrong = np.where(sure, 0.0, 1 - at(together.posterior, labels))
    quality = at(together.right, labels)
    if sure.any() and identified:
        quality = halfway(quality, 1 - wrong)
    return Findings(
        wrong=wrong,
        quality=np.where(sure, 1.0, quality),
        predicted=together.right.argmax(1),
        issue=(wrong > 0.5) & identified,
        probabilities=together.right,
        noise=[with_interval(each, overall, level) for each in noise],
        identified=identified,
        warning=_warning(bool(sure.any()), identified, overall),
        model=FinalModel(design, y["final"], scale),
        given=_of_kind(design, y, "given", table, labels, fold, sure),
        cleaned=_of_kind(design, y, "cleaned", table, labels, fold, sure),
        exchanged=_exchanged(result, effort, len(owned)),
        history=result.history,
    )


def _checked(inputs: Array, labels: Array, clients: Array, sure: Array, classes: int | None) -> int:
    """The number of classes; refuses what is not rows of clients with labels."""
    if not len(inputs) == len(labels) == len(clients) == len(sure):
        raise FedbilevelError(
            f"inputs, labels, clients and trusted have different lengths: {len(inputs)}, {len(labels)}, "
            f"{len(clients)} and {len(sure)}."
        )
    if not len(labels):
        raise FedbilevelError("there are no rows to clean.")
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        raise FedbilevelError("labels must be whole numbers from 0 on.")
    number = int(labels.max()) + 1 if classes is None else classes
    if number < 2 or labels.max() >= number:
        raise FedbilevelError(f"labels go up to {labels.max()}, which does not fit {number} classes.")
    if not np.all(np.isfinite(inputs)):
        raise FedbilevelError("inputs must be finite numbers: fill in what is missing.")
    if sure.any() and len(np.unique(labels[sure])) == 1:
        raise FedbilevelError(
            f"all trusted rows have the label {labels[sure][0]}: trusted rows of several classes are needed, over all "
            "clients together."
        )
    return number


def _run(
    design: Design,
    effort: Effort,
    table: Array,
    labels: Array,
    sure: Array,
    fold: Array,
    owned: list[Array],
    algorithm: Algorithm | None,
    seed: int,
    progress: Callable[[int, int], Any] | None,
    checkpoint: Path | str | None,
) -> Result:
    shards = [{"rows": r, "label": labels[r], "trusted": sure[r], "fold": fold[r]} for r in owned]
    batch_size = None if max(map(len, owned)) <= MOST_AT_ONCE else MOST_AT_ONCE
    task = label_errors(design, table, shards, len(labels), int(sure.sum()), batch_size)
    if algorithm is None:
        step = power(effort.step * 10, -0.5, 100.0)
        algorithm = Alternating(lr_upper=4.0, lr_lower=1.0, server="adam", lr_server=step)
    told = [lambda row: progress(row["round"], effort.rounds)] if progress else []
    return solve(task, algorithm, effort.rounds, seed, metrics=False, callbacks=told, checkpoint=checkpoint)


def _of_kind(design: Design, y: Any, kind: Kind, table: Array, labels: Array, fold: Array, sure: Array) -> Score | None:
    """How well a kind of candidate does on trusted rows; None without trusted rows."""
    return score(says(design, y, kind, table[sure], fold[sure]), labels[sure]) if sure.any() else None


def _warning(trusted: bool, identified: bool, overall: Interval) -> str:
    sentences = [] if trusted else [NOTHING_TRUSTED]
    if not identified:
        sentences.append(NOT_IDENTIFIED.format(low=overall.low, high=overall.high))
    return " ".join(sentences)


def _exchanged(result: Result, effort: Effort, clients: int) -> Exchanged:
    megabytes = result.metrics["megabytes"]
    of_one = 2 * FEDAVG_ROUNDS * clients * sum(a.nbytes for a in jax.tree.leaves(result.y["final"])) / 1e6
    return Exchanged(megabytes, effort.rounds, megabytes / of_one, EXCHANGED)
