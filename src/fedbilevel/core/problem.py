"""The problem: two losses on pytrees, and what is known about x and y."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedbilevel.core.types import Key, Loss, Tree
from fedbilevel.core.vectors import Vector, simplex
from fedbilevel.errors import FedbilevelError


@dataclass(frozen=True)
class Problem:
    """Choose x so that the y trained with x does best: losses on pytrees, and what is known about x and y.

    Args:
        upper: ``upper(x, y, batch) -> scalar``, the loss on a batch of validation rows.
        lower: ``lower(x, y, batch) -> scalar``, the loss on a batch of training rows. Both are means over the rows of
            their batch (plus terms that do not depend on rows), so that a mini-batch is an unbiased sample of the
            whole.
        init: ``init(key) -> (x, y)``, where to start. For private x: the block of one client.
        project_x, project_y: the nearest feasible point of a pytree (see ``vectors.box``, ``ball``, ``simplex``);
            None means no constraint.
        lower_level: "global": all clients share one y; "local": every client has its own y.
        private_x: every client owns a block of x that concerns no other client and is never sent. All blocks have the
            shape that ``init`` gives; solutions have a leading axis of clients.
        weighting: x is one flat array with the weight of every client: the lower objective is sum_m x_m lower_m(y), and
            ``lower`` (which ignores its x) is a client's own loss. x lies in the probability simplex.
        needs: hyper-parameters that an algorithm must have, as ``(("restart", True), ...)``, where any others would
            silently give wrong results.
        noise: the losses themselves are random, by dropout for instance, and take a key as a fourth argument. It comes
            from the name of the batch, so that the same batch at two points has the same noise. Where all rows are
            used, which is also how losses are evaluated, it is None, and nothing must be random.
    """

    upper: Loss
    lower: Loss
    init: Callable[[Key], tuple[Tree, Tree]]
    project_x: Callable[[Tree], Tree] | None = None
    project_y: Callable[[Tree], Tree] | None = None
    lower_level: Literal["global", "local"] = "global"
    private_x: bool = False
    weighting: bool = False
    needs: tuple[tuple[str, Any], ...] = ()
    noise: bool = False

    def __post_init__(self) -> None:
        for name, form in (("upper", "(x, y, batch)"), ("lower", "(x, y, batch)"), ("init", "(key)")):
            if not callable(getattr(self, name)):
                kind = type(getattr(self, name)).__name__
                raise FedbilevelError(f"{name} must be a function, {name}{form}, but is {kind}.")
        if self.lower_level not in ("global", "local"):
            raise FedbilevelError(f"lower_level must be 'global' or 'local', not '{self.lower_level}'.")
        if self.weighting and (self.private_x or self.lower_level == "local"):
            raise FedbilevelError("weighting=True needs a shared x and a global lower level.")
        if self.weighting and self.project_x is None:
            object.__setattr__(self, "project_x", simplex)

    def upper_on(self, x: Tree, y: Tree, batch: Tree, key: Key | None = None) -> jax.Array:
        """The upper loss, with the noise of this key if it is random."""
        return self.upper(x, y, batch, key) if self.noise else self.upper(x, y, batch)

    def lower_on(self, x: Tree, y: Tree, batch: Tree, key: Key | None = None) -> jax.Array:
        """The lower loss, with the noise of this key if it is random."""
        return self.lower(x, y, batch, key) if self.noise else self.lower(x, y, batch)

    def start(self, key: Key) -> tuple[Vector, Vector]:
        """The first x (one block if private) and y, as vectors."""
        start = self.init(key)
        if not isinstance(start, tuple | list) or len(start) != 2:
            raise FedbilevelError(f"init(key) must return the pair (x, y), but returned {type(start).__name__}.")
        x, y = start
        return Vector(jax.tree.map(as_float, x), "x"), Vector(jax.tree.map(as_float, y), "y")

    def nearest(self, v: Vector) -> Vector:
        """The nearest feasible point of the space of v; blocks that the clients own are projected one by one."""
        project = self.project_x if v.space == "x" else self.project_y
        if project is None:
            return v
        return Vector((jax.vmap(project) if v.owned else project)(v.tree), v.space, v.owned)


def as_float(value: Any) -> jax.Array:
    """An array of floats: whole numbers become floats, so that gradients exist."""
    kind = jnp.result_type(value)
    return jnp.asarray(value, kind if jnp.issubdtype(kind, jnp.floating) else jnp.result_type(float))
