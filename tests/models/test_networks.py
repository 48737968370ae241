"""Models: shapes, initialisations, and equality with XLA's convolution and with PyTorch."""

import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.errors import FedbilevelError
from fedbilevel.models import (
    Model,
    batch_norm,
    cnn7,
    conv4,
    convolve,
    lenet5,
    logistic_regression,
    max_pool,
    mlp,
    scaled,
)
from fedbilevel.testing import identical, largest_difference

EXAMPLES = Path(__file__).parents[2] / "examples"


def images(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape))


@pytest.mark.parametrize("outputs", [3, 100])  # of whole lines, of patches
@settings(max_examples=5)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(5, 9), st.integers(5, 9), st.integers(1, 3)),
    window=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
)
def test_convolution_and_its_gradients_follow_the_definition(
    outputs: int, shape: tuple[int, ...], window: tuple[int, int], stride: int, padding: int
) -> None:
    inputs, filters = images(*shape), images(*window, shape[3], outputs)

    def patch_by_patch(inputs: jax.Array, filters: jax.Array) -> jax.Array:  # XLA's gradient crashes for some of these
        padded = jnp.pad(inputs, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
        sizes = zip(padded.shape[1:3], window, strict=True)
        down, across = (np.arange(0, n - k + 1, stride)[:, None] + np.arange(k) for n, k in sizes)
        patches = padded[:, down[:, None, :, None], across[None, :, None, :]]
        return jnp.einsum("nijabc,abco->nijo", patches, filters)

    def with_gradients(f: Any) -> Any:
        total = lambda *both: (jnp.sum(jnp.sin(outputs := f(*both))), outputs)
        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(inputs, filters)

    ours = with_gradients(lambda inputs, filters: convolve(inputs, filters, stride, padding))
    assert largest_difference(ours, with_gradients(patch_by_patch)) < 1e-5


def test_pooling_drops_the_rest() -> None:
    inputs = images(2, 7, 5, 3)
    pooled = max_pool(inputs)
    assert pooled.shape == (2, 3, 2, 3)
    assert jnp.array_equal(pooled[:, 1, 1], inputs[:, 2:4, 2:4].max((1, 2)))


MODELS: dict[str, tuple[Model, tuple[int, ...], int, int]] = {  # the model, an image, outputs, number of parameters
    "mlp": (mlp(784, 20, 10), (28, 28, 1), 10, 784 * 20 + 20 + 210),
    "logistic": (logistic_regression(64, 3), (64,), 3, 64 * 3 + 3),
    "lenet5": (lenet5(), (28, 28, 1), 10, 61_706),
    "lenet5-rgb": (lenet5((32, 32, 3), 5), (32, 32, 3), 5, 61_581),
    "cnn7": (cnn7(), (32, 32, 3), 10, 62_006),
    "conv4": (conv4(), (28, 28, 1), 64, 640 + 3 * 36_928),
    "conv4-84": (conv4((84, 84, 3), 5, filters=4), (84, 84, 3), 5, 112 + 3 * 148 + 505),
    "conv4-norm": (conv4(outputs=5, filters=8, norm="batch"), (28, 28, 1), 5, 80 + 3 * 584 + 4 * 16 + 45),
}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_sizes(name: str) -> None:
    model, shape, outputs, size = MODELS[name]
    parameters = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(a.size for a in jax.tree.leaves(parameters)) == size
    for kind in (np.uint8, np.float32):
        assert jax.eval_shape(model.apply, parameters, np.ones((3, *shape), kind)).shape == (3, outputs)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "conv4-norm"])
def test_bytes_are_scaled(name: str) -> None:
    model, shape, _, _ = MODELS[name]
    pixels = np.random.default_rng(0).integers(0, 256, (3, *shape), np.uint8)
    both = jax.jit(lambda key, a, b: (model.apply(y := model.init(key), a), model.apply(y, b)))
    assert largest_difference(*both(jax.random.key(0), pixels, pixels / 255)) < 1e-9


def test_bytes_take_the_type_of_the_weights() -> None:
    assert scaled(jnp.ones(3, jnp.uint8), jnp.float32).dtype == jnp.float32
    model = mlp(4, 2)
    parameters = jax.tree.map(lambda a: a.astype(jnp.float32), model.init(jax.random.key(0)))
    assert model.apply(parameters, jnp.ones((3, 4), jnp.uint8)).dtype == jnp.float32


def test_equal_models_are_the_same_object() -> None:
    assert mlp(3, 2) is mlp(3, 2, initial="he") is logistic_regression(3, 2)
    assert lenet5() is lenet5([28, 28, 1], classes=10)
    assert cnn7() is lenet5((32, 32, 3))
    assert conv4() is conv4((28, 28, 1), None, norm="none")
    assert conv4() is not conv4(norm="batch")
    assert mlp(3, 2) is not mlp(3, 2, initial="pytorch")


@pytest.mark.parametrize(
    "make",
    [
        lambda: mlp(3),
        lambda: mlp(3, 0),
        lambda: mlp(3, 2, initial="xavier"),
        lambda: mlp(3, 2, dropout=1.0),
        lambda: lenet5((30, 30, 1)),
        lambda: lenet5((28, 28)),
        lambda: conv4((15, 28, 1)),
        lambda: conv4(norm="layer"),
        lambda: convolve(jnp.ones((1, 5, 5, 2)), jnp.ones((3, 3, 1, 1))),
        lambda: convolve(jnp.ones((1, 2, 2, 1)), jnp.ones((3, 3, 1, 1))),
    ],
)
def test_nonsense_is_refused(make: Any) -> None:
    with pytest.raises(FedbilevelError):
        make()


def test_hessian_products() -> None:
    """Forward over reverse, as the library does it, through a whole block, against differences of gradients."""
    inputs = images(3, 7, 7, 2)
    at, along = images(3, 3, 2, 4), images(5, 3, 3, 2, 4)[1]

    def loss(filters: jax.Array) -> jax.Array:
        hidden = convolve(inputs, filters, padding=1)
        return jnp.sum(max_pool(jax.nn.relu(batch_norm(hidden, jnp.arange(1.0, 5.0), jnp.ones(4)))) ** 2)

    gradient = jax.jit(jax.grad(loss))
    exact = jax.jit(lambda y, v: jax.jvp(jax.grad(loss), (y,), (v,))[1])(at, along)
    step = 1e-7  # small enough that no maximum changes hands
    difference = (gradient(at + step * along) - gradient(at - step * along)) / (2 * step)
    assert largest_difference(exact, difference) < 1e-4 * float(abs(exact).max())


def test_batch_norm_cancels_the_bias() -> None:
    model = conv4((16, 16, 1), filters=4, norm="batch")
    parameters, apply, inputs = jax.jit(model.init)(jax.random.key(0)), jax.jit(model.apply), images(6, 16, 16, 1)
    shifted = {**parameters, "conv": [{**block, "b": block["b"] + 1} for block in parameters["conv"]]}
    assert largest_difference(apply(parameters, inputs), apply(shifted, inputs)) < 1e-9


# With PyTorch


def torch_like(name: str) -> Any:
    """The same network in PyTorch."""
    nn = pytest.importorskip("torch").nn
    relu, pool, flat = nn.ReLU, lambda: nn.MaxPool2d(2), nn.Flatten
    dense = lambda *w: [layer for i, o in pairwise(w) for layer in (nn.Linear(i, o), relu())][:-1]
    if name == "mlp":
        return nn.Sequential(flat(), *dense(784, 20, 10))
    if name.startswith("lenet5"):
        channels, padding, outputs = (1, 2, 10) if name == "lenet5" else (3, 0, 5)
        first = [nn.Conv2d(channels, 6, 5, padding=padding), relu(), pool()]
        return nn.Sequential(*first, nn.Conv2d(6, 16, 5), relu(), pool(), flat(), *dense(400, 120, 84, outputs))
    channels, filters, head = {
        "conv4": (1, 64, []),
        "conv4-84": (3, 4, [nn.Linear(100, 5)]),
        "conv4-norm": (1, 8, [nn.Linear(8, 5)]),
    }[name]
    blocks = []
    for c in (channels, filters, filters, filters):
        norm = [nn.BatchNorm2d(filters)] if name == "conv4-norm" else []
        blocks += [nn.Conv2d(c, filters, 3, padding=1), *norm, relu(), pool()]
    return nn.Sequential(*blocks, flat(), *head)


def copied(net: Any, side: int) -> Any:
    """The parameters of a PyTorch network in our structure; before the first dense layer are side x side pixels."""
    nn = pytest.importorskip("torch").nn
    array = lambda tensor: tensor.detach().numpy()
    convolutions, layers = [], []
    for module in net:
        if isinstance(module, nn.Conv2d):
            convolutions.append({"w": array(module.weight).transpose(2, 3, 1, 0), "b": array(module.bias)})
        elif isinstance(module, nn.BatchNorm2d):
            convolutions[-1] |= {"scale": array(module.weight), "shift": array(module.bias)}
        elif isinstance(module, nn.Linear):
            weight = array(module.weight).T
            if convolutions and not layers:  # PyTorch flattens (channels, height, width), we (height, width, channels)
                weight = weight.reshape(-1, side, side, weight.shape[1]).transpose(1, 2, 0, 3).reshape(weight.shape)
            layers.append({"w": weight, "b": array(module.bias)})
    return {"conv": convolutions, "dense": layers} if convolutions else layers


@pytest.mark.parametrize(
    ("name", "side"), [("mlp", 0), ("lenet5", 5), ("lenet5-rgb", 5), ("conv4", 1), ("conv4-84", 5), ("conv4-norm", 1)]
)
def test_with_the_weights_of_pytorch_the_outputs_are_those_of_pytorch(name: str, side: int) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net, (model, shape, _, _) = torch_like(name), MODELS[name]
    inputs = np.random.default_rng(0).random((6, *shape), np.float32)
    parameters = copied(net, side)
    same = jax.tree.structure(parameters) == jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
    assert same
    theirs = net(torch.from_numpy(inputs.transpose(0, 3, 1, 2).copy())).detach().numpy()
    np.testing.assert_allclose(jax.jit(model.apply)(parameters, jnp.asarray(inputs)), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "side"), [("mlp", 0), ("lenet5", 5), ("conv4", 1)])
def test_the_initialisation_of_pytorch(name: str, side: int) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = {"mlp": mlp(784, 20, 10, initial="pytorch"), "lenet5": lenet5(initial="pytorch")}.get(
        name, conv4(initial="pytorch")
    )
    theirs, ours = copied(torch_like(name), side), jax.jit(model.init)(jax.random.key(0))
    ours, theirs = (jax.tree.map(np.asarray, tree) for tree in (ours, theirs))
    fan_in = jax.tree.leaves(jax.tree.map(lambda a: a.size // a.shape[-1], ours))
    widths = iter(fan_in)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape
        if a.ndim == 1:  # leaves are sorted: the bias comes before the weight that knows the number of inputs
            bias = (a, b)
            next(widths)
            continue
        bound = next(widths) ** -0.5
        for each in (*bias, a, b):
            assert float(np.abs(each).max()) <= bound * (1 + 1e-6)
        for each in (a, b):  # uniform: mean 0, variance bound^2 / 3, fourth moment bound^4 / 5; five standard errors
            unit, error = each.ravel() / bound, 5 * each.size**-0.5
            assert abs(float(unit.mean())) < error / 3**0.5
            assert abs(float((unit**2).mean()) - 1 / 3) < error * (4 / 45) ** 0.5
            assert abs(float((unit**4).mean()) - 1 / 5) < error * (16 / 225) ** 0.5


def test_dropout_needs_a_key_and_keeps_the_mean() -> None:
    net, plain = mlp(6, 40, 3, dropout=0.25), mlp(6, 40, 3)
    weights, inputs = net.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (5, 6))
    np.testing.assert_array_equal(net.apply(weights, inputs), plain.apply(weights, inputs))
    np.testing.assert_array_equal(net.apply(weights, inputs, None), plain.apply(weights, inputs))
    keys = jax.random.split(jax.random.key(2), 20000)
    outputs = np.asarray(jax.vmap(lambda key: net.apply(weights, inputs, key))(keys))
    error = outputs.std(axis=0) / np.sqrt(len(keys))
    assert np.all(np.abs(outputs.mean(axis=0) - plain.apply(weights, inputs)) < 5 * error)
    # One hidden unit at a time: it is there, times 4/3, or it is not.
    alone = [weights[0], {"w": jnp.zeros((40, 3)).at[7].set(1.0), "b": jnp.zeros(3)}]
    seen = jax.vmap(lambda key: net.apply(alone, inputs, key))(keys)[:, :, 0]
    kept = np.isclose(seen, plain.apply(alone, inputs)[:, 0] / 0.75)
    assert np.all(kept | np.isclose(seen, 0))
    active = np.asarray(plain.apply(alone, inputs)[:, 0]) > 0
    assert active.any()
    np.testing.assert_allclose(kept[:, active].mean(), 0.75, atol=0.01)


def test_he_keeps_the_scale() -> None:
    weights = mlp(400, 300, 10).init(jax.random.key(0))[0]["w"]
    assert float(weights.std()) == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert identical(mlp(5, 2).init(jax.random.key(3)), mlp(5, 2).init(jax.random.key(3)))


@pytest.mark.parametrize("library", [pytest.param("flax", marks=pytest.mark.slow), "equinox"])
def test_examples_run(library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = EXAMPLES / f"{library}_model.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.split("validation loss ")[1].split("\n")[0].split(" -> ")
    assert float(last) < 0.7 * float(first)
