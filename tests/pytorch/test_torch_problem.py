"""What problems of PyTorch models do: parameters, randomness, rows, solutions, and bad input."""

import copy
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedbilevel as fb
from fedbilevel.errors import FedbilevelError, FedbilevelWarning
from fedbilevel.pytorch import compatibility
from layers import Frozen, Nested, Tied

KEY = jax.random.key(0)


def mean_square(x: Any, y: Any, batch: Any) -> torch.Tensor:
    return (y(batch["row"]) ** 2).mean() + (x**2).sum()


def problem(net: Any, loss: Any = mean_square, x: Any = None, **more: Any) -> fb.Problem:
    return fb.torch.problem(loss, loss, x=torch.ones(1) if x is None else x, y=net, **more)


def on(made: fb.Problem, key: Any = None, shape: tuple[int, ...] = (4, 6)) -> jax.Array:
    """The upper loss at the start."""
    row = np.random.default_rng(0).normal(size=shape).astype("float32")
    return made.upper_on(*made.init(KEY), {"row": row}, key)


def rows(count: int = 5) -> dict[str, Any]:
    made = torch.Generator().manual_seed(count)
    return {"row": torch.randn(count, 6, generator=made), "label": torch.arange(count) % 2}


def task(made: fb.Problem, **more: Any) -> fb.Task:
    return fb.Task(made, [{"train": rows(5), "val": rows(4)}, {"train": rows(6), "val": rows(3)}], **more)


def test_the_names_are_those_of_the_module() -> None:
    net = Nested()
    _, y = problem(net).init(KEY)
    assert set(y) == {name for name, _ in net.named_parameters()}
    assert {name: a.shape for name, a in y.items()} == {n: tuple(p.shape) for n, p in net.named_parameters()}


def test_tied_parameters_are_one() -> None:
    net = Tied()
    _, y = problem(net).init(KEY)
    assert "a.weight" in y
    assert "b.weight" not in y
    fb.torch.load(net, {name: 0 * a + 3 for name, a in y.items()})
    assert net.b.weight is net.a.weight
    assert bool((net.b.weight == 3).all())


def test_frozen_parameters_stay() -> None:
    net = Frozen()
    before = copy.deepcopy(net)
    y = problem(net).init(KEY)[1]
    assert set(y) == {"head.weight", "head.bias"}
    fb.torch.load(net, {name: a + 1 for name, a in y.items()})
    assert torch.equal(net.body.weight, before.body.weight)
    assert torch.allclose(net.head.weight, before.head.weight + 1)


def test_the_users_module_is_not_touched() -> None:
    net = Nested()
    made = problem(net)
    before = on(made)
    assert net.seen is None  # a forward pass keeps something in the module
    with torch.no_grad():
        net.mean += 10
    assert on(made) == before


def test_x_may_be_a_module_and_both_may_be_several() -> None:
    first, second, head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def loss(x: Any, y: Any, batch: Any) -> torch.Tensor:
        hidden = torch.relu(x["body"][1](torch.relu(x["body"][0](batch["row"]))))
        return (y(hidden) ** 2).mean() * x["scale"].exp()

    made = problem(head, loss, {"body": [first, second], "scale": torch.tensor(0.5)})
    x = made.init(KEY)[0]
    assert set(x["body"][1]) == {"weight", "bias"}
    row = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 6)).astype("float32"))
    expected = (head(torch.relu(second(torch.relu(first(row))))) ** 2).mean() * np.exp(0.5)
    np.testing.assert_allclose(on(made), expected.item(), rtol=1e-5)
    solution = jax.tree.map(lambda a: a + 1, x)
    target = {"body": [first, second], "scale": torch.tensor(0.5)}
    loaded = fb.torch.load(target, solution)
    assert loaded is target
    np.testing.assert_allclose(first.weight.detach(), solution["body"][0]["weight"])
    np.testing.assert_allclose(loaded["scale"], 1.5)


def test_solutions_become_tensors() -> None:
    found = fb.torch.tensors({"a": jnp.arange(3.0), "b": [jnp.ones((), jnp.bfloat16)]})
    assert found["a"].dtype == torch.float64
    assert found["b"][0].dtype == torch.bfloat16
    found["a"][0] = 7  # a copy that may be changed


def test_modules_that_compute_their_weights_are_copied() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old way, which keeps a computed tensor in the module
        net = nn.utils.weight_norm(nn.Linear(6, 2))
    made = problem(net)
    assert set(made.init(KEY)[1]) == {"bias", "weight_g", "weight_v"}
    assert jnp.isfinite(on(made))


class TestNoise:
    net = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 2))

    def test_comes_from_the_batch(self) -> None:
        made = problem(self.net, noise=True)
        one, other = jax.random.split(KEY)
        assert on(made, one) == on(made, one)
        assert on(made, one) != on(made, other)

    def test_is_off_where_losses_are_evaluated(self) -> None:
        quiet = copy.deepcopy(self.net).eval()
        assert on(problem(self.net, noise=True)) == on(problem(quiet))

    def test_has_the_mean_of_the_quiet_network(self) -> None:
        net = nn.Dropout(0.25)
        made = problem(nn.ModuleList([net, nn.Linear(1, 1)]), lambda x, y, batch: y[0](batch["row"]).mean() + x.sum())
        made = fb.Problem(made.upper, made.lower, made.init, noise=True)
        ones = {"row": np.ones((2000, 6), "float32")}
        values = [float(made.upper_on(*made.init(KEY), ones, key)) - 1 for key in jax.random.split(KEY, 4)]
        assert abs(np.mean(values) - 1) < 0.02
        assert np.std(values) > 0

    def test_needs_a_word(self) -> None:
        with pytest.warns(FedbilevelWarning, match="y has dropout, which is off without noise=True"):
            made = problem(self.net)
        assert on(made) == on(problem(copy.deepcopy(self.net).eval()))

        def loud(x: Any, y: Any, batch: Any) -> torch.Tensor:
            return mean_square(x, y, batch) * torch.rand(())

        with pytest.raises(FedbilevelError, match=r"noise=True.*line \d+"):
            on(problem(nn.Linear(6, 2), loud))

    def test_other_random_numbers(self) -> None:
        def loud(x: Any, y: Any, batch: Any) -> torch.Tensor:
            row = batch["row"]
            if y.training:
                row = row + 0.1 * torch.randn_like(row) + torch.bernoulli(torch.full((6,), 0.5))
            return mean_square(x, y, {"row": row})

        made = problem(nn.Linear(6, 2), loud, noise=True)
        one, other = jax.random.split(KEY)
        assert on(made, one) == on(made, one)
        assert on(made, one) != on(made, other)
        assert jnp.isfinite(on(made))


class TestRows:
    def test_tensors_are_shared_not_copied(self) -> None:
        train = rows()
        made = fb.Task(problem(nn.Linear(6, 2)), [{"train": train, "val": rows()}])
        assert np.shares_memory(made.clients[0]["train"]["row"], train["row"].numpy())

    def test_tensors_in_lookups_stay_one_table(self) -> None:
        table = torch.randn(9, 6)
        part = lambda start: {"row": fb.Lookup(table, torch.arange(start, start + 3))}
        made = fb.Task(problem(nn.Linear(6, 2)), [{"train": part(m), "val": part(m + 1)} for m in range(3)])
        assert made.clients[0]["train"]["row"].table is made.clients[2]["val"]["row"].table

    def test_whole_numbers_and_truth_values(self) -> None:
        kinds: list[Any] = []

        def loss(x: Any, y: Any, batch: Any) -> torch.Tensor:
            kinds.append((batch["label"].dtype, batch["seen"].dtype))
            chosen = torch.where(batch["seen"], batch["label"], 0)
            return functional.cross_entropy(y(batch["row"]), chosen.long()) + (x**2).sum()

        part = {**rows(4), "seen": torch.tensor([True, False, True, True])}
        part["label"] = part["label"].to(torch.int16)
        fb.Task(problem(nn.Linear(6, 2), loss), [{"train": part, "val": part}])
        assert set(kinds) == {(torch.int16, torch.bool)}

    def test_what_numpy_cannot_read(self) -> None:
        bad = {"row": torch.zeros(3, 6, device="meta")}
        with pytest.raises(FedbilevelError, match=r"^clients: an array cannot be read by numpy: "):
            fb.Task(problem(nn.Linear(6, 2)), [{"train": bad, "val": bad}])

    def test_of_data_sets_and_loaders(self) -> None:
        made = rows(7)
        data = TensorDataset(made["row"], made["label"])
        found = fb.torch.rows(data, "row", "label")
        np.testing.assert_array_equal(found["row"], made["row"])
        np.testing.assert_array_equal(found["label"], made["label"])
        loaded = fb.torch.rows(DataLoader(data, batch_size=3, shuffle=True), "row", "label")
        assert sorted(loaded["row"][:, 0]) == sorted(found["row"][:, 0])

    def test_of_samples_with_names(self) -> None:
        class Named(Dataset[Any]):
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> dict[str, Any]:
                if index > 2:
                    raise IndexError
                return {"row": torch.full((2,), index), "label": index}

        found = fb.torch.rows(Named())
        assert found["label"].tolist() == [0, 1, 2]
        assert found["row"].shape == (3, 2)

    def test_bad_sources(self) -> None:
        data = TensorDataset(torch.zeros(3, 2), torch.zeros(3))
        with pytest.raises(FedbilevelError, match="samples have 2 parts: give names"):
            fb.torch.rows(data)
        with pytest.raises(FedbilevelError, match="needs a Dataset or a DataLoader, but got list"):
            fb.torch.rows([1, 2])
        uneven = DataLoader(
            data, batch_size=1, collate_fn=lambda batch: torch.zeros(1, len(batch) + int(torch.rand(()) > 2))
        )
        assert fb.torch.rows(uneven, "row")["row"].shape == (3, 1)


class TestBadInput:
    def test_modules(self) -> None:
        for given, said in (
            (nn.ReLU(), "nothing to train in ReLU: it has no parameters"),
            (nn.Linear(2, 2).requires_grad_(False), r"are frozen \(requires_grad=False\)"),
            (nn.LazyLinear(2), "y: the parameter 'weight' has no shape yet: call the module once"),
            (nn.Linear(2, 2, device="meta"), "is on the device 'meta'"),
            (torch.zeros(2, dtype=torch.complex64), "y is complex"),
            ({}, "y is empty"),
            (3.0, "y must be a tensor or a torch.nn.Module, or several, but has a float"),
        ):
            with pytest.raises(FedbilevelError, match=said):
                problem(given)

    def test_shared_parameters(self) -> None:
        net = nn.Linear(6, 2)
        with pytest.raises(FedbilevelError, match="x and y share parameters"):
            problem(net, x=nn.Sequential(net))

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (lambda y: None, "must return a tensor with one number, but returned nothing"),
            (lambda y: (y.weight.sum(), 1), "but returned a tuple"),
            (lambda y: 3, "but returned int"),
            (lambda y: y.weight.sum(0), r"must return one number, but returned an array of shape \(6,\)"),
            (lambda y: y.weight.sum().long(), "returned int64, which has no gradient"),
            (lambda y: torch.complex(y.weight.sum(), y.weight.sum()), "returned complex64, which has no gradient"),
            (lambda y: torch.tensor(1.0), "has no gradient in y"),
            (lambda y: y(torch.zeros(3, 5)).sum(), r"lower\(x, y, batch\) fails in y \(Linear\) \(.*line \d+"),
        ],
    )
    def test_losses(self, value: Any, said: str) -> None:
        with pytest.raises(FedbilevelError, match=said):
            task(problem(nn.Linear(6, 2), lambda x, y, batch: value(y)))

    def test_writing_into_what_is_outside(self) -> None:
        outside = torch.zeros(4, 2)

        def loss(x: Any, y: Any, batch: Any) -> torch.Tensor:
            outside[:] = y(batch["row"])
            return outside.sum()

        with pytest.raises(FedbilevelError, match="make the tensor in the loss"):
            on(problem(nn.Linear(6, 2), loss))

    def test_solutions_of_something_else(self) -> None:
        with pytest.raises(FedbilevelError, match="not one of this module: see 'bias'"):
            fb.torch.load(nn.Linear(2, 2), {"weight": jnp.zeros((2, 2))})
        with pytest.raises(FedbilevelError, match=r"'weight' has the shape \(2, 2\).*choose one"):
            fb.torch.load(nn.Linear(2, 2, bias=False), {"weight": jnp.zeros((5, 2, 2))})

    def test_double_precision_where_jax_has_none(self) -> None:
        with jax.enable_x64(False), pytest.warns(FedbilevelWarning, match="jax_enable_x64"):
            problem(nn.Linear(6, 2).double())


def test_a_loss_for_a_gpu_runs_without_one() -> None:
    def loss(x: Any, y: Any, batch: Any) -> torch.Tensor:
        row = batch["row"].to("cuda").cuda() + torch.ones(6, device="cuda")
        return (y(row) ** 2).mean().cpu() + x.sum()

    assert jnp.isfinite(on(problem(nn.Linear(6, 2), loss)))


def test_gradients_are_checked_against_pytorch() -> None:
    found = fb.torch.check(task(problem(nn.Linear(6, 2))))
    assert set(found) == {"lower", "upper", "gradient of lower", "gradient of upper"}

    def loss(x: Any, y: Any, batch: Any) -> torch.Tensor:  # as if torchax computed something else
        extra = 0.0 if type(batch["row"]) is torch.Tensor else 0.1
        return mean_square(x, y, batch) * (1 + extra)

    with pytest.raises(FedbilevelError, match=r"the lower differs from PyTorch's by 1.0e-01"):
        fb.torch.check(task(problem(nn.Linear(6, 2), loss)))


def test_the_users_code_runs_once_per_shape() -> None:
    seen: list[int] = []

    def loss(x: Any, y: Any, batch: Any) -> torch.Tensor:
        seen.append(len(batch["row"]))
        return mean_square(x, y, batch)

    made = problem(nn.Linear(6, 2), loss)
    for _ in range(3):
        jax.grad(made.upper, (0, 1))(*made.init(KEY), {"row": np.ones((4, 6))})
    assert seen == [4]


def test_placeholders_only_for_what_is_gone() -> None:
    for name in compatibility.PLACEHOLDERS:
        operation, _, overload = name.rpartition(".")
        with pytest.raises(AttributeError):
            getattr(getattr(torch.ops.aten, operation.removeprefix("aten.")), overload)
    made = len(compatibility.PLACEHOLDERS)
    with compatibility.placeholders():
        assert torch.ops.aten.add.Tensor.name() == "aten::add.Tensor"
        assert len(compatibility.PLACEHOLDERS) == made
        assert isinstance(torch.ops.aten.add.no_such_overload, compatibility.Placeholder)
    assert compatibility.PLACEHOLDERS.pop() == "aten.add.no_such_overload"
    with pytest.raises(AttributeError):
        _ = torch.ops.aten.add.no_such_overload


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(FedbilevelError, match=r"^PyTorch models need PyTorch: pip install 'fedbilevel\[torch\]'\.$"):
        _ = fb.torch
