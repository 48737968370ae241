"""Tasks on people's own tables: the functions that sites of a federation use, with a client for each of the table.

Every client divides its own rows, and tells the facts that a site would send. Where the table says which rows are
trusted, these are the validation and test rows, and the others are for training.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.core.rows import select
from fedbilevel.core.task import Task
from fedbilevel.data import OwnTable
from fedbilevel.data.columns import listed
from fedbilevel.errors import FedbilevelError, FedbilevelWarning, UnknownName
from fedbilevel.tasks.classifier import Classifier, standardising
from fedbilevel.tasks.own_details import DETAILS
from fedbilevel.tasks.sites import Examples, Facts, SiteTask, check_shares, divided, moments, together

TRAIN, VALIDATION, TEST = range(3)


def own_task(name: str, site: SiteTask, table: OwnTable, options: Mapping[str, Any], weights: str = "equal") -> Task:
    """The task of a name on the rows of a table.

    Args:
        name: of the task.
        site: its functions.
        table: the rows.
        options: of the functions.
        weights: of the clients: "equal", or "size", by the number of training rows.
    """
    if weights not in ("equal", "size"):
        raise UnknownName("way to weight clients", weights, ["equal", "size"])
    given = {key: p.default for key, p in inspect.signature(site.task).parameters.items() if p.default is not p.empty}
    for key in options:
        if key not in given:
            raise UnknownName(f"option of {name}", key, given)
    given |= options
    parts = _divided(table, given)
    there = [m for m, (_, rows) in enumerate(table.rows_of()) if (parts[rows] >= 0).any()]
    inputs = table.inputs if table.pixels is None else table.pixels.reshape(*table.pixels.shape[:3], -1)
    whole = Examples(inputs, table.labels, parts, len(table.classes), groups=table.group)

    judge = given.get("judge", "all")
    if judge != "all" and judge not in table.clients:
        raise UnknownName("client", judge, table.clients)
    asked = {**given, "judge": judge if judge == "all" else str(table.clients.index(judge))}
    facts = [_facts(site, _only(whole, table.client == m, str(m)), asked) for m in there]
    sizes = np.array([((table.client == m) & (parts == TRAIN)).sum() for m in there], float)
    known = {**together(facts, sizes if weights == "size" else None), "clients": np.asarray(len(there))}
    _check_facts(name, table, known)
    used = np.flatnonzero(parts >= 0)
    pooled = _only(whole, slice(None) if len(used) == len(table) else used, exactly=False)
    made = site.task(pooled, known, **{k: v for k, v in given.items() if k not in ("train", "validation")})

    owner, of_rows = table.client[used], parts[used]
    clients = []
    for m, told in zip(there, facts, strict=True):
        mine = {
            split: np.flatnonzero(owner[of_rows == part] == m)
            for split, part in (("train", TRAIN), ("val", VALIDATION))
        }
        rows = {split: select(made.clients[0][split], index) for split, index in mine.items()}
        if "number of judges" in told and not told["number of judges"]:
            rows["val"] = {**rows["val"], "share": np.zeros_like(rows["val"]["share"])}
        clients.append(rows)
    names = tuple(table.clients[m] for m in there)
    details = DETAILS[name](table, names, sizes) if name in DETAILS else None
    # Of a site they are about its own rows, here about those of all clients.
    headline = {key: said.removeprefix("mean ") for key, said in made.shown.headline.items()}
    shown = dataclasses.replace(made.shown, headline=headline, details=details, note=str(table))
    if made.problem.weighting and weights == "size":
        raise FedbilevelError(f"{name} finds the weights of the clients: leave out weights.")
    return dataclasses.replace(
        made,
        clients=clients,
        weights="size" if weights == "size" else None,
        shown=shown,
        classifier=lambda x, y: _classifier(table, known, site.layers(x, y)),
    )


def _only(examples: Examples, rows: np.ndarray | slice, site: str = "", exactly: bool = True) -> Examples:
    """Some of the rows; in double precision where sums must be exact."""
    take = lambda array: None if array is None else array[rows]
    inputs = examples.inputs[rows]
    inputs = inputs.astype(float) if exactly and not examples.images else inputs
    labels, parts, groups = examples.labels[rows], take(examples.parts), take(examples.groups)
    return examples._replace(inputs=inputs, labels=labels, parts=parts, groups=groups, site=site)


def _facts(site: SiteTask, examples: Examples, options: Mapping[str, Any]) -> Facts:
    taken = inspect.signature(site.facts).parameters
    return site.facts(examples, **{name: value for name, value in options.items() if name in taken})


def _divided(table: OwnTable, options: Mapping[str, Any]) -> np.ndarray:
    """What each row is for, -1 for those of clients that have too few."""
    train, validation, seed = options["train"], options["validation"], options["seed"]
    check_shares(train, validation)
    parts = np.full(len(table), -1)
    small, untrusted = [], []
    for name, rows in table.rows_of():
        trusted = None if table.trusted is None else table.trusted[rows]
        if trusted is not None and min(trusted.sum() // 2, (~trusted).sum()) >= 1:
            share = validation / (1 - train)
            parts[rows[trusted]] = 1 + _drawn(table, rows[trusted], (share,), seed, name)
            parts[rows[~trusted]] = TRAIN
            continue
        if len(rows) < 3:
            small.append(name)
            continue
        if trusted is not None:
            untrusted.append(name)
        parts[rows] = _drawn(table, rows, (train, validation), seed, name)
    if small:
        _warn(
            f"{len(small)} clients have fewer than 3 rows, too few for training, validation and test, and are left "
            f"out: {listed(small)}."
        )
    if untrusted:
        _warn(f"{len(untrusted)} clients have too few trusted rows, so others validate and test: {listed(untrusted)}.")
    if not (parts >= 0).any():
        raise FedbilevelError("no client has 3 rows: this task needs rows for training, validation and test.")
    return parts


def _check_facts(name: str, table: OwnTable, known: Facts) -> None:
    """Refuse what the task would refuse, too, in the words of a table: it has no sites, and classes have names."""
    kind = "validation" if table.trusted is None else "trusted"
    if (rare := np.flatnonzero(known.get("sum validation", np.ones(1)) < 1)).size:
        names = listed([table.classes[n] for n in rare])
        raise FedbilevelError(
            f"{name}: there are no validation rows with the label {names}: this task needs more {kind} rows of it."
        )
    if (known.get("mean positives", np.ones(1)) <= 0).any():
        raise FedbilevelError(
            f"{name}: there are no validation rows of both groups with the label {table.classes[1]}: this task needs "
            f"more {kind} rows of them."
        )


def _warn(sentence: str) -> None:
    warnings.warn(sentence, FedbilevelWarning, stacklevel=5)


def _drawn(table: OwnTable, rows: np.ndarray, shares: Sequence[float], seed: int, name: str) -> np.ndarray:
    """Parts of some rows with these shares, the last with the rest: of every label alike, if there are enough."""
    if len(shares) == 2:
        group = None if table.group is None else table.group[rows]
        examples = Examples(np.zeros((len(rows), 0)), table.labels[rows], None, len(table.classes), name, group)
        try:
            pieces = divided(examples, shares[0], shares[1], seed)[1:]
            parts = np.empty(len(rows), int)
            for part, piece in enumerate(pieces):
                parts[piece] = part
            return parts
        except FedbilevelError:
            pass  # too few of every label: then without regard to labels
    order = np.random.default_rng([seed, len(rows)]).permutation(len(rows))
    if len(shares) == 1:
        order = order[np.argsort(table.labels[rows][order], kind="stable")]  # every other row of a label
        place = np.arange(len(rows))
        parts = np.empty(len(rows), int)
        parts[order] = np.floor((place + 1) * shares[0]) == np.floor(place * shares[0])
        parts[order[-1]], parts[order[0]] = 1, 0
        return parts
    ends = np.clip(np.round(np.cumsum(shares) * len(rows)).astype(int), [1, 2], [len(rows) - 2, len(rows) - 1])
    parts = np.empty(len(rows), int)
    for part, piece in enumerate(np.split(order, ends)):
        parts[piece] = part
    return parts


def _classifier(table: OwnTable, facts: Facts, layers: Any) -> Classifier:
    """The classifier of a solution: the task standardises once more, by its training rows."""
    mean, deviation = moments(facts)
    if table.pixels is not None:
        encoding = table.encoding
        mean, deviation = (mean - encoding.mean) / encoding.deviation, (float(deviation) or 1.0) / encoding.deviation
    return Classifier(table.encoding, table.classes, [standardising(layers, mean, deviation)], label=table.label)
