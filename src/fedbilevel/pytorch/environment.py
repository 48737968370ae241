"""Where torch code runs on JAX arrays: torchax's environment, with our operations, constants, randomness and errors."""

import contextvars
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.core import Tracer
from torch.utils import _pytree as torch_tree

from fedbilevel.errors import FedbilevelError
from fedbilevel.pytorch.arrays import from_torch
from fedbilevel.pytorch.compatibility import Tensor, View, torchax
from fedbilevel.pytorch.operations import OPERATIONS

NOT_RANDOM = (
    "the loss draws random numbers where nothing may be random: give noise=True to fb.torch.problem, and draw them "
    "only if the module is in training, as in dropout(..., training=y.training)."
)
MOVES = (torch.Tensor.cuda, torch.Tensor.cpu)
"""Between devices, of which a traced loss has one."""
_one_at_a_time = threading.RLock()
"""Torch's modes, and the filters of warnings, belong to the process; tracing would use one core at a time anyway."""
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

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        given = [a for a in torch_tree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        if func in MOVES:
            return args[0]
        ours = [a for a in given if isinstance(a, Tensor | View)]
        if not ours and given:
            return func(*args, **kwargs)
        writes = _writes(func) and bool(given) and given[0] is args[0]
        if len(ours) < len(given):
            if writes and given[0] is not ours[0]:
                raise FedbilevelError(
                    "the loss writes into a tensor that was made outside of it: make the tensor in the loss."
                )
            plain = lambda a: isinstance(a, torch.Tensor) and not isinstance(a, Tensor | View)
            args, kwargs = torch_tree.tree_map(lambda a: Tensor(from_torch(a), self) if plain(a) else a, (args, kwargs))
        with ExitStack() as how:
            if not any(map(_traced, ours)) and not self._random(func):
                how.enter_context(jax.ensure_compile_time_eval())
            if torch.is_grad_enabled():
                return super().dispatch(func, types, args, kwargs)
            if not writes:
                result = super().dispatch(func, types, args, kwargs)
                still = lambda t: Tensor(jax.lax.stop_gradient(t.jax()), self)
                return torch_tree.tree_map_only(Tensor, still, result)
            # What is written where there are no gradients changes the value, and leaves the derivative as it was.
            before = args[0].jax()
            with torch.enable_grad():
                result = super().dispatch(func, types, args, kwargs)
            after = args[0].jax()
            if jnp.issubdtype(after.dtype, jnp.floating) and before.shape == after.shape:
                moved = jnp.where(after == before, before, before + jax.lax.stop_gradient(after - before))
                args[0].update(moved) if isinstance(args[0], View) else args[0].apply_jax_(lambda _: moved)
            return result

    def _random(self, func: Any) -> bool:
        try:
            return self._get_op_or_decomp(func).needs_env
        except torchax.tensor.OperatorNotFound:
            return False


def _traced(tensor: Any) -> bool:
    """Whether the values of a tensor are known only when the compiled program runs."""
    return isinstance(tensor.source_jax() if isinstance(tensor, View) else tensor.jax(), Tracer)


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
        with _one_at_a_time, warnings.catch_warnings(), torch.enable_grad(), env:
            # Of torch code that asks for 64 bits, as all labels do, where JAX has 32.
            warnings.filterwarnings("ignore", "Explicitly requested dtype")
            yield env
    finally:
        _noise.reset(token)


def wrapped(array: Any) -> Any:
    """An array as torch code sees it."""
    return Tensor(jnp.asarray(array), environment())
