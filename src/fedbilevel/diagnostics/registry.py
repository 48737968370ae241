"""The diagnostics by name: what ``solve(..., diagnostics=["hypergradient", "lower_gap"])`` puts into the history."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedbilevel.core import Tree
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import norm
from fedbilevel.diagnostics.drift import mefbo_drift, virtual_hypergradient
from fedbilevel.diagnostics.fedbioacc import NEEDED as FOR_LYAPUNOV
from fedbilevel.diagnostics.fedbioacc import lyapunov_of
from fedbilevel.diagnostics.mefbo import MeFBOResidual, kind_of_residual, residual_of
from fedbilevel.diagnostics.potentials import (
    adjoint_error,
    averaged_square,
    fedbio_potential,
    local_potential,
    mefbo_potential,
    momentum_errors,
    moreau_gradient,
)
from fedbilevel.diagnostics.quantities import NotDefined, adjoint_gap, gap_to, stationarity_of, upper_loss, vectors
from fedbilevel.diagnostics.snapshot import Snapshot, check_needs, client_drift
from fedbilevel.errors import FedbilevelError, Names

Measure = Callable[[Task, Tree, Tree], float | Mapping[str, float]]


@dataclass(frozen=True)
class Diagnostic:
    """A column (or some) of the history: ``function(snapshot, **options)`` is a number or {column: number}.

    >>> DIAGNOSTICS["lyapunov"].using(curvature=0.5, smoothness=2.0).options
    {'curvature': 0.5, 'smoothness': 2.0}
    """

    name: str
    function: Callable[..., Any]
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def using(self, **options: Any) -> "Diagnostic":
        """The same with other constants (those of the function of this name)."""
        return replace(self, options={**self.options, **options})

    def check(self, moment: Snapshot) -> None:
        """Refuse runs that lack something this diagnostic needs."""
        check_needs(self.name, self.needs, moment)

    def columns(self, moment: Snapshot) -> dict[str, float]:
        """The values by column, NaN where they are not defined."""
        try:
            value = self.function(moment, **self.options)
        except NotDefined:
            value = float("nan")
        if not isinstance(value, Mapping):
            value = {self.name: value}
        return {name: float(number) for name, number in value.items()}


def _drift(moment: Snapshot) -> dict[str, float]:
    return {f"client_drift_{name}": value for name, value in client_drift(moment.engine, moment.state).items()}


def _envelope(moment: Snapshot) -> dict[str, float]:
    algorithm = moment.algorithm
    penalty = float(algorithm.penalty(max(0, int(moment.state.round) - 1)))  # R_t is for the point that c_t led to
    try:
        residual = residual_of(moment.task, *moment.point, penalty, algorithm.prox, moment.attempt)
    except NotDefined:
        residual = MeFBOResidual(*3 * [float("nan")], name="")
    kind = kind_of_residual(moment.task.problem)
    return {
        "mefbo_residual" if kind == "tangent cone" else "mefbo_prox_residual": residual.residual,
        "mefbo_hypergradient": residual.hypergradient,
        "mefbo_lower_gap": residual.lower_gap,
    }


def _adjoint_gap(moment: Snapshot) -> float:
    u = moment.adjoint
    return adjoint_gap(moment.task, *moment.point, u.tree if u is not None else None)


def _stationary(moment: Snapshot, step: float = 0.001) -> float:
    x, _ = vectors(*moment.point)
    return stationarity_of(moment.task.problem, x, moment.solved.hypergradient, step)


def _stationary_weights(moment: Snapshot, step: float = 0.001) -> float:
    return step * _stationary(moment, step)


DIAGNOSTICS: Names[Diagnostic] = Names(
    "diagnostic",
    {
        each.name: each
        for each in (
            Diagnostic("hypergradient", lambda moment: norm(moment.solved.hypergradient)),
            Diagnostic("objective", lambda moment: moment.solved.value),
            Diagnostic("upper_loss", lambda moment: upper_loss(moment.task, *moment.point)),
            Diagnostic("lower_gap", lambda moment: gap_to(moment.task, moment.point[1], moment.solved.y.tree)),
            Diagnostic("stationarity", _stationary),
            Diagnostic("adjoint_gap", _adjoint_gap, ("global", "adjoint")),
            Diagnostic("client_drift", _drift, ("simulation",)),
            Diagnostic("mefbo_residual", _envelope, ("global", "envelope")),
            Diagnostic("lyapunov", lyapunov_of, FOR_LYAPUNOV),
            Diagnostic("fedbio_potential", fedbio_potential, ("fedbio", "shared")),
            Diagnostic("local_potential", local_potential, ("own x", "shared")),
            Diagnostic("momentum_errors", momentum_errors, ("momentum", "shared")),
            Diagnostic("adjoint_error", adjoint_error, ("global", "adjoint")),
            Diagnostic("mefbo_potential", mefbo_potential, ("mefbo",)),
            Diagnostic("mefbo_drift", mefbo_drift, ("mefbo", "shared", "simulation")),
            Diagnostic("virtual_hypergradient", virtual_hypergradient, ("averages", "simulation")),
            Diagnostic("mean_squared_hypergradient", averaged_square),
            Diagnostic("moreau_gradient", moreau_gradient),
            Diagnostic("weighting_stationarity", _stationary_weights, ("weighting",)),
            Diagnostic("weighting_value", lambda moment: moment.solved.value, ("weighting",)),
        )
    },
)
"""The diagnostics that ``solve`` knows by name. The columns have these names, with some exceptions: client_drift_x and
so on, one for each upload; mefbo_residual (mefbo_prox_residual if it is the prox residual), mefbo_hypergradient and
mefbo_lower_gap; momentum_error_x and so on; mefbo_drift_x, _y and _theta; mefbo_potential and mefbo_theta_gap;
squared_hypergradient and mean_squared_hypergradient.
"""


def find(entry: "str | Diagnostic | Measure") -> Diagnostic:
    """A diagnostic by its name, or made of a function ``f(task, x, y) -> number or {name: number}``."""
    if isinstance(entry, str):
        return DIAGNOSTICS[entry]
    if isinstance(entry, Diagnostic):
        return entry
    if not callable(entry):
        raise FedbilevelError(f"a diagnostic must be a name or a function f(task, x, y), not {entry!r}.")
    name = getattr(entry, "__name__", "")
    if name.isidentifier():
        return Diagnostic(name, lambda moment: entry(moment.task, *moment.point))

    def named(moment: Snapshot) -> Mapping[str, float]:
        value = entry(moment.task, *moment.point)
        if not isinstance(value, Mapping):
            raise FedbilevelError("a diagnostic without a name must return {name: number}.")
        return value

    return Diagnostic("function", named)


def measure(diagnostics: Sequence[Diagnostic], moment: Snapshot) -> dict[str, float]:
    """The columns of all of them."""
    return {name: value for each in diagnostics for name, value in each.columns(moment).items()}
