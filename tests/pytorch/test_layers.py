"""Every layer of the list gives the value and the gradient that PyTorch gives, or is refused in one sentence."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.errors import FedbilevelError, FedbilevelWarning
from fedbilevel.pytorch.agreement import differences
from fedbilevel.pytorch.problem import Loss
from layers import SECTIONS

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
VALUES = "use torch.where instead of if"
REFUSED = {
    "AdaptiveMaxPool2d": "torchax has no operation aten.adaptive_max_pool2d in y.layers.0",
    "ctc_loss": "torchax has no operation aten._ctc_loss",
    "if on the values of tensors": VALUES,
    "selecting rows by a mask": VALUES,
    "item(), numpy()": VALUES,
}
ALWAYS = ("convolutions", "ways to write a module")
CASES = [
    pytest.param(section, name, marks=() if section in ALWAYS or name in REFUSED else pytest.mark.slow, id=name)
    for section, cases in SECTIONS.items()
    for name in cases
]


def weighted_sum(x: Any, y: Any, batch: Any) -> torch.Tensor:
    found = y(batch["rows"])
    weights = torch.linspace(0.5, 1.5, found.numel(), dtype=found.dtype).reshape(found.shape)
    return (found * weights).sum() + (x * x).sum()


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.FedbilevelWarning")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch's own
@pytest.mark.parametrize(("section", "name"), CASES)
def test_layer(section: str, name: str) -> None:
    torch.manual_seed(0)
    net, rows = SECTIONS[section][name]()
    loss = fb.torch.problem(weighted_sum, weighted_sum, x=torch.ones(2), y=net).upper
    assert isinstance(loss, Loss)
    if name in REFUSED:
        with pytest.raises(FedbilevelError, match=re.escape(REFUSED[name])):
            differences(loss, {"rows": rows.numpy()})
    else:
        assert max(differences(loss, {"rows": rows.numpy()}).values()) < 1e-4


def test_the_table_of_the_page_is_this_list() -> None:
    text = PAGE.read_text()
    for section, cases in SECTIONS.items():
        (works, not_yet) = re.findall(rf"^\| {re.escape(section)} \| (.*) \| (.*) \|$", text, re.MULTILINE)[0]
        assert works.split("; ") == [f"`{name}`" for name in cases if name not in REFUSED]
        assert not_yet == ("; ".join(f"`{name}`" for name in cases if name in REFUSED) or "-")


def test_batch_normalization_says_what_it_does() -> None:
    with pytest.warns(FedbilevelWarning, match="use GroupNorm instead, or call eval"):
        fb.torch.problem(weighted_sum, weighted_sum, x=torch.ones(2), y=torch.nn.BatchNorm1d(3))
