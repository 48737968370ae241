"""``solve``: run an algorithm on a task, and return the solution and its history."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Algorithm, Tree, as_float
from fedbilevel.core.digest import digest
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import is_vector
from fedbilevel.diagnostics import Diagnostic, Measure, Snapshot, find, measure
from fedbilevel.engines.accounting import traffic
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.participation import Participation, participation
from fedbilevel.engines.plan import Plan
from fedbilevel.engines.simulation import Batching, Simulation
from fedbilevel.errors import Diverged, FedbilevelError, Interrupted, RoundLost, UnknownName
from fedbilevel.runs import interrupts
from fedbilevel.runs.callbacks import Callback, OnRow, Started
from fedbilevel.runs.until import reached
from fedbilevel.storage.checkpoints import Checkpoints, Saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
ENGINES = ("simulation", "local")


class Engine(Protocol):
    """What ``solve`` needs of an engine. A state has ``server``, ``round``, ``finite`` and the counts ``served`` and
    ``calls``.
    """

    plan: Plan

    def start(self, seed: int, x: Any = None, y: Any = None, u: Any = None) -> Any: ...
    def advance(self, state: Any, rounds: int) -> Any: ...
    def solution(self, state: Any) -> tuple[Any, Any]: ...
    def metrics(self, state: Any) -> Mapping[str, Any]: ...
    def arrays(self, state: Any) -> dict[str, np.ndarray]: ...
    def restore(self, arrays: Mapping[str, np.ndarray]) -> Any: ...


@dataclass(frozen=True)
class Result:
    """What ``solve`` returns.

    ``x`` and ``y`` have the user's own structure (a private x and a local y with a leading axis of clients);
    ``history`` is a list of rows, one per evaluation (``pandas.DataFrame(result.history)``); ``metrics`` is its last
    row; ``state`` is the engine's, ``seconds`` includes compilation.
    """

    x: Tree
    y: Tree
    history: list[Row]
    state: Any = field(repr=False)
    plan: Plan = field(repr=False)
    seconds: float

    @property
    def metrics(self) -> Row:
        """The last row of the history."""
        return self.history[-1]

    def plot(self, metrics: str | Sequence[str] | None = None, against: str = "round") -> "Figure":
        """Draw the history: a matplotlib figure, which notebooks show and ``savefig`` writes.

        Args:
            metrics: columns of the history, each on its own axes; None draws all metrics and diagnostics.
            against: the column to draw them against, such as "round", "exchanges", "megabytes" or "seconds".
        """
        from fedbilevel.drawing.curves import curves  # here, so that importing the library does not import matplotlib

        return curves(self.history, metrics, against)


def solve(
    task: Task,
    algorithm: Algorithm,
    rounds: int = 200,
    seed: int = 0,
    sample: "int | Participation | list[int] | None" = None,
    *,
    every: int | None = None,
    until: Mapping[str, float] | None = None,
    diagnostics: Sequence[str | Diagnostic | Measure] = (),
    x: Tree = None,
    y: Tree = None,
    u: Tree = None,
    engine: "Literal['simulation', 'local'] | Engine" = "simulation",
    batching: Batching = "auto",
    metrics: bool = True,
    callbacks: "Sequence[Callback | Callable[[Row], Any]]" = (),
    checkpoint: "Checkpoints | Path | str | None" = None,
    out: "Path | str | None" = None,
) -> Result:
    """Run an algorithm on a task.

    Args:
        task: the problem and its clients.
        algorithm: the algorithm with its hyper-parameters, for instance ``FedBiOAcc(lr_upper=2.0)``.
        rounds: number of communication rounds.
        seed: seed for everything random: the first x and y, batches, cohorts.
        sample: which clients take part in a round: None for all, a number of clients drawn uniformly,
            ``Independent(probability)``, or a list of clients.
        every: rounds between evaluations (default: about fifty evaluations).
        until: bounds on columns of the history, such as ``{"hypergradient": 1e-3}``: the run ends at the first
            evaluation at which each of these columns is at most its bound.
        diagnostics: exact quantities for every row of the history: names of ``diagnostics.DIAGNOSTICS`` such as
            "hypergradient", and functions ``f(task, x, y) -> number or {name: number}``. A column is NaN where its
            quantity is not defined, and replaces a metric of the same name. Neither the traffic nor the seconds
            include them.
        x, y: where to start, instead of the problem's ``init``.
        u: where the adjoint starts, in the structure of y, instead of at 0; for PrimalDual, its multiplier.
        engine: "simulation" (compiled) or "local" (messages between a server and clients in this process), or an
            engine that was made for this task, algorithm and sample.
        batching: how the simulator visits the clients: "scan" one by one, "vmap" all at once, "auto" whichever suits
            the device.
        metrics: whether rows have the task's metrics; False does not use its test data.
        callbacks: functions that are called with every row of the history, and :class:`~fedbilevel.Callback` objects.
        checkpoint: a folder in which the run is saved every half minute, at its end and when it is interrupted, or
            :class:`~fedbilevel.Checkpoints`. If the folder has checkpoints of the same run, it continues from the
            newest one, to the same result as without the interruption, bit for bit. Only for the engine "simulation".
        out: a run folder to write, as ``fedbilevel run`` does: ``report``, ``figures``, ``watch`` and, where the task
            can be made again, ``resume`` work on it. The same call continues an interrupted run.

    Raises:
        Diverged: when a state is NaN or infinite. Its ``result`` has the rounds before.
        Interrupted: on Ctrl-C; it is a KeyboardInterrupt. Its ``result`` has the rounds before. Both are
            :class:`Stopped`.
    """
    if not isinstance(algorithm, Algorithm):
        raise FedbilevelError(f"give an algorithm with its hyper-parameters, for instance FedBiO(), not {algorithm!r}.")
    check_task(task)
    check_rounds(rounds, every)
    check_seed(seed)
    if out is not None:
        from fedbilevel.runs.from_python import solve_into  # which knows run folders

        if checkpoint is not None:
            raise FedbilevelError("give out or checkpoint: a run folder has its own checkpoints.")
        return solve_into(
            Path(out), task, algorithm, rounds, seed, sample, callbacks, every=every, diagnostics=diagnostics, x=x, y=y,
            engine=engine, batching=batching, metrics=metrics, until=until, u=u,
        )  # fmt: skip
    watched = [find(entry) for entry in ([diagnostics] if isinstance(diagnostics, str) else diagnostics)]
    began = time.perf_counter()
    chosen = participation(sample, len(task.clients))
    runner = _engine(engine, task, algorithm, chosen, batching)
    given = _start_values(task, x, y, u)
    if u is not None and not runner.plan.starts_u:
        raise FedbilevelError(f"{type(algorithm).__name__} keeps no adjoint from round to round: leave out u.")
    every = interval(rounds, every)
    told = [each if isinstance(each, Callback) else OnRow(each) for each in callbacks]
    checkpoints = Checkpoints(checkpoint) if isinstance(checkpoint, Path | str) else checkpoint
    saved, run = None, ""
    if checkpoints is not None:
        if engine == "local":
            raise FedbilevelError("checkpoints need engine='simulation': elsewhere, clients keep a part of the state.")
        how = (type(runner).__name__, batching, metrics, [d.name for d in watched])
        run = _fingerprint(task, algorithm, chosen, seed, every, given, how)
        saved = checkpoints.newest(run, runner.restore)
    history: list[Row] = saved.history if saved else []
    began -= saved.seconds if saved else 0

    def go_back(lost: RoundLost, state: Any) -> Any:
        """The state before a round that has to be made again; where there is none, the same state: who has lost the
        round continues from what it has.
        """
        saved = checkpoints.newest(run, runner.restore, lost.round) if checkpoints is not None else None
        if saved is None and lost.round > 1:
            return state
        history[:] = saved.history if saved else []
        return saved.state if saved else runner.start(seed, *given)

    def evaluate(state: Any) -> None:
        nonlocal began
        row = observe(runner, state, time.perf_counter() - began, metrics)
        paused = time.perf_counter()
        row |= measure(watched, Snapshot(runner, state, history))
        began += time.perf_counter() - paused
        for each in told:
            each.row(row)
        history.append(row)

    def result(state: Any) -> Result:
        return Result(*runner.solution(state), history, state, runner.plan, time.perf_counter() - began)

    def save(state: Any) -> None:
        if checkpoints is not None:
            seconds = time.perf_counter() - began
            checkpoints.save(run, runner.arrays(state), int(state.round), Saved(state, history, seconds))

    state = saved.state if saved else runner.start(seed, *given)
    for each in told:
        each.start(Started(task, algorithm, rounds, seed, list(history)))
    try:
        if not bool(state.finite):
            raise diverged(algorithm, state, None, task.not_finite_at_start())
        for each in watched:
            each.check(Snapshot(runner, state))
        at_once = 1  # rounds per call: a call cannot be interrupted, so it is kept to about half a second
        while True:
            try:
                now, seen = int(state.round), history[-1]["round"] if history else -1
                if (now % every == 0 or now >= rounds) and seen < now:
                    evaluate(state)
                if now >= rounds or (history and reached(history[-1], until or {})):
                    found = result(state)
                    break
                if checkpoints is not None and now > 0 and checkpoints.due():
                    save(state)
                interrupts.check()
                called = time.perf_counter()
                due = min(rounds, (now // every + 1) * every)
                new = jax.block_until_ready(runner.advance(state, min(at_once, due - now)))
                if not bool(new.finite):
                    raise diverged(algorithm, new, result(state), task.not_finite_at_start() if now == 0 else "")
                state = new
                if checkpoints is None or checkpoints.seconds > 0:  # otherwise every round is saved
                    at_once = 2 * at_once if time.perf_counter() - called < 0.25 else max(1, at_once // 2)
            except RoundLost as lost:
                state = go_back(lost, state)
        save(state)
    except KeyboardInterrupt as interrupt:
        interrupts.seen()
        save(state)
        raise Interrupted.of(interrupt, result(state)) from None
    finally:
        for each in told:
            each.end()
    return found


def interval(rounds: int, every: int | None) -> int:
    """Rounds between evaluations: as asked for, or about fifty evaluations."""
    return every or max(1, rounds // 50)


def observe(engine: Engine, state: Any, seconds: float, metrics: bool) -> Row:
    """A row of the history without diagnostics: the costs so far, and the task's metrics if requested."""
    row: Row = {"round": int(state.round), **traffic(engine.plan, state), "seconds": seconds}
    if metrics:
        row |= {name: float(value) for name, value in engine.metrics(state).items()}
    return row


def check_task(task: Any) -> None:
    """Refuse what is not a task."""
    if isinstance(task, str):
        how = f"fb.tasks.{task.replace('-', '_')}(), ..." if task.replace("-", "_").isidentifier() else "task, ..."
        raise FedbilevelError(f"give a task, not its name: fb.solve({how}), or fb.Experiment({task!r}).run().")
    if not isinstance(task, Task):
        raise FedbilevelError(f"give a task, fb.Task(problem, clients), not {type(task).__name__}.")


def check_rounds(rounds: Any, every: Any) -> None:
    """Refuse what is not a number of rounds."""
    if not isinstance(rounds, Integral) or rounds < 0:
        raise FedbilevelError(f"rounds must be a whole number of at least 0, not {rounds}.")
    if every is not None and (not isinstance(every, Integral) or every < 1):
        raise FedbilevelError(f"every must be a whole number of at least 1, not {every}.")


def check_seed(seed: Any) -> None:
    """Refuse what is not a seed."""
    if not isinstance(seed, Integral) or not 0 <= int(seed) < 2**32:
        raise FedbilevelError(f"seed must be a whole number from 0 to 4294967295, not {seed}.")


def _engine(name: str | Engine, task: Task, algorithm: Algorithm, chosen: Participation, batching: Batching) -> Engine:
    if not isinstance(name, str):
        return name
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    return Local(task, algorithm, chosen) if name == "local" else Simulation(task, algorithm, chosen, batching)


def _fingerprint(
    task: Task, algorithm: Algorithm, sample: Participation, seed: int, every: int, start: Any, more: Any
) -> str:
    """A hash of what determines a run: the data, the algorithm with its hyper-parameters, participation, seed, when it
    is evaluated and where it starts. The code of the losses cannot be hashed; the shapes of x and y are checked apart.
    """
    words = (
        task.name,
        dict(task.options),
        algorithm,
        sample,
        seed,
        every,
        more,
        task.layout,
        task.fingerprint,
        str(jnp.result_type(float)),
    )
    return digest([(repr(words), np.zeros(0)), *(("start", leaf) for leaf in jax.tree.leaves(start))])


def _start_values(task: Task, x: Tree, y: Tree, u: Tree) -> tuple[Tree, Tree, Tree]:
    """The given x, y and u as arrays, checked against what the problem's ``init`` gives."""
    first_x, first_y = jax.eval_shape(task.problem.start, jax.random.key(0))
    blocks = (len(task.clients),) if task.problem.private_x else ()
    checked = []
    for name, given, first, lead in (("x", x, first_x, blocks), ("y", y, first_y, ()), ("u", u, first_y, ())):
        if given is not None:
            given = jax.tree.map(as_float, given)
            shapes = (
                jax.tree.map(lambda a: a.shape, given),
                jax.tree.map(lambda a, lead=lead: (*lead, *a.shape), first.tree),
            )
            if shapes[0] != shapes[1]:
                raise FedbilevelError(
                    f"the given {name} has the shape {shapes[0]}, but this problem needs {shapes[1]}."
                )
            given = jax.tree.map(lambda a, like: a.astype(like.dtype), given, first.tree)
        checked.append(given)
    return checked[0], checked[1], checked[2]


def diverged(algorithm: Algorithm, state: Any, before: Result | None = None, why: str = "") -> Diverged:
    """Name the variables that are not finite, and the steps to lower, unless ``why`` says what else is the reason;
    ``before`` is the result so far.
    """
    parts, _ = jax.tree_util.tree_flatten_with_path(state.server, is_leaf=is_vector)
    bad = []
    for path, part in parts:
        if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(part) if hasattr(leaf, "dtype")):
            bad.append(jax.tree_util.keystr(path, simple=True, separator="."))
    names = {f.name for f in fields(algorithm)}
    steps = dict.fromkeys(algorithm.steps.get(name.rsplit(".", 1)[-1], "") for name in bad)
    now = {step: getattr(algorithm, step) for step in steps if step in names}
    advice = ", ".join(
        f"{step} (now {v:g})" if isinstance(v, int | float) else f"{step} (now {v})" for step, v in now.items()
    )
    text = (
        f"round {int(state.round)}: {' and '.join(bad)} became NaN or infinite: "
        f"try a smaller {advice or 'step size'}, or check that the losses are finite."
    )
    return Diverged(why or text, int(state.round), tuple(bad), before)
