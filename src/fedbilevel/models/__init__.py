"""Networks and losses in plain JAX.

Imports core; tasks import it.
"""

from fedbilevel.models.networks import (
    BAND,
    CACHED,
    INITIALISATIONS,
    Layer,
    Model,
    batch_norm,
    cnn7,
    conv4,
    convolve,
    cross_entropy,
    lenet5,
    logistic_regression,
    max_pool,
    mlp,
    norms,
    outputs,
    scaled,
    squared_norm,
)

__all__ = [
    "BAND",
    "CACHED",
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
