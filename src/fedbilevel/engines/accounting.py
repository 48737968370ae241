"""What a run has spent so far, from its plan and the counts of its state."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbilevel.engines.plan import Plan

ORACLES = ("Gf", "Gg", "J", "H")
"""Gradients of the upper and the lower loss, cross products, Hessian products."""

COUNTED = frozenset(
    ["round", "seconds", "exchanges", "megabytes_down", "megabytes_up", "megabytes", "floats", *ORACLES, "samples"]
)
"""The columns that every history has; the others are metrics."""


def traffic(plan: Plan, state: Any) -> Mapping[str, float | int]:
    """What has been sent and computed so far, by all clients together."""
    costs = [(np.asarray(state.served[name], np.int64), exchange) for name, exchange in plan.by_name.items()]
    total = lambda quantity: int(sum(np.sum(served * quantity(exchange)) for served, exchange in costs))
    down, up = (_sent_once(plan, state) + total(lambda e: e.bytes_down)) / 1e6, total(lambda e: e.bytes_up) / 1e6
    return {
        "exchanges": sum(int(np.sum(calls)) for calls in state.calls.values()),
        "megabytes_down": down,
        "megabytes_up": up,
        "megabytes": down + up,
        "floats": total(lambda e: e.down + e.up),
        **{name: total(lambda e, name=name: e.oracles[name]) for name in ORACLES},
        "samples": total(lambda e: e.samples),
    }


def _sent_once(plan: Plan, state: Any) -> int:
    """Bytes that are sent in the first round only. They go to all clients, as only then do clients keep them."""
    if not plan.once or not int(state.round):
        return 0
    first = plan.round[0].name
    return plan.once * int(np.sum(state.served[first]) // max(1, np.sum(state.calls[first])))
