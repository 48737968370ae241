"""The contract: what every algorithm must keep, whoever wrote it. Each check raises ``Broken``, with a sentence."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel.core import Algorithm
from fedbilevel.core.schedules import Schedule
from fedbilevel.core.task import Task
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.participation import Participation, Uniform
from fedbilevel.engines.plan import Plan, plan
from fedbilevel.engines.simulation import Simulation, traces
from fedbilevel.errors import FedbilevelError
from fedbilevel.runs.solve import solve
from fedbilevel.storage.checkpoints import Checkpoints
from fedbilevel.tasks import Quadratic, WeightedQuadratics
from fedbilevel.testing.problems import identical, largest_difference, noisy


class Broken(AssertionError):
    """An algorithm does not keep the contract."""


class Limit(NamedTuple):
    """Run an algorithm on a problem for ``rounds`` rounds: x must end at ``expected``, None for the solution of the
    problem, up to ``tolerance``.
    """

    algorithm: Algorithm
    rounds: int = 3000
    problem: Quadratic | WeightedQuadratics | None = None  # None: five different clients, with p = 4 and d = 6
    expected: Any = None
    tolerance: float = 1e-6


def check_algorithm(algorithm: Algorithm | type[Algorithm], limits: Sequence[Limit] = ()) -> Plan:
    """Check an algorithm on small problems. Returns what a round costs.

    - It is a frozen dataclass, whose default values are valid, and whose bounds refuse what lies outside.
    - It can be planned; client functions, and the shapes of the state, are the same in every round.
    - The compiled simulator and the message engine give the same numbers and counts, also with a sample of the clients.
    - The same seed gives the same bits, another seed others. It is compiled once, for all rounds and all step sizes.
    - A run that is interrupted and continued from a checkpoint ends with the same bits.
    - It ends where it should, if you say where: ``limits``.

    Call it where arrays have double precision, as in the test that ``fedbilevel new algorithm`` writes.

    Args:
        algorithm: an instance with small numbers of steps, which compiles fast; a class stands for its defaults.
        limits: where it ends on problems with a known solution.
    """
    if not isinstance(algorithm, Algorithm):
        algorithm = algorithm()
    check_bounds(type(algorithm))
    task = noisy(algorithm.lower_level, algorithm.weighting)
    cost = check_plan(task, algorithm)
    check_engines(task, algorithm, Uniform(3))
    check_step_compiles_nothing(task, algorithm)
    check_resume(task, algorithm)
    for limit in limits:
        check_limit(limit)
    return cost


def check_bounds(kind: type[Algorithm]) -> int:
    """Every field with a bound refuses what lies outside, with one sentence that names it. Returns their number."""
    if "__dataclass_fields__" not in vars(kind):
        raise Broken(f"{kind.__name__} must be a frozen dataclass: write @dataclass(frozen=True) above it.")
    if kind() != kind() or hash(kind()) != hash(kind()):
        raise Broken(f"two {kind.__name__}() must be equal, and have the same hash.")
    checked = 0
    for f in dataclasses.fields(kind):
        above, least = f.metadata.get("above"), f.metadata.get("least")
        bad = above if above is not None else None if least is None else least - 1
        if bad is None:
            continue
        bad = (bad,) if isinstance(f.default, tuple) else type(f.default)(bad) if isinstance(f.default, int) else bad
        try:
            kind(**{f.name: bad})
        except FedbilevelError as error:
            if f"{kind.__name__}: {f.name} must be" not in str(error):
                raise Broken(f"{kind.__name__}({f.name}={bad}) is refused with another reason: {error}") from error
        else:
            raise Broken(f"{kind.__name__}({f.name}={bad}) is not refused.")
        checked += 1
    return checked


def check_plan(task: Task, algorithm: Algorithm) -> Plan:
    """What a round costs can be found by tracing, and something is exchanged."""
    cost = plan(task, algorithm)
    if cost.exchanges < 1:
        raise Broken(f"a round of {type(algorithm).__name__} asks no client for anything.")
    return cost


def check_state(before: Any, after: Any) -> None:
    """The structure, shapes and types of a state do not change."""
    kinds = lambda state: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
    if jax.tree.structure(before) != jax.tree.structure(after) or kinds(before) != kinds(after):
        raise Broken("init and round must return states of the same structure, shapes and types.")


def check_engines(task: Task, algorithm: Algorithm, cohort: Participation, tolerance: float = 1e-10) -> None:
    """Both engines give the same numbers and counts, and the same seed the same bits; nothing is traced twice."""
    name, before = type(algorithm).__name__, len(traces)
    simulation = Simulation(task, algorithm, cohort)
    starts = [simulation.start(seed) for seed in (3, 3, 4)]
    ends = [simulation.advance(simulation.advance(state, 1), 2) for state in starts]
    if traces[before:] != ["start", "advance"]:
        raise Broken(f"{name} is compiled more than once: {', '.join(traces[before:])}.")
    check_state(starts[0], ends[0])
    first, again, other = (simulation.solution(state) for state in ends)
    if not identical(first, again):
        raise Broken(f"the same seed gives {name} other results.")
    if identical(first, other):
        raise Broken(f"another seed gives {name} the same results: are batches drawn with the key?")
    local = Local(task, algorithm, cohort)
    end = local.advance(local.start(seed=3), 3)
    if local.failures:
        raise Broken(f"a client of {name} failed in the message engine: {local.failures}.")
    if (apart := largest_difference(first, local.solution(end))) >= tolerance:
        raise Broken(f"the simulator and the message engine differ by {apart:.1e}: does a client function use anything "
                     "but its arguments?")  # fmt: skip
    for mine, theirs in ((ends[0].served, end.served), (ends[0].calls, end.calls)):
        if set(mine) != set(theirs) or any(not np.array_equal(mine[each], theirs[each]) for each in mine):
            raise Broken(f"the two engines count the exchanges of {name} differently.")


def check_step_compiles_nothing(task: Task, algorithm: Algorithm) -> None:
    """Other numbers are arguments of the same compiled program, and have an effect on it."""
    name = type(algorithm).__name__
    floats = {
        f.name: value
        for f in dataclasses.fields(algorithm)
        if isinstance(value := getattr(algorithm, f.name), float) and not f.metadata.get("static")
        if np.isfinite(value)
    }
    scaled = {
        f.name: dataclasses.replace(value, scale=0.9 * value.scale)
        for f in dataclasses.fields(algorithm)
        if isinstance(value := getattr(algorithm, f.name), Schedule)
    }
    if not floats and not scaled:
        return
    changed = dataclasses.replace(algorithm, **{key: 0.9 * value for key, value in floats.items()}, **scaled)
    run = lambda each: solve(task, each, rounds=2, every=2, metrics=False)
    run(algorithm)
    before = len(traces)
    run(changed)
    if traces[before:]:
        raise Broken(f"another step size compiles {name} again: declare what decides with parameter(..., static=True).")


def check_resume(task: Task, algorithm: Algorithm, rounds: int = 4) -> None:
    """A run that stops in the middle and continues ends with the same bits as one that does not."""
    with tempfile.TemporaryDirectory() as folder:
        place = Checkpoints(Path(folder), seconds=0.0, keep=rounds + 1)
        whole = solve(task, algorithm, rounds, every=1, metrics=False, checkpoint=place)
        for late in place.files()[: rounds // 2]:
            late.unlink()
        if place.round != rounds - rounds // 2:
            raise Broken("checkpoints are missing.")
        continued = solve(task, algorithm, rounds, every=1, metrics=False, checkpoint=place)
    if not identical((whole.x, whole.y), (continued.x, continued.y)):
        raise Broken(f"a run of {type(algorithm).__name__} that was interrupted and continued ends elsewhere.")


def check_limit(limit: Limit) -> None:
    """An algorithm ends where it should."""
    problem = Quadratic.random(clients=5, p=4, d=6) if limit.problem is None else limit.problem
    if limit.algorithm.lower_level == "local" and isinstance(problem, Quadratic):
        problem = problem.local()
    expected = problem.solution() if limit.expected is None else limit.expected
    result = solve(problem.task(), limit.algorithm, rounds=limit.rounds, every=limit.rounds)
    apart = float(np.max(np.abs(np.asarray(result.x) - np.asarray(expected))))
    if not apart <= limit.tolerance:
        raise Broken(
            f"{limit.algorithm} ends {apart:.2e} from where it should after {limit.rounds} rounds, more than "
            f"{limit.tolerance:g}."
        )
