"""Names of types that all of core uses."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Tree = Any
"""A pytree of arrays, in the user's own structure."""
Key = jax.Array
Carry = TypeVar("Carry")
Value = TypeVar("Value")
Loss = Callable[..., jax.Array]
Step = Callable[..., Any]
"""A client function: ``step(client, memory, key, *broadcast) -> (memory, upload)``, or, for a client that remembers
nothing, ``step(client, key, *broadcast) -> upload``."""
