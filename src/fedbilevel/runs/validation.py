"""The validation loss that settings are compared by, optionally on held-out rows that nothing is trained on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.core import Tree, columns, select
from fedbilevel.core.task import Task
from fedbilevel.diagnostics import upper_loss
from fedbilevel.errors import FedbilevelError


def hold_out(task: Task, share: float) -> Task:
    """Hold out this share of the validation rows, at the clients or on the server: the task's ``choice`` becomes the
    upper loss on them. A task that has its own choice stays as it is.
    """
    if not 0 <= share < 1:
        raise FedbilevelError(f"held_out must be a share of the validation rows from 0 to below 1, not {share}.")
    if share == 0 or task.choice is not None:
        return task
    rng = np.random.default_rng(0)

    def parted(rows: Tree) -> tuple[Tree, Tree]:
        count = len(columns(rows)[0][0])
        if count < 2:
            raise FedbilevelError("a client with a single validation row cannot hold any out: use held_out = 0.")
        order, first = rng.permutation(count), min(max(round(share * count), 1), count - 1)
        return select(rows, np.sort(order[first:])), select(rows, np.sort(order[:first]))

    def with_validation(task: Task, rows: Sequence[Tree]) -> Task:
        if task.server is not None:
            return dataclasses.replace(task, server=rows[0])
        clients = [{**client, "val": some} for client, some in zip(task.clients, rows, strict=True)]
        return dataclasses.replace(task, clients=clients)

    held = [client["val"] for client in task.clients] if task.server is None else [task.server]
    seen, held_out = zip(*map(parted, held), strict=True)
    one = [{**client, "train": select(client["train"], slice(1))} for client in task.clients]  # nobody looks at them
    judge = with_validation(dataclasses.replace(task, clients=one, weights=task.normalised_weights), held_out)
    return dataclasses.replace(with_validation(task, seen), choice=lambda x, y: upper_loss(judge, x, y))


def validation_loss(task: Task, x: Any, y: Any) -> float:
    """The loss that settings are compared by."""
    return upper_loss(task, x, y) if task.choice is None else float(task.choice(x, y))
