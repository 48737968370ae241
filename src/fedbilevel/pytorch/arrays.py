"""From tensors to arrays and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from fedbilevel.errors import FedbilevelError


def from_torch(tensor: torch.Tensor) -> jax.Array:
    """A copy of a tensor on JAX's device."""
    if tensor.is_meta:
        raise FedbilevelError("a tensor on the device 'meta' has no values: make it on the CPU.")
    plain = tensor.detach().cpu()
    if plain.is_sparse:
        plain = plain.to_dense()
    if plain.dtype == torch.bfloat16:  # which numpy does not have
        return jnp.asarray(plain.float().numpy(), jnp.bfloat16)
    return jnp.asarray(np.array(plain.numpy()))


def to_torch(array: Any) -> torch.Tensor:
    """A copy of an array as a tensor on the CPU."""
    values = np.asarray(array)
    if values.dtype == jnp.bfloat16:
        return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(values))


def tensors(tree: Any) -> Any:
    """A solution, or any pytree of arrays, as tensors: ``fb.torch.tensors(result.x)``."""
    return jax.tree.map(to_torch, tree)
