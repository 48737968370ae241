"""Models as pairs of functions on pytrees: ``init(key) -> parameters`` and ``apply(parameters, inputs) -> outputs``.

Images are arrays (rows, height, width, channels). They may be uint8: ``apply`` scales them to [0, 1].
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Key, Tree
from fedbilevel.errors import FedbilevelError, Names
from fedbilevel.models.convolutions import batch_norm, convolve, max_pool, pooled_relu

Layer = dict[str, jax.Array]


class Model(NamedTuple):
    """A model: any pair of such functions will do. ``apply`` of a model with dropout also takes a key, and drops
    nothing without one.
    """

    init: Callable[[Key], Tree]
    apply: Callable[..., jax.Array]


def _he(key: Key, shape: tuple[int, ...], fan_in: int) -> Layer:
    """Normal weights of variance 2 / fan_in, which keeps the scale through ReLU; no bias."""
    return {"w": jax.random.normal(key, shape) * (2 / fan_in) ** 0.5, "b": jnp.zeros(shape[-1])}


def _pytorch(key: Key, shape: tuple[int, ...], fan_in: int) -> Layer:
    """PyTorch's default: weights and biases uniform in +- 1 / sqrt(fan_in)."""
    bound, (of_weight, of_bias) = fan_in**-0.5, jax.random.split(key)
    return {
        "w": jax.random.uniform(of_weight, shape, minval=-bound, maxval=bound),
        "b": jax.random.uniform(of_bias, shape[-1:], minval=-bound, maxval=bound),
    }


INITIALISATIONS: Names[Callable[[Key, tuple[int, ...], int], Layer]] = Names(
    "initialisation", {"he": _he, "pytorch": _pytorch}
)
"""How the weights of a layer are drawn, by name."""


def mlp(*widths: int, initial: str = "he", dropout: float = 0.0) -> Model:
    """Fully connected layers of these widths, inputs and outputs included, with ReLU in between.

    Inputs with more than two axes, such as images, are flattened.

    >>> net = mlp(64, 32, 10)
    >>> net.apply(net.init(jax.random.key(0)), jnp.ones((5, 64))).shape
    (5, 10)

    Args:
        widths: at least two.
        initial: "he" or "pytorch".
        dropout: with ``apply(parameters, inputs, key)`` a hidden unit is left out with this probability.
    """
    if len(widths) < 2 or min(widths) < 1:
        raise FedbilevelError(
            f"mlp needs at least the widths of the inputs and the outputs, all positive, not {widths}."
        )
    if not 0 <= dropout < 1:
        raise FedbilevelError(f"mlp: dropout must be a probability below 1, not {dropout}.")
    return _mlp(widths, initial, dropout)


@cache  # equal models are the same object, so that tasks made twice share their compiled code
def _mlp(widths: tuple[int, ...], initial: str, dropout: float) -> Model:
    draw = INITIALISATIONS[initial]

    def init(key: Key) -> list[Layer]:
        return _dense_init(key, widths, draw)

    def apply(parameters: Any, inputs: jax.Array, key: Key | None = None) -> jax.Array:
        inputs = scaled(inputs, parameters[0]["w"].dtype)
        inputs = inputs if inputs.ndim <= 2 else inputs.reshape(len(inputs), -1)
        return _dense_apply(parameters, inputs, dropout, key)

    return Model(init, apply)


def logistic_regression(features: int, classes: int, initial: str = "he") -> Model:
    """One linear layer: an ``mlp`` with nothing hidden; use it with ``cross_entropy``."""
    return mlp(features, classes, initial=initial)


def lenet5(shape: Sequence[int] = (28, 28, 1), classes: int = 10, initial: str = "he") -> Model:
    """LeNet-5 as it is used today: two 5 x 5 convolutions of 6 and 16 filters, each with ReLU and 2 x 2 max-pooling,
    then fully connected layers of 120, 84 and ``classes`` outputs.

    The original (LeCun et al. 1998) had tanh, trained averages as pooling, a sparse second convolution and a radial
    output; no paper on federated bilevel optimization means that.

    Args:
        shape: height, width and channels of an image. 28 x 28 pixels are padded by 2, as the original was fed; 32 x 32
            are not.
        classes: number of outputs.
        initial: "he" or "pytorch".
    """
    shape = tuple(shape)
    if len(shape) != 3 or shape[:2] not in ((28, 28), (32, 32)):
        raise FedbilevelError(
            f"lenet5: images must be 28 x 28 or 32 x 32, for instance shape (28, 28, 1), not {shape}."
        )
    return _lenet5(shape, classes, initial)


@cache
def _lenet5(shape: tuple[int, ...], classes: int, initial: str) -> Model:
    draw = INITIALISATIONS[initial]
    padding = 2 if shape[0] == 28 else 0

    def init(key: Key) -> dict[str, list[Layer]]:
        of_first, of_second, of_dense = jax.random.split(key, 3)
        first, second = (5, 5, shape[2], 6), (5, 5, 6, 16)
        convolutions = [draw(of_first, first, 25 * shape[2]), draw(of_second, second, 25 * 6)]
        return {"conv": convolutions, "dense": _dense_init(of_dense, (400, 120, 84, classes), draw)}

    def apply(parameters: Any, images: jax.Array) -> jax.Array:
        first, second = parameters["conv"]
        hidden = scaled(images, first["w"].dtype)
        hidden = pooled_relu(convolve(hidden, first["w"], padding=padding), first["b"])
        hidden = pooled_relu(convolve(hidden, second["w"]), second["b"])
        return _dense_apply(parameters["dense"], hidden.reshape(len(hidden), -1))

    return Model(init, apply)


def cnn7(classes: int = 10, initial: str = "he") -> Model:
    """The 7-layer CNN for CIFAR-10 of the MeFBO paper (appendix F): LeNet-5 on images of 32 x 32 x 3.

    The paper only says "a 7-layer CNN (LeCun et al., 1998)". That article counts seven layers in LeNet-5, two of them
    pooling, and the published code of FedNest, of the same field, has just that network.
    """
    return lenet5((32, 32, 3), classes, initial)


def conv4(
    shape: Sequence[int] = (28, 28, 1),
    outputs: int | None = None,
    filters: int = 64,
    norm: str = "none",
    initial: str = "he",
) -> Model:
    """The network of few-shot learning: four blocks of a 3 x 3 convolution (padded by 1), ReLU and 2 x 2 max-pooling.

    The FedBiOAcc paper (appendix B.2) names "a 4-layer convolutional neural network where each convolutional layer has
    64 filters of 3 x 3" and cites Finn et al. (2017), whose blocks also have batch normalization: ``norm="batch"``. It
    uses mean and variance of the batch at hand, always. The loss of a row then depends on the other rows, and a
    mini-batch is no longer an unbiased sample of all rows; hence it is not the default.

    Args:
        shape: height, width and channels of an image, at least 16 x 16.
        outputs: None returns the features (64 for 28 x 28 pixels, 1600 for 84 x 84), a number adds a linear layer.
        filters: of every convolution.
        norm: "none" or "batch".
        initial: "he" or "pytorch".
    """
    shape = tuple(shape)
    if len(shape) != 3 or min(shape[:2]) < 16:
        raise FedbilevelError(f"conv4: images must be at least 16 x 16, for instance shape (28, 28, 1), not {shape}.")
    if norm not in ("none", "batch"):
        raise FedbilevelError(f"conv4: norm must be 'none' or 'batch', not {norm!r}.")
    return _conv4(shape, outputs, filters, norm, initial)


@cache
def _conv4(shape: tuple[int, ...], outputs: int | None, filters: int, norm: str, initial: str) -> Model:
    draw = INITIALISATIONS[initial]
    features = (shape[0] // 16) * (shape[1] // 16) * filters

    def init(key: Key) -> dict[str, list[Layer]]:
        *of_blocks, of_dense = jax.random.split(key, 5)
        channels = (shape[2], filters, filters, filters)
        blocks = [draw(k, (3, 3, c, filters), 9 * c) for k, c in zip(of_blocks, channels, strict=True)]
        if norm == "batch":
            blocks = [{**block, "scale": jnp.ones(filters), "shift": jnp.zeros(filters)} for block in blocks]
        head = [] if outputs is None else _dense_init(of_dense, (features, outputs), draw)
        return {"conv": blocks, "dense": head}

    def apply(parameters: Any, images: jax.Array) -> jax.Array:
        hidden = scaled(images, parameters["conv"][0]["w"].dtype)
        for block in parameters["conv"]:
            hidden = convolve(hidden, block["w"], padding=1)
            if norm == "batch":
                hidden = batch_norm(hidden + block["b"], block["scale"], block["shift"])
                hidden = max_pool(jax.nn.relu(hidden))
            else:
                hidden = pooled_relu(hidden, block["b"])
        hidden = hidden.reshape(len(hidden), -1)
        return hidden if outputs is None else _dense_apply(parameters["dense"], hidden)

    return Model(init, apply)


def scaled(inputs: jax.Array, kind: Any = jnp.float32) -> jax.Array:
    """Pixels of type uint8 as numbers from 0 to 1 of this type; anything else as it is."""
    return inputs.astype(kind) / 255 if inputs.dtype == jnp.uint8 else inputs


def _dense_init(key: Key, widths: Sequence[int], draw: Callable[..., Layer]) -> list[Layer]:
    keys = jax.random.split(key, len(widths) - 1)
    return [draw(k, (i, o), i) for k, i, o in zip(keys, widths[:-1], widths[1:], strict=True)]


def _dense_apply(layers: Sequence[Layer], inputs: jax.Array, dropout: float = 0.0, key: Key | None = None) -> jax.Array:
    *hidden, last = layers
    for number, layer in enumerate(hidden):
        inputs = jax.nn.relu(inputs @ layer["w"] + layer["b"])
        if dropout and key is not None:
            kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - dropout, inputs.shape)
            inputs = jnp.where(kept, inputs / (1 - dropout), 0)
    return inputs @ last["w"] + last["b"]
