"""Bad input gets one clear sentence."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb


def upper(x: Any, y: Any, batch: Any) -> Any:
    return ((y - batch["a"].mean()) ** 2).mean() + (x**2).sum()


def lower(x: Any, y: Any, batch: Any) -> Any:
    return ((y - x[0] * batch["a"][:, None]) ** 2).mean()


def init(key: Any) -> Any:
    return np.ones(2), np.zeros(3)


PROBLEM = fb.Problem(upper, lower, init)
ROWS = {"a": np.arange(4.0)}
CLIENT = {"train": ROWS, "val": ROWS}


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ([], "at least one client"),
        ([CLIENT, {"train": ROWS}], "client 1 has no 'val' data"),
        ([CLIENT, {"train": {"a": np.zeros(0)}, "val": ROWS}], "client 1 has no 'train' rows"),
        ([{"train": {"a": np.zeros(3), "b": np.zeros(2)}, "val": ROWS}], "have different numbers of rows"),
        ([CLIENT, {"train": {"a": np.zeros((4, 2))}, "val": ROWS}], "client 1: the 'train' arrays have the row shapes"),
        ([{"train": {"a": np.float64(3)}, "val": ROWS}], "leading axis of rows"),
    ],
)
def test_bad_clients_are_named(clients: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        fb.Task(PROBLEM, clients)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weights": [1.0, 2.0]}, "weights must be 1 numbers"),
        ({"weights": [-1.0]}, "weights must be 1 numbers"),
        ({"weights": [0.0]}, "weights must be 1 numbers"),
        ({"weights": "equal"}, "not 'equal'"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"batch_size": {"train": 3}}, "needs the entries train and val"),
    ],
)
def test_bad_options_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        fb.Task(PROBLEM, [CLIENT], **options)


def test_bad_losses_are_named() -> None:
    with pytest.raises(fb.FedbilevelError, match=r"lower\(x, y, batch\) must return one number"):
        fb.Task(fb.Problem(upper, lambda x, y, b: y, init), [CLIENT])
    with pytest.raises(fb.FedbilevelError, match=r"upper\(x, y, batch\) fails on the first rows of client 0: KeyError"):
        fb.Task(fb.Problem(lambda x, y, b: b["c"].mean(), lower, init), [CLIENT])
    with pytest.raises(fb.FedbilevelError, match="must return the pair"):
        fb.Task(fb.Problem(upper, lower, lambda key: np.ones(3)), [CLIENT])
    with pytest.raises(fb.FedbilevelError, match="'global' or 'local'"):
        fb.Problem(upper, lower, init, lower_level="both")  # pyright: ignore[reportArgumentType]


def test_a_loss_that_is_no_mean_is_refused_where_it_would_be_wrong() -> None:
    """Sums over rows: fine with equal sizes, refused with ragged clients and all rows."""
    summed = fb.Problem(upper, lambda x, y, b: ((y - x[0] * b["a"][:, None]) ** 2).sum(), init)
    other = {"train": {"a": np.arange(6.0)}, "val": ROWS}
    fb.Task(summed, [CLIENT, CLIENT], batch_size=None)
    fb.Task(summed, [CLIENT, other], batch_size=2)
    fb.Task(PROBLEM, [CLIENT, other], batch_size=None)
    with pytest.raises(fb.FedbilevelError, match=r"lower\(x, y, batch\) is not a mean over the rows"):
        fb.Task(summed, [CLIENT, other], batch_size=None)


def test_weights() -> None:
    long = {"train": {"a": np.arange(12.0)}, "val": ROWS}
    assert fb.Task(PROBLEM, [CLIENT, long]).normalised_weights.tolist() == [0.5, 0.5]
    assert fb.Task(PROBLEM, [CLIENT, long], "size").normalised_weights.tolist() == [0.25, 0.75]
    assert fb.Task(PROBLEM, [CLIENT, long], [1, 4]).normalised_weights.tolist() == [0.2, 0.8]


def test_data_are_stored_once_and_keep_their_type() -> None:
    images = {"a": np.zeros((5, 7), np.uint8)}
    task = fb.Task(
        fb.Problem(upper, lambda x, y, b: y.mean() * b["a"].mean(), init), [{"train": images, "val": ROWS}] * 3
    )
    assert task.data.train.arrays["a"].shape == (15, 7)
    assert task.data.train.arrays["a"].dtype == np.uint8
    assert task.data.train.start.tolist() == [0, 5, 10]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fb.FedBiO(lr_upper=0.0), "FedBiO: lr_upper must be greater than 0"),
        (lambda: fb.FedBiO(local_steps=0), "local_steps must be at least 1"),
        (lambda: fb.FedBiO(radius=-1.0), "radius must be greater than 0"),
        (lambda: fb.FedBiO(lr_lower=float("nan")), "lr_lower must be greater than 0"),
        (lambda: fb.FedBiOAcc(c_lower=2.0), r"c_lower \* rate\^2 must be at most 1, not 2"),
        (lambda: fb.FedBiOAcc(c_upper=100.0, rate="cube_root(2, 1000)"), r"c_upper .* not 4"),
        (lambda: fb.FedBiOAcc(rate="sometimes"), "FedBiOAcc: rate: 'sometimes' is not a schedule"),
        (lambda: fb.FedAvg(lr_lower=-1.0), "FedAvg: lr_lower"),
    ],
)
def test_hyper_parameters_are_checked(make: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        make()


def test_projection_onto_the_simplex() -> None:
    for seed in range(5):
        v = np.random.default_rng(seed).normal(size=6)
        point = np.asarray(fb.vectors.simplex(jnp.asarray(v)))
        assert point.min() >= 0
        assert point.sum() == pytest.approx(1)
        # The nearest point makes an obtuse angle with every vertex.
        assert all((v - point) @ (vertex - point) <= 1e-12 for vertex in np.eye(6))


def asserting(x: Any, y: Any, batch: Any) -> Any:
    if batch["a"].shape != (7,):
        raise AssertionError  # what a bare assert raises; pytest gives those of its files a message
    return lower(x, y, batch)


def test_a_bare_assertion_of_a_loss_is_named_with_its_line() -> None:
    said = (
        r"lower\(x, y, batch\) fails on the first rows of client 0: AssertionError "
        r"\(test_task\.py, line \d+: raise AssertionError"
    )
    with pytest.raises(fb.FedbilevelError, match=said):
        fb.Task(fb.Problem(upper, asserting, init), [CLIENT])


def deep(x: Any, y: Any, batch: Any) -> Any:
    return missing(batch).mean()


def missing(batch: Any) -> Any:
    return batch["c"]


def test_the_line_is_that_of_the_users_file() -> None:
    """The innermost one of it, not that of a library."""
    with pytest.raises(fb.FedbilevelError, match=r"KeyError: 'c' \(test_task\.py, line \d+: return batch\[\"c\"\]\)"):
        fb.Task(fb.Problem(deep, lower, init), [CLIENT])
    with pytest.raises(fb.FedbilevelError, match=r"TypeError: .*\(test_task\.py, line \d+: .*jnp\.dot"):
        fb.Task(fb.Problem(upper, lambda x, y, b: jnp.dot(y, np.ones(5)), init), [CLIENT])


def test_suggestions_are_by_algorithm() -> None:
    suggested = fb.Suggestion(hyper={"fedbio": {"lr_upper": 0.3, "rate": 1.0}, "*": {"lr_upper": 0.1}})
    assert suggested.for_algorithm("fedbio", ["lr_upper"]) == {"lr_upper": 0.3}
    assert suggested.for_algorithm("simfbo", ["lr_upper", "lr_lower"]) == {"lr_upper": 0.1}
    assert fb.Suggestion().for_algorithm("fedbio", ["lr_upper"]) == {}
