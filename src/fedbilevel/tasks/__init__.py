"""Tasks by name. Each is a file with a function that returns a :class:`fedbilevel.Task`.

Imports core, algorithms, models and data; whatever runs tasks imports it. How results are shown is in files beside:
strengths for regularization, suspects for data_cleaning.
"""

from collections.abc import Callable
from typing import Any

from fedbilevel.core.task import Task
from fedbilevel.data import OwnTable
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
from fedbilevel.tasks.nonconvex import nonconvex
from fedbilevel.tasks.own import own_task
from fedbilevel.tasks.quadratic import Quadratic, quadratic
from fedbilevel.tasks.regularization import (
    regularization,
    regularization_facts,
    regularization_layers,
    regularization_of_site,
)
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
        "nonconvex": nonconvex,
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
        "hyper-representation": SiteTask(
            hyper_representation_facts, hyper_representation_of_site, column_bounds, lambda x, y: [*x, y]
        ),
        "loss-tuning": SiteTask(loss_tuning_facts, loss_tuning_of_site, loss_tuning_bounds),
        "regularization": SiteTask(regularization_facts, regularization_of_site, column_bounds, regularization_layers),
    },
)
"""The tasks of this folder for sites that bring their own rows; ``federation.study`` has all."""

OWN_TASKS: Names[SiteTask] = Names(
    "task for your own table", {name: task for name, task in SITE_TASKS.items() if name != "data-cleaning"}
)
"""The tasks on people's own tables. Without data-cleaning: label errors are found by the command ``clean``."""


def on_table(name: str, table: OwnTable, weights: str = "equal", **options: Any) -> Task:
    """A task on your own table, which ``fb.data.table`` has read: ``fb.solve`` runs it.

    Args:
        name: of the task, for instance "regularization".
        table: the rows.
        weights: of the clients: "equal", or "size", by the number of training rows.
        options: of the task, for instance ``hidden=32``: those that a site of a federation has.
    """
    return own_task(name, OWN_TASKS[name], table, options, weights)


__all__ = [
    "OWN_TASKS",
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
    "nonconvex",
    "on_table",
    "quadratic",
    "regularization",
]
