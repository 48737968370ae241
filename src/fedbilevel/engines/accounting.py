"""What a run has spent so far, from its plan and the counts of its state."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbilevel.engines.plan import Plan

ORACLES = ("Gf", "Gg", "J", "H")
"""Gradients of the upper and the lower loss, cross products, Hessian products."""

COUNTED = frozenset(
    ["round", "seconds", "exchanges", "megabytes_down", "megabytes_up", "megabytes", "floats", "Gf", "Gg", "J", "H"]
)
"""The columns that every history has; the others are metrics."""


def traffic(plan: Plan, state: Any) -> Mapping[str, float | int]:
    """What has been sent and computed so far, by all clients together."""
    served, calls = np.asarray(state.served, np.int64), np.asarray(state.calls, np.int64)
    exchanges = plan.all
    # What is sent once goes to everybody: only then does it stay with the clients.
    once = (
        plan.once * int(served[len(plan.start)] // max(1, calls[len(plan.start)]))
        if plan.once and int(state.round)
        else 0
    )
    down = (once + sum(int(n) * e.bytes_down for n, e in zip(served, exchanges, strict=True))) / 1e6
    up = sum(int(n) * e.bytes_up for n, e in zip(served, exchanges, strict=True)) / 1e6
    floats = sum(int(n) * (e.down + e.up) for n, e in zip(served, exchanges, strict=True))
    oracles = {name: sum(int(n) * e.oracles[name] for n, e in zip(served, exchanges, strict=True)) for name in ORACLES}
    return {
        "exchanges": int(calls.sum()),
        "megabytes_down": down,
        "megabytes_up": up,
        "megabytes": down + up,
        "floats": floats,
        **oracles,
    }
