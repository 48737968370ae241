"""How much the engine costs: ``python -m benchmarks.engine`` prints ratios measured in one interleaved run.

1. A FedBiO round (MLP 784-200-10, 10 clients, batch 64, 5 local steps) against the same arithmetic written by hand in
   JAX with nothing of the library in it, and against the same arithmetic as a plain PyTorch autograd loop over clients
   (where torch is installed: ``pip install '.[benchmark]'``).
2. A round with 10 of 10,000 clients against a round with 10 of 100, 60 samples each; and the peak memory of both.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.engines.participation import Participation, Uniform
from fedbilevel.engines.simulation import Simulation
from fedbilevel.models import cross_entropy, mlp, squared_norm

CLIENTS, ROWS, BATCH, LOCAL_STEPS = 10, 600, 64, 5
ETA, GAMMA, TAU, L2 = 0.1, 0.1, 0.1, 1e-3
NET = mlp(784, 200, 10)


def upper(x: Any, y: Any, batch: Any) -> jax.Array:
    """Validation loss."""
    return cross_entropy(NET.apply(y, batch["image"].astype(jnp.float32)), batch["label"]).mean()


def lower(x: Any, y: Any, batch: Any) -> jax.Array:
    """Training loss with one weight per class."""
    losses = cross_entropy(NET.apply(y, batch["image"].astype(jnp.float32)), batch["label"])
    return (jax.nn.sigmoid(x[batch["label"]]) * losses).mean() + L2 / 2 * squared_norm(y)


def init(key: jax.Array) -> tuple[Any, Any]:
    """Zero weights and a fresh network."""
    return jnp.zeros(10), NET.init(key)


PROBLEM = fb.Problem(upper, lower, init)


def make_task(clients: int, rows: int, kind: Any) -> fb.Task:
    """Random images; what they show does not matter for the time."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 2, (clients * rows, 784), np.uint8).astype(kind, copy=False)
    labels = rng.integers(0, 10, clients * rows).astype(np.int32)
    part = lambda m: {"image": images[m * rows : (m + 1) * rows], "label": labels[m * rows : (m + 1) * rows]}
    held = {"image": images[:rows], "label": labels[:rows]}
    return fb.Task(PROBLEM, [{"train": part(m), "val": held} for m in range(clients)], batch_size=BATCH)


def of_library(task: fb.Task, cohort: Participation | None = None) -> Callable[[int], None]:
    """Rounds by the simulator."""
    engine = Simulation(task, fb.FedBiO(ETA, GAMMA, TAU, LOCAL_STEPS), cohort)
    state = [engine.start(seed=0)]

    def rounds(count: int) -> None:
        state[0] = engine.advance(state[0], count)
        jax.block_until_ready(state[0])

    return rounds


def by_hand(task: fb.Task) -> Callable[[int], None]:
    """The same rounds as one would write them for this one problem."""
    x0, y0 = init(jax.random.key(0))
    tree = jax.tree.map

    def draw(shards: Any, m: Any, key: jax.Array) -> Any:
        index = shards.start[m] + jax.random.randint(key, (BATCH,), 0, ROWS)
        return tree(lambda a: a[index], shards.arrays)

    def local_step(data: Any, m: Any, z: Any, key: jax.Array) -> Any:
        x, y, u = z
        k = jax.random.split(key, 5)
        omega = jax.grad(lower, 1)(x, y, draw(data.train, m, k[0]))
        fx = jax.grad(upper, 0)(x, y, draw(data.val, m, k[1]))
        g1, g2 = draw(data.train, m, k[2]), draw(data.train, m, k[4])
        cross = jax.jvp(lambda y: jax.grad(lower, 0)(x, y, g1), (y,), (u,))[1]
        fy = jax.grad(upper, 1)(x, y, draw(data.val, m, k[3]))
        hessian = jax.jvp(lambda y: jax.grad(lower, 1)(x, y, g2), (y,), (u,))[1]
        return (
            x - ETA * (fx - cross),
            tree(lambda a, b: a - GAMMA * b, y, omega),
            tree(lambda a, h, b: a - TAU * (h - b), u, hessian, fy),
        )

    def one_round(data: Any, z: Any, key: jax.Array) -> Any:
        def visit(total: Any, m: Any) -> tuple[Any, None]:
            own = jax.random.fold_in(key, m)
            end = jax.lax.fori_loop(0, LOCAL_STEPS, lambda i, z: local_step(data, m, z, jax.random.fold_in(own, i)), z)
            return tree(lambda t, a, b: t + (a - b) / CLIENTS, total, end, z), None

        total, _ = jax.lax.scan(visit, tree(jnp.zeros_like, z), jnp.arange(CLIENTS))
        return tree(jnp.add, z, total)

    @jax.jit
    def many(data: Any, z: Any, key: jax.Array, count: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda r, z: one_round(data, z, jax.random.fold_in(key, r)), z)

    state = [(x0, y0, tree(jnp.zeros_like, y0))]

    def rounds(count: int) -> None:
        state[0] = many(task.data, state[0], jax.random.key(1), count)
        jax.block_until_ready(state[0])

    return rounds


def by_torch(task: fb.Task) -> Callable[[int], None] | None:
    """The same arithmetic as research code usually does it."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    split = {
        name: {k: torch.from_numpy(np.array(v)) for k, v in shards.arrays.items()}
        for name, shards in (("train", task.data.train), ("val", task.data.val))
    }
    x: Any = torch.zeros(10)
    y: list[Any] = [
        torch.from_numpy(np.array(a)) for layer in init(jax.random.key(0))[1] for a in (layer["w"], layer["b"])
    ]
    state: list[Any] = [(x, y, [torch.zeros_like(a) for a in y])]

    def draw(name: str, m: int) -> tuple[Any, Any]:
        index = m * ROWS + torch.randint(0, ROWS, (BATCH,))
        return split[name]["image"][index], split[name]["label"][index].long()

    def losses(y: list[Any], batch: tuple[Any, Any]) -> Any:
        hidden = torch.relu(batch[0] @ y[0] + y[1])
        return functional.cross_entropy(hidden @ y[2] + y[3], batch[1], reduction="none")

    def train(x: Any, y: list[Any], batch: tuple[Any, Any]) -> Any:
        return (torch.sigmoid(x)[batch[1]] * losses(y, batch)).mean() + L2 / 2 * sum((a * a).sum() for a in y)

    def product(x: Any, y: list[Any], u: list[Any], m: int, target: list[Any]) -> Any:
        slope = torch.autograd.grad(train(x, y, draw("train", m)), y, create_graph=True)
        along: Any = sum((a * b).sum() for a, b in zip(slope, u, strict=True))
        return torch.autograd.grad(along, target)

    def local_step(x: Any, y: list[Any], u: list[Any], m: int) -> tuple[Any, list[Any], list[Any]]:
        x, y = x.detach().requires_grad_(), [a.detach().requires_grad_() for a in y]
        omega = torch.autograd.grad(train(x, y, draw("train", m)), y)
        cross = product(x, y, u, m, [x])[0]  # the upper loss does not depend on x directly
        fy = torch.autograd.grad(losses(y, draw("val", m)).mean(), y)
        hessian = product(x, y, u, m, y)
        with torch.no_grad():
            return (
                x + ETA * cross,
                [a - GAMMA * b for a, b in zip(y, omega, strict=True)],
                [a - TAU * (h - b) for a, h, b in zip(u, hessian, fy, strict=True)],
            )

    def rounds(count: int) -> None:
        for _ in range(count):
            x, y, u = state[0]
            ends = []
            for m in range(CLIENTS):
                z = (x, y, u)
                for _ in range(LOCAL_STEPS):
                    z = local_step(*z, m)
                ends.append(z)
            mean = lambda parts: sum(parts) / CLIENTS
            with torch.no_grad():
                state[0] = (
                    mean([e[0] for e in ends]),
                    [mean(a) for a in zip(*(e[1] for e in ends), strict=True)],
                    [mean(a) for a in zip(*(e[2] for e in ends), strict=True)],
                )

    return rounds


def interleaved(candidates: dict[str, Callable[[int], None]], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds per round of each candidate, taken in turns. One round before is not counted: whoever comes after
    PyTorch finds its threads still spinning, which costs that candidate some 5 % of three rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            run(1)
            began = time.perf_counter()
            run(rounds)
            times[name].append(1e3 * (time.perf_counter() - began) / rounds)
    return times


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """The median over repeats of time of a / time of b."""
    return statistics.median(p / q for p, q in zip(times[a], times[b], strict=True))


def report(title: str, times: dict[str, list[float]]) -> None:
    """Medians and minima."""
    print(title)
    for name, each in times.items():
        print(f"  {name:<28}{statistics.median(each):9.2f} ms per round (best {min(each):.2f})")


def use_threads(count: int) -> None:
    """One thread for XLA, or as many as it likes; to be called before JAX starts its backend, which reads this."""
    if count == 1:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"


def peak_memory(clients: int) -> float:
    """Megabytes of a process that runs 20 rounds with 10 of so many clients."""
    command = [sys.executable, "-m", "benchmarks.engine", "--memory-of", str(clients)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        task = make_task(options.memory_of, 60, np.uint8)
        of_library(task, Uniform(10))(20)
        # Not ru_maxrss, which a process inherits from the one that started it.
        status = Path("/proc/self/status").read_text()
        print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
        return

    task = make_task(CLIENTS, ROWS, np.float32)
    candidates: dict[str, Callable[[int], None]] = {"fedbilevel": of_library(task), "by hand in JAX": by_hand(task)}
    torch_rounds = by_torch(task)
    if torch_rounds is not None:
        candidates["plain PyTorch"] = torch_rounds
    times = interleaved(candidates, 3, options.repeats)
    report("FedBiO, MLP 784-200-10, 10 clients, batch 64, 5 local steps", times)
    print(f"  fedbilevel / by hand:       {ratio(times, 'fedbilevel', 'by hand in JAX'):.3f}   (at most 1.05)")
    if torch_rounds is not None:
        print(f"  plain PyTorch / fedbilevel: {ratio(times, 'plain PyTorch', 'fedbilevel'):.2f}    (at least 2)")
    else:
        print("  plain PyTorch: not installed (pip install '.[benchmark]')")

    sizes = (100, 10_000)
    crowds = {f"10 of {n:,} clients": of_library(make_task(n, 60, np.uint8), Uniform(10)) for n in sizes}
    times = interleaved(crowds, 5, options.repeats)
    report("\nFedBiO, the same model, 10 clients per round, 60 samples per client", times)
    small, large = crowds
    print(f"  10,000 / 100 clients:       {ratio(times, large, small):.3f}   (at most 1.20)")
    data = [n * (60 * 784 + 60 * 4) * 2 / 2**20 for n in sizes]
    for n, size in zip(sizes, data, strict=True):
        print(f"  peak memory, {n:>6,} clients: {peak_memory(n):7.0f} MB, of which data {size:.0f} MB (train and val)")


if __name__ == "__main__":
    main()
