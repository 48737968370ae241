"""What the tasks for sites that bring their own rows share.

Before the first round every site sends facts: sums and maxima over its training rows, nothing about a single row. Then
everybody builds the task from the facts of all sites: a site with its own rows, the server with blank ones, which gives
it the same problem without any data.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError

Facts = Mapping[str, np.ndarray]


class Examples(NamedTuple):
    """The rows of a site: inputs (NaN where a number is missing), labels as numbers from 0, and for every row whether
    it is for training (0), validation (1) or test (2), if the site says so.
    """

    inputs: np.ndarray
    labels: np.ndarray
    parts: np.ndarray | None
    classes: int
    site: str = ""


class SiteTask(NamedTuple):
    """A task for sites: ``facts(examples, ...)`` and ``task(examples, facts, ...)``, both with options of the task as
    further arguments.
    """

    facts: Callable[..., Facts]
    task: Callable[..., Task]


def together(facts: Sequence[Facts]) -> Facts:
    """The facts of all sites: sums of what is called "sum ...", maxima of what is called "max ...".

    >>> together([{"sum n": np.array(2), "max n": np.array(2)}, {"sum n": np.array(3), "max n": np.array(3)}])
    {'sum n': array(5), 'max n': array(3)}
    """
    join = lambda name: np.sum if name.startswith("sum ") else np.max
    return {name: np.asarray(join(name)([each[name] for each in facts], axis=0)) for name in facts[0]}


def divided(examples: Examples, train: float, validation: float, seed: int) -> list[np.ndarray]:
    """The numbers of the rows for training, validation and test: as the site says, or drawn, with the same shares of
    every label.
    """
    check_shares(train, validation)
    if examples.parts is not None:
        division = [np.flatnonzero(examples.parts == number) for number in range(3)]
    else:
        # Sites draw for themselves. Other shares are another draw: else two sums would differ by few rows only.
        shares = (train, validation)
        drawn = hashlib.sha256(f"{seed} {shares} {examples.site}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(drawn))
        pieces: list[list[np.ndarray]] = [[], [], []]
        for label in np.unique(examples.labels):
            rows = rng.permutation(np.flatnonzero(examples.labels == label))
            cuts = np.round(np.cumsum(shares) * len(rows)).astype(int)
            for number, piece in enumerate(np.split(rows, cuts)):
                pieces[number].append(piece)
        division = [np.sort(np.concatenate(piece)) for piece in pieces]
    for name, rows in zip(("training", "validation", "test"), division, strict=True):
        if not len(rows):
            raise FedbilevelError(
                f"of {len(examples.labels)} rows, none is left for {name}: this task needs more rows."
            )
    return division


def check_shares(train: float, validation: float, task: str = "") -> None:
    """Refuse shares of the rows that leave nothing for the test."""
    if not (train > 0 and validation > 0 and train + validation < 1):
        raise FedbilevelError(f"{task}train and validation must be shares above 0 that leave a rest for the test.")
