"""Federated bilevel optimization."""

from importlib.metadata import version

from fedbilevel import data, diagnostics, schedules, tasks, vectors
from fedbilevel.algorithms import (
    AFL,
    ALGORITHMS,
    F2SA,
    GD,
    MRBO,
    RFHO,
    SUSTAIN,
    AggITD,
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
from fedbilevel.callbacks import Callback, MLflow, TensorBoard
from fedbilevel.checkpoint import Checkpoints
from fedbilevel.core import Algorithm, Client, Clients, Lookup, Objective, Problem, Replies, parameter
from fedbilevel.engines.participation import Independent, Uniform
from fedbilevel.engines.plan import plan
from fedbilevel.errors import Diverged, FedbilevelError
from fedbilevel.experiment import Experiment, resume
from fedbilevel.records import load
from fedbilevel.solve import Result, Stopped, solve
from fedbilevel.sweep import sweep
from fedbilevel.task import Details, Reference, Task
from fedbilevel.tasks import TASKS
from fedbilevel.vectors import Vector

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
    "LFedNest",
    "LocalBSGVRM",
    "Lookup",
    "MLflow",
    "MeFBO",
    "Objective",
    "PrimalDual",
    "Problem",
    "Reference",
    "Replies",
    "Result",
    "ShroFBO",
    "SimFBO",
    "StocBiO",
    "Stopped",
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
