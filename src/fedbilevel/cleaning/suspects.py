"""The order and the words of the table of suspects."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def worst_first(quality: np.ndarray, trusted: np.ndarray) -> np.ndarray:
    """The numbers of all rows, those of least quality first, trusted ones last.

    >>> worst_first(np.array([0.9, 0.1, 0.5]), np.array([False, True, False])).tolist()
    [2, 0, 1]
    """
    return np.lexsort((quality, trusted))


def named(names: Sequence[Any], numbers: np.ndarray) -> np.ndarray:
    """The names of numbers; of their own type if all have the same and it is a number or a boolean.

    >>> named([False, True], np.array([1, 0])).tolist(), named(["a", 1], np.array([1, 0])).tolist()
    ([True, False], [1, 'a'])
    """
    kinds = {type(name) for name in names}
    if len(kinds) == 1 and issubclass(next(iter(kinds)), bool | int | float | np.number | np.bool_):
        return np.array(names)[numbers]
    column = np.empty(len(names), object)
    column[:] = list(names)
    return column[numbers]
