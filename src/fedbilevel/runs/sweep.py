"""``sweep``: many settings of an algorithm and many seeds on one task, with few compilations."""

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np

from fedbilevel.core import Algorithm
from fedbilevel.core.task import Task
from fedbilevel.diagnostics import Diagnostic, Measure, Snapshot, find, measure
from fedbilevel.engines.lanes import Lanes
from fedbilevel.engines.participation import Participation, participation
from fedbilevel.engines.simulation import Batching, Simulation
from fedbilevel.errors import Diverged, FedbilevelError, UnknownName
from fedbilevel.runs.solve import Result, Row, check_rounds, check_seed, check_task, diverged, interval, observe, solve

Outcome = Result | Diverged


def sweep(
    task: Task,
    algorithms: Algorithm | Sequence[Algorithm],
    rounds: int = 200,
    seeds: Iterable[int] = (0,),
    sample: "int | Participation | list[int] | None" = None,
    *,
    every: int | None = None,
    diagnostics: Sequence[str | Diagnostic | Measure] = (),
    metrics: bool = True,
    batching: Batching = "auto",
    way: Literal["auto", "each", "lanes"] = "auto",
    workers: int = 1,
) -> list[Outcome]:
    """Run every algorithm with every seed: first all seeds of the first one. Settings that differ only in numbers such
    as step sizes, and seeds, share one compiled program.

    Returns a :class:`Result` for each, as ``solve`` does up to rounding, or, for those that diverge, the
    :class:`Diverged` that ``solve`` raises (its ``result`` has the rounds before). They do not stop the others.

    Args:
        task, rounds, sample, every, diagnostics, metrics, batching: as in ``solve``.
        algorithms: usually settings of one algorithm; if they differ in more than numbers, each kind is compiled.
        seeds: seeds for everything random.
        way: "each" runs one after the other; "lanes" runs all at once, as rows of arrays, which takes longer to compile
            and is only faster where rounds are tiny or the device is a GPU; "auto" chooses by the device. The seconds
            of lanes are those of all of them together.
        workers: number of threads for "each"; more than one helps where rounds leave cores idle.
    """
    check_task(task)
    algorithms = [algorithms] if isinstance(algorithms, Algorithm) else list(algorithms)
    seeds = list(seeds)
    for seed in seeds:
        check_seed(seed)
    check_rounds(rounds, every)
    if not algorithms or not seeds or workers < 1:
        raise FedbilevelError("a sweep needs at least one algorithm, one seed and one worker.")
    if way not in ("auto", "each", "lanes"):
        raise UnknownName("way", str(way), ["auto", "each", "lanes"])
    if way == "auto":
        way = "each" if jax.default_backend() == "cpu" else "lanes"
    chosen = participation(sample, len(task.clients))
    outcomes: list[Outcome | None] = [None] * (len(algorithms) * len(seeds))
    for members in _alike(algorithms):
        engines = {n: Simulation(task, algorithms[n], chosen, batching) for n in members}
        runs = [(n * len(seeds) + place, engines[n], seed) for n in members for place, seed in enumerate(seeds)]
        settings: dict[str, Any] = {"every": every, "diagnostics": diagnostics, "metrics": metrics}
        if way == "lanes":
            found = _lanes(task, [run[1:] for run in runs], rounds, **settings)
        else:
            found = _each(task, [run[1:] for run in runs], rounds, chosen, workers, **settings)
        for (place, _, _), outcome in zip(runs, found, strict=True):
            outcomes[place] = outcome
    return [outcome for outcome in outcomes if outcome is not None]


def _alike(algorithms: Sequence[Algorithm]) -> list[list[int]]:
    """The algorithms by number, in groups that differ only in numbers."""
    groups: dict[Any, list[int]] = {}
    for n, algorithm in enumerate(algorithms):
        if not isinstance(algorithm, Algorithm):
            raise FedbilevelError(
                f"give algorithms with their hyper-parameters, for instance FedBiO(), not {algorithm!r}."
            )
        groups.setdefault(jax.tree.structure(algorithm), []).append(n)
    return list(groups.values())


def _each(
    task: Task,
    runs: Sequence[tuple[Simulation, int]],
    rounds: int,
    chosen: Participation,
    workers: int,
    **settings: Any,
) -> list[Outcome]:
    """One after the other, or some at the same time."""
    interrupted = threading.Event()

    def on_row(row: Row) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt

    def one(run: tuple[Simulation, int]) -> Outcome:
        engine, seed = run
        try:
            algorithm = engine.program.algorithm
            return solve(task, algorithm, rounds, seed, chosen, engine=engine, callbacks=[on_row], **settings)
        except Diverged as error:
            return error

    first = one(runs[0])  # compiles for all
    with ThreadPoolExecutor(workers) as pool:
        try:
            return [first, *(pool.map if workers > 1 else map)(one, runs[1:])]
        except KeyboardInterrupt:
            interrupted.set()
            pool.shutdown(cancel_futures=True)
            raise


def _lanes(
    task: Task,
    runs: Sequence[tuple[Simulation, int]],
    rounds: int,
    every: int | None,
    diagnostics: Sequence[str | Diagnostic | Measure],
    metrics: bool,
) -> list[Outcome]:
    """All at once."""
    began, every = time.perf_counter(), interval(rounds, every)
    engines, lanes = [engine for engine, _ in runs], Lanes([engine for engine, _ in runs])
    watched = [find(entry) for entry in ([diagnostics] if isinstance(diagnostics, str) else diagnostics)]
    histories: list[list[Row]] = [[] for _ in runs]
    ended: dict[int, Diverged] = {}

    def result(number: int, state: Any) -> Result:
        engine, seconds = engines[number], time.perf_counter() - began
        return Result(*engine.solution(state), histories[number], state, engine.plan, seconds)

    def evaluate(number: int, state: Any) -> None:
        engine, seconds = engines[number], time.perf_counter() - began
        row = observe(engine, state, seconds, metrics)
        histories[number].append(row | measure(watched, Snapshot(engine, state, histories[number])))

    def look(states: Any, before: Any) -> None:
        """Evaluate the lanes that go on; say of others why they do not."""
        finite = np.asarray(states.finite)
        for number in (n for n in range(len(runs)) if n not in ended):
            state = lanes.lane(states, number)
            if finite[number]:
                evaluate(number, state)
                continue
            ended[number] = diverged(engines[number].program.algorithm, state)
            if before is not None:
                ended[number].result = result(number, lanes.lane(before, number))

    states = lanes.start([seed for _, seed in runs])
    for each in watched:
        each.check(Snapshot(engines[0], lanes.lane(states, 0)))
    look(states, None)
    for due in [*range(every, rounds, every), rounds] if rounds else []:
        if len(ended) == len(runs):
            break
        done = (due - 1) // every * every
        before, states = states, jax.block_until_ready(lanes.advance(states, due - done))
        look(states, before)
    return [ended.get(number) or result(number, lanes.lane(states, number)) for number in range(len(runs))]
