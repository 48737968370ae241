"""A program is what engines execute: the problem, the algorithm, the layout of the data, and who takes part."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Each, Key, Objective, Problem
from fedbilevel.core.data import Data, Layout
from fedbilevel.core.sampling import walking
from fedbilevel.core.vectors import Vector, is_vector
from fedbilevel.engines.participation import Everyone, Independent, Participation
from fedbilevel.errors import FedbilevelError


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["algorithm"],
    meta_fields=["problem", "layout", "participation", "batching"],
)
@dataclass(frozen=True)
class Program:
    """Everything a compiled round depends on except data. The numbers of the algorithm are its leaves: programs that
    differ only in these share their compiled code.
    """

    problem: Problem
    algorithm: Algorithm
    layout: Layout
    participation: Participation
    batching: Literal["scan", "vmap"] = "scan"  # how the simulator goes through the clients

    @classmethod
    def checked(
        cls,
        problem: Problem,
        algorithm: Algorithm,
        layout: Layout,
        participation: Participation | None = None,
        batching: Literal["scan", "vmap"] = "scan",
    ) -> "Program":
        """A program whose algorithm fits its problem and its clients; an error says what does not fit."""
        program = cls(problem, algorithm, layout, participation or Everyone(), batching)
        check_fits(problem, algorithm, layout, program.participation)
        return program

    @property
    def holds(self) -> bool:
        """Whether clients keep something from one exchange to the next."""
        return _holds(self.problem, self.algorithm)

    @property
    def lasting(self) -> bool:
        """Whether clients keep something from one round to the next."""
        return self.algorithm.remembers == "run" or self.problem.private_x

    @property
    def first_participation(self) -> Participation:
        """Who takes part in ``init``: a private x needs all clients, to set up the blocks."""
        return Everyone() if self.problem.private_x else self.participation

    def private(self, vector: Any) -> bool:
        """Whether this is a vector that stays with its client."""
        return self.problem.private_x and is_vector(vector) and vector.space == "x"

    def set_owned(self, tree: Any, owned: bool) -> Any:
        """Mark private vectors as owned (the server's view) or not (their owner's view)."""
        parts, structure = split_vectors(tree)
        return jax.tree.unflatten(structure, [Vector(v.tree, "x", owned) if self.private(v) else v for v in parts])

    def start_key(self, run: Key) -> Key:
        """The key of ``init``: the same in every engine."""
        return self._naming(jax.random.fold_in(run, 1), run, 0)

    def round_keys(self, run: Key, round: int | jax.Array) -> tuple[Key, Key]:
        """The keys of a round, for drawing its cohort and for its work; the second names batches."""
        draw, work = round_keys(run, round)
        return draw, self._naming(work, jax.random.fold_in(run, 3), round)

    def _naming(self, key: Key, series: Key, before: int | jax.Array) -> Key:
        """A key that can name the batches of this data."""
        return key if self.layout.sampling == "replacement" else walking(key, series, before)

    def cohort_key(self, exchange: Key) -> Key:
        """The key that draws the cohort of an exchange, if every exchange has its own; the same in every engine."""
        return jax.random.fold_in(exchange, self.layout.clients)

    def server_objective(self, data: Data) -> Objective:
        """The upper loss on the server's own rows; an error if it has none."""
        check_server_rows(self.algorithm, self.layout)
        return self.layout.client(self.problem, data, 0, data.weights[0]).f


def check_fits(problem: Problem, algorithm: Algorithm, layout: Layout, participation: Participation) -> None:
    """Refuse an algorithm that cannot solve this problem, or not with these clients."""
    name = type(algorithm).__name__
    if algorithm.lower_level != problem.lower_level:
        raise FedbilevelError(
            f"{name} is for problems with a {algorithm.lower_level} lower level, but this one is {problem.lower_level}."
        )
    for needed, value in problem.needs:
        if getattr(algorithm, needed, None) != value:
            raise FedbilevelError(
                f"this problem needs an algorithm with {needed} = {value}, which {name} does not have: "
                "its results would be meaningless."
            )
    if algorithm.weighting and not problem.weighting:
        raise FedbilevelError(
            f"{name} weights clients: it needs a problem with weighting=True, whose x is the clients' weights."
        )
    if algorithm.upper_at == "server":
        check_server_rows(algorithm, layout)
    if problem.weighting:
        _check_weights(problem, layout)
    if _holds(problem, algorithm) and (participation.resample or getattr(participation, "replacement", False)):
        raise FedbilevelError(
            f"the clients of {name} keep state here, so they must be the same for all exchanges of a round: sample "
            "without resample and without replacement."
        )


def _holds(problem: Problem, algorithm: Algorithm) -> bool:
    return algorithm.remembers != "nothing" or problem.private_x


def _check_weights(problem: Problem, layout: Layout) -> None:
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(problem.start, jax.random.key(0))[0].tree)
    if shapes != (layout.clients,):
        raise FedbilevelError(
            f"with weighting=True, x must be one array with a weight for each of the {layout.clients} clients, "
            f"but init gives the shape {shapes}."
        )


def check_server_rows(algorithm: Algorithm, layout: Layout) -> None:
    """Refuse to evaluate the upper loss on a server that has no validation rows."""
    if not layout.server:
        raise FedbilevelError(
            f"{type(algorithm).__name__} evaluates the upper loss on the server: give the task validation rows there."
        )


def check_each(broadcast: tuple[Any, ...], participation: Participation) -> None:
    """Refuse separate messages for the clients where it is not known beforehand how many take part."""
    if any(isinstance(part, Each) for part in broadcast) and (
        isinstance(participation, Independent) or getattr(participation, "replacement", False)
    ):
        raise FedbilevelError(
            "this algorithm sends every client a separate message: sample a fixed number of clients, without "
            "replacement."
        )


def split_vectors(tree: Any) -> tuple[list[Any], Any]:
    """The vectors and scalars of a state or message, vectors whole."""
    return jax.tree.flatten(tree, is_leaf=is_vector)


def without(tree: Any, left_out: Callable[[Any], bool]) -> Any:
    """A state or message without some of its vectors: None stands in their place."""
    parts, structure = split_vectors(tree)
    return jax.tree.unflatten(structure, [None if left_out(part) else part for part in parts])


def round_keys(run: Key, round: int | jax.Array) -> tuple[Key, Key]:
    """Two ordinary keys for every round, the same in every engine."""
    draw, work = jax.random.split(jax.random.fold_in(jax.random.fold_in(run, 2), round))
    return draw, work
