"""Federated bilevel optimization."""

from importlib.metadata import version

from fedbilevel import diagnostics, schedules, tasks, vectors
from fedbilevel.algorithms import (
    ALGORITHMS,
    F2SA,
    AggITD,
    CommFedBiO,
    DistBiO,
    DistBiOAcc,
    FedAvg,
    FedBiO,
    FedBiOAcc,
    FedBiOAccLocal,
    FedBiOLocal,
    FedMSA,
    FedNest,
    LFedNest,
    LocalBSGVRM,
    MeFBO,
    ShroFBO,
    SimFBO,
)
from fedbilevel.core import Algorithm, Client, Clients, Objective, Problem, Replies, parameter
from fedbilevel.engines.participation import Independent
from fedbilevel.engines.plan import plan
from fedbilevel.errors import Diverged, FedbilevelError
from fedbilevel.solve import Result, Stopped, solve
from fedbilevel.task import Reference, Task
from fedbilevel.tasks import TASKS
from fedbilevel.vectors import Vector

__version__ = version("fedbilevel")

__all__ = [
    "ALGORITHMS",
    "F2SA",
    "TASKS",
    "AggITD",
    "Algorithm",
    "Client",
    "Clients",
    "CommFedBiO",
    "DistBiO",
    "DistBiOAcc",
    "Diverged",
    "FedAvg",
    "FedBiO",
    "FedBiOAcc",
    "FedBiOAccLocal",
    "FedBiOLocal",
    "FedMSA",
    "FedNest",
    "FedbilevelError",
    "Independent",
    "LFedNest",
    "LocalBSGVRM",
    "MeFBO",
    "Objective",
    "Problem",
    "Reference",
    "Replies",
    "Result",
    "ShroFBO",
    "SimFBO",
    "Stopped",
    "Task",
    "Vector",
    "__version__",
    "diagnostics",
    "parameter",
    "plan",
    "schedules",
    "solve",
    "tasks",
    "vectors",
]
