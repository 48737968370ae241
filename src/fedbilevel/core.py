"""The vocabulary: Problem, Objective, Client, Replies, Clients, Algorithm.

A federated bilevel algorithm is a server program made of *exchanges*. One exchange is one message down to some
clients, one pure function run on each of them, one message up, one reduction::

    z = add(z, clients.run(self.descend, z).mean())

An algorithm is written once, in these words, and every engine executes it unchanged: as one compiled program over
thousands of simulated clients, or as messages between separate parties.

Conventions: clients m = 1..M with weights w_m (summing to 1), f = sum w_m f_m the upper and g = sum w_m g_m the lower
objective, h(x) = f(x, y*(x)) with y*(x) = argmin_y g(x, y), u* = [d2yy g]^-1 grad_y f, and grad h = grad_x f - d2xy g
u*.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fedbilevel import schedules
from fedbilevel.errors import FedbilevelError
from fedbilevel.vectors import Vector, simplex

Tree = Any
Key = jax.Array
Carry = TypeVar("Carry")
Result = TypeVar("Result")
Loss = Callable[..., jax.Array]


@dataclass(frozen=True)
class Problem:
    """Choose x so that the y trained with x does best: losses on pytrees, and what is known about x and y.

    Args:
        upper: ``upper(x, y, batch) -> scalar``, the loss on a batch of validation rows.
        lower: ``lower(x, y, batch) -> scalar``, the loss on a batch of training rows. Both are means over the rows of
            their batch (plus terms that do not depend on rows), so that a mini-batch is an unbiased sample of the
            whole.
        init: ``init(key) -> (x, y)``, where to start. For private x: the block of one client.
        project_x, project_y: the nearest feasible point of a pytree (see ``vectors.box``, ``ball``, ``simplex``);
            None is no constraint.
        lower_level: "global" - one y for everybody; "local" - every client has its own y.
        private_x: every client owns a block of x that concerns nobody else and is never sent. All blocks have the
            shape that ``init`` gives; solutions have a leading axis of clients.
        weighting: x is one flat array, the weight of every client: the lower objective is sum_m x_m lower_m(y), and
            ``lower`` (which does not look at its x) is a client's own loss. x lies in the probability simplex.
        needs: hyper-parameters that an algorithm must have, as ``(("restart", True), ...)``, where any others would
            give wrong results in silence.
        noise: the losses are random themselves, by dropout for instance, and take a key as a fourth argument. It comes
            from the name of the batch, so that the same batch at two points has the same noise. Where all rows are
            used, which is also how losses are evaluated, it is None, and nothing shall be random.
    """

    upper: Loss
    lower: Loss
    init: Callable[[Key], tuple[Tree, Tree]]
    project_x: Callable[[Tree], Tree] | None = None
    project_y: Callable[[Tree], Tree] | None = None
    lower_level: Literal["global", "local"] = "global"
    private_x: bool = False
    weighting: bool = False
    needs: tuple[tuple[str, Any], ...] = ()
    noise: bool = False

    def __post_init__(self) -> None:
        if self.lower_level not in ("global", "local"):
            raise FedbilevelError(f"lower_level is 'global' or 'local', not '{self.lower_level}'.")
        if self.weighting and (self.private_x or self.lower_level == "local"):
            raise FedbilevelError("weighting=True has one x for everybody and a global lower level.")
        if self.weighting and self.project_x is None:
            object.__setattr__(self, "project_x", simplex)

    def upper_on(self, x: Tree, y: Tree, batch: Tree, key: Key | None = None) -> jax.Array:
        """The upper loss, with the noise of this key if it is random."""
        return self.upper(x, y, batch, key) if self.noise else self.upper(x, y, batch)

    def lower_on(self, x: Tree, y: Tree, batch: Tree, key: Key | None = None) -> jax.Array:
        """The lower loss, with the noise of this key if it is random."""
        return self.lower(x, y, batch, key) if self.noise else self.lower(x, y, batch)

    def start(self, key: Key) -> tuple[Vector, Vector]:
        """The first x (one block if private) and y, as vectors."""
        start = self.init(key)
        if not isinstance(start, tuple | list) or len(start) != 2:
            raise FedbilevelError(f"init(key) must return the pair (x, y), but returned {type(start).__name__}.")
        x, y = start
        return Vector(jax.tree.map(as_float, x), "x"), Vector(jax.tree.map(as_float, y), "y")

    def nearest(self, v: Vector) -> Vector:
        """The nearest feasible point of the space of v; blocks that the clients own are projected one by one."""
        project = self.project_x if v.space == "x" else self.project_y
        if project is None:
            return v
        return Vector((jax.vmap(project) if v.owned else project)(v.tree), v.space, v.owned)


def as_float(value: Any) -> jax.Array:
    """An array of floats: whole numbers become floats, so that gradients exist."""
    kind = jnp.result_type(value)
    return jnp.asarray(value, kind if jnp.issubdtype(kind, jnp.floating) else jnp.result_type(float))


def mean_type(kind: Any) -> Any:
    """The type of a mean of numbers of this type."""
    return kind if jnp.issubdtype(kind, jnp.floating) else jnp.result_type(float)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows of a table that is in memory once, however many clients use it: row i is ``table[index[i]]``.

    Where a row is one image, ``index`` has one axis; where a row is a group of images, such as the samples of a
    few-shot task, it has more.

    >>> images = jnp.arange(12).reshape(4, 3)
    >>> Lookup(images, jnp.array([[2, 0], [0, 3]])).shape
    (2, 2, 3)
    """

    table: Any
    index: Any

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.index.shape, *self.table.shape[1:])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, rows: Any) -> Any:
        return self.table[self.index[rows]]

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.table, self.index), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "Lookup":
        return cls(*children)


def columns(rows: Tree) -> tuple[list[Any], Any]:
    """The arrays and lookups that rows consist of, and their structure."""
    return jax.tree.flatten(rows, is_leaf=lambda part: isinstance(part, Lookup))


def take(rows: Tree, index: Any) -> Tree:
    """Some of the rows, as arrays."""
    return jax.tree.map(lambda a: a[index], rows, is_leaf=lambda part: isinstance(part, Lookup))


def select(rows: Tree, index: Any) -> Tree:
    """Some of the rows; what is looked up stays so."""
    some = lambda a: Lookup(a.table, a.index[index]) if isinstance(a, Lookup) else a[index]
    return jax.tree.map(some, rows, is_leaf=lambda part: isinstance(part, Lookup))


class Rows(NamedTuple):
    """The rows of one client: ``size`` rows of some arrays, from row ``start``. Never padded, never copied."""

    arrays: Tree
    start: jax.Array | int
    size: jax.Array | int
    longest: int  # of all clients: the shape of a full batch
    ragged: bool  # whether clients differ in size

    def draw(self, key: Key, size: int) -> Tree:
        """A batch of rows drawn uniformly with replacement; the same key gives the same rows."""
        return self._take(jax.random.randint(key, (size,), 0, self.size))

    def all(self) -> Tree:
        """All rows; clients with fewer than the longest repeat their last row."""
        return self._take(jnp.minimum(jnp.arange(self.longest), self.size - 1))

    def _take(self, index: jax.Array) -> Tree:
        return take(self.arrays, self.start + index)


class Tally(Counter[str]):
    """Counts oracle calls while a client function is traced: gradients Gf, Gg, cross products J, Hessian products H."""

    times: int = 1

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        before, self.times = self.times, self.times * times
        yield
        self.times = before


class Objective:
    """One client's loss, seen through its batches: value and derivatives at (x, y).

    A batch is *named by a key*: the same key gives the same rows, so "the same batch at two points" is one key used
    twice. With ``size=None`` every batch is all the data and the key does not matter.
    """

    def __init__(self, loss: Loss, name: str, rows: Rows, size: int | None, tally: Tally | None = None) -> None:
        self._loss, self._name, self._rows, self._size, self._tally = loss, name, rows, size, tally

    def value(self, x: Vector, y: Vector, key: Key) -> jax.Array:
        """The loss."""
        return self._on(key)(x.tree, y.tree)

    def dx(self, x: Vector, y: Vector, key: Key) -> Vector:
        """The gradient in x."""
        self._count("G")
        return Vector(jax.grad(self._on(key), 0)(x.tree, y.tree), "x")

    def dy(self, x: Vector, y: Vector, key: Key) -> Vector:
        """The gradient in y."""
        self._count("G")
        return Vector(jax.grad(self._on(key), 1)(x.tree, y.tree), "y")

    def gradients(self, x: Vector, y: Vector, key: Key) -> tuple[Vector, Vector]:
        """The gradients in x and in y on one batch: one pass, counted once."""
        self._count("G")
        dx, dy = jax.grad(self._on(key), (0, 1))(x.tree, y.tree)
        return Vector(dx, "x"), Vector(dy, "y")

    def dxy(self, x: Vector, y: Vector, v: Vector, key: Key) -> Vector:
        """The cross product ``d2xy v = grad_x <grad_y, v>``, a vector of the space of x."""
        self._count("J")
        loss = self._on(key)
        return Vector(jax.jvp(lambda y: jax.grad(loss, 0)(x.tree, y), (y.tree,), (v.tree,))[1], "x")

    def dyy(self, x: Vector, y: Vector, v: Vector, key: Key) -> Vector:
        """The Hessian product ``d2yy v``."""
        self._count("H")
        loss = self._on(key)
        return Vector(jax.jvp(lambda y: jax.grad(loss, 1)(x.tree, y), (y.tree,), (v.tree,))[1], "y")

    def hessian(self, x: Vector, y: Vector, key: Key) -> jax.Array:
        """The matrix ``d2yy`` on one batch, in the order of ``y.flat()``; counted as one product per column."""
        if self._tally is not None:
            self._tally["H"] += y.size * self._tally.times
        loss = self._on(key)
        return jax.hessian(lambda flat: loss(x.tree, y.like(flat).tree))(y.flat())

    def second_order(self, x: Vector, y: Vector, v: Vector, key: Key) -> tuple[Vector, Vector, Vector]:
        """(gradient in y, cross product, Hessian product) on one batch, in one pass."""
        for oracle in "GJH":
            self._count(oracle)
        loss = self._on(key)
        # d/dt grad(x, y + t v) at t = 0: its x part is d2xy v, its y part d2yy v, and the primal holds grad_y.
        (_, dy), (dxy, dyy) = jax.jvp(lambda y: jax.grad(loss, (0, 1))(x.tree, y), (y.tree,), (v.tree,))
        return Vector(dy, "y"), Vector(dxy, "x"), Vector(dyy, "y")

    def _count(self, oracle: str) -> None:
        if self._tally is not None:
            name = oracle + self._name if oracle == "G" else oracle
            self._tally[name] += self._tally.times

    def _on(self, key: Key) -> Callable[[Tree, Tree], jax.Array]:
        """The loss on the batch of this name, as a function of (x, y)."""
        rows = self._rows
        if self._size is not None:
            batch, noise = rows.draw(key, self._size), jax.random.fold_in(key, 0)
            return lambda x, y: self._scalar(x, y, batch, noise)
        batch = rows.all()
        if not rows.ragged:
            return lambda x, y: self._scalar(x, y, batch)
        # Clients of different sizes share one shape: a client's mean is taken row by row, over its own rows only.
        own = jnp.arange(rows.longest) < rows.size

        def mean(x: Tree, y: Tree) -> jax.Array:
            each = jax.vmap(lambda row: self._scalar(x, y, jax.tree.map(lambda a: a[None], row)))(batch)
            return jnp.sum(jnp.where(own, each, 0)) / rows.size

        return mean

    def _scalar(self, x: Tree, y: Tree, batch: Tree, key: Key | None = None) -> jax.Array:
        value = self._loss(x, y, batch, key)
        if jnp.shape(value) != ():
            level = "upper" if self._name == "f" else "lower"
            raise FedbilevelError(
                f"{level}(x, y, batch) must return one number, but returned an array of shape {jnp.shape(value)}."
            )
        return value


@dataclass(frozen=True)
class Client:
    """What a client function may touch: its own data through f and g, its weight, the constraints. Nothing else.

    ``id`` is its number, from 0 to ``clients - 1``.
    """

    problem: Problem
    train: Rows
    val: Rows
    weight: jax.Array | float
    batch_sizes: tuple[int | None, int | None]
    id: jax.Array | int
    clients: int
    tally: Tally | None = None

    @property
    def f(self) -> Objective:
        """The upper loss on this client's validation rows."""
        return Objective(self.problem.upper_on, "f", self.val, self.batch_sizes[1], self.tally)

    @property
    def g(self) -> Objective:
        """The lower loss on this client's training rows; with client weights, M x_m times its own loss, so that the
        mean over clients is the weighted sum.
        """
        lower, id, clients = self.problem.lower_on, self.id, self.clients
        if not self.problem.weighting:
            return self.own
        weighted = lambda x, y, batch, key: clients * x[id] * lower(x, y, batch, key)
        return Objective(weighted, "g", self.train, self.batch_sizes[0], self.tally)

    @property
    def own(self) -> Objective:
        """The lower loss on this client's training rows, without the client's weight."""
        return Objective(self.problem.lower_on, "g", self.train, self.batch_sizes[0], self.tally)

    def larger_batches(self, factor: int) -> "Client":
        """The same client drawing batches this many times larger."""
        sizes = tuple(None if size is None else size * factor for size in self.batch_sizes)
        return dataclasses.replace(self, batch_sizes=sizes)

    def project_x(self, x: Vector) -> Vector:
        """The nearest feasible x."""
        return self.problem.nearest(x)

    def project_y(self, y: Vector) -> Vector:
        """The nearest feasible y."""
        return self.problem.nearest(y)

    def repeat(self, times: int, body: Callable[[Carry, Key, Any], Carry], carry: Carry, key: Key) -> Carry:
        """Local steps: ``carry = body(carry, key_i, i)`` for i = 0 .. times-1, compiled as one loop."""
        if self.tally is not None:
            with self.tally.repeated(times):
                return body(carry, key, jnp.asarray(0))
        if times <= 1:
            return body(carry, jax.random.fold_in(key, 0), 0) if times else carry
        return lax.fori_loop(0, times, lambda i, carry: body(carry, jax.random.fold_in(key, i), i), carry)

    def at_both(self, function: Callable[[Carry], Result], one: Carry, other: Carry) -> tuple[Result, Result]:
        """``function(one), function(other)``, one after the other and compiled once: for what takes long to compile."""
        if self.tally is not None:
            with self.tally.repeated(2):
                value = function(one)
            return value, value
        values = lax.map(function, jax.tree.map(lambda *both: jnp.stack(both), one, other))
        return jax.tree.map(lambda pair: pair[0], values), jax.tree.map(lambda pair: pair[1], values)


Step = Callable[..., tuple[Any, Any]]


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Each:
    """A different message for every client of the cohort, or a reply from each: arrays with a leading axis.

    ``alive`` tells which rows there are, where a client failed to answer (None: all).
    """

    rows: Any
    alive: jax.Array | None = None

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.rows, self.alive), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "Each":
        return cls(*children)

    def row(self, number: int | jax.Array) -> Any:
        """One client's part."""
        return jax.tree.map(lambda a: a[number], self.rows)

    def reordered(self, order: jax.Array) -> "Each":
        """The same rows in another order."""
        return jax.tree.map(lambda a: a[order], self)


class Replies(ABC):
    """What came back from one exchange."""

    @abstractmethod
    def mean(self) -> Any:
        """The mean of the uploads, weighted with the clients' weights, over those who replied.

        A private x-vector is not averaged: it stays with its owner, and is 0 for owners who did not reply. Upload
        *differences* to what was broadcast, then ``add`` their mean: rounding is relative to the step, not to the
        point, and who did not reply does not move.
        """

    @abstractmethod
    def estimate(self) -> Any:
        """An unbiased estimate of ``sum_m w_m upload_m`` over all n clients: ``n / |C| sum_{m in C} w_m upload_m``.

        The same as ``mean`` if everybody replies or all weights are equal. Private x-vectors stay with their owners.
        """

    @abstractmethod
    def stack(self) -> Any:
        """All uploads, with a leading axis of all clients of the federation, 0 for those who did not reply.

        For small uploads only (losses, inner products).
        """

    @abstractmethod
    def replied(self) -> jax.Array:
        """Which of all clients replied."""

    @abstractmethod
    def each(self) -> Each:
        """The uploads kept apart, one row per client of the cohort, to be handed on (see ``Clients.shuffle``)."""


class Clients(ABC):
    """The clients that take part in a round, as the server program sees them."""

    @abstractmethod
    def run(self, step: Step, *broadcast: Any) -> Replies:
        """One exchange: every client computes ``memory, upload = step(client, memory, key, *broadcast)``.

        Of an argument that is :class:`Each`, a client receives its own row.
        """

    @property
    @abstractmethod
    def holds_upper(self) -> bool:
        """Whether the server has validation rows of its own, and with them the whole upper loss."""

    @property
    @abstractmethod
    def f(self) -> Objective:
        """The upper loss on the server's own validation rows."""

    @abstractmethod
    def sample(self, size: int) -> "Clients":
        """A sub-cohort, drawn uniformly without replacement from these clients."""

    @abstractmethod
    def weighted(self, weights: jax.Array) -> "Clients":
        """The same clients with other weights: one entry for each of *all* clients of the federation."""

    @abstractmethod
    def project_x(self, x: Vector) -> Vector:
        """The nearest feasible x. Project averages, not only what is averaged: the mean of projections is biased."""

    @abstractmethod
    def project_y(self, y: Vector) -> Vector:
        """The nearest feasible y."""

    @abstractmethod
    def next_key(self) -> Key:
        """A fresh key for the server's own random choices."""

    def shuffle(self, each: Each) -> Each:
        """The rows handed to the clients in a random order: every row goes to a client drawn uniformly."""
        size = len(jax.tree.leaves(each.rows)[0])
        return each.reordered(jax.random.permutation(self.next_key(), size))

    @abstractmethod
    def repeat(self, times: int | jax.Array, body: Callable[["Clients", Carry], Carry], carry: Carry) -> Carry:
        """Exchanges in a loop, ``carry = body(clients, carry)``; the number may be random (an array)."""


def parameter(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    least: float | None = None,
    tune: tuple[float, float] | None = None,
    choices: tuple[str, ...] = (),
    whole: bool = False,
) -> Any:
    """A hyper-parameter: a dataclass field with a help text, a lower bound (strict or not), a range worth searching
    (on a log scale), or the words to choose from. A tuple holds one number for each client, ``whole`` numbers or not.
    """
    known = {"help": help, "above": above, "least": least, "tune": tune, "choices": choices, "whole": whole}
    return dataclasses.field(default=default, metadata=known)


@dataclass(frozen=True)
class Algorithm(ABC):
    """A frozen dataclass of hyper-parameters whose methods are the server program and the client functions.

    ``init`` and ``round`` are the server; client functions are pure methods ``step(client, memory, key, *broadcast)
    -> (memory, upload)`` handed to ``clients.run``. States are NamedTuples of vectors and scalars.
    """

    bilevel: ClassVar[bool] = True
    """Whether it moves x at all."""
    lower_level: ClassVar[str] = "global"
    weighting: ClassVar[bool] = False
    """Whether it only solves problems whose x is the clients' weights."""
    upper_at: ClassVar[Literal["clients", "server", "either"]] = "clients"
    """Who evaluates the upper loss. At the "clients", validation rows of the server are known to all of them."""
    remembers: ClassVar[Literal["nothing", "round", "run"]] = "nothing"
    """What a client keeps between exchanges: nothing (memory is None); until the end of the round (None at first, zeros
    after a loop that ran zero times, then what its last function returned); or for the whole run (starting from
    ``memory``)."""

    def memory(self, x: Vector, y: Vector) -> Any:
        """What every client keeps at the start, if it remembers for the whole run."""
        return None

    @abstractmethod
    def init(self, clients: Clients, x: Vector, y: Vector) -> Any:
        """The server's first state; may exchange."""

    @abstractmethod
    def round(self, clients: Clients, server: Any) -> Any:
        """One round: exchanges, and the server's next state."""

    @abstractmethod
    def solution(self, server: Any, memory: Any) -> tuple[Vector, Vector]:
        """The current x and y, from the server's state (or the clients' memories)."""

    def check(self) -> None:
        """Refuse combinations of hyper-parameters that make no sense (raise FedbilevelError)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, known = getattr(self, field.name), field.metadata
            if field.type is schedules.Schedule or field.type == "Schedule":
                value = value if isinstance(value, schedules.Schedule) else schedules.parse(value)
                object.__setattr__(self, field.name, value)
                value = value.scale
            elif isinstance(field.default, int | float):
                value = self._number(field.name, value, field.default)
                object.__setattr__(self, field.name, value)
            elif isinstance(field.default, tuple):
                value = self._numbers(field.name, value, known)
                object.__setattr__(self, field.name, value)
            elif known.get("choices") and value not in known["choices"]:
                raise FedbilevelError(
                    f"{type(self).__name__}: {field.name} is {' or '.join(known['choices'])}, not {value!r}."
                )
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._bound(field.name, value, known.get("above"), known.get("least"))
        self.check()

    def _number(self, name: str, value: Any, like: float) -> float:
        """The value as what the field holds: true or false, a whole number, or a number."""
        kind = type(like)
        if isinstance(value, Integral if kind is int else Real) and isinstance(value, bool) == (kind is bool):
            return kind(value)
        if kind is bool and isinstance(value, bool):
            return value
        what = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise FedbilevelError(f"{type(self).__name__}: {name} must be {what}, but is {value!r}.")

    def _numbers(self, name: str, value: Any, known: Mapping[str, Any]) -> tuple[float, ...]:
        """The value as a tuple of numbers, one for each client."""
        values = value if isinstance(value, tuple | list) else (value,)
        like = 0 if known.get("whole") else 0.0
        numbers = tuple(self._number(name, each, like) for each in values)
        for number in numbers:
            self._bound(name, number, known.get("above"), known.get("least"))
        return numbers

    def _bound(self, name: str, value: float, above: float | None, least: float | None) -> None:
        if above is not None and not value > above:
            raise FedbilevelError(f"{type(self).__name__}: {name} must be greater than {above}, but is {value}.")
        if isinstance(value, int) and value >= 2**31:
            raise FedbilevelError(f"{type(self).__name__}: {name} must be below 2^31, but is {value}.")
        if least is not None and not value >= least:
            raise FedbilevelError(f"{type(self).__name__}: {name} must be at least {least}, but is {value}.")
