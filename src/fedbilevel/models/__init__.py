"""Networks, convolutions as matrix products, and losses, all in plain JAX.

Imports core; tasks import it.
"""

from fedbilevel.models.convolutions import batch_norm, convolve, max_pool
from fedbilevel.models.losses import cross_entropy, norms, outputs, squared_norm
from fedbilevel.models.networks import (
    INITIALISATIONS,
    Layer,
    Model,
    cnn7,
    conv4,
    lenet5,
    logistic_regression,
    mlp,
    scaled,
)

__all__ = [
    "INITIALISATIONS",
    "Layer",
    "Model",
    "batch_norm",
    "cnn7",
    "conv4",
    "convolve",
    "cross_entropy",
    "lenet5",
    "logistic_regression",
    "max_pool",
    "mlp",
    "norms",
    "outputs",
    "scaled",
    "squared_norm",
]
