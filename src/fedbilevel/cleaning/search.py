"""Search for label errors in arrays: build the task, run it, and let every client judge its own rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.algorithms import Alternating
from fedbilevel.cleaning.findings import Exchanged, FinalModel, Findings, Noise, Score
from fedbilevel.cleaning.scaling import Scale, Sums
from fedbilevel.errors import FedbilevelError
from fedbilevel.runs.solve import solve
from fedbilevel.tasks.efforts import DEFAULT, THOROUGH, design_of, folds_of, steps
from fedbilevel.tasks.label_errors import Said, label_errors, say
from fedbilevel.tasks.noise_model import transition

Array = np.ndarray
FEDAVG_ROUNDS = 200
"""Rounds of one FedAvg run of the final model, the unit of cost."""


def clean_arrays(
    inputs: Array,
    labels: Array,
    clients: Array,
    trusted: Array | None = None,
    classes: int | None = None,
    *,
    thorough: bool = False,
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
        thorough: more candidates and more rounds, for four times the cost.
        seed: of the folds and the first models.
        progress: is called with the number of rounds done and the number of all rounds.
        checkpoint: a folder in which the run is saved, and continued from if it was interrupted.
    """
    inputs, labels, clients = np.asarray(inputs), np.asarray(labels), np.asarray(clients)
    sure = np.zeros(len(labels), bool) if trusted is None else np.asarray(trusted, bool)
    if not len(inputs) == len(labels) == len(clients) == len(sure):
        raise FedbilevelError(
            f"inputs, labels, clients and trusted have different lengths: {len(inputs)}, {len(labels)}, "
            f"{len(clients)} and {len(sure)}."
        )
    number = int(labels.max(initial=0)) + 1 if classes is None else classes
    if number < 2 or labels.min(initial=0) < 0 or labels.max(initial=0) >= number:
        raise FedbilevelError("labels must be whole numbers from 0 to classes - 1, of at least two classes.")
    names = list(dict.fromkeys(clients.tolist()))
    owned = [np.flatnonzero(clients == name) for name in names]
    effort = THOROUGH if thorough else DEFAULT

    scale = Scale.fit([Sums.of(inputs[rows]) for rows in owned], images=inputs.ndim > 2)
    table = scale(inputs)
    design = design_of(table.shape[1], number, bool(sure.any()), effort)
    fold = np.zeros(len(labels), np.int32)
    for m, rows in enumerate(owned):
        fold[rows] = folds_of(labels[rows], sure[rows], design.folds, np.random.default_rng([seed, m]))
    shards = [{"rows": r, "label": labels[r], "trusted": sure[r], "fold": fold[r]} for r in owned]
    task = label_errors(design, table, shards, len(labels), int(sure.sum()))
    algorithm = Alternating(**steps())
    told = (lambda row: progress(row["round"], effort.rounds)) if progress else (lambda row: None)
    result = solve(task, algorithm, effort.rounds, seed, metrics=False, callbacks=[told], checkpoint=checkpoint)

    noise, said = [], []
    for m, rows in enumerate(owned):
        own = jax.tree.map(lambda a, m=m: a[m], result.x)
        of_client = say(design, own, result.y, table[rows], labels[rows], fold[rows])
        noise.append(
            _noise(names[m], of_client, labels[rows], sure[rows], np.asarray(transition(own, result.y["noise"])))
        )
        said.append(of_client)
    order = np.argsort(np.concatenate(owned))
    together = Said(*(np.concatenate(parts)[order] for parts in zip(*said, strict=True)))
    wrong = np.where(sure, 0.0, 1 - _at(together.posterior, labels))
    last = result.metrics
    unit = 2 * FEDAVG_ROUNDS * len(owned) * 4e-6 * sum(a.size for a in jax.tree.leaves(result.y["final"]))
    kinds = [each.kind for each in design.candidates]
    scores = [
        _score(together.each[:, kinds.index(kind)], labels, sure) if sure.any() else None
        for kind in ("given", "cleaned")
    ]
    return Findings(
        wrong=wrong,
        quality=1 - wrong,
        predicted=together.right.argmax(1),
        issue=wrong > 0.5,
        probabilities=together.right,
        noise=noise,
        identified=True,
        warning="",
        model=FinalModel(design, result.y["final"], scale),
        given=scores[0],
        cleaned=scores[1],
        exchanged=Exchanged(
            last["megabytes"],
            effort.rounds,
            last["megabytes"] / unit,
            "Sums of the columns; models and their gradients, summed over the rows of a client. No row, no label and "
            "no client's own noise level was sent.",
        ),
        history=result.history,
    )


def _at(table: Array, labels: Array) -> Array:
    return np.take_along_axis(table, labels[:, None].astype(int), 1)[:, 0]


def _noise(name: Any, said: Said, labels: Array, sure: Array, matrix: Array) -> Noise:
    classes = len(matrix)
    wrong = 1 - _at(said.posterior, labels)[~sure].astype(float)
    confusion = np.zeros((classes, classes))
    np.add.at(confusion.T, labels[~sure], said.posterior[~sure])
    level = float(wrong.mean()) if len(wrong) else 0.0
    # The score of a row is (P(wrong) - e) / (e (1 - e)).
    information = float(np.sum((wrong - level) ** 2))
    error = 1.96 * level * (1 - level) / max(information, 1e-12) ** 0.5
    low, high = max(0.0, level - error), min(1.0, level + error)
    return Noise(name, len(wrong), level, low, high, matrix, confusion, int(np.sum(wrong > 0.5)))


def _score(probabilities: Array, labels: Array, sure: Array) -> Score:
    right = _at(probabilities, labels)[sure]
    accuracy = np.mean(probabilities[sure].argmax(1) == labels[sure])
    return Score(float(accuracy), float(-np.mean(np.log(np.maximum(right, 1e-12)))))
