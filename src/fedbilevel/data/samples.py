"""Data sets in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Samples(NamedTuple):
    """Samples in order.

    Args:
        inputs: images as uint8, (n, height, width) or (n, height, width, 3); tables as float32, (n, features).
        labels: int32, (n,).
        groups: by name, further facts about every sample, as int32 numbers of `DataSet.groups[name]`.
    """

    inputs: np.ndarray
    labels: np.ndarray
    groups: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set in memory.

    The arrays are read-only and never copied: a client is an array of indices into them (see
    `fedbilevel.data.partition`). The 60,000 training images of MNIST stay one array of 47 MB for any number of clients.

    Args:
        name: of the data set.
        train: the training samples, or all samples of a set without a split.
        test: the test samples, if the set has a split.
        classes: the name of every label.
        validation: the validation samples, if the set has them (mini-ImageNet).
        features: the names of the columns of a table.
        groups: for every group column, the names of its numbers.
        peak: the value of a white pixel: `inputs / peak` is between 0 and 1.
    """

    name: str
    train: Samples
    test: Samples | None
    classes: tuple[str, ...]
    validation: Samples | None = None
    features: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    peak: int | None = None

    def __repr__(self) -> str:
        sizes = {"train": self.train, "validation": self.validation, "test": self.test}
        counts = ", ".join(f"{len(s.labels)} {part}" for part, s in sizes.items() if s is not None)
        return f"DataSet({self.name}: {counts}, {len(self.classes)} classes, inputs {self.train.inputs.shape[1:]})"


def _aligned(array: np.ndarray) -> np.ndarray:
    """The array at an address that is a multiple of 64 bytes, where JAX can use it on the CPU without a copy."""
    if array.flags.c_contiguous and array.ctypes.data % 64 == 0:
        return array
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def read_only(inputs: np.ndarray, labels: Any, groups: Mapping[str, Any] | None = None) -> Samples:
    """Samples with the right types, in arrays that cannot be changed by accident."""
    inputs = _aligned(inputs if inputs.dtype == np.uint8 else np.asarray(inputs, np.float32))
    columns = {name: np.array(column, np.int32) for name, column in (groups or {}).items()}
    labels = np.array(labels, np.int32)
    for array in (inputs, labels, *columns.values()):
        array.flags.writeable = False
    return Samples(inputs, labels, columns)
