"""A hash of arrays, to check that data, a solution or a checkpoint has not changed."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np


def digest(arrays: Iterable[tuple[str, Any]]) -> str:
    """A hash of named arrays: their types, shapes and contents, in this order."""
    hashed = hashlib.sha256()
    for name, array in arrays:
        array = np.asarray(array)
        hashed.update(f"{name} {array.dtype} {array.shape}".encode())
        hashed.update(np.ascontiguousarray(array).data)
    return hashed.hexdigest()
