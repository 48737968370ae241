"""The same model, once in PyTorch and once in JAX, gives the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedbilevel as fb
from fedbilevel.testing import largest_difference

STEPS = {"lr_upper": 0.5, "lr_lower": 0.2}
ALGORITHMS = {
    "fedbio": fb.FedBiO(**STEPS, lr_adjoint=0.2, local_steps=2),
    "fedbioacc": fb.FedBiOAcc(local_steps=2),
    "fednest": fb.FedNest(**STEPS),
    "mefbo": fb.MeFBO(),
    "simfbo": fb.SimFBO(),
}


def network(kind: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(kind)


def in_torch(net: nn.Module) -> fb.Problem:
    def upper(x: Any, y: Any, batch: Any) -> Any:
        return functional.cross_entropy(y(batch["row"]), batch["label"])

    def lower(x: Any, y: Any, batch: Any) -> Any:
        losses = functional.cross_entropy(y(batch["row"]), batch["label"], reduction="none")
        decay = sum((p**2).sum() for p in y.parameters())
        return (torch.sigmoid(x)[batch["label"]] * losses).mean() + 0.05 * decay

    return fb.torch.problem(upper, lower, x=torch.zeros(2, dtype=net[0].weight.dtype), y=net)


def in_jax(net: nn.Module) -> fb.Problem:
    def losses(y: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(batch["row"] @ y["0.weight"].T + y["0.bias"])
        outputs = jax.nn.log_softmax(hidden @ y["2.weight"].T + y["2.bias"])
        return -jnp.take_along_axis(outputs, batch["label"][:, None], 1)[:, 0]

    def lower(x: Any, y: Any, batch: Any) -> jax.Array:
        decay = sum(jnp.sum(a**2) for a in y.values())
        return jnp.mean(jax.nn.sigmoid(x)[batch["label"]] * losses(y, batch)) + 0.05 * decay

    start = {name: jnp.asarray(p.detach().numpy()) for name, p in net.named_parameters()}
    zeros = jnp.zeros(2, next(iter(start.values())).dtype)
    return fb.Problem(lambda x, y, batch: jnp.mean(losses(y, batch)), lower, lambda key: (zeros, start))


def clients(kind: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows = lambda: {"row": rng.normal(size=(6, 3)).astype(kind), "label": rng.integers(0, 2, 6)}
    return [{"train": rows(), "val": rows()} for _ in range(2)]


def compare(algorithm: str, kind: Any, engine: Any = "simulation") -> float:
    """The largest difference of x and y after three rounds."""
    net = network(kind)
    data = clients("float64" if kind is torch.float64 else "float32")
    as_tensors = [{split: jax.tree.map(torch.from_numpy, rows) for split, rows in each.items()} for each in data]
    ours = fb.solve(fb.Task(in_torch(net), as_tensors, batch_size=4), ALGORITHMS[algorithm], 3, engine=engine)
    theirs = fb.solve(fb.Task(in_jax(net), data, batch_size=4), ALGORITHMS[algorithm], 3)
    start = {name: p.detach().numpy() for name, p in net.named_parameters()}
    assert largest_difference(theirs.y, start) > 1e-3
    return largest_difference((ours.x, ours.y), (theirs.x, theirs.y))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_in_double_precision(name: str) -> None:
    assert compare(name, torch.float64) < 1e-10


def test_through_messages() -> None:
    assert compare("fedbio", torch.float64, "local") < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_in_single_precision(name: str) -> None:
    with jax.enable_x64(False):
        assert compare(name, torch.float32) < 1e-5
