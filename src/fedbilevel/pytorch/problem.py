"""``fb.torch.problem``: a bilevel problem of losses that are written in PyTorch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from fedbilevel.core.problem import Problem
from fedbilevel.core.types import Key, Tree
from fedbilevel.errors import FedbilevelError
from fedbilevel.pytorch.compatibility import Tensor, View
from fedbilevel.pytorch.environment import entered, wrapped
from fedbilevel.pytorch.explain import explained
from fedbilevel.pytorch.variables import Variables

TorchLoss = Callable[[Any, Any, Any], Any]


class Loss:
    """A loss in PyTorch as algorithms call it: a function of pytrees of arrays, which JAX traces.

    Args:
        name: "upper" or "lower", for messages.
        function: ``function(x, y, batch)`` in PyTorch.
        x, y: what the loss gets as x and y.
    """

    def __init__(self, name: str, function: TorchLoss, x: Variables, y: Variables) -> None:
        self.name, self.function, self.x, self.y = name, function, x, y
        self._traced = jax.jit(self._run)  # so that the user's code runs once per shape, not once per derivative

    def __call__(self, x: Tree, y: Tree, batch: Tree, key: Key | None = None) -> jax.Array:
        """The loss on a batch, with the noise of this key."""
        return self._traced(x, y, batch, key)

    def _run(self, x: Tree, y: Tree, batch: Tree, key: Key | None) -> jax.Array:
        with entered(key):
            mine, yours = (v.rebuilt(tree, key is not None) for v, tree in ((self.x, x), (self.y, y)))
            with explained(self.name, (*self.x.modules(mine), *self.y.modules(yours))):
                value = self.function(mine, yours, jax.tree.map(wrapped, batch))
        return self._array(value)

    def _array(self, value: Any) -> jax.Array:
        if isinstance(value, Tensor | View):
            return value.jax()
        if isinstance(value, torch.Tensor):
            return jnp.asarray(value.detach().numpy())
        said = {type(None): "nothing", tuple: "a tuple"}.get(type(value), f"{type(value).__name__}")
        raise FedbilevelError(f"{self.name}(x, y, batch) must return a tensor with one number, but returned {said}.")


def problem(upper: TorchLoss, lower: TorchLoss, *, x: Any, y: Any, noise: bool = False, **more: Any) -> Problem:
    """A :class:`~fedbilevel.Problem` of losses in PyTorch.

    >>> net = torch.nn.Linear(3, 2)
    >>> def upper(x, y, batch):
    ...     return torch.nn.functional.cross_entropy(y(batch["row"]), batch["label"])
    >>> def lower(x, y, batch):
    ...     return upper(x, y, batch) + sum((x.exp() * p**2).sum() for p in y.parameters() if p.ndim == 2)
    >>> example = problem(upper, lower, x=torch.zeros(3), y=net)

    Args:
        upper: ``upper(x, y, batch) -> tensor with one number``, the loss on a batch of validation rows.
        lower: ``lower(x, y, batch) -> tensor with one number``, the loss on a batch of training rows. Both are means
            over the rows of their batch, plus terms that do not depend on rows.
        x, y: what the losses get, and where to start: a tensor or a ``torch.nn.Module``, or a dictionary, list or tuple
            of them. Parameters with ``requires_grad=False`` and buffers stay as they are.
        noise: the losses draw random numbers, by dropout for instance. They then come from the batch, so that the same
            batch has the same noise; where losses are evaluated on all rows, modules are in the mode ``eval``.
        more: what else a :class:`~fedbilevel.Problem` takes, such as ``private_x=True``; projections are functions of
            arrays, such as ``fb.vectors.box(0.0, 1.0)``.
    """
    mine, yours = Variables("x", x, noise), Variables("y", y, noise)
    if {id(t) for t in mine.given} & {id(t) for t in yours.given}:
        raise FedbilevelError("x and y share parameters: give each parameter to one of them.")
    start = mine.arrays(), yours.arrays()
    return Problem(
        Loss("upper", upper, mine, yours), Loss("lower", lower, mine, yours), lambda key: start, noise=noise, **more
    )
