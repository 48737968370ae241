"""How fast PyTorch models are: ``python -m benchmarks.pytorch`` prints ratios from one interleaved run.

1. A FedBiO round (MLP 784-200-10, 10 clients, batch 64, 5 local steps) with the losses of ``benchmarks.engine`` written
   in PyTorch, against the same arithmetic as a plain PyTorch loop over clients, and against the losses in JAX.
2. A gradient step and a Hessian product of conv4 (75 images of 28 x 28) and LeNet-5 (64 images), each an unchanged
   ``torch.nn.Sequential``, in a compiled loop, against the same module in plain PyTorch.

Convolutional networks use one thread unless ``--threads`` says otherwise, as in ``benchmarks.models``.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.nn import functional

import fedbilevel as fb
from benchmarks.engine import (
    BATCH,
    CLIENTS,
    L2,
    ROWS,
    by_torch,
    interleaved,
    make_task,
    of_library,
    ratio,
    report,
    use_threads,
)
from benchmarks.models import RATE


def conv4() -> nn.Sequential:
    """Four blocks of a 3 x 3 convolution with 64 filters, ReLU and pooling."""
    block = lambda channels: [nn.Conv2d(channels, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*block(1), *block(64), *block(64), *block(64), nn.Flatten(), nn.Linear(64, 5))


def lenet5() -> nn.Sequential:
    """LeNet-5 with ReLU and max-pooling."""
    first = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    dense = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*first, *dense)


def cross_entropy(x: Any, y: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of a classifier."""
    return functional.cross_entropy(y(batch["image"]), batch["label"])


def weighted(x: torch.Tensor, y: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Training loss with one weight per class, as in ``benchmarks.engine``."""
    losses = functional.cross_entropy(y(batch["image"]), batch["label"], reduction="none")
    decay = sum((p * p).sum() for p in y.parameters())
    return (torch.sigmoid(x)[batch["label"]] * losses).mean() + L2 / 2 * decay


def of_module(net: nn.Module, batch: dict[str, np.ndarray], second: bool) -> Callable[[int], None]:
    """Steps along the gradient, or along a Hessian product, traced and compiled."""
    problem = fb.torch.problem(cross_entropy, cross_entropy, x=torch.zeros(1), y=net)
    x, start = problem.init(jax.random.key(0))
    gradient = jax.grad(lambda y: problem.lower(x, y, batch))
    direction = (lambda y: jax.jvp(gradient, (y,), (y,))[1]) if second else gradient
    step = lambda i, y: jax.tree.map(lambda a, b: a - RATE * b, y, direction(y))
    many = jax.jit(lambda y, count: jax.lax.fori_loop(0, count, step, y))
    return lambda count: jax.block_until_ready(many(start, count))


def of_plain(net: nn.Module, batch: dict[str, np.ndarray], second: bool) -> Callable[[int], None]:
    """The same by autograd."""
    y, given = list(net.parameters()), {name: torch.from_numpy(part) for name, part in batch.items()}

    def rounds(count: int) -> None:
        for _ in range(count):
            slope: Any = torch.autograd.grad(cross_entropy(None, net, given), y, create_graph=second)
            if second:
                along: Any = sum((a * b.detach()).sum() for a, b in zip(slope, y, strict=True))
                slope = torch.autograd.grad(along, y)
            with torch.no_grad():
                for a, b in zip(y, slope, strict=True):
                    a -= RATE * b

    return rounds


def of_network(make: Callable[[], nn.Sequential], rows: int, classes: int, repeats: int, threads: int) -> None:
    """Measure and print one convolutional network."""
    rng = np.random.default_rng(0)
    batch = {"image": rng.random((rows, 1, 28, 28), np.float32), "label": rng.integers(0, classes, rows)}
    for second in (False, True):
        net = make()
        candidates = {"fedbilevel": of_module(net, batch, second), "plain PyTorch": of_plain(net, batch, second)}
        times = interleaved(candidates, 3, repeats)
        what = "Hessian product" if second else "gradient step"
        report(f"\n{make.__name__}, {rows} images of 28 x 28, {what}, threads: {threads}", times)
        print(f"  fedbilevel / plain PyTorch: {ratio(times, 'fedbilevel', 'plain PyTorch'):.2f}    (at most 1.0)")


def of_rounds(repeats: int) -> None:
    """Measure and print FedBiO rounds of an MLP."""
    own = make_task(CLIENTS, ROWS, np.float32)
    net = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    problem = fb.torch.problem(cross_entropy, weighted, x=torch.zeros(10), y=net)
    plain = by_torch(own)
    assert plain is not None
    candidates = {
        "PyTorch losses": of_library(fb.Task(problem, own.clients, batch_size=BATCH)),
        "JAX losses": of_library(own),
        "plain PyTorch": plain,
    }
    times = interleaved(candidates, 3, repeats)
    report("FedBiO, MLP 784-200-10, 10 clients, batch 64, 5 local steps", times)
    print(f"  PyTorch losses / JAX losses:    {ratio(times, 'PyTorch losses', 'JAX losses'):.2f}")
    print(f"  plain PyTorch / PyTorch losses: {ratio(times, 'plain PyTorch', 'PyTorch losses'):.2f}    (at least 2.5)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["mlp", "networks"])
    options = parser.parse_args()
    if options.only != "mlp":
        use_threads(options.threads)  # of JAX, for all that follows
    else:
        of_rounds(options.repeats)
        return
    torch.set_num_threads(options.threads)
    of_network(conv4, 75, 5, options.repeats, options.threads)
    of_network(lenet5, 64, 10, options.repeats, options.threads)


if __name__ == "__main__":
    main()
