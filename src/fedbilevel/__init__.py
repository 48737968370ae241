"""Federated bilevel optimization."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fedbilevel import data, diagnostics, tasks, testing
from fedbilevel.algorithms import (
    AFL,
    ALGORITHMS,
    F2SA,
    GD,
    MEHA,
    MRBO,
    RFHO,
    SABA,
    SOBA,
    SUSTAIN,
    AdaFBiO,
    AggITD,
    Alternating,
    CommFedBiO,
    CommFedBiOSketch,
    DistBiO,
    DistBiOAcc,
    FedAvg,
    FedBiO,
    FedBiOAcc,
    FedBiOAccLocal,
    FedBiOLocal,
    FedMBO,
    FedMSA,
    FedNest,
    LFedNest,
    LocalBSGM,
    LocalBSGVRM,
    MeFBO,
    MeFBOStorm,
    PrimalDual,
    ShroFBO,
    SimFBO,
    StocBiO,
)
from fedbilevel.cleaning.clean import clean
from fedbilevel.cleaning.found import Found
from fedbilevel.core import (
    Algorithm,
    Client,
    Clients,
    Lookup,
    Objective,
    Problem,
    Replies,
    parameter,
    schedules,
    vectors,
)
from fedbilevel.core.presentation import Details, Presentation, Reference, Sequel, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector
from fedbilevel.diagnostics.constants import measure_constants
from fedbilevel.engines.participation import Independent, Uniform
from fedbilevel.engines.plan import plan
from fedbilevel.errors import Diverged, FedbilevelError, Interrupted, Stopped, needs
from fedbilevel.runs.callbacks import Callback, MLflow, TensorBoard
from fedbilevel.runs.execute import resume
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.from_python import compare, tune
from fedbilevel.runs.prediction import predict
from fedbilevel.runs.solve import Result, solve
from fedbilevel.runs.sweep import sweep
from fedbilevel.storage.checkpoints import Checkpoints
from fedbilevel.storage.load import load
from fedbilevel.tasks import TASKS

if TYPE_CHECKING:
    from fedbilevel.cleaning.estimator import CleanClassifier
    from fedbilevel.pytorch import interface as torch  # noqa: F401

__version__ = version("fedbilevel")

__all__ = [
    "AFL",
    "ALGORITHMS",
    "F2SA",
    "GD",
    "MEHA",
    "MRBO",
    "RFHO",
    "SABA",
    "SOBA",
    "SUSTAIN",
    "TASKS",
    "AdaFBiO",
    "AggITD",
    "Algorithm",
    "Alternating",
    "Callback",
    "Checkpoints",
    "CleanClassifier",
    "Client",
    "Clients",
    "CommFedBiO",
    "CommFedBiOSketch",
    "Details",
    "DistBiO",
    "DistBiOAcc",
    "Diverged",
    "Experiment",
    "FedAvg",
    "FedBiO",
    "FedBiOAcc",
    "FedBiOAccLocal",
    "FedBiOLocal",
    "FedMBO",
    "FedMSA",
    "FedNest",
    "FedbilevelError",
    "Found",
    "Independent",
    "Interrupted",
    "LFedNest",
    "LocalBSGM",
    "LocalBSGVRM",
    "Lookup",
    "MLflow",
    "MeFBO",
    "MeFBOStorm",
    "Objective",
    "Presentation",
    "PrimalDual",
    "Problem",
    "Reference",
    "Replies",
    "Result",
    "Sequel",
    "ShroFBO",
    "SimFBO",
    "StocBiO",
    "Stopped",
    "Suggestion",
    "Task",
    "TensorBoard",
    "Uniform",
    "Vector",
    "__version__",
    "clean",
    "compare",
    "data",
    "diagnostics",
    "load",
    "measure_constants",
    "parameter",
    "plan",
    "predict",
    "resume",
    "schedules",
    "solve",
    "sweep",
    "tasks",
    "testing",
    "tune",
    "vectors",
]


def __getattr__(name: str) -> Any:
    """``CleanClassifier``, whose base classes take longer to import than all of this library, and ``torch``."""
    if name == "CleanClassifier":
        from fedbilevel.cleaning.estimator import CleanClassifier

        return CleanClassifier
    if name == "torch":
        needs("torch", "torch", "PyTorch models need PyTorch")
        return import_module("fedbilevel.pytorch.interface")
    raise AttributeError(f"module 'fedbilevel' has no attribute {name!r}")
