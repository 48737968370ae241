"""A run at one moment, for diagnostics, and what a diagnostic may require of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbio_local import FedBiOLocal
from fedbilevel.algorithms.fedbioacc import FedBiOAcc, FedBiOAccState
from fedbilevel.algorithms.fedbioacc_local import FedBiOAccLocal
from fedbilevel.algorithms.mefbo import MoreauPenalty
from fedbilevel.core import Tree
from fedbilevel.core.schedules import Schedule
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector
from fedbilevel.diagnostics.average import Solved
from fedbilevel.diagnostics.quantities import defined, solved_at
from fedbilevel.diagnostics.weighting import WEIGHTING
from fedbilevel.engines.simulation import Simulation, State
from fedbilevel.errors import FedbilevelError


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment, for diagnostics. The lower problem is solved at most once for all of them."""

    engine: Any
    state: Any
    history: Sequence[Mapping[str, Any]] = ()  # the rows before

    @property
    def task(self) -> Task:
        """The task that is being solved."""
        return self.engine.task

    @property
    def algorithm(self) -> Any:
        """The algorithm that is running, with the numbers of the round to come where they are schedules."""
        return self.engine.program.algorithm.at(self.state.round)

    @cached_property
    def point(self) -> tuple[Tree, Tree]:
        """x and y in the user's structure."""
        return self.engine.solution(self.state)

    @cached_property
    def attempt(self) -> Solved:
        """The lower problem at x, solved or not."""
        return solved_at(self.task, *self.point)

    @property
    def solved(self) -> Solved:
        """The exact solution at x; raises NotDefined where there is none."""
        return defined(self.attempt)

    @property
    def adjoint(self) -> Vector | None:
        """The adjoint u that the server keeps, if the algorithm has one."""
        return self.algorithm.variables(self.state.server).get("u")


NEEDS: Mapping[str, tuple[str, Callable[[Snapshot], bool]]] = {
    "global": ("problems with a global lower level", lambda s: s.task.problem.lower_level == "global"),
    "shared": ("problems whose x is not private", lambda s: not s.task.problem.private_x),
    "weighting": (WEIGHTING, lambda s: s.task.problem.weighting),
    "adjoint": (
        "algorithms that keep the adjoint u, such as FedBiO, FedBiOAcc, SimFBO and FedMSA",
        lambda s: s.adjoint is not None,
    ),
    "envelope": (
        "MeFBO and others with a penalty and a prox",
        lambda s: isinstance(getattr(s.algorithm, "penalty", None), Schedule) and hasattr(s.algorithm, "prox"),
    ),
    "fedbio": ("FedBiO", lambda s: isinstance(s.algorithm, FedBiO)),
    "own x": (
        "FedBiO-Local, FedBiOAcc-Local and those with one local step",
        lambda s: isinstance(s.algorithm, FedBiOLocal | FedBiOAccLocal),
    ),
    "momentum": (
        "FedBiOAcc, and FedBiOAcc-Local without restart",
        lambda s: isinstance(s.algorithm, FedBiOAcc | FedBiOAccLocal) and not getattr(s.algorithm, "restart", False),
    ),
    "mefbo": ("MeFBO", lambda s: isinstance(s.algorithm, MoreauPenalty)),
    "averages": ("FedBiO and FedBiOAcc", lambda s: isinstance(s.algorithm, FedBiO | FedBiOAcc)),
    "momenta": ("FedBiOAcc", lambda s: isinstance(s.state.server, FedBiOAccState)),
    "simulation": ("engine='simulation'", lambda s: isinstance(s.engine, Simulation)),
}
"""What a diagnostic may require: what has it, in words, and whether this run does."""


def check_needs(name: str, needs: Sequence[str], moment: Snapshot) -> None:
    """Refuse runs that lack something the diagnostic of this name needs."""
    for who, has in (NEEDS[need] for need in needs):
        if not has(moment):
            raise FedbilevelError(f"the diagnostic {name} is for {who}.")


def client_drift(engine: Simulation, state: State) -> dict[str, float]:
    """Measure how far clients end up from their mean in the first exchange of the next round: sum w_m |z_m - mean|^2
    for every vector they upload.

    The names are those of the upload (``x``, ``y``, ``u``); blocks of a private x have no mean and are left out.
    """
    return {name: float(value) for name, value in engine.spread(state).items()}
