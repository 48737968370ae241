"""Federated bilevel optimization."""

from importlib.metadata import version

from fedbilevel import diagnostics, schedules, tasks, vectors
from fedbilevel.algorithms import ALGORITHMS, FedAvg, FedBiO, FedBiOAcc
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
    "TASKS",
    "Algorithm",
    "Client",
    "Clients",
    "Diverged",
    "FedAvg",
    "FedBiO",
    "FedBiOAcc",
    "FedbilevelError",
    "Independent",
    "Objective",
    "Problem",
    "Reference",
    "Replies",
    "Result",
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
