"""x or y as people have it, a tensor, a module, or several; and as algorithms have it, a pytree of arrays."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as torch_tree

from fedbilevel.errors import FedbilevelError, FedbilevelWarning
from fedbilevel.pytorch.arrays import from_torch, to_torch
from fedbilevel.pytorch.environment import wrapped

BATCH_STATISTICS = (
    "{} has batch normalization: it uses the statistics of each batch, and its running statistics are neither updated "
    "nor federated; use GroupNorm instead, or call eval() of these layers to keep their statistics as they are."
)


class Variables:
    """What a user calls x or y: tensors are trained, and so are the parameters of modules that require gradients.

    The modules are copied once, when the problem is made: what happens to the user's own later does not matter.

    Args:
        name: "x" or "y", for messages.
        value: a tensor or a module, or a dictionary, list or tuple of them.
        noise: whether losses may be random.
    """

    def __init__(self, name: str, value: Any, noise: bool = False) -> None:
        self.name = name
        leaves, self._structure = jax.tree.flatten(value)
        if not leaves:
            raise FedbilevelError(f"{name} is empty: give a tensor or a torch.nn.Module, or several.")
        self.given: list[torch.Tensor] = []  # the user's own, to find what x and y share
        for leaf in leaves:
            self._check(leaf)
            self.given += [p for _, p in trained(leaf)]
        self._parts: list[Any] = copy.deepcopy(leaves, {id(t): t.detach().clone() for t in _not_leaves(leaves)})
        for part in self._parts:
            _use_batch_statistics(name, part)
            _warn_of_dropout(name, part, noise)
        self._names = [trained(part) for part in self._parts]
        moved = {id(p) for each in self._names for _, p in each}
        self._fixed = {id(t): (t, from_torch(t)) for part in self._parts for t in _tensors(part) if id(t) not in moved}
        _warn_of_precision(name, self.given)

    def _check(self, leaf: Any) -> None:
        if not isinstance(leaf, torch.Tensor | torch.nn.Module):
            kind = type(leaf).__name__
            raise FedbilevelError(f"{self.name} must be a tensor or a torch.nn.Module, or several, but has a {kind}.")
        found = trained(leaf)
        if not found:
            frozen = any(True for _ in leaf.parameters()) if isinstance(leaf, torch.nn.Module) else False
            why = "all its parameters are frozen (requires_grad=False)" if frozen else "it has no parameters"
            raise FedbilevelError(f"{self.name}: there is nothing to train in {type(leaf).__name__}: {why}.")
        for path, parameter in found:
            where = f"{self.name}: the parameter '{path}'" if path else self.name
            if torch.nn.parameter.is_lazy(parameter):
                raise FedbilevelError(f"{where} has no shape yet: call the module once on a batch.")
            if parameter.is_complex():
                raise FedbilevelError(f"{where} is complex: give its real and imaginary parts as two tensors.")
            if parameter.is_meta:
                raise FedbilevelError(f"{where} is on the device 'meta' and has no values.")

    def arrays(self) -> Any:
        """Where to start: the values when the problem was made."""
        values = [
            {path: from_torch(p) for path, p in names} if isinstance(part, torch.nn.Module) else from_torch(part)
            for part, names in zip(self._parts, self._names, strict=True)
        ]
        return jax.tree.unflatten(self._structure, values)

    def rebuilt(self, tree: Any, random: bool) -> Any:
        """The user's own structure, with these arrays as its tensors: a new copy of every module, which the loss may
        change and keep things in. Layers such as dropout are switched off unless they may be random.
        """
        values = self._structure.flatten_up_to(tree)
        memo: dict[int, Any] = {key: wrapped(array) for key, (_, array) in self._fixed.items()}
        for names, value in zip(self._names, values, strict=True):
            for path, parameter in names:
                memo[id(parameter)] = wrapped(value[path] if path else value)
        parts = copy.deepcopy(self._parts, memo)
        for part in parts:
            if isinstance(part, torch.nn.Module) and not random:
                part.eval()
        return jax.tree.unflatten(self._structure, parts)

    def plain(self) -> Any:
        """A copy of the user's own structure in PyTorch, whose tensors require gradients."""
        parts = copy.deepcopy(self._parts)
        for part in parts:
            if isinstance(part, torch.nn.Module):
                part.eval()
        parts = [
            part if isinstance(part, torch.nn.Module) else part.detach().to(_floating(part)).requires_grad_()
            for part in parts
        ]
        return jax.tree.unflatten(self._structure, parts)

    def modules(self, rebuilt: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """All modules of what was rebuilt, by the names that people would call them."""
        leaves = jax.tree_util.tree_flatten_with_path(rebuilt)[0]
        for path, leaf in leaves:
            if isinstance(leaf, torch.nn.Module):
                start = self.name + jax.tree_util.keystr(path)
                for name, module in leaf.named_modules():
                    yield f"{start}.{name}" if name else start, module


def trained(leaf: Any) -> list[tuple[str, torch.Tensor]]:
    """What an algorithm moves: a tensor itself, under the name "", or the parameters of a module. Tied ones once."""
    if isinstance(leaf, torch.nn.Module):
        return [(name, p) for name, p in leaf.named_parameters() if p.requires_grad]
    return [("", leaf)]


def load(target: Any, solution: Any) -> Any:
    """Copy a solution into a module, ``fb.torch.load(net, result.y)``, and return the module.

    Args:
        target: what ``fb.torch.problem`` was given as x or y, or something alike.
        solution: ``result.x`` or ``result.y``.
    """
    leaves, structure = jax.tree.flatten(target)
    try:
        values = structure.flatten_up_to(solution)
    except ValueError:
        raise FedbilevelError("fb.torch.load: the solution is not one of this module: its parts differ.") from None
    pairs: list[tuple[str, torch.Tensor, Any]] = []
    for leaf, value in zip(leaves, values, strict=True):
        if not isinstance(leaf, torch.nn.Module):
            pairs.append(("", leaf, value))
            continue
        known = dict(leaf.named_parameters(remove_duplicate=False))
        missing = {name for name, _ in trained(leaf)} - set(value) if isinstance(value, dict) else {"."}
        if missing or set(value) - set(known):
            odd = sorted(missing | (set(value) - set(known)))[0]
            raise FedbilevelError(f"fb.torch.load: the solution is not one of this module: see '{odd}'.")
        pairs += [(name, known[name], array) for name, array in value.items()]
    for name, tensor, array in pairs:
        if tuple(tensor.shape) != jnp.shape(array):
            raise FedbilevelError(
                f"fb.torch.load: '{name}' has the shape {tuple(tensor.shape)}, but in the solution {jnp.shape(array)}"
                f"{' (where every client has its own, choose one)' if jnp.shape(array)[1:] == tensor.shape else ''}."
            )
    with torch.no_grad():
        for _, tensor, array in pairs:
            tensor.copy_(to_torch(array))
    return target


def _tensors(leaf: Any) -> Iterator[torch.Tensor]:
    """All tensors of a module: parameters, buffers, and what its attributes hold."""
    if isinstance(leaf, torch.Tensor):
        yield leaf
        return
    for module in leaf.modules():
        for value in torch_tree.tree_leaves(dict(vars(module), _modules=None)):
            if isinstance(value, torch.Tensor):
                yield value


def _not_leaves(leaves: list[Any]) -> list[torch.Tensor]:
    """Tensors that were computed, which torch does not copy."""
    return [t for leaf in leaves for t in _tensors(leaf) if not t.is_leaf]


def _use_batch_statistics(name: str, part: Any) -> None:
    layers = part.modules() if isinstance(part, torch.nn.Module) else []
    tracking = [layer for layer in layers if isinstance(layer, _NormBase) and layer.running_mean is not None]
    found = [layer for layer in tracking if layer.training]
    for layer in found:
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    if found:
        warnings.warn(BATCH_STATISTICS.format(name), FedbilevelWarning, stacklevel=4)


def _warn_of_dropout(name: str, part: Any, noise: bool) -> None:
    layers = part.modules() if isinstance(part, torch.nn.Module) else []
    if not noise and any(isinstance(layer, _DropoutNd) and layer.training and layer.p > 0 for layer in layers):
        said = f"{name} has dropout, which is off without noise=True: give it, or call eval() of the module."
        warnings.warn(said, FedbilevelWarning, stacklevel=4)


def _floating(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()


def _warn_of_precision(name: str, given: list[torch.Tensor]) -> None:
    if any(t.dtype == torch.float64 for t in given) and not jax.config.read("jax_enable_x64"):
        warnings.warn(
            f"{name} is in double precision, but JAX computes in single precision: "
            "jax.config.update('jax_enable_x64', True) at the start of the program changes that.",
            FedbilevelWarning,
            stacklevel=4,
        )
