"""A task: a problem, the clients' data, and what to measure."""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Algorithm, Client, Lookup, Problem, Rows, Tally, Tree, columns, take
from fedbilevel.errors import FedbilevelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedbilevel.runs.solve import Result

SPLITS = ("train", "val")
BatchSize = int | None | Mapping[str, int | None]


class Shards(NamedTuple):
    """The rows of all clients one after the other: client m has ``rows[m]`` rows from ``start[m]`` on."""

    arrays: Tree
    start: jax.Array
    rows: jax.Array


class Data(NamedTuple):
    """All that enters a compiled round of the simulator, once."""

    train: Shards
    val: Shards
    weights: jax.Array


class Layout(NamedTuple):
    """What a compiled program must know of the data beforehand: sizes and whether clients differ in them."""

    clients: int
    longest: tuple[int, int]
    ragged: tuple[bool, bool]
    batch_sizes: tuple[int | None, int | None]
    server: bool = False  # whether the validation rows are the server's, the same for all clients

    def client(
        self, problem: Problem, data: Data, id: jax.Array | int, weight: jax.Array, tally: Tally | None = None
    ) -> Client:
        """Client number ``id`` (an array in a compiled program)."""
        train, val = (
            Rows(shards.arrays, shards.start[id], shards.rows[id], longest, ragged)
            for shards, longest, ragged in zip((data.train, data.val), self.longest, self.ragged, strict=True)
        )
        return Client(problem, train, val, weight, self.batch_sizes, id, self.clients, tally)


class Reference(NamedTuple):
    """A run to compare with: an algorithm from a given x (in the user's structure).

    Its results are called METRIC_label; title is what people read. A grid search has ``others`` to start from as well:
    all are run and paid for, and the one with the least metric ``by`` in the end counts.
    """

    label: str
    title: str
    algorithm: Algorithm
    x: Tree
    others: Sequence[Tree] = ()
    by: str = ""


class Details(NamedTuple):
    """A table in words and numbers: what a user of a task wants to see of the solution itself."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]


@dataclass(frozen=True, eq=False)
class Task:
    """A problem with its clients.

    Args:
        problem: the losses and what is known about x and y.
        clients: for every client ``{"train": arrays, "val": arrays}``, pytrees of arrays with a leading axis of rows.
            The lower loss sees batches of "train", the upper loss batches of "val".
        server: validation rows that the server holds, instead of "val" at the clients: the upper loss sees these.
        weights: w_m: None is 1/M each, "size" is proportional to the number of training rows, or one number per
            client.
        batch_size: rows per batch, drawn with replacement; None is all rows, exactly; ``{"train": 64, "val": None}``
            sets them apart.
        metrics: ``metrics(x, y) -> {name: number}`` on the current solution, in the user's structure.
        choice: ``choice(x, y) -> number``, a loss on rows that neither level is trained on and that are no test:
            tuning goes by it; by the upper loss if there is none. Where the objective is known, it may be that.
        name, options: how the task was made, for the records.
        references: runs to compare with.
        details: ``details(results) -> Details``, what the solution looks like; here and below ``results`` holds the
            ``Result`` of the run as "run" and those of the references by their labels.
        picture: ``picture(results, figure)`` draws the solution on an empty matplotlib figure, whose size it may set.
        files: ``files(results, folder)`` writes what else a user of this task wants to keep.
        headline: the metrics of the summary table, as {name: heading}.
        compare_by: the metrics that a comparison draws (default: all of the headline).
        suggested: hyper-parameters that suit this task better than an algorithm's defaults, by the name of the
            algorithm or "*" for all others; the command line uses them where none are given.
        algorithm, rounds, sample: what the command line runs where nothing else is asked for.
    """

    problem: Problem
    clients: Sequence[Mapping[str, Tree]]
    weights: Sequence[float] | np.ndarray | Literal["size"] | None = None
    batch_size: BatchSize = 64
    metrics: Callable[[Tree, Tree], Mapping[str, Any]] | None = None
    choice: Callable[[Tree, Tree], float] | None = None
    name: str = "custom"
    options: Mapping[str, Any] = field(default_factory=dict)
    references: Sequence[Reference] = ()
    details: Callable[[Mapping[str, "Result"]], Details] | None = None
    picture: Callable[[Mapping[str, "Result"], "Figure"], None] | None = None
    files: Callable[[Mapping[str, "Result"], Path], None] | None = None
    headline: Mapping[str, str] = field(default_factory=dict)
    suggested: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    server: Tree = None
    compare_by: Sequence[str] = ()
    algorithm: str = "fedbioacc"
    rounds: int = 200
    sample: str = "everyone"

    def __post_init__(self) -> None:
        if len(self.clients) == 0:
            raise FedbilevelError("a task needs at least one client.")
        for split in SPLITS:
            self._check_rows(split)
        if self.server is not None and self.problem.private_x:
            raise FedbilevelError("the server cannot evaluate the upper loss of a private x: give the clients 'val'.")
        if isinstance(self.batch_size, Mapping) and set(self.batch_size) != set(SPLITS):
            raise FedbilevelError(f"batch_size needs the entries train and val, but has {sorted(self.batch_size)}.")
        if any(size is not None and (not isinstance(size, Integral) or size < 1) for size in self.layout.batch_sizes):
            raise FedbilevelError(
                f"batch_size must be a whole number, at least 1 (or None for all rows), but is {self.batch_size}."
            )
        _ = self.normalised_weights  # refuses bad ones
        if self.problem.weighting and np.ptp(self.normalised_weights) > 0:
            raise FedbilevelError("with weighting=True, x holds the clients' weights: leave out weights=.")
        self._check_losses()

    def advice(self, name: str, known: Collection[str]) -> dict[str, Any]:
        """What is suggested for the algorithm of this name, of the hyper-parameters that it has."""
        suggested = self.suggested.get(name, self.suggested.get("*", {}))
        return {field: suggested[field] for field in suggested if field in known}

    def measured(self, x: Tree, y: Tree) -> Mapping[str, Any]:
        """The metrics of a solution; none if the task has no metrics."""
        return self.metrics(x, y) if self.metrics is not None else {}

    def _holders(self, split: str) -> list[tuple[str, Tree]]:
        """Who holds the rows of a split, and these rows."""
        if split == "val" and self.server is not None:
            return [("the server", self.server)]
        for number, client in enumerate(self.clients):
            if split not in client:
                raise FedbilevelError(
                    f"client {number} has no '{split}' data: give every client {{'train': arrays, 'val': arrays}}."
                )
        return [(f"client {number}", client[split]) for number, client in enumerate(self.clients)]

    def _check_rows(self, split: str) -> None:
        first: Any = None
        for holder, rows in self._holders(split):
            leaves, structure = columns(rows)
            if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
                raise FedbilevelError(f"{holder}: '{split}' must hold arrays with a leading axis of rows.")
            lengths = {len(leaf) for leaf in leaves}
            if len(lengths) > 1:
                raise FedbilevelError(
                    f"{holder}: the '{split}' arrays differ in their number of rows: {sorted(lengths)}."
                )
            if lengths == {0}:
                raise FedbilevelError(f"{holder} has no '{split}' rows: leave this client out or give it data.")
            kind = (structure, [np.shape(leaf)[1:] for leaf in leaves])
            first = kind if first is None else first
            if kind != first:
                raise FedbilevelError(
                    f"{holder}: the '{split}' arrays have the row shapes {kind[1]}, "
                    f"but those of client 0 have {first[1]}."
                )

    def _check_losses(self) -> None:
        """One evaluation on shapes finds wrong shapes; one with numbers, where needed, that a loss is a mean over
        rows.
        """
        layout, problem = self.layout, self.problem
        key = jax.random.key(0)
        rows = [jax.tree.map(np.asarray, take(self._holders(split)[0][1], slice(3))) for split in SPLITS]
        for loss, level, batch, size, ragged in zip(
            (problem.lower_on, problem.upper_on),
            ("lower", "upper"),
            rows,
            layout.batch_sizes,
            layout.ragged,
            strict=True,
        ):
            x, y = jax.eval_shape(problem.start, key)
            try:
                value = jax.eval_shape(loss, x.tree, y.tree, batch)
            except FedbilevelError:
                raise
            except Exception as error:
                reason = str(error).strip().splitlines()[0]
                raise FedbilevelError(
                    f"{level}(x, y, batch) fails on the first rows of client 0: {type(error).__name__}: {reason}"
                ) from error
            if value.shape != ():
                raise FedbilevelError(
                    f"{level}(x, y, batch) must return one number, but returned an array of shape {value.shape}."
                )
            if size is None and ragged and not self._is_mean(loss, batch):
                raise FedbilevelError(
                    f"{level}(x, y, batch) is not a mean over the rows of its batch, which batch_size=None needs when "
                    "clients differ in size: use a mean, or give a batch_size."
                )

    def _is_mean(self, loss: Callable[..., jax.Array], batch: Tree) -> bool:
        # Near the start, not at it: there many losses are 0, and 0 is both a sum and a mean.
        away = lambda a: a + 0.1 * np.random.default_rng(0).normal(size=a.shape).astype(a.dtype)
        x, y = jax.tree.map(away, self.problem.start(jax.random.key(0)))
        size = len(jax.tree.leaves(batch)[0])
        each = [loss(x.tree, y.tree, jax.tree.map(lambda a, i=i: a[i : i + 1], batch)) for i in range(size)]
        doubled = loss(x.tree, y.tree, jax.tree.map(lambda a: np.concatenate([a, a]), batch))
        return bool(np.allclose(np.mean(each), doubled, rtol=1e-3, atol=1e-6, equal_nan=True))

    @cached_property
    def normalised_weights(self) -> np.ndarray:
        """w_m, summing to 1."""
        if self.weights is None:
            weights = np.ones(len(self.clients))
        elif isinstance(self.weights, str):
            if self.weights != "size":
                raise FedbilevelError(f"weights are None, 'size' or numbers, not '{self.weights}'.")
            weights = np.array(self._counts("train"), float)
        else:
            weights = np.asarray(self.weights, float)
        if (
            weights.shape != (len(self.clients),)
            or not np.all(np.isfinite(weights) & (weights >= 0))
            or not weights.any()
        ):
            raise FedbilevelError(
                f"weights must be {len(self.clients)} numbers that are not negative and not all zero, one per client."
            )
        return weights / weights.sum()

    def _counts(self, split: str) -> list[int]:
        return [len(columns(rows)[0][0]) for _, rows in self._holders(split)]

    @cached_property
    def layout(self) -> Layout:
        """The static part of the data."""
        counts = [self._counts(split) for split in SPLITS]
        sizes = [
            self.batch_size[split] if isinstance(self.batch_size, Mapping) else self.batch_size for split in SPLITS
        ]
        return Layout(
            clients=len(self.clients),
            longest=(max(counts[0]), max(counts[1])),
            ragged=(len(set(counts[0])) > 1, len(set(counts[1])) > 1),
            batch_sizes=(sizes[0], sizes[1]),
            server=self.server is not None,
        )

    @cached_property
    def data(self) -> Data:
        """The rows of all clients, put one after the other on the device, once."""
        tables: dict[int, jax.Array] = {}  # on the device, by what they are copies of

        def joined(parts: Sequence[Any]) -> Any:
            if not all(isinstance(part, Lookup) for part in parts):
                return jnp.asarray(np.concatenate([part[:] for part in parts]))
            first = parts[0].table
            if any(part.table is not first for part in parts):
                raise FedbilevelError("the lookups of all clients must be into the same table.")
            if id(first) not in tables:
                # What nobody can change is shared with the device where that is possible, not copied to it.
                fixed = isinstance(first, np.ndarray) and not first.flags.writeable
                tables[id(first)] = jax.device_put(first) if fixed else jnp.asarray(first)
            return Lookup(tables[id(first)], jnp.asarray(np.concatenate([part.index for part in parts])))

        def shards(split: str) -> Shards:
            counts = np.array(self._counts(split), np.int32)
            held = [columns(rows) for _, rows in self._holders(split)]
            arrays = jax.tree.unflatten(
                held[0][1], [joined(parts) for parts in zip(*(c for c, _ in held), strict=True)]
            )
            start = np.cumsum(counts) - counts
            if len(counts) < len(self.clients):  # the server's rows: the same for everybody
                start, counts = (np.repeat(a, len(self.clients)) for a in (start, counts))
            return Shards(arrays, jnp.asarray(start), jnp.asarray(counts))

        return Data(shards("train"), shards("val"), jnp.asarray(self.normalised_weights))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all data; a table that several lookups share is read once."""
        leaves = jax.tree.leaves(self.data)
        first = {id(leaf): number for number, leaf in reversed(list(enumerate(leaves)))}
        shared = " ".join(str(first[id(leaf)]) for leaf in leaves)
        return digest((shared, leaves[number]) for number in sorted(set(first.values())))

    def only(self, client: int, knows_server: bool = True) -> "Task":
        """The task of one client alone: what a party of a federation knows. The server's rows may be kept from it."""
        server = self.server if knows_server else jax.tree.map(np.zeros_like, take(self.server, slice(1)))
        own = {split: _own_tables(rows) for split, rows in self.clients[client].items()}
        return dataclasses.replace(self, clients=[own], weights=None, references=(), server=server)


def _own_tables(rows: Tree) -> Tree:
    """The same rows with tables of nothing else."""

    def own(part: Any) -> Any:
        if not isinstance(part, Lookup):
            return part
        used, index = np.unique(part.index, return_inverse=True)
        return Lookup(np.asarray(part.table)[used], index.reshape(part.index.shape))

    return jax.tree.map(own, rows, is_leaf=lambda part: isinstance(part, Lookup))


def digest(arrays: Iterable[tuple[str, Any]]) -> str:
    """A hash of named arrays: their types, shapes and contents, in this order."""
    found = hashlib.sha256()
    for name, array in arrays:
        array = np.asarray(array)
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()
