"""Where torch code runs on JAX arrays: torchax's environment, with our operations, constants, randomness and errors."""

import contextvars
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as torch_tree

from fedbilevel.errors import FedbilevelError
from fedbilevel.pytorch.arrays import from_torch
from fedbilevel.pytorch.compatibility import torchax
from fedbilevel.pytorch.operations import OPERATIONS

Tensor = torchax.tensor.Tensor
"""A JAX array that torch code takes for a tensor."""
View = torchax.view.View
"""A part of one, which writes into it."""
NOT_RANDOM = (
    "the loss draws random numbers, by dropout for instance: give fb.torch.problem(..., noise=True), "
    "or call eval() of the module first."
)
_noise: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("noise", default=None)


class Environment(torchax.tensor.Environment):
    """torchax's environment with these differences:

    - there is one device, JAX's: tensors that losses create or move to another device stay there;
    - tensors from outside of the loss are constants;
    - what depends on constants only is computed when the loss is traced, so that Python may look at it;
    - ``torch.no_grad()`` stops gradients;
    - random numbers come from the key of the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._constants: dict[int, tuple[torch.Tensor, jax.Array]] = {}
        for operation, function in OPERATIONS.items():
            self._ops[operation] = torchax.ops.ops_registry.Operator(
                operation, function, is_jax_function=True, is_user_defined=True, needs_env=False, is_view_op=False
            )

    def _should_use_torchax_tensor(self, device: Any) -> bool:
        return True

    def _is_same_device(self, the_tensor: Any, new_device: Any) -> bool:
        return True

    def get_and_rotate_prng_key(self, generator: Any = None) -> jax.Array:
        """The next key of this batch."""
        noise = _noise.get()
        if noise is None:
            raise FedbilevelError(NOT_RANDOM)
        noise[0], key = jax.random.split(noise[0])
        return key

    def constant(self, tensor: torch.Tensor) -> Any:
        """A tensor from outside of the loss, copied to JAX once."""
        known = self._constants.get(id(tensor))
        if known is None or known[0] is not tensor:
            known = (tensor, from_torch(tensor))
        return Tensor(known[1], self)

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation."""
        given = [a for a in torch_tree.tree_leaves((args, kwargs or {})) if isinstance(a, torch.Tensor)]
        ours = [a for a in given if isinstance(a, Tensor | View)]
        if ours and len(ours) < len(given):
            if args and not isinstance(args[0], Tensor | View) and isinstance(args[0], torch.Tensor) and _writes(func):
                raise FedbilevelError(
                    "the loss writes into a tensor that was made outside of it: make the tensor in the loss."
                )
            plain = lambda a: isinstance(a, torch.Tensor) and not isinstance(a, Tensor | View)
            args, kwargs = torch_tree.tree_map(lambda a: self.constant(a) if plain(a) else a, (args, kwargs or {}))
        elif given and not ours:
            return func(*args, **(kwargs or {}))
        with ExitStack() as how:
            if not any(isinstance(a.jax(), jax.core.Tracer) for a in ours) and not self._random(func):
                how.enter_context(jax.ensure_compile_time_eval())
            result = super().dispatch(func, types, args, kwargs)
        if torch.is_grad_enabled():
            return result
        still = lambda t: Tensor(jax.lax.stop_gradient(t.jax()), self)
        fixed = isinstance(result, torch.Tensor) and any(result is a for a in ours)  # written in place
        return result if fixed else torch_tree.tree_map_only(Tensor, still, result)

    def _random(self, func: Any) -> bool:
        try:
            return self._get_op_or_decomp(func).needs_env
        except torchax.tensor.OperatorNotFound:
            return False


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "").partition(".")[0]
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


@cache
def environment() -> Environment:
    """The one environment of this process."""
    return Environment()


@contextmanager
def entered(key: Any = None) -> Iterator[Environment]:
    """Run torch code on JAX arrays, with random numbers from this key, or without any."""
    env = environment()
    token = _noise.set(None if key is None else [key])
    try:
        with warnings.catch_warnings(), torch.enable_grad(), env:
            # Of torch code that asks for 64 bits, as all labels do, where JAX has 32.
            warnings.filterwarnings("ignore", "Explicitly requested dtype")
            yield env
    finally:
        _noise.reset(token)


def wrapped(array: Any) -> Any:
    """An array as torch code sees it."""
    return Tensor(jnp.asarray(array), environment())
