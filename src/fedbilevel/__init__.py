"""Federated bilevel optimization."""

from importlib.metadata import version

from fedbilevel import data, diagnostics, tasks
from fedbilevel.algorithms import (
    AFL,
    ALGORITHMS,
    F2SA,
    GD,
    MRBO,
    RFHO,
    SUSTAIN,
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
    LocalBSGVRM,
    MeFBO,
    PrimalDual,
    ShroFBO,
    SimFBO,
    StocBiO,
)
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
from fedbilevel.core.presentation import Details, Presentation, Reference, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector
from fedbilevel.engines.participation import Independent, Uniform
from fedbilevel.engines.plan import plan
from fedbilevel.errors import Diverged, FedbilevelError, Interrupted, Stopped
from fedbilevel.runs.callbacks import Callback, MLflow, TensorBoard
from fedbilevel.runs.execute import resume
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.solve import Result, solve
from fedbilevel.runs.sweep import sweep
from fedbilevel.storage.checkpoints import Checkpoints
from fedbilevel.storage.load import load
from fedbilevel.tasks import TASKS

__version__ = version("fedbilevel")

__all__ = [
    "AFL",
    "ALGORITHMS",
    "F2SA",
    "GD",
    "MRBO",
    "RFHO",
    "SUSTAIN",
    "TASKS",
    "AggITD",
    "Algorithm",
    "Alternating",
    "Callback",
    "Checkpoints",
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
    "Independent",
    "Interrupted",
    "LFedNest",
    "LocalBSGVRM",
    "Lookup",
    "MLflow",
    "MeFBO",
    "Objective",
    "Presentation",
    "PrimalDual",
    "Problem",
    "Reference",
    "Replies",
    "Result",
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
    "data",
    "diagnostics",
    "load",
    "parameter",
    "plan",
    "resume",
    "schedules",
    "solve",
    "sweep",
    "tasks",
    "vectors",
]
