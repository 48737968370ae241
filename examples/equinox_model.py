"""A network written in Equinox, trained by several parties who learn together how strongly to regularise each layer.

An Equinox model is a pytree that holds its arrays and its functions. The arrays are the parameters; the rest stays
outside. Run it: ``python examples/equinox_model.py`` (``pip install '.[examples]'``).
"""

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.models import Model, cross_entropy, squared_norm


class Network(equinox.Module):
    """Two layers."""

    hidden: equinox.nn.Linear
    head: equinox.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        of_hidden, of_head = jax.random.split(key)
        self.hidden = equinox.nn.Linear(8, 16, key=of_hidden)
        self.head = equinox.nn.Linear(16, 2, key=of_head)

    def __call__(self, row: jax.Array) -> jax.Array:
        return self.head(jax.nn.relu(self.hidden(row)))


_, functions = equinox.partition(Network(jax.random.key(0)), equinox.is_array)
model = Model(
    init=lambda key: equinox.filter(Network(key), equinox.is_array),
    apply=lambda arrays, inputs: jax.vmap(equinox.combine(arrays, functions))(inputs),
)


def upper(x: Any, y: Any, batch: Any) -> jax.Array:
    """The loss on validation rows."""
    return cross_entropy(model.apply(y, batch["features"]), batch["label"]).mean()


def lower(x: Any, y: Any, batch: Any) -> jax.Array:
    """The loss on training rows, with one weight decay for each layer: exp(x)."""
    decay = jnp.exp(x["hidden"]) * squared_norm(y.hidden) + jnp.exp(x["head"]) * squared_norm(y.head)
    return cross_entropy(model.apply(y, batch["features"]), batch["label"]).mean() + decay


def init(key: jax.Array) -> tuple[Any, Any]:
    """Where to start."""
    return {"hidden": jnp.array(-4.0), "head": jnp.array(-4.0)}, model.init(key)


def rows(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Points of two classes, told apart by two of eight features, with noise."""
    features = rng.normal(size=(count, 8)).astype(np.float32)
    label = features[:, 0] * features[:, 1] + 0.3 * rng.normal(size=count) > 0
    return {"features": features, "label": label.astype(np.int32)}


def main() -> None:
    """Solve and print."""
    rng = np.random.default_rng(0)
    clients = [{"train": rows(rng, 60), "val": rows(rng, 60)} for _ in range(4)]
    task = fb.Task(fb.Problem(upper, lower, init), clients, batch_size=None)
    result = fb.solve(task, fb.FedBiO(lr_upper=0.5, lr_lower=0.2, lr_adjoint=0.1, local_steps=1), rounds=300)
    loss = lambda x, y: np.mean([upper(x, y, client["val"]) for client in clients])
    first, last = loss(*init(jax.random.key(0))), loss(result.x, result.y)
    print(f"validation loss {first:.3f} -> {last:.3f}")
    print({name: round(float(jnp.exp(value)), 5) for name, value in result.x.items()})


if __name__ == "__main__":
    main()
