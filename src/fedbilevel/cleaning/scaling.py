"""Scaling inputs by sums over the rows of all clients."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MOST = 8.0  # deviations from the mean; what is farther away is an outlier and would dominate a linear model

CHUNK = 2**14  # rows at a time, which bounds the memory


class Sums(NamedTuple):
    """What a client tells about its rows: their number, and for every column the sum and the sum of squares."""

    rows: int
    values: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> "Sums":
        """The sums of one client."""
        values = squares = np.zeros(int(np.prod(rows.shape[1:])))
        for n in range(0, len(rows), CHUNK):
            some = rows[n : n + CHUNK].reshape(-1, len(values)).astype(float)
            values, squares = values + some.sum(0), squares + (some**2).sum(0)
        return cls(len(rows), values, squares)


class Scale(NamedTuple):
    """Columns of mean 0 and deviation 1. Pixels of images have one deviation together, because the small deviation of
    a pixel at the border is no reason to make it larger.
    """

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, parts: Sequence[Sums], images: bool) -> "Scale":
        """From the sums of all clients."""
        count = sum(part.rows for part in parts)
        mean = sum(part.values for part in parts) / count
        square = sum(part.squares for part in parts) / count
        variance = np.asarray(square - mean**2)
        variance = np.where(variance > 1e-12 * square, variance, 0)
        deviation = np.sqrt(np.broadcast_to(variance.mean(), variance.shape) if images else variance)
        return cls(np.asarray(mean), np.where(deviation > 0, deviation, np.inf))

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The rows, scaled, as a table of float32."""
        table = np.empty((len(rows), len(self.mean)), np.float32)
        for n in range(0, len(rows), CHUNK):
            some = rows[n : n + CHUNK].reshape(-1, len(self.mean))
            table[n : n + CHUNK] = np.clip((some - self.mean) / self.deviation, -MOST, MOST)
        return table
