"""How fast the convolutional networks are: ``python -m benchmarks.models`` prints ratios from one interleaved run.

1. One 3 x 3 convolution of 64 filters and its gradients in a compiled loop over clients: by patches and a matrix
   product (``fedbilevel.models.convolve``) against ``lax.conv_general_dilated``.
2. A gradient step and a Hessian product of conv4 (75 images of 28 x 28) and LeNet-5 (64 images), in a compiled loop,
   against the same arithmetic in plain PyTorch (where torch is installed: ``pip install '.[benchmark]'``).

All use one thread unless ``--threads`` says otherwise: where other programs share the cores, two threads of PyTorch
wait for each other, and the ratio says nothing about the arithmetic.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.engine import interleaved, ratio, report, use_threads
from fedbilevel.models import Model, conv4, convolve, cross_entropy, lenet5

RATE = 1e-3


def of_xla(images: jax.Array, filters: jax.Array) -> jax.Array:
    """XLA's own convolution."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, filters, (1, 1), ((1, 1), (1, 1)), dimension_numbers=layout)


def over_clients(convolution: Callable[..., jax.Array], clients: int = 2) -> Callable[[int], None]:
    """The gradients of one convolution for several clients, one after the other in a compiled loop."""
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.random((clients, 25, 14, 14, 64), np.float32))
    filters = jnp.asarray(rng.random((3, 3, 64, 64), np.float32) / 300)
    loss = lambda images, filters: jnp.sum(jnp.square(convolution(images, filters)))

    @jax.jit
    def visit_all(filters: jax.Array) -> jax.Array:
        def visit(total: jax.Array, own: jax.Array) -> tuple[jax.Array, None]:
            of_images, of_filters = jax.grad(loss, (0, 1))(own, filters)
            return total + of_filters + of_images.sum(), None

        return jax.lax.scan(visit, jnp.zeros_like(filters), images)[0]

    def rounds(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(visit_all(filters))

    return rounds


def batch(rows: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels."""
    rng = np.random.default_rng(0)
    return rng.random((rows, 28, 28, 1), np.float32), rng.integers(0, classes, rows)


def of_library(model: Model, images: np.ndarray, labels: np.ndarray, second: bool) -> Callable[[int], None]:
    """Steps along the gradient, or along a Hessian product."""
    loss = lambda y: cross_entropy(model.apply(y, jnp.asarray(images)), jnp.asarray(labels)).mean()
    gradient = jax.grad(loss)
    direction = (lambda y: jax.jvp(gradient, (y,), (y,))[1]) if second else gradient
    step = lambda i, y: jax.tree.map(lambda a, b: a - RATE * b, y, direction(y))
    many = jax.jit(lambda y, count: jax.lax.fori_loop(0, count, step, y))
    start = model.init(jax.random.key(0))
    return lambda count: jax.block_until_ready(many(start, count))


def of_torch(name: str, model: Model, images: np.ndarray, labels: np.ndarray, second: bool) -> Callable[[int], None]:
    """The same in PyTorch, from the same weights (of the first dense layer the rows are in another order)."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    parameters: Any = model.init(jax.random.key(0))
    flat = [layer[part] for layer in (*parameters["conv"], *parameters["dense"]) for part in "wb"]
    tensor = lambda a: torch.from_numpy(np.array(np.transpose(a, (3, 2, 0, 1)) if a.ndim == 4 else a, order="C"))
    start: list[Any] = [tensor(a) for a in flat]
    inputs, target = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels)
    paddings = (1, 1, 1, 1) if name == "conv4" else (2, 0)

    def loss(y: list[Any]) -> Any:
        hidden, rest = inputs, y
        for padding in paddings:
            hidden, rest = functional.conv2d(hidden, rest[0], rest[1], padding=padding), rest[2:]
            hidden = functional.max_pool2d(functional.relu(hidden), 2)
        hidden = hidden.flatten(1)
        while len(rest) > 2:
            hidden, rest = functional.relu(hidden @ rest[0] + rest[1]), rest[2:]
        return functional.cross_entropy(hidden @ rest[0] + rest[1], target)

    def rounds(count: int) -> None:
        y = start
        for _ in range(count):
            y = [a.detach().requires_grad_() for a in y]
            slope = torch.autograd.grad(loss(y), y, create_graph=second)
            if second:
                along: Any = sum((a * b.detach()).sum() for a, b in zip(slope, y, strict=True))
                slope = torch.autograd.grad(along, y)
            with torch.no_grad():
                y = [a - RATE * b for a, b in zip(y, slope, strict=True)]

    return rounds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    use_threads(options.threads)
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        torch = None

    times = interleaved({"patches": over_clients(convolve_padded), "lax.conv": over_clients(of_xla)}, 1, 3)
    report("Gradients of one 3 x 3 convolution, 25 x 14 x 14 x 64, for 2 clients in lax.scan", times)
    print(f"  lax.conv / patches: {ratio(times, 'lax.conv', 'patches'):.1f}")

    if torch is not None:
        torch.set_num_threads(options.threads)
    for name, model, rows, classes in (("conv4", conv4(outputs=5), 75, 5), ("lenet5", lenet5(), 64, 10)):
        for second in (False, True):
            data = batch(rows, classes)
            candidates = {"fedbilevel": of_library(model, *data, second)}
            if torch is not None:
                candidates["plain PyTorch"] = of_torch(name, model, *data, second)
            times = interleaved(candidates, 3, options.repeats)
            what = "Hessian product" if second else "gradient step"
            report(f"\n{name}, {rows} images of 28 x 28, {what}, threads: {options.threads}", times)
            if torch is not None:
                found = ratio(times, "fedbilevel", "plain PyTorch")
                print(f"  fedbilevel / plain PyTorch: {found:.2f}    (at most 1.0)")
    if torch is None:
        print("\nplain PyTorch: not installed (pip install '.[benchmark]')")


def convolve_padded(images: jax.Array, filters: jax.Array) -> jax.Array:
    """Ours, of the same size as the images."""
    return convolve(images, filters, padding=1)


if __name__ == "__main__":
    main()
