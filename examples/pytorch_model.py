"""A PyTorch model, unchanged, trained by six parties who learn together which sources of their data to trust.

x weights three sources, of which one is careful, one noisy, and one follows another rule; y is the module. Run it:
``python examples/pytorch_model.py`` (``pip install '.[torch]'``).
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import fedbilevel as fb


def upper(x: torch.Tensor, y: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """How good the model is on trusted rows."""
    return functional.cross_entropy(y(batch["features"]), batch["label"])


def lower(x: torch.Tensor, y: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the model is trained for: rows count as much as their source."""
    losses = functional.cross_entropy(y(batch["features"]), batch["label"], reduction="none")
    weight = 3 * torch.softmax(x, 0)  # at x = 0 all count equally
    return (weight[batch["source"]] * losses).mean() + 0.01 * sum((p**2).sum() for p in y.parameters())


def rows(count: int, sources: int) -> dict[str, torch.Tensor]:
    """Rows from the first so many sources."""
    features, source = torch.randn(count, 5), torch.randint(0, sources, (count,))
    rule = torch.where(source == 2, features[:, 2], features[:, 0] + features[:, 1])
    noise = torch.where(source == 1, 3.0, 0.3) * torch.randn(count)
    return {"features": features, "source": source, "label": (rule + noise > 0).long()}


def main() -> None:
    """Solve and print."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    clients = [{"train": rows(120, 3), "val": rows(40, 1)} for _ in range(6)]
    test = rows(2000, 1)

    def metrics(x: Any, y: Any) -> dict[str, float]:
        with torch.no_grad():
            predicted = fb.torch.load(net, y)(test["features"]).argmax(1)
        return {"accuracy": float((predicted == test["label"]).float().mean())}

    problem = fb.torch.problem(upper, lower, x=torch.zeros(3), y=net)
    task = fb.Task(problem, clients, batch_size=32, metrics=metrics)
    fedbio = fb.FedBiO(lr_upper=0.5, lr_lower=0.3, lr_adjoint=0.3)
    result = fb.solve(task, fedbio, rounds=300)
    plain = fb.solve(task, fb.FedAvg(lr_lower=0.3), rounds=300)  # trains y at x = 0

    print(f"accuracy without x: {plain.metrics['accuracy']:.2f}")
    print(f"accuracy with x: {result.metrics['accuracy']:.2f}")
    weights = 3 * torch.softmax(fb.torch.tensors(result.x), 0)
    print("weights of the sources:", *(f"{float(weight):.2f}" for weight in weights))


if __name__ == "__main__":
    main()
