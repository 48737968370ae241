"""A task: a problem, the clients' data, and what to measure."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.checks import (
    check_losses,
    check_rows,
    check_start,
    check_values,
    measured,
    not_finite_at_start,
)
from fedbilevel.core.data import SPLITS, Data, Held, Joined, Layout, held
from fedbilevel.core.digest import digest
from fedbilevel.core.presentation import Presentation, Suggestion
from fedbilevel.core.problem import Problem
from fedbilevel.core.rows import as_arrays, own_tables, take
from fedbilevel.core.sampling import SAMPLINGS, Sampling
from fedbilevel.core.types import Tree
from fedbilevel.errors import FedbilevelError, UnknownName

BatchSize = int | None | Mapping[str, int | None]
MOST_ROWS = 1_000_000
"""Of a batch of a client that has fewer."""


@dataclass(frozen=True, eq=False)
class Task:
    """A problem with its clients.

    Args:
        problem: the losses and what is known about x and y.
        clients: for every client ``{"train": arrays, "val": arrays}``, pytrees of arrays with a leading axis of rows.
            The lower loss sees batches of "train", the upper loss batches of "val".
        weights: the clients' weights w_m: None for 1/M each, "size" for the number of training rows, or one number per
            client.
        batch_size: rows per batch; None uses all rows; ``{"train": 64, "val": None}`` sets them separately.
        sampling: how batches are drawn from a client's rows. "replacement": every row uniformly and independently, as
            the theory of most algorithms assumes. "epochs": all rows in random order, then again in another order.
            "blocks": neighbouring rows, in an order of blocks that is drawn once. The batches of every term of an
            algorithm walk on their own, and a client that does not take part in a round skips its batches.
        server: validation rows that the server holds, instead of "val" at the clients: the upper loss sees these.
        metrics: ``metrics(x, y) -> {name: number}`` on the current solution, in the user's structure.
        choice: ``choice(x, y) -> number``, the loss that tuning minimises, on held-out rows: neither level is trained
            on them, and they are not test rows. Where the objective is known, it may be that. None: the upper loss.
        classifier: ``classifier(x, y)``, what predicts the classes of new rows, with a method ``packed`` that gives
            what a run folder stores of it.
        name, options: how the task was made, for the records.
        shown: how its results are shown.
        suggested: what the command line runs by default.
    """

    problem: Problem
    clients: Sequence[Mapping[str, Tree]]
    weights: Sequence[float] | np.ndarray | Literal["size"] | None = None
    batch_size: BatchSize = 64
    server: Tree = None
    metrics: Callable[[Tree, Tree], Mapping[str, Any]] | None = None
    choice: Callable[[Tree, Tree], float] | None = None
    classifier: Callable[[Tree, Tree], Any] | None = None
    name: str = "custom"
    options: Mapping[str, Any] = field(default_factory=dict)
    shown: Presentation = field(default_factory=Presentation)
    suggested: Suggestion = field(default_factory=Suggestion)
    sampling: Sampling = "replacement"

    def __post_init__(self) -> None:
        if not isinstance(self.problem, Problem):
            raise FedbilevelError(f"a task needs a problem, fb.Problem(upper, lower, init), not {self.problem!r}.")
        check_start(self.problem)
        if len(self.clients) == 0:
            raise FedbilevelError("a task needs at least one client.")
        self._convert()
        seen: set[int] = set()
        for split in SPLITS:
            check_rows(split, self._held(split))
            check_values(split, self._held(split), seen)
        if self.server is not None and self.problem.private_x:
            raise FedbilevelError("the server cannot evaluate the upper loss of a private x: give the clients 'val'.")
        if isinstance(self.batch_size, Mapping) and set(self.batch_size) != set(SPLITS):
            raise FedbilevelError(f"batch_size needs the entries train and val, but has {sorted(self.batch_size)}.")
        if any(size is not None and (not isinstance(size, Integral) or size < 1) for size in self.layout.batch_sizes):
            raise FedbilevelError(
                f"batch_size must be a whole number of at least 1, or None for all rows, not {self.batch_size}."
            )
        if self.sampling not in SAMPLINGS:
            raise UnknownName("sampling", str(self.sampling), SAMPLINGS)
        for size, longest in zip(self.layout.batch_sizes, self.layout.longest, strict=True):
            if size is not None and size > max(longest, MOST_ROWS):
                raise FedbilevelError(
                    f"batch_size is {size}, but the largest client has {longest} rows: use None for all rows."
                )
        _ = self.normalised_weights  # refuses bad ones
        if self.problem.weighting and np.ptp(self.normalised_weights) > 0:
            raise FedbilevelError("with weighting=True, x holds the clients' weights: leave out weights=.")
        check_losses(self.problem, self.layout, {split: self._held(split) for split in SPLITS})

    def measured(self, x: Tree, y: Tree) -> Mapping[str, Any]:
        """The metrics of a solution; none if the task has no metrics."""
        return {} if self.metrics is None else measured(self.metrics, x, y)

    def not_finite_at_start(self) -> str:
        """What is NaN or infinite before anything was trained, in a sentence; "" if nothing is."""
        return not_finite_at_start(self.problem, {split: self._held(split) for split in SPLITS})

    @cached_property
    def normalised_weights(self) -> np.ndarray:
        """w_m, summing to 1."""
        if self.weights is None:
            weights = np.ones(len(self.clients))
        elif isinstance(self.weights, str):
            if self.weights != "size":
                raise FedbilevelError(f"weights must be None, 'size' or numbers, not '{self.weights}'.")
            weights = np.array([part.size for part in self._held("train")], float)
        else:
            weights = np.asarray(self.weights, float)
        if (
            weights.shape != (len(self.clients),)
            or not np.all(np.isfinite(weights) & (weights >= 0))
            or not weights.any()
        ):
            raise FedbilevelError(
                f"weights must be {len(self.clients)} numbers, one per client, none negative and not all zero."
            )
        return weights / weights.sum()

    @cached_property
    def layout(self) -> Layout:
        """The static part of the data."""
        train, val = ([part.size for part in self._held(split)] for split in SPLITS)
        sizes = [
            self.batch_size[split] if isinstance(self.batch_size, Mapping) else self.batch_size for split in SPLITS
        ]
        return Layout(
            clients=len(self.clients),
            longest=(max(train), max(val)),
            ragged=(len(set(train)) > 1, len(set(val)) > 1),
            batch_sizes=(sizes[0], sizes[1]),
            server=self.server is not None,
            sampling=self.sampling,
        )

    @cached_property
    def data(self) -> Data:
        """The rows of all clients, put one after the other on the device, once."""
        joined = Joined()
        train, val = (joined.shards(self._held(split), len(self.clients)) for split in SPLITS)
        return Data(train, val, jnp.asarray(self.normalised_weights))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all data; a table that several lookups share is read once."""
        leaves = jax.tree.leaves(self.data)
        first = {id(leaf): number for number, leaf in reversed(list(enumerate(leaves)))}
        shared = " ".join(str(first[id(leaf)]) for leaf in leaves)
        return digest((shared, leaves[number]) for number in sorted(set(first.values())))

    def only(self, client: int, knows_server: bool = True) -> "Task":
        """The task of one client alone, as a party of a federation knows it, with or without the server's rows."""
        server = self.server if knows_server else jax.tree.map(np.zeros_like, take(self.server, slice(1)))
        own = {split: own_tables(rows) for split, rows in self.clients[client].items()}
        shown = dataclasses.replace(self.shown, references=())
        return dataclasses.replace(self, clients=[own], weights=None, server=server, shown=shown)

    def _convert(self) -> None:
        """Take the arrays of other libraries as those of numpy, once."""
        known: dict[int, Any] = {}
        for name, given in (("clients", self.clients), ("server", self.server)):
            try:
                arrays = [as_arrays(rows, known) for rows in given] if name == "clients" else as_arrays(given, known)
            except Exception as error:
                reason = str(error).strip().partition("\n")[0].removesuffix(".") or type(error).__name__
                raise FedbilevelError(f"{name}: an array cannot be read by numpy: {reason}.") from error
            if known:
                object.__setattr__(self, name, arrays)

    def _held(self, split: str) -> list[Held]:
        return held(self.clients, self.server, split)
