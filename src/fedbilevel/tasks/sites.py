"""What the tasks for sites that bring their own rows share.

Before the first round every site sends facts: sums, means and maxima over its rows, nothing about a single row, and
nothing about fewer rows than the site allows. Then everybody builds the task from the facts of all sites: a site with
its own rows, the server with blank ones, which gives it the same problem without any data.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.core import columns
from fedbilevel.core.task import Task
from fedbilevel.core.types import Tree
from fedbilevel.errors import FedbilevelError

Facts = Mapping[str, np.ndarray]
Bounds = Mapping[str, tuple[np.ndarray | float, np.ndarray | float]]
"""For every fact, the least and the largest possible value of each of its numbers."""
MOST_ROWS = 10**9


class Columns(NamedTuple):
    """The least and the largest value of every column of the inputs, or of all pixels of images; and how many numbers
    of a row are in a column.
    """

    least: np.ndarray
    most: np.ndarray
    each: int = 1


class Examples(NamedTuple):
    """The rows of a site.

    Args:
        inputs: of a table, float64 with NaN where a number is missing; of images, uint8 with an axis of colours.
        labels: as numbers from 0.
        parts: for every row whether it is for training (0), validation (1) or test (2), if the site says so.
        classes: number of labels.
        site: its name, and what else the draw of the parts depends on, after a blank.
        groups: of the people that the rows are about, as numbers from 0, if the schema has a group.
        least: the fewest rows that a number which leaves the site may be about.
        widths: how many columns of the inputs each feature has: 1, or one for each of its values. Empty: 1 each.
        trusted: for every row whether somebody has checked its label, if the site says so.
    """

    inputs: np.ndarray
    labels: np.ndarray
    parts: np.ndarray | None
    classes: int
    site: str = ""
    groups: np.ndarray | None = None
    least: int = 1
    widths: tuple[int, ...] = ()
    trusted: np.ndarray | None = None

    @property
    def name(self) -> str:
        """The name of the site; the server's blank rows have none."""
        return self.site.partition(" ")[0]

    @property
    def images(self) -> bool:
        """Whether these are images, not a table."""
        return self.inputs.dtype == np.uint8


class Judged(NamedTuple):
    """What a site finds out about the labels of its own rows, in their order; nothing of this is sent.

    Args:
        trusted: which labels somebody has checked, so they are right.
        issue: which labels are probably wrong.
        quality: the score to rank by, from 0 to 1: low for labels that are probably wrong.
        predicted: the most likely class, by models that were not trained on the row.
        wrong: the probability that the label is wrong.
        remark: what people should know, in a sentence; empty if nothing.
    """

    trusted: np.ndarray
    issue: np.ndarray
    quality: np.ndarray
    predicted: np.ndarray
    wrong: np.ndarray
    remark: str = ""


def three_parts(task: Task, examples: Examples) -> dict[str, int]:
    """How many rows of a site are for training, validation and test."""
    train, validation = (len(columns(task.clients[0][part])[0][0]) for part in ("train", "val"))
    return {
        "for training": train,
        "for validation": validation,
        "for testing": len(examples.labels) - train - validation,
    }


class SiteTask(NamedTuple):
    """A task for sites.

    Args:
        facts: ``facts(examples, ...)``, what a site sends about its rows before the first round. A name says how the
            facts of sites are joined: "sum ..." over their rows, "number ..." of sites, "max ...", or "mean ..." with
            the weights of the sites.
        task: ``task(examples, facts, ...)``. Both take options of the task as further arguments.
        bounds: ``bounds(facts, rows, columns)``, what is possible: for a site that says it has this number of training
            rows, with these columns of the inputs.
        layers: ``layers(x, y)``, the dense layers of the model of a solution, ``{"w": ..., "b": ...}`` each.
        parts: ``parts(task, examples)``, how many rows of a site are for what.
        judge: ``judge(examples, facts, x, y, ...)``, what a site finds out about its labels, for tasks that find wrong
            ones; with options of the task, too.
    """

    facts: Callable[..., Facts]
    task: Callable[..., Task]
    bounds: Callable[[Facts, int, Columns], Bounds]
    layers: Callable[[Tree, Tree], Sequence[Mapping[str, Any]]] = lambda x, y: y
    parts: Callable[[Task, Examples], Mapping[str, int]] = three_parts
    judge: Callable[..., Judged] | None = None


def together(facts: Sequence[Facts], weights: np.ndarray | None = None, shares: np.ndarray | None = None) -> Facts:
    """The facts of all sites. The weights of the sites are equal unless given; ``shares`` says how much of the sums of
    each site counts, 1 unless given.

    >>> together([{"sum n": np.array(2), "max n": np.array(2)}, {"sum n": np.array(3), "max n": np.array(3)}])
    {'sum n': array(5), 'max n': array(3)}
    >>> together([{"mean n": np.array(1.0)}, {"mean n": np.array(2.0)}], np.array([3, 1]))
    {'mean n': array(1.25)}
    """
    ways = {
        "sum": lambda of_sites: _sum(of_sites, shares),
        "number": lambda of_sites: np.sum(of_sites, 0),
        "max": lambda of_sites: np.max(of_sites, 0),
        "mean": lambda of_sites: np.average(of_sites, 0, weights),
    }
    return {name: np.asarray(ways[name.split(" ")[0]]([each[name] for each in facts])) for name in facts[0]}


def _sum(of_sites: Sequence[np.ndarray], shares: np.ndarray | None) -> np.ndarray:
    if shares is None or np.all(shares == 1):
        return np.sum(of_sites, 0)
    shared = np.tensordot(shares, np.asarray(of_sites, float), 1)
    whole = np.asarray(of_sites[0]).dtype
    return (np.rint(shared) if whole.kind in "iu" else shared).astype(whole)


class Divided(NamedTuple):
    """The rows of a site as a task uses them: without what is about too few of them, and divided."""

    examples: Examples
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def divided(examples: Examples, train: float, validation: float, seed: int) -> Divided:
    """The numbers of the rows for training, validation and test: as the site says, or drawn, with the same shares of
    every label, and of every group if there are some. What would tell of too few training rows is missing or filled in.
    """
    check_shares(train, validation)
    if examples.parts is not None:
        division = [np.flatnonzero(examples.parts == number) for number in range(3)]
    else:
        # Sites draw for themselves. Other shares are another draw: else two sums would differ by few rows only.
        shares = (train, validation)
        rng = drawn(f"{seed} {shares} {examples.site}")
        pieces: list[list[np.ndarray]] = [[], [], []]
        kinds = examples.labels if examples.groups is None else examples.labels + examples.classes * examples.groups
        for kind in np.unique(kinds):
            rows = rng.permutation(np.flatnonzero(kinds == kind))
            cuts = np.round(np.cumsum(shares) * len(rows)).astype(int)
            for number, piece in enumerate(np.split(rows, cuts)):
                pieces[number].append(piece)
        division = [np.sort(np.concatenate(piece)) for piece in pieces]
    for name, rows in zip(("training", "validation", "test"), division, strict=True):
        if not len(rows):
            raise FedbilevelError(
                f"of {len(examples.labels)} rows, none is left for {name}: this task needs more rows."
            )
    return Divided(_discreet(examples, division[0]), *division)


def undivided(examples: Examples) -> Divided:
    """All rows of a site, for a task that needs no part of them for a test."""
    rows, none = np.arange(len(examples.labels)), np.zeros(0, int)
    return Divided(_discreet(examples, rows), rows, rows, none)


def check_shares(train: float, validation: float, task: str = "") -> None:
    """Refuse shares of the rows that leave nothing for the test."""
    if not (train > 0 and validation > 0 and train + validation < 1):
        raise FedbilevelError(f"{task}train and validation must be shares above 0 that leave a rest for the test.")


def _discreet(examples: Examples, train: np.ndarray) -> Examples:
    """The rows such that no count of the training rows, nor what is left of all of them, is about too few.

    Where too few values of a feature are missing, these are filled in, each with that of another row. Columns with too
    few known values are missing altogether, and so are those of a feature's rare values: of 0 and 1, both.
    """
    if examples.images or examples.least <= 1:
        return examples
    inputs, first = examples.inputs.copy(), 0
    for width in examples.widths or (1,) * inputs.shape[1]:
        column = slice(first, first + width)
        values = inputs[train, column]
        unknown = np.isnan(values[:, 0]) if width == 1 else ~values.any(1)
        if 0 < unknown.sum() < min(examples.least, len(train) - unknown.sum() + 1):
            values[unknown] = drawn(f"{first} {examples.site}").choice(values[~unknown], unknown.sum())
            inputs[train, column] = values
        inputs[:, column][:, _rare(values, examples.least)] = np.nan
        first += width
    return examples._replace(inputs=inputs)


def _rare(values: np.ndarray, least: int) -> np.ndarray:
    """Which columns of a feature tell of too few rows."""
    if values.shape[1] > 1:
        counts = np.append(values.sum(0), (~values.any(1)).sum()).astype(int)
        return ~told(counts, least)[:-1]
    known = values[~np.isnan(values)]
    ones, zeros = int((known == 1).sum()), int((known == 0).sum())
    rare = ones + zeros == len(known) and 0 < min(ones, zeros) < least
    return np.array([rare or 0 < len(known) < least])


def drawn(text: str) -> np.random.Generator:
    """Random numbers that nobody guesses without knowing the text."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()))


def told(counts: np.ndarray, least: int) -> np.ndarray:
    """Which of some counts may be told: none below the least, nor so many that the rest can be found by subtraction.

    >>> told(np.array([30, 40, 3]), 10), told(np.array([30, 40, 0]), 10), told(np.array([30, 9, 9]), 10)
    (array([False,  True, False]), array([ True,  True,  True]), array([ True, False, False]))
    """
    order = np.argsort(counts, kind="stable")
    may = np.ones(len(counts), bool)
    few = int(np.sum(counts < least))
    if counts[order[:few]].any():
        # The rarest are hidden together: as many as it takes for their sum to be one that may be told.
        enough = int(np.searchsorted(np.cumsum(counts[order]), least)) + 1
        may[order[: max(few, enough)]] = False
    return may


def column_facts(divided: Divided) -> Facts:
    """Of every column of the training rows: how many numbers are known, their sum, and the sum of their squares. Of
    images, the same of all pixels, as numbers from 0 to 1.
    """
    trained_on = divided.examples.inputs[divided.train]
    if divided.examples.images:
        levels = np.bincount(trained_on.ravel(), minlength=256)
        light = np.arange(256) / 255
        count, total, squares = np.asarray(trained_on.size), np.asarray(levels @ light), np.asarray(levels @ light**2)
    else:
        known = ~np.isnan(trained_on)
        filled = np.where(known, trained_on, 0)
        count, total, squares = known.sum(0), filled.sum(0), (filled**2).sum(0)
    return {"sum count": count, "sum values": total, "sum squares": squares}


def column_bounds(facts: Facts, rows: int, columns: Columns) -> Bounds:
    """What is possible for :func:`column_facts`."""
    least, most, each = columns
    count, total = facts["sum count"], facts["sum values"]
    return {
        "sum count": (rows * each if each > 1 else 0, rows * each),  # all pixels are known
        "sum values": (count * least, count * most),
        # By Cauchy and Schwarz, and because (value - least) (most - value) is never negative.
        "sum squares": (total**2 / np.maximum(count, 1), (least + most) * total - count * least * most),
    }


def moments(facts: Facts) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of every column over the training rows of all sites, or of all pixels."""
    count = np.maximum(facts["sum count"], 1)
    mean, square = facts["sum values"] / count, facts["sum squares"] / count
    variance = square - mean**2
    return mean, np.sqrt(np.where(variance > 1e-13 * square, variance, 0))  # less than that is rounding


def standardised(table: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Columns of mean 0 and deviation 1; 0 where a number is missing, and in columns that are constant."""
    made, scale = np.empty(table.shape, np.float32), np.where(deviation > 0, deviation, np.inf)
    for first in range(0, len(table), 1 << 16):  # little memory besides the result
        standard = (table[first : first + (1 << 16)] - mean) / scale
        made[first : first + (1 << 16)] = np.where(np.isnan(standard), 0, standard)
    return made
