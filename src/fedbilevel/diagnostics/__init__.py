"""Exact quantities on all the data, outside any communication budget: how far a run is from the solution.

``solve(..., diagnostics=["hypergradient", "lower_gap"])`` puts them into the history; :data:`DIAGNOSTICS` has the
names. Imports core, mathematics, algorithms and engines; runs import it.
"""

from fedbilevel.diagnostics.average import KEY
from fedbilevel.diagnostics.constants import Constants, measure_constants
from fedbilevel.diagnostics.fedbioacc import lyapunov
from fedbilevel.diagnostics.mefbo import MeFBOResidual, mefbo_residual
from fedbilevel.diagnostics.quantities import (
    Exact,
    NotDefined,
    adjoint_gap,
    exact,
    hypergradient,
    lower_gap,
    lower_solution,
    objective,
    stationarity,
    upper_loss,
)
from fedbilevel.diagnostics.registry import DIAGNOSTICS, Diagnostic, Measure, find, measure
from fedbilevel.diagnostics.snapshot import NEEDS, Snapshot, client_drift
from fedbilevel.diagnostics.weighting import weighting_stationarity, weighting_value

__all__ = [
    "DIAGNOSTICS",
    "KEY",
    "NEEDS",
    "Constants",
    "Diagnostic",
    "Exact",
    "MeFBOResidual",
    "Measure",
    "NotDefined",
    "Snapshot",
    "adjoint_gap",
    "client_drift",
    "exact",
    "find",
    "hypergradient",
    "lower_gap",
    "lower_solution",
    "lyapunov",
    "measure",
    "measure_constants",
    "mefbo_residual",
    "objective",
    "stationarity",
    "upper_loss",
    "weighting_stationarity",
    "weighting_value",
]
