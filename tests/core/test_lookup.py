"""Rows that are looked up in one table give what rows of their own give."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.task import Task


def _task(lookup: bool, pairs: bool = False) -> Task:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(12, 3))
    index = [rng.integers(12, size=(n, 2) if pairs else n) for n in (4, 6, 5)]

    def upper(x, y, batch):
        return jnp.mean((batch["a"] @ y - batch["b"].reshape((-1,) + (1,) * pairs)) ** 2)

    def lower(x, y, batch):
        return upper(x, y, batch) + jnp.sum(jnp.exp(x) * y**2)

    def rows(i: np.ndarray) -> dict:
        return {"a": fb.Lookup(table, i) if lookup else table[i], "b": np.arange(len(i), dtype=float)}

    problem = fb.Problem(upper, lower, lambda key: (jnp.zeros(3), jnp.zeros(3)))
    return Task(problem, [{"train": rows(i), "val": rows(i[::-1])} for i in index], batch_size=2)


@pytest.mark.parametrize("pairs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_same_numbers_in_both_engines(pairs: bool) -> None:
    algorithm = fb.FedBiO(lr_upper=0.1, lr_lower=0.1, lr_adjoint=0.1, local_steps=2)
    own = fb.solve(_task(False, pairs), algorithm, rounds=3)
    looked_up = fb.solve(_task(True, pairs), algorithm, rounds=3)
    local = fb.solve(_task(True, pairs), algorithm, rounds=3, engine="local")
    np.testing.assert_array_equal(own.x, looked_up.x)
    np.testing.assert_allclose(local.x, looked_up.x, atol=1e-14)


def test_the_table_is_there_once() -> None:
    task = _task(True)
    assert task.data.train.arrays["a"].table is task.data.val.arrays["a"].table


def test_a_party_has_only_its_own_rows_of_the_table() -> None:
    task = _task(True)
    alone = task.only(0)
    rows = alone.clients[0]["train"]["a"]
    assert len(rows.table) == len(np.unique(task.clients[0]["train"]["a"].index)) < 12
    np.testing.assert_array_equal(rows[:], task.clients[0]["train"]["a"][:])


def test_different_tables_are_refused() -> None:
    task = _task(True)
    other = {
        split: {**rows, "a": fb.Lookup(np.zeros((12, 3)), rows["a"].index)} for split, rows in task.clients[0].items()
    }
    with pytest.raises(fb.FedbilevelError, match="same table"):
        _ = Task(task.problem, [other, *task.clients[1:]], batch_size=2).data


def test_the_images_of_a_data_set_are_not_copied_to_the_device() -> None:
    images = fb.data.load("digits").train.inputs
    rows = {"image": fb.Lookup(images, np.arange(len(images), dtype=np.int32))}
    loss = lambda x, y, batch: jnp.mean((batch["image"].mean((1, 2)) - x) ** 2) + y**2
    problem = fb.Problem(loss, loss, lambda key: (jnp.zeros(()), jnp.zeros(())))
    task = Task(problem, [{"train": rows, "val": rows}])
    assert task.data.train.arrays["image"].table.unsafe_buffer_pointer() == images.ctypes.data
    assert task.data.val.arrays["image"].table is task.data.train.arrays["image"].table
