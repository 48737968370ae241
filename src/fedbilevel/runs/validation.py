"""What settings are compared by: a validation loss, on rows that nothing is trained on if some are held out."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.core import Tree, columns, select
from fedbilevel.core.task import Task
from fedbilevel.diagnostics import upper_loss
from fedbilevel.errors import FedbilevelError


def keep_apart(task: Task, share: float) -> Task:
    """The task without this share of the validation rows of everyone who has some; its ``choice`` is the upper loss on
    them. A task that has a choice of its own stays as it is.
    """
    if not 0 <= share < 1:
        raise FedbilevelError(f"kept_apart is a share of the validation rows, from 0 to below 1, not {share}.")
    if share == 0 or task.choice is not None:
        return task
    rng = np.random.default_rng(0)

    def parted(rows: Tree) -> tuple[Tree, Tree]:
        count = len(columns(rows)[0][0])
        if count < 2:
            raise FedbilevelError("a client with one validation row cannot keep some of them apart: kept_apart = 0.")
        order, first = rng.permutation(count), min(max(round(share * count), 1), count - 1)
        return select(rows, np.sort(order[first:])), select(rows, np.sort(order[:first]))

    def with_validation(task: Task, rows: Sequence[Tree]) -> Task:
        if task.server is not None:
            return dataclasses.replace(task, server=rows[0])
        clients = [{**client, "val": some} for client, some in zip(task.clients, rows, strict=True)]
        return dataclasses.replace(task, clients=clients)

    held = [client["val"] for client in task.clients] if task.server is None else [task.server]
    seen, apart = zip(*map(parted, held), strict=True)
    one = [{**client, "train": select(client["train"], slice(1))} for client in task.clients]  # nobody looks at them
    judge = with_validation(dataclasses.replace(task, clients=one, weights=task.normalised_weights), apart)
    return dataclasses.replace(with_validation(task, seen), choice=lambda x, y: upper_loss(judge, x, y))


def validation_loss(task: Task, x: Any, y: Any) -> float:
    """The loss that settings are compared by."""
    return upper_loss(task, x, y) if task.choice is None else float(task.choice(x, y))
