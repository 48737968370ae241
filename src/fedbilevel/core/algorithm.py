"""The algorithm: hyper-parameters, the server program, and the client functions."""

import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import jax

from fedbilevel.core.client import Client
from fedbilevel.core.parameters import check_fields, is_argument, may_change
from fedbilevel.core.schedules import Schedule
from fedbilevel.core.server import Clients
from fedbilevel.core.types import Key, Step
from fedbilevel.core.vectors import Vector, is_vector
from fedbilevel.errors import FedbilevelError, UnknownName


@dataclass(frozen=True)
class Algorithm(ABC):
    """A frozen dataclass of hyper-parameters whose methods are the server program and the client functions.

    ``init`` and ``round`` run on the server. Client functions are pure methods ``step(client, memory, key, *broadcast)
    -> (memory, upload)`` that are passed to ``clients.run``. Where clients remember nothing, ``step(client, key,
    *broadcast) -> upload`` is enough. States are NamedTuples of vectors and scalars.

    An algorithm is a pytree: floats and schedules are its leaves, everything else is its structure. Algorithms of equal
    structure share their compiled code.
    """

    bilevel: ClassVar[bool] = True
    """Whether it optimizes x at all."""
    lower_level: ClassVar[str] = "global"
    """The problems that it solves: those with a "global" or with a "local" lower level."""
    weighting: ClassVar[bool] = False
    """Whether it only solves problems whose x is the clients' weights."""
    upper_at: ClassVar[Literal["clients", "server", "either"]] = "clients"
    """Who evaluates the upper loss. With "clients", validation rows of the server are given to all clients."""
    remembers: ClassVar[Literal["nothing", "round", "run"]] = "nothing"
    """What a client keeps between exchanges: nothing (memory is None); until the end of the round (None at first, zeros
    after a loop that ran zero times, then what its last function returned); or for the whole run (starting from
    ``memory``)."""

    steps: ClassVar[Mapping[str, str]] = {"x": "lr_upper", "y": "lr_lower", "u": "lr_adjoint"}
    """The step size of each vector of the server's state, by name: what to lower when that vector diverges."""

    citation: ClassVar[str] = ""
    """The paper, and which part of it this implements. For readers, like the five texts below."""
    source: ClassVar[str] = ""
    """Whether the code "follows the paper", or is a "reconstruction", and from what."""
    assumes: ClassVar[str] = ""
    """What the theory assumes of f, g and the clients."""
    exact: ClassVar[str] = ""
    """Whether it converges to the solution when clients differ, or where else."""
    alone: ClassVar[str] = ""
    """Which algorithm of a single machine it is with one client."""
    costs: ClassVar[str] = ""
    """Exchanges, floats and oracle calls of a round, as a formula in the hyper-parameters."""

    def memory(self, x: Vector, y: Vector) -> Any:
        """A client's first memory, if it remembers for the whole run."""
        return None

    @abstractmethod
    def init(self, clients: Clients, x: Vector, y: Vector) -> Any:
        """The server's first state; may make exchanges."""

    @abstractmethod
    def round(self, clients: Clients, server: Any) -> Any:
        """Make the exchanges of one round, and return the server's next state."""

    @abstractmethod
    def solution(self, server: Any, memory: Any) -> tuple[Vector, Vector]:
        """The current x and y, from the server's state (or the clients' memories)."""

    def variables(self, server: Any) -> Mapping[str, Vector]:
        """The vectors of the server's state by name. "x", "y" and "u" (the adjoint) mean the same for all algorithms.

        By default the names are those of the fields, and the first vector of a name counts.
        """
        parts, _ = jax.tree_util.tree_flatten_with_path(server, is_leaf=is_vector)
        vectors = [(path, part) for path, part in parts if is_vector(part)]
        return {jax.tree_util.keystr(path[-1:], simple=True): vector for path, vector in reversed(vectors)}

    def at(self, round: int | jax.Array) -> Self:
        """This algorithm as it is in one round, counted from 0 (``init`` counts as the first): numbers that were given
        as schedules have their values. Engines ask for it, so that algorithms only see numbers.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        change = [f.name for f in dataclasses.fields(self) if may_change(f) and isinstance(values[f.name], Schedule)]
        if not change:
            return self
        now = object.__new__(type(self))
        for name, value in values.items():
            object.__setattr__(now, name, value(round) if name in change else value)
        return now

    def check(self) -> None:
        """Refuse combinations of hyper-parameters that make no sense (raise FedbilevelError)."""

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Refuse hyper-parameters that it does not have, with the nearest one that it has."""
        known = [f.name for f in dataclasses.fields(cls) if f.init]
        if cls.__init__ is not object.__init__ and cls.__dataclass_params__.init:  # pyright: ignore
            for name in named:
                if name not in known:
                    raise UnknownName(f"hyper-parameter of {cls.__name__}", name, known)
            if len(values) > len(known):
                raise FedbilevelError(f"{cls.__name__} has only these {len(known)} numbers: {', '.join(known)}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_pytree_node(cls, _flatten, functools.partial(_unflatten, cls))


def _flatten(algorithm: Algorithm) -> tuple[tuple[Any, ...], tuple[tuple[str, ...], tuple[Any, ...]]]:
    """The numbers, and the rest by name."""
    fields = [(field, getattr(algorithm, field.name)) for field in dataclasses.fields(algorithm)]
    arguments = {field.name: value for field, value in fields if is_argument(field, value)}
    rest = tuple((field.name, value) for field, value in fields if field.name not in arguments)
    return tuple(arguments.values()), (tuple(arguments), rest)


def _unflatten(kind: type[Algorithm], rest: tuple[tuple[str, ...], tuple[Any, ...]], leaves: Any) -> Algorithm:
    """Without any check: in a compiled program the numbers are not known."""
    algorithm = object.__new__(kind)
    for name, value in (*zip(rest[0], leaves, strict=True), *rest[1]):
        object.__setattr__(algorithm, name, value)
    return algorithm


def call(step: Step, client: Client, memory: Any, key: Key, *broadcast: Any) -> tuple[Any, Any]:
    """Run a client function, with memory if it takes one. Returns its memory and its upload."""
    if _has_memory(getattr(step, "__func__", step)):
        return step(client, memory, key, *broadcast)
    return memory, step(client, key, *broadcast)


@functools.cache
def _has_memory(function: Any) -> bool:
    return "memory" in inspect.signature(function).parameters
