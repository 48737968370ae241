"""Every task that can use rows of sites does: set up, computed and measured by messages, on files of three sites."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_sites import SCHEMA, Sites, rows, study, write

import fedbilevel as fb
from fedbilevel.federation.study import SITE_TASKS, site_task

TASKS: dict[str, dict[str, Any]] = {
    "client-weighting": {"hidden": 4},
    "data-cleaning": {"hidden": 4},
    "fairness": {"hidden": 4},
    "hyper-representation": {"hidden": 4},
    "label-errors": {"hidden": 4, "folds": 2},
    "loss-tuning": {"hidden": 4},
    "regularization": {},
}
MEASURED = {
    "client-weighting": "accuracy", "data-cleaning": "accuracy", "fairness": "accuracy",
    "hyper-representation": "accuracy", "label-errors": "loss", "loss-tuning": "accuracy", "regularization": "auc",
}  # fmt: skip


QUICK = ("client-weighting", "fairness")
"""The others compile for longer; two of them are in ``test_sites.py``, too."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in SITE_TASKS])
def test_rows_of_sites_give_the_simulators_numbers(tmp_path: Path, name: str) -> None:
    group = {"group": {"column": "smokes", "values": ["n", "y"]}} if name == "fairness" else {}
    features = {key: value for key, value in SCHEMA["features"].items() if key != "smokes" or not group}
    wanted = study(
        tmp_path,
        task={"name": name, **TASKS[name]},
        algorithm={"name": "fedbio"},
        schema={**SCHEMA, **group, "features": features},
    )
    sites = Sites(tmp_path, wanted)
    for number, site in enumerate(sites.names):
        write(tmp_path / site / "rows.csv", rows(300 + 40 * number, number))
    engine, facts = sites.set_up(wanted)
    state = engine.advance(engine.start(0), 2)
    x, y = engine.solution(state)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((x, y)))
    own = [site_task(wanted.build(worker.examples, facts, 3), 0, own=True) for worker in sites.workers]
    plain = [{part: {k: a[:] for k, a in columns.items()} for part, columns in task.clients[0].items()} for task in own]
    everybody = fb.Task(own[0].problem, plain, batch_size=own[0].batch_size)
    expected = fb.solve(everybody, wanted.build(sites.workers[0].examples, facts, 3).algorithm, rounds=2, seed=0)
    for found, known in zip(jax.tree.leaves(y), jax.tree.leaves(expected.y), strict=True):
        np.testing.assert_allclose(found, known, rtol=1e-4, atol=1e-5)
    measured = engine.metrics(state)
    assert measured["sites"] == 3
    for site in sites.names:
        assert np.isfinite(measured[f"{MEASURED[name]}_{site}"]), measured


def test_the_documentation_lists_the_tasks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    told = page.partition("accept the rows of sites:")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z-]+)`", told)) == set(SITE_TASKS)
