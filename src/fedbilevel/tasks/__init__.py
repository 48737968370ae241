"""Tasks by name. Each is a file with a function that returns a :class:`fedbilevel.Task`.

Imports core, algorithms, models and data; whatever runs tasks imports it. How results are shown is in files beside:
strengths for regularization, suspects for data_cleaning.
"""

from collections.abc import Callable

from fedbilevel.core.task import Task
from fedbilevel.errors import Names
from fedbilevel.tasks.cleaning import data_cleaning_bounds, data_cleaning_facts, data_cleaning_of_site
from fedbilevel.tasks.client_weighting import (
    client_weighting,
    client_weighting_bounds,
    client_weighting_facts,
    client_weighting_of_site,
)
from fedbilevel.tasks.client_weighting_toy import client_weighting_toy
from fedbilevel.tasks.data_cleaning import data_cleaning
from fedbilevel.tasks.fairness import fairness, fairness_bounds, fairness_facts, fairness_of_site
from fedbilevel.tasks.few_shot import few_shot
from fedbilevel.tasks.hyper_representation import (
    hyper_representation,
    hyper_representation_facts,
    hyper_representation_of_site,
)
from fedbilevel.tasks.loss_tuning import loss_tuning, loss_tuning_bounds, loss_tuning_facts, loss_tuning_of_site
from fedbilevel.tasks.quadratic import Quadratic, quadratic
from fedbilevel.tasks.regularization import regularization, regularization_facts, regularization_of_site
from fedbilevel.tasks.sites import SiteTask, column_bounds
from fedbilevel.tasks.weighted_quadratics import WeightedQuadratics

TASKS: Names[Callable[..., Task]] = Names(
    "task",
    {
        "client-weighting": client_weighting,
        "client-weighting-toy": client_weighting_toy,
        "data-cleaning": data_cleaning,
        "fairness": fairness,
        "few-shot": few_shot,
        "hyper-representation": hyper_representation,
        "loss-tuning": loss_tuning,
        "quadratic": quadratic,
        "regularization": regularization,
    },
)

SITE_TASKS: Names[SiteTask] = Names(
    "task for data of sites",
    {
        "client-weighting": SiteTask(client_weighting_facts, client_weighting_of_site, client_weighting_bounds),
        "data-cleaning": SiteTask(data_cleaning_facts, data_cleaning_of_site, data_cleaning_bounds),
        "fairness": SiteTask(fairness_facts, fairness_of_site, fairness_bounds),
        "hyper-representation": SiteTask(hyper_representation_facts, hyper_representation_of_site, column_bounds),
        "loss-tuning": SiteTask(loss_tuning_facts, loss_tuning_of_site, loss_tuning_bounds),
        "regularization": SiteTask(regularization_facts, regularization_of_site, column_bounds),
    },
)
"""The tasks of this folder for sites that bring their own rows; ``federation.study`` has all."""

__all__ = [
    "SITE_TASKS",
    "TASKS",
    "Quadratic",
    "WeightedQuadratics",
    "client_weighting",
    "client_weighting_toy",
    "data_cleaning",
    "fairness",
    "few_shot",
    "hyper_representation",
    "loss_tuning",
    "quadratic",
    "regularization",
]
