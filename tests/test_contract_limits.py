"""Where every algorithm ends, driven by the list in tests/contract.py."""

import numpy as np
import pytest

import fedbilevel as fb
from contract import CONTRACT, Limit

LIMITS = [(name, limit) for name, entry in CONTRACT.items() for limit in entry.limits]


@pytest.mark.parametrize(("name", "limit"), LIMITS, ids=[f"{name}: {limit.name}" for name, limit in LIMITS])
def test_limits(name: str, limit: Limit) -> None:
    result = fb.solve(limit.problem.task(), limit.algorithm, rounds=limit.rounds, every=limit.rounds)
    np.testing.assert_allclose(np.asarray(result.x), limit.expected, atol=limit.tolerance)
