"""The data check of every task: what is wrong with rows and losses is a sentence, not a dump or silence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.indices import depends

CLASSES, FEATURES = 4, 3
Loss = Callable[[Any, Any, Any], Any]


def logits(x: Any, y: Any, batch: Any) -> Any:
    return batch["a"] @ y + x.sum()


LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda x, y, b: fb_cross_entropy(logits(x, y, b), b["label"]).mean(),
    "indexing": lambda x, y, b: -jax.nn.log_softmax(logits(x, y, b))[jnp.arange(len(b["label"])), b["label"]].mean(),
    "vmap": lambda x, y, b: jax.vmap(lambda row, k: -jax.nn.log_softmax(row)[k])(logits(x, y, b), b["label"]).mean(),
    "one_hot": lambda x, y, b: (
        -(jax.nn.one_hot(b["label"], CLASSES) * jax.nn.log_softmax(logits(x, y, b))).sum(1).mean()
    ),
    "weights": lambda x, y, b: (jnp.ones(CLASSES)[b["label"]] * (logits(x, y, b) ** 2).sum(1)).mean(),
    "compiled": lambda x, y, b: jax.jit(LOSSES["indexing"])(x, y, b),
}


def fb_cross_entropy(scores: Any, labels: Any) -> Any:
    from fedbilevel.models import cross_entropy

    return cross_entropy(scores, labels)


def problem(lower: Loss, upper: Loss | None = None) -> fb.Problem:
    return fb.Problem(upper or lower, lower, lambda key: (jnp.zeros(2), jnp.zeros((FEATURES, CLASSES))))


def rows(**changed: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"a": rng.normal(size=(8, FEATURES)).astype(np.float32), "label": np.arange(8) % CLASSES, **changed}


def task(lower: Loss, bad: dict[str, Any] | None = None, upper: Loss | None = None) -> fb.Task:
    """The second client may have other validation rows."""
    clients = [{"train": rows(), "val": rows()}, {"train": rows(), "val": rows(**(bad or {}))}]
    return fb.Task(problem(lower, upper), clients, batch_size=4)


@pytest.mark.parametrize("name", LOSSES)
def test_labels_out_of_range_are_found_wherever_they_are(name: str) -> None:
    task(LOSSES[name])
    labels = np.arange(8) % CLASSES
    labels[6] = CLASSES  # not among the first rows
    sentence = rf"client 1: the 'val' array 'label' contains {CLASSES} in row 6.*among 4 entries: use 0 to 3\."
    with pytest.raises(fb.FedbilevelError, match=sentence):
        task(LOSSES[name], {"label": labels})
    labels[6] = -2
    with pytest.raises(fb.FedbilevelError, match="contains -2 in row 6"):
        task(LOSSES[name], {"label": labels})


def test_whole_numbers_that_are_no_index_may_be_anything() -> None:
    counts = {"label": np.array([0, 10**6] * 4)}
    task(lambda x, y, b: (logits(x, y, b) ** 2).mean() + b["label"].mean(), counts)
    task(lambda x, y, b: (jnp.ones(CLASSES)[b["label"] % CLASSES] * logits(x, y, b).sum(1) ** 2).mean(), counts)
    task(lambda x, y, b: (jnp.ones(5)[jnp.clip(b["label"], 0, 4)] * logits(x, y, b).sum(1) ** 2).mean(), counts)
    shifted = {"label": np.full(8, CLASSES)}  # classes from 1
    task(lambda x, y, b: (jnp.ones(CLASSES)[b["label"] - 1] * logits(x, y, b).sum(1) ** 2).mean(), shifted)
    none = {"label": np.full(8, -1)}  # a one-hot row of zeros
    task(LOSSES["one_hot"], none)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"a": np.full((8, FEATURES), np.nan)}, "the 'val' array 'a' contains nan in row 0: fill it in"),
        ({"a": np.where(np.arange(24).reshape(8, 3) == 16, np.inf, 1.0)}, "'a' contains inf in row 5"),
        ({"a": np.array([["1", "2", "3"]] * 8, object)}, r"'a' contains objects: give numbers"),
        ({"label": np.array(["cat"] * 8)}, "'label' contains text: give numbers"),
        ({"label": np.array(["2020-01-01"] * 8, "M8[D]")}, "'label' contains dates: give numbers"),
        ({"a": fb.Lookup(np.zeros((5, FEATURES), np.float32), np.arange(8))}, "looks up row 7 of a table with 5 rows"),
        ({"a": fb.Lookup(np.full((9, FEATURES), np.inf), np.arange(8))}, "'a' contains inf in row 0"),
    ],
)
def test_bad_rows_are_named(bad: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match="client 1: .*" + sentence):
        task(LOSSES["indexing"], bad)


def test_numbers_that_are_infinite_on_the_device_are_named() -> None:
    large = {"a": np.where(np.arange(24).reshape(8, 3) == 16, 1e300, 1.0)}
    task(LOSSES["indexing"], large)  # in double precision
    with (
        jax.enable_x64(False),
        pytest.raises(fb.FedbilevelError, match=r"1e\+300 in row 5, which is infinite in single"),
    ):
        task(LOSSES["indexing"], large)
    with pytest.raises(fb.FedbilevelError, match=r"'a' contains .*nan.* in row 0"):
        task(LOSSES["indexing"], {"a": np.full((8, FEATURES), complex(0, np.nan))})


ACCURACY: Loss = lambda x, y, b: (logits(x, y, b).argmax(1) == b["label"]).mean()
ROUNDED: Loss = lambda x, y, b: (jnp.round(logits(x, y, b)) ** 2).mean()
FIXED: Loss = lambda x, y, b: (jax.lax.stop_gradient(logits(x, y, b)) ** 2).mean()
OTHER: Loss = lambda x, y, b: (b["a"] ** 2).mean()
WHOLE: Loss = lambda x, y, b: logits(x, y, b).argmax()


@pytest.mark.parametrize("loss", [ACCURACY, ROUNDED, FIXED, OTHER])
def test_losses_without_a_gradient_are_refused(loss: Loss) -> None:
    with pytest.raises(fb.FedbilevelError, match=r"lower\(x, y, batch\) has no gradient in y"):
        task(loss)
    with pytest.raises(fb.FedbilevelError, match=r"upper\(x, y, batch\) has no gradient in x and y"):
        task(LOSSES["indexing"], upper=loss)


def test_a_loss_of_whole_numbers_is_refused() -> None:
    with pytest.raises(fb.FedbilevelError, match=r"lower\(x, y, batch\) returned int.*, which has no gradient"):
        task(WHOLE)


def test_a_gradient_that_is_zero_at_the_start_is_none_of_these() -> None:
    task(lambda x, y, b: (y**2).mean() + (x**2).mean())


def test_what_a_function_depends_on_is_found_without_running_it() -> None:
    function = lambda x, y, z: (x * jnp.floor(y)).sum() + jnp.where(z > 0, z, 0).sum()
    assert depends(function, jnp.result_type(float), *(jnp.ones(3),) * 3) == [True, False, True]
