"""When a run has come far enough: bounds on columns of its history."""

import math
from collections.abc import Mapping
from typing import Any

from fedbilevel.errors import FedbilevelError


def parse(text: str) -> dict[str, float]:
    """Read bounds from text.

    >>> parse("hypergradient=1e-3, lower_gap=0.1"), parse("")
    ({'hypergradient': 0.001, 'lower_gap': 0.1}, {})
    """
    bounds: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            bounds[name] = float(number)
        except ValueError:
            bounds[name] = math.nan
        if not name or not math.isfinite(bounds[name]):
            raise FedbilevelError(f"until must be written like hypergradient=1e-3, not '{text}'.")
    return bounds


def reached(row: Mapping[str, Any], bounds: Mapping[str, float]) -> bool:
    """Whether every one of these columns is at most its bound."""
    for name in bounds:
        if name not in row:
            raise FedbilevelError(f"until: a run has no column '{name}', only {', '.join(sorted(row))}.")
    return bool(bounds) and all(row[name] <= bound for name, bound in bounds.items())
