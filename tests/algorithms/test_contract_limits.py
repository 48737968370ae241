"""Where every algorithm ends, driven by the list in tests/contract.py."""

from dataclasses import replace

import numpy as np
import pytest

import derivations
import fedbilevel as fb
from contract import CONTRACT, PROX, T1, T5, Limit

LIMITS = [
    pytest.param(
        name,
        limit,
        id=f"{name}: {limit.name}",
        # CI runs the first of every algorithm, -m slow the others.
        marks=pytest.mark.slow if number > 0 or limit.name.endswith("60 terms") else (),
    )
    for name, entry in CONTRACT.items()
    for number, limit in enumerate(entry.limits)
]


@pytest.mark.parametrize(("name", "limit"), LIMITS)
def test_limits(name: str, limit: Limit) -> None:
    limit.check()


PARTIAL = {
    "simfbo": (T1, fb.SimFBO(0.02, 0.1, 0.1), fb.Uniform(3), T1.solution()),
    "shrofbo": (T1, fb.ShroFBO(0.02, 0.1, 0.1), fb.Uniform(3), T1.solution()),
    "mefbo": (T1, fb.MeFBO(0.2, **PROX, penalty=10.0), fb.Uniform(3), derivations.mefbo(T1, 10.0, 1.0)),
    "fedmbo": (
        T1,
        fb.FedMBO(0.02, 0.1, 0.3, inner_rounds=2, terms=3),
        fb.Uniform(3, resample=True),
        derivations.truncated(T1, 0.3, 3),
    ),
    "primal-dual": (T5[0], fb.PrimalDual(0.0015, 0.03, 0.03), fb.Independent(0.7, resample=True), T5[0].solution()),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_partial_participation_converges_where_the_paper_says_so(name: str) -> None:
    """With constant steps x goes on moving about its limit; on quadratics its mean over time is there, up to an error
    of the order of the steps where the round is not affine (products of random cohorts), and much closer than x."""
    problem, algorithm, cohort, expected = PARTIAL[name]
    task = replace(problem.task(), metrics=lambda x, y: {f"x{i}": v for i, v in enumerate(np.asarray(x))})
    result = fb.solve(task, algorithm, rounds=20_000, every=50, sample=cohort)
    xs = np.array([[row[f"x{i}"] for i in range(len(expected))] for row in result.history])
    start, late = np.linalg.norm(xs[0] - expected), xs[len(xs) // 4 :]
    assert np.linalg.norm(late.mean(axis=0) - expected) < (0.05 if name == "primal-dual" else 0.02) * start
    assert 1e-6 < np.linalg.norm(late.std(axis=0)) < 0.5 * start
