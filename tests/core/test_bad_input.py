"""What people give at first, and what they are told: one sentence, before anything is compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb

RNG = np.random.default_rng(0)


def rows(n: int) -> dict[str, Any]:
    return {"a": (a := RNG.normal(size=(n, 5))), "b": a[:, 0] + RNG.normal(size=n)}


def upper(x: Any, y: Any, batch: Any) -> Any:
    return jnp.mean((batch["a"] @ y - batch["b"]) ** 2)


def lower(x: Any, y: Any, batch: Any) -> Any:
    return upper(x, y, batch) + jnp.sum(jnp.exp(x) * y**2)


def start(key: Any) -> tuple[Any, Any]:
    return jnp.zeros(5), jnp.zeros(5)


def task(upper: Any = upper, lower: Any = lower, init: Any = start, clients: Any = None, **more: Any) -> fb.Task:
    clients = clients or [{"train": rows(20), "val": rows(15)} for _ in range(2)]
    return fb.Task(fb.Problem(upper, lower, init), clients, **{"batch_size": None, **more})


def of_rows(**columns: Any) -> fb.Task:
    return task(clients=[{"train": {"a": np.zeros((3, 5)), **columns}, "val": rows(3)}])


def solve(made: fb.Task) -> Any:
    return fb.solve(made, fb.FedBiO(0.1, 0.1, 0.1, local_steps=1), rounds=1)


def labelled(x: Any, y: Any, batch: Any) -> Any:
    return jnp.mean(jax.nn.one_hot(batch["b"], 3) @ y[:3]) + jnp.sum(y**2)


OTHER = [{"train": rows(20), "val": rows(15)}, {"train": {"a": np.zeros((3, 5)), "c": np.zeros(3)}, "val": rows(3)}]
NO_NUMBER = "metrics(x, y) must give numbers by name, but 'a' is"
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: task(upper=lambda x, y, b: None), "upper(x, y, batch) must return one number, but returned None."),
    "tuple": (lambda: task(lower=lambda x, y, b: (lower(x, y, b), 1)), "lower(x, y, batch) must return one number, but "
              "returned a tuple."),
    "int": (lambda: task(upper=lambda x, y, b: 3), "which has no gradient: return a float."),
    "complex loss": (lambda: task(upper=lambda x, y, b: upper(x, y, b) * 1j), "which has no gradient: return a float."),
    "init": (lambda: task(init=lambda: 3), "init(key), which gives the first x and y, fails: TypeError"),
    "init that fails": (lambda: task(init=lambda k: {}["x"]), "fails: KeyError: 'x' (test_bad_input.py, line"),
    "no init": (lambda: task(init=(1, 2)), "init must be a function, init(key), but is tuple."),
    "complex x": (lambda: task(init=lambda k: (jnp.zeros(5, complex), jnp.zeros(5))), "init(key) gives a complex x"),
    "no parameters": (lambda: task(init=lambda k: (jnp.zeros(5), {})), "is the model one without parameters?"),
    "metrics": (lambda: solve(task(metrics=lambda x, y: 3.0)), "must return a dictionary such as"),
    "metric array": (lambda: solve(task(metrics=lambda x, y: {"a": np.zeros(3)})), f"{NO_NUMBER} [0. 0. 0.]."),
    "metric text": (lambda: solve(task(metrics=lambda x, y: {"a": "good"})), f"{NO_NUMBER} good."),
    "a name": (lambda: fb.solve("data-cleaning", fb.FedBiO()),  # type: ignore[arg-type]
               "give a task, not its name: fb.solve(fb.tasks.data_cleaning(), ...), or fb.Experiment('data-cleaning')"),
    "lr": (lambda: fb.FedBiO(lr=0.1),  # type: ignore[call-arg]
           "called 'lr': did you mean 'lr_adjoint' or 'lr_lower' or 'lr_upper'?"),
    "too many": (lambda: fb.FedBiO(*[0.1] * 9), "FedBiO has only these 6 numbers: lr_upper,"),  # type: ignore[arg-type]
    "large batch": (lambda: task(batch_size=10**10), "batch_size is 10000000000, but the largest client has 20 rows"),
    "keys": (lambda: task(clients=OTHER), "client 1: the 'train' arrays are 'a', 'c', but those of client 0"),
    "objects": (lambda: of_rows(b=np.array([1, 2, None], object)), "the 'train' array 'b' contains objects"),
    "text": (lambda: of_rows(b=np.array(["x", "y", "z"])), "the 'train' array 'b' contains text"),
    "NaN": (lambda: of_rows(b=np.array([1, 2, np.nan])), "the 'train' array 'b' contains nan in row 2"),
    "infinite": (lambda: of_rows(b=jnp.array([1, 2, jnp.inf])), "the 'train' array 'b' contains inf in row 2"),
    "labels": (lambda: task(lower=labelled, clients=[{"train": {"a": np.zeros((3, 5)), "b": np.array([0, 1, 3])},
                            "val": rows(3)}]), "contains 3 in row 2, but the loss looks it up among 3 entries"),
    "no gradient": (lambda: task(upper=lambda x, y, b: jnp.mean(b["b"])), "has no gradient in x and y"),
    "a sum": (lambda: task(lower=lambda x, y, b: jnp.sum((b["a"] @ y - b["b"]) ** 2) + jnp.sum(y**2),
                           clients=[{"train": rows(20), "val": rows(9)}, {"train": rows(30), "val": rows(9)}]),
              "is not a mean over the rows of its batch"),
    "NaN at the start": (lambda: solve(task(init=lambda k: (jnp.zeros(5) + jnp.nan, jnp.zeros(5)))),
                         "init(key) gives an x that is NaN or infinite."),
    "NaN loss": (lambda: solve(task(upper=lambda x, y, b: upper(x, y, b) * jnp.log(-1.0 - jnp.sum(y**2)))),
                 "upper(x, y, batch) is nan at the start, on the first rows of client 0: no step can help."),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_one_sentence(name: str) -> None:
    do, sentence = BAD[name]
    with pytest.raises(fb.FedbilevelError) as refused:
        do()
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "smaller" not in str(refused.value)


def test_names_are_suggested_by_how_they_begin() -> None:
    with pytest.raises(fb.FedbilevelError, match="did you mean 'lr_upper'"):
        fb.FedBiO(lr_uper=0.1)  # type: ignore[call-arg]
