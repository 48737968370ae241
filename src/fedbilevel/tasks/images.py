"""What the tasks on small images share: the images of a data set, their division among clients, standardised inputs."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel import data as sets
from fedbilevel.core import Lookup
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.models import Model, scaled

DATA = ("mnist", "fashion-mnist", "digits", "cifar-10")
DIGITS_TEST = 500  # test images of the digits, which come without a split
PARTITIONS = {"iid": sets.iid, "non-iid": sets.shards}


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels are uint8 with white 255."""

    train: np.ndarray
    labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...]

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Mean and deviation of all training pixels, as numbers from 0 to 1."""
        # Part by part: counting takes eight bytes for each pixel.
        parts = np.array_split(self.train, max(1, len(self.train) // 1000))
        levels = sum(np.bincount(part.ravel(), minlength=256) for part in parts) / self.train.size
        brightness = np.arange(256) / 255
        mean = float(levels @ brightness)
        return mean, float(np.sqrt(levels @ (brightness - mean) ** 2))

    @property
    def pixels(self) -> int:
        return int(np.prod(self.train.shape[1:]))

    @property
    def shorter(self) -> float:
        """How much shorter steps of the first layer must be than for MNIST: a Hessian grows with the pixels."""
        return min(1.0, 784 / self.pixels)

    def rows(self, index: np.ndarray) -> dict[str, Any]:
        """Some training rows of one client."""
        return {"image": Lookup(self.train, index.astype(np.int32)), "label": self.labels[index]}


def available(task: str, name: str) -> sets.DataSet:
    """A data set; of CIFAR-10 the training batches that are present, or all of it if there are none."""
    if name not in DATA:
        raise UnknownName(f"data set for {task}", name, list(DATA))
    if name == "cifar-10":
        try:
            return sets.cifar_10(part=True)
        except FedbilevelError:
            return sets.cifar_10()
    return sets.load(name)


def images(task: str, name: str, seed: int | np.random.Generator) -> Images:
    """The images of a data set; 500 of the digits, drawn with the seed, are test images."""
    loaded = available(task, name)
    if name == "digits":
        order = np.random.default_rng(seed).permutation(len(loaded.train.labels))
        tested, rest = order[:DIGITS_TEST], order[DIGITS_TEST:]
        bright = np.rint(loaded.train.inputs * (255 / 16)).astype(np.uint8)
        labels = loaded.train.labels
        parts = bright[rest], labels[rest], bright[tested], labels[tested]
    else:
        assert loaded.test is not None
        parts = loaded.train.inputs, loaded.train.labels, loaded.test.inputs, loaded.test.labels
    return Images(*parts, loaded.classes)


def divide(
    task: str, labels: np.ndarray, partition: str, clients: int, validation: float, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Training and validation samples of every client, as indices."""
    if partition not in PARTITIONS:
        raise UnknownName(f"partition for {task}", partition, list(PARTITIONS))
    if not 0 < validation < 1:
        raise FedbilevelError(f"{task}: validation is a share of every client's images, between 0 and 1.")
    train, held_out = sets.split(PARTITIONS[partition](labels, clients, rng), (1 - validation, validation), rng)
    return train, held_out


@cache  # equal models are the same object, so that tasks made twice share their compiled code
def standardised(model: Model, mean: float, deviation: float) -> Model:
    """The model behind pixels of mean 0 and deviation 1."""

    def apply(parameters: Any, inputs: jax.Array, *key: Any) -> jax.Array:
        return model.apply(parameters, (scaled(inputs, jnp.result_type(float)) - mean) / deviation, *key)

    return Model(model.init, apply)


def per_class(correct: np.ndarray, labels: np.ndarray, classes: int, least: int = 1) -> np.ndarray:
    """The accuracy of every class, or the mean of any other number; NaN for one with fewer test images than least."""
    counts = np.bincount(labels, minlength=classes)
    with np.errstate(invalid="ignore"):
        return np.where(counts < least, np.nan, np.bincount(labels, correct, classes) / counts)


def of_known(reduce: Any, numbers: np.ndarray) -> float:
    """The mean, or the least, of the numbers that are known; NaN if none is."""
    known = numbers[~np.isnan(numbers)]
    return float(reduce(known)) if len(known) else float("nan")
