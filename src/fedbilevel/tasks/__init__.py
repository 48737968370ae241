"""Tasks by name. Each is one file with a function that returns a :class:`fedbilevel.Task`."""

from collections.abc import Callable

from fedbilevel.errors import Names
from fedbilevel.task import Task
from fedbilevel.tasks.client_weighting_toy import client_weighting_toy
from fedbilevel.tasks.data_cleaning import data_cleaning
from fedbilevel.tasks.quadratic import Quadratic, quadratic
from fedbilevel.tasks.weighted_quadratics import WeightedQuadratics

TASKS: Names[Callable[..., Task]] = Names(
    "task",
    {"client-weighting-toy": client_weighting_toy, "data-cleaning": data_cleaning, "quadratic": quadratic},
)

__all__ = ["TASKS", "Quadratic", "WeightedQuadratics", "client_weighting_toy", "data_cleaning", "quadratic"]
