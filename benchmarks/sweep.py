"""What is the fastest way through many settings: ``python -m benchmarks.sweep [TASK[:DATA] ...] [--settings 8]
[--rounds 20] [--seeds]`` prints, for every task, times and ratios measured in one interleaved run.

- alone: one by one, each setting compiled for itself, as ``fb.solve`` does;
- each: one by one, step sizes are arguments of one compiled program (``fb.sweep``);
- threads: the same, two at a time (``fb.sweep(..., workers=2)``);
- map: all in one call, one after the other (``lax.map``);
- lanes: all in one call, at once (``vmap``; ``fb.sweep(..., way="lanes")``).

With ``--seeds`` all have the same step sizes and seeds of their own, and "alone" compiles only once. Otherwise the
times of "alone" are measured on two settings and multiplied. "threads" has nothing to compile after "each".
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.engines import simulation
from fedbilevel.engines.lanes import Lanes
from fedbilevel.engines.participation import participation
from fedbilevel.engines.simulation import Simulation
from fedbilevel.runs.experiment import Experiment

TASKS = ("quadratic", "data-cleaning:digits", "data-cleaning:mnist", "hyper-representation:mnist")
Run = Callable[[], Any]


def ways(name: str, count: int, rounds: int, seeds: bool) -> tuple[str, dict[str, Run]]:
    """What the task runs by default, in all ways."""
    task_name, _, data = name.partition(":")
    built = Experiment(task_name, settings={"data": data} if data else {}).build()
    task, algorithm = built.task, built.algorithm
    cohort = participation(built.experiment.participation(), len(task.clients))
    shrunk = lambda n: jax.tree.map(lambda number: number * (1 - 0.5 * n / count), algorithm)
    engines = [Simulation(task, algorithm if seeds else shrunk(n), cohort) for n in range(count)]
    base = engines[0]
    numbers = range(count) if seeds else [0] * count

    def one(engine: Any, seed: int) -> Any:
        return jax.block_until_ready(engine.advance(engine.start(seed), rounds))

    def alone() -> None:
        for engine, seed in zip(engines, numbers, strict=True):
            one(Simulation(task, engine.program.algorithm, cohort), seed)

    def each() -> None:
        for engine, seed in zip(engines, numbers, strict=True):
            one(engine, seed)

    def threads() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, engines, numbers))

    @jax.jit
    def all_of_them(programs: Any, keys: Any, data: Any, rounds: Any) -> Any:
        def run(member: Any) -> Any:
            program, key = member
            state = simulation.start(program, base.plan.no_counts(), data, key, None, None)
            return simulation.advance(program, data, state, rounds)

        return jax.lax.map(run, (jax.tree.map(lambda *column: jnp.stack(column), *programs), keys))

    def mapped() -> None:
        keys = jnp.stack([jax.random.key(seed) for seed in numbers])
        programs = tuple(engine.program for engine in engines)
        jax.block_until_ready(all_of_them(programs, keys, task.data, jnp.asarray(rounds)))

    def lanes() -> None:
        together = Lanes(engines)
        jax.block_until_ready(together.advance(together.start(list(numbers)), rounds))

    def alone_twice() -> None:
        for engine, seed in list(zip(engines, numbers, strict=True))[:2]:
            one(Simulation(task, engine.program.algorithm, cohort), seed)

    runs = {"each": each, "threads": threads, "map": mapped, "lanes": lanes}
    first = {"alone": alone if seeds else alone_twice}
    return type(algorithm).__name__, first | runs


def seconds(run: Run) -> float:
    """How long it takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(name: str, count: int, rounds: int, seeds: bool, repeats: int = 3) -> None:
    """Print the times of one task. The first call of a way compiles."""
    title, runs = ways(name, count, rounds, seeds)
    jax.clear_caches()
    first = {way: seconds(run) for way, run in runs.items()}
    if not seeds:
        first["alone"] *= count / 2
    warm = {way: min(times) for way, times in _interleaved(runs, repeats).items()}
    if not seeds:
        warm["alone"] *= count / 2
    print(f"{name}, {title}: {count} {'seeds' if seeds else 'settings'}, {rounds} rounds")
    print(f"  {'':8}{'compiled':>10}{'/ alone':>9}{'warm':>10}{'/ each':>9}")
    for way in runs:
        ratios = first[way] / first["alone"], warm[way] / warm["each"]
        print(f"  {way:8}{first[way]:8.2f} s{ratios[0]:9.2f}{warm[way]:8.3f} s{ratios[1]:9.2f}", flush=True)


def _interleaved(runs: dict[str, Run], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(repeats):
        for way, run in runs.items():
            times[way].append(seconds(run))
    return times


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--settings", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", action="store_true")
    chosen = parser.parse_args()
    for name in chosen.tasks:
        measure(name, chosen.settings, chosen.rounds, chosen.seeds)


if __name__ == "__main__":
    main()
