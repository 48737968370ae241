"""Larger models from a random start: a ResNet as representation, and a frozen transformer with adapters."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedbilevel as fb

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """Two convolutions with group normalization, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(2, outputs), nn.GroupNorm(2, outputs)])
        self.around = nn.Conv2d(inputs, outputs, 1, stride) if (stride, inputs) != (1, outputs) else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.norms[0](self.first(images)), inplace=True)
        return functional.relu(self.norms[1](self.second(hidden)) + self.around(images))


def resnet18(width: int) -> nn.Sequential:
    """ResNet-18 with group normalization, as many channels in its first stage as ``width``."""
    stages = [
        layer
        for n in range(4)
        for layer in (
            Block(width * 2 ** max(n - 1, 0), width * 2**n, 1 if n == 0 else 2),
            Block(width * 2**n, width * 2**n, 1),
        )
    ]
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.GroupNorm(2, width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def solved(problem: fb.Problem, rows: Any) -> fb.Result:
    """The losses agree with PyTorch's, and two rounds change x or y."""
    clients = [{"train": rows(8), "val": rows(8)} for _ in range(2)]
    task = fb.Task(problem, clients, batch_size=4)
    fb.torch.check(task, rows=2)
    steps = {"lr_upper": 0.01, "lr_lower": 0.05, "lr_adjoint": 0.05}
    return fb.solve(task, fb.FedBiO(**steps, local_steps=1), rounds=2)


def test_hyper_representation_with_a_resnet() -> None:
    torch.manual_seed(0)
    backbone, head = resnet18(4), nn.Linear(32, 3)
    before = {name: p.detach().clone() for name, p in backbone.named_parameters()}

    def upper(x: nn.Module, y: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(y(x(batch["image"])), batch["label"])

    def lower(x: nn.Module, y: nn.Module, batch: Any) -> torch.Tensor:
        return upper(x, y, batch) + 0.01 * sum((p**2).sum() for p in y.parameters())

    rows = lambda n: {"image": torch.randn(n, 3, 32, 32), "label": torch.randint(0, 3, (n,))}
    result = solved(fb.torch.problem(upper, lower, x=backbone, y=head), rows)
    fb.torch.load(backbone, result.x)
    assert any(not torch.equal(before[name], p) for name, p in backbone.named_parameters())


class Adapted(nn.Module):
    """A linear layer that stays as it is, plus a product of two small matrices."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_frozen_transformer_with_adapters() -> None:
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    settings = transformers.BertConfig(vocab_size=50, num_labels=3, max_position_embeddings=16, **shape)
    net = transformers.BertForSequenceClassification(settings).requires_grad_(False).eval()
    for layer in net.bert.encoder.layer:
        layer.attention.self.query = Adapted(layer.attention.self.query)
        layer.attention.self.value = Adapted(layer.attention.self.value)
    net.classifier.requires_grad_(True)

    def upper(x: torch.Tensor, y: nn.Module, batch: Any) -> torch.Tensor:
        logits = y(input_ids=batch["words"], attention_mask=batch["seen"]).logits
        return functional.cross_entropy(logits, batch["label"])

    def lower(x: torch.Tensor, y: nn.Module, batch: Any) -> torch.Tensor:
        trained = [p for name, p in y.named_parameters() if "up" in name or "down" in name or "classifier" in name]
        return upper(x, y, batch) + x.exp() * sum((p**2).sum() for p in trained)

    def rows(n: int) -> dict[str, Any]:
        seen = (torch.arange(6) < torch.randint(2, 7, (n, 1))).long()
        return {"words": torch.randint(0, 50, (n, 6)), "seen": seen, "label": torch.randint(0, 3, (n,))}

    result = solved(fb.torch.problem(upper, lower, x=torch.tensor(-4.0), y=net), rows)
    assert len(result.y) == 2 * 2 * 2 + 2
    assert all(np.isfinite(a).all() for a in result.y.values())
