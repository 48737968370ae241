"""``fb.torch.check``: whether the traced losses give what PyTorch itself gives."""

from typing import Any

import jax
import numpy as np
import torch

from fedbilevel.core.rows import take
from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError
from fedbilevel.pytorch.arrays import to_torch
from fedbilevel.pytorch.problem import Loss
from fedbilevel.pytorch.variables import trained


def check(task: Task, rows: int = 8, tolerance: float | None = None) -> dict[str, float]:
    """Compare the losses of a task with PyTorch itself on the first rows of the first client: values and gradients.

    Returns the largest difference of each, relative to the largest entry; raises a :class:`FedbilevelError` where one
    is above the tolerance (1e-4 in single precision, 1e-8 in double).
    """
    client = {**task.clients[0], **({} if task.server is None else {"val": task.server})}
    found: dict[str, float] = {}
    for loss, split in ((task.problem.lower, "train"), (task.problem.upper, "val")):
        if not isinstance(loss, Loss):
            raise FedbilevelError("fb.torch.check needs a task whose problem is one of fb.torch.problem.")
        found |= differences(loss, jax.tree.map(np.asarray, take(client[split], slice(rows))))
    double = jax.tree.leaves(task.problem.init(jax.random.key(0)))[-1].dtype == np.float64
    allowed = tolerance or (1e-8 if double else 1e-4)
    for name, distance in found.items():
        if not distance <= allowed:
            raise FedbilevelError(f"the {name} differs from PyTorch's by {distance:.1e} of its size.")
    return found


def differences(loss: Loss, batch: Any) -> dict[str, float]:
    """How far the value and the gradient of a loss are from PyTorch's, on one batch, at the start."""
    at = loss.x.arrays(), loss.y.arrays()
    value, slopes = jax.value_and_grad(lambda at: loss(at[0], at[1], batch))(at)
    plain, own = _plain(loss, batch)
    return {
        loss.name: _distance([value], [plain]),
        f"gradient of {loss.name}": _distance(jax.tree.leaves(slopes), own),
    }


def _plain(loss: Loss, batch: Any) -> tuple[Any, list[Any]]:
    """The value and the gradients that PyTorch computes, in the order of the leaves of (x, y)."""
    mine, yours = loss.x.plain(), loss.y.plain()
    value = loss.function(mine, yours, jax.tree.map(to_torch, batch))
    where = [dict(trained(leaf)) for leaf in jax.tree.leaves((mine, yours))]
    parameters = [part[name] for part in where for name in sorted(part)]
    slopes = torch.autograd.grad(value, parameters, allow_unused=True)
    return value.detach(), [p.detach() * 0 if s is None else s for s, p in zip(slopes, parameters, strict=True)]


def _distance(ours: list[Any], theirs: list[Any]) -> float:
    pairs = [(np.asarray(a, float), np.asarray(b, float)) for a, b in zip(ours, theirs, strict=True)]
    size = max(np.max(np.abs(b), initial=0) for _, b in pairs)
    return float(max(np.max(np.abs(a - b), initial=0) for a, b in pairs) / max(size, 1e-30))
