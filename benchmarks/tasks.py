"""How far a round is from its floor: ``python -m benchmarks.tasks [TASK ...]`` prints, for every task as the command
line runs it by default, the time of a round and the share of it that matrix products take.

The products are counted in the traced round (shapes, and how often loops repeat them). Each shape is then timed alone,
in a compiled loop like the one that it comes from. So the floor is what the round would take if everything else were
free. It can be a little too high: products that the compiler finds to be equal are computed once in the round.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.engine import use_threads
from fedbilevel.engines.participation import participation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.runs.experiment import Experiment
from fedbilevel.tasks import TASKS


class Product(NamedTuple):
    """One kind of matrix product: the shapes of its factors, which axes it joins, and its type."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    axes: Any
    kind: str

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        (joined, _), (shared, _) = self.axes
        rest = np.prod([n for axis, n in enumerate(self.right) if axis not in (*self.axes[0][1], *self.axes[1][1])])
        return 2.0 * float(np.prod(self.left)) * float(rest) if joined or shared else 0.0


def inner(value: Any) -> Iterator[Any]:
    """The programs inside a parameter of an operation."""
    for part in value if isinstance(value, tuple | list) else (value,):
        part = getattr(part, "jaxpr", part)
        if hasattr(part, "eqns"):
            yield part


def products(program: Any, times: int = 1) -> Counter[Product]:
    """All matrix products of a traced program; the loop over rounds counts once."""
    found: Counter[Product] = Counter()
    for operation in program.eqns:
        if operation.primitive.name == "dot_general":
            left, right = (v.aval for v in operation.invars)
            found[Product(left.shape, right.shape, operation.params["dimension_numbers"], str(left.dtype))] += times
            continue
        repeats = operation.params["length"] if operation.primitive.name == "scan" else 1
        for parameter in operation.params.values():
            for part in inner(parameter):
                found += products(part, times * repeats)
    return found


def alone(product: Product) -> Callable[[int], None]:
    """The product so many times, in a compiled loop."""
    rng = np.random.default_rng(0)
    left, right = (jnp.asarray(rng.random(shape), product.kind) for shape in (product.left, product.right))

    @jax.jit
    def many(left: jax.Array, right: jax.Array, count: jax.Array) -> jax.Array:
        def step(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            left, _ = lax.optimization_barrier(carry)  # so that no product can be taken out of the loop
            return left, lax.dot_general(left, right, product.axes)

        return lax.fori_loop(0, count, step, (left, lax.dot_general(left, right, product.axes)))[1]

    return lambda count: jax.block_until_ready(many(left, right, jnp.asarray(count)))


def milliseconds(run: Callable[[int], Any], repeats: int, at_least: float = 0.05) -> float:
    """Of one execution: the best of several, each long enough to be measured."""
    run(1)
    count = 1
    while True:
        began = time.perf_counter()
        run(count)
        if (took := time.perf_counter() - began) > at_least:
            break
        count *= 2 if took > at_least / 8 else 8
    best = []
    for _ in range(repeats):
        began = time.perf_counter()
        run(count)
        best.append(1e3 * (time.perf_counter() - began) / count)
    return statistics.median(best)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help="names of tasks; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    use_threads(options.threads)
    print(f"{'task':<22}{'algorithm':<18}{'ms per round':>13}{'in products':>13}{'share':>7}{'GFLOP':>8}")
    for name in options.tasks or TASKS:
        experiment, task, algorithm, _ = Experiment(name).build()
        engine = Simulation(task, algorithm, participation(experiment.participation(), len(task.clients)))
        state = engine.start(seed=0)
        traced: Any = jax.make_jaxpr(lambda state, engine=engine: engine.advance(state, 1))(state)
        counted = products(traced.jaxpr)
        floor = sum(n * milliseconds(alone(product), 3, 0.01) for product, n in counted.items())
        flops = sum(n * product.flops for product, n in counted.items())
        whole = milliseconds(
            lambda n, e=engine, s=state: jax.block_until_ready(e.advance(s, n).round), options.repeats, 0.5
        )
        share = f"{100 * floor / whole:.0f} %"
        print(f"{name:<22}{experiment.algorithm:<18}{whole:>13.1f}{floor:>13.1f}{share:>7}{flops / 1e9:>8.2f}")


if __name__ == "__main__":
    main()
