"""Import torchax where it and the installed PyTorch do not fit, and correct two of its methods.

torchax 0.0.13 lists operations by name when it is imported. Some of them, overloads that take the *names* of axes such
as ``aten.prod.dim_Dimname``, are gone from PyTorch 2.13, so the import fails. Nobody calls what is gone. So while
torchax is imported, and only then, such a name gives a placeholder that stands in torchax's tables. Once a torchax is
out that does without these names, no placeholder is made, and that part can go.

Its tensors, too, have two methods that do other than PyTorch's: ``a.data`` passes gradients on, and ``a.type_as(b)``
changes the type of ``a`` itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from torch._ops import OpOverloadPacket

from fedbilevel.errors import needs

PLACEHOLDERS: list[str] = []
"""The names that were asked for and are not there."""


class Placeholder:
    """Stands in torchax's tables for an operation that PyTorch no longer has."""

    def __init__(self, name: str) -> None:
        self.name = name
        PLACEHOLDERS.append(name)

    def __repr__(self) -> str:
        return f"<{self.name}, which this PyTorch does not have>"


@contextmanager
def placeholders() -> Iterator[None]:
    """Overloads that are gone give placeholders, and all others themselves."""
    original = OpOverloadPacket.__getattr__

    def found(packet: OpOverloadPacket, name: str) -> Any:
        try:
            return original(packet, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return Placeholder(f"{packet}.{name}")

    OpOverloadPacket.__getattr__ = found  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = original


with placeholders():
    torchax: Any = needs("torchax", "torch", "PyTorch models need torchax, too")
    for module in (
        "decompositions",
        "ops.jaten",
        "ops.jtorch",
        "ops.jc10d",
        "ops.jtorchvision_nms",
    ):  # as it does itself
        needs(f"torchax.{module}", "torch", "PyTorch models need torchax, too")

Tensor: Any = torchax.tensor.Tensor
"""A JAX array that torch code takes for a tensor."""
View: Any = torchax.view.View
"""A part of one, which writes into it."""


def _set_data(tensor: Any, other: Any) -> None:
    tensor.apply_jax_(lambda _: other.jax())


for kind in (Tensor, View):
    kind.data = property(lambda tensor: Tensor(jax.lax.stop_gradient(tensor.jax()), tensor._env), _set_data)
    kind.type_as = lambda tensor, other: tensor.to(other.dtype)
