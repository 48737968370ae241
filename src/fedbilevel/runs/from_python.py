"""``compare``, ``tune`` and ``solve(out=...)`` from Python: the same run folders as the commands write."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.core import Algorithm
from fedbilevel.core.task import Task
from fedbilevel.engines.participation import Everyone, Independent, Participation, Uniform
from fedbilevel.errors import Diverged, FedbilevelError, Interrupted
from fedbilevel.runs import comparison as comparisons
from fedbilevel.runs import configuration, plugins
from fedbilevel.runs import fair_search as searches
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.comparison import Algorithms, Compared
from fedbilevel.runs.execute import describe, save_solution
from fedbilevel.runs.experiment import Built, Experiment
from fedbilevel.runs.given import Given, Maker, words_of_algorithm, words_of_task
from fedbilevel.runs.solve import Result, interval, solve
from fedbilevel.runs.tuning import Tuned, Tuning
from fedbilevel.runs.tuning import tune as tune_one
from fedbilevel.storage.files import alone, new_folder
from fedbilevel.storage.run_folder import RunFolder


def compare(
    task: Task | Maker | str,
    algorithms: Algorithms | None = None,
    rounds: int | None = None,
    seeds: Iterable[int] = (0,),
    sample: "int | float | str | None" = None,
    *,
    settings: Mapping[str, Any] | None = None,
    tuned: Path | str | None = None,
    out: Path | str | None = None,
    jobs: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Compared:
    """Run several algorithms on a task with several seeds, each in a run folder of its own: the command ``compare``.

    ``report``, ``figures``, ``watch`` and ``resume`` work on the folder. Use several processes under ``if __name__ ==
    "__main__":``, since they import your file again.

    Args:
        task: a task; a function that makes one, called with ``seed=`` if it has this argument; or a name.
        algorithms: such as ``[FedBiO(lr_upper=0.1), FedBiOAcc, "fednest"]``, or a mapping with names of your own. A
            class stands for what the task suggests. None: all that fit the task.
        rounds: number of rounds; None: what the task suggests.
        seeds: for everything random.
        sample: which clients take part in a round, as on the command line.
        settings: options of the task and hyper-parameters, as ``--set`` takes them.
        tuned: the folder of a search: the hyper-parameters that it found.
        out: the folder; if it has the same comparison, that is continued. Default: a new one in ``runs/``.
        jobs: number of processes; 0: one for each core, or this one alone if something cannot be sent to others.
        progress: called with the number of runs done, and the number of all.
    """
    not_while_importing("fb.compare")
    made = comparisons.plan(task, algorithms, rounds, list(seeds), _sample(sample), settings, tuned=_path(tuned))
    return comparisons.run(made, _path(out), progress, jobs)


def tune(
    task: Task | Maker | str,
    algorithm: "Algorithm | type[Algorithm] | str | Sequence[Any] | None" = None,
    trials: int = 30,
    rounds: int | None = None,
    seeds: Iterable[int] = (0,),
    sample: "int | float | str | None" = None,
    *,
    settings: Mapping[str, Any] | None = None,
    vary: Mapping[str, str] | None = None,
    hold_out: float | None = None,
    prune: bool = True,
    out: Path | str | None = None,
    progress: Callable[[int, int, float | None], None] | None = None,
) -> "Tuned | searches.Searched":
    """Search for the hyper-parameters with the lowest validation loss: the command ``tune``.

    Args:
        task, rounds, sample, settings, out: as in :func:`compare`.
        algorithm: one algorithm; or several, which get the same number of trials each on the same held-out rows.
        trials: number of settings to try, for each algorithm.
        seeds: a setting is judged by its mean over these.
        vary: more hyper-parameters, with the values to try: ``{"local_steps": "1,5"}``.
        hold_out: the share of the validation rows to compare settings on. Default: 0.2 for several algorithms, else 0.
        prune: whether settings that are behind after a third of the rounds are given up.
        progress: called with the number of trials done, of all, and the lowest validation loss so far.
    """
    not_while_importing("fb.tune")
    about = words_of_task(task)
    several = isinstance(algorithm, list | tuple)
    wanted: Sequence[Any] = algorithm if isinstance(algorithm, list | tuple) else [algorithm]
    first, *more = [*seeds] or [0]
    asked = []
    for each in wanted:
        word, kind, strange = (None, None, {}) if each is None else words_of_algorithm(each)
        given = Given(about.make, kind, {**about.only_python, **strange})
        bare = Experiment(about.word, word, rounds, first, _sample(sample), about.settings, given=given)
        held = hold_out if hold_out is not None else 0.2 if several else 0.0
        asked.append(
            Tuning(bare.changed(settings or {}), trials, vary or {}, held_out=held, prune=prune, seeds=tuple(more))
        )
    if several:
        return searches.search(asked, _path(out), progress)
    return tune_one(asked[0], _path(out), progress)


def solve_into(
    folder: Path,
    task: Task,
    algorithm: Algorithm,
    rounds: int,
    seed: int,
    sample: "int | Participation | list[int] | None",
    callbacks: Sequence[Any],
    **more: Any,
) -> Result:
    """Run ``solve``, and write a run folder; an interrupted one is continued."""
    not_while_importing("fb.solve(out=...)")
    word, _, strange = words_of_algorithm(algorithm)
    about = words_of_task(task)
    only_python = {**about.only_python, **strange}
    if any(more[name] is not None for name in "xyu"):
        only_python["start"] = "the starting point"
    if not isinstance(more["engine"], str):
        raise FedbilevelError("give the engine by its name if the run is to be written to a folder.")
    named = [each for each in more["diagnostics"] if isinstance(each, str)]
    experiment = Experiment(
        about.word, word, rounds, seed, _sample(sample), every=interval(rounds, more["every"]), diagnostics=named,
        engine=more["engine"], batching=more["batching"], references=False,
        until=",".join(f"{name}={float(bound)!r}" for name, bound in (more["until"] or {}).items()),
    )  # fmt: skip
    experiment = dataclasses.replace(experiment, given=Given(about.make, algorithm, only_python))
    built = Built(experiment, task, algorithm, dict(task.options))
    place = RunFolder(folder if RunFolder(folder).begun else new_folder(folder.name, folder))
    with alone(place.path):
        text = configuration.write(built.config())
        if place.begun and configuration.parse(text, "")[0] != configuration.parse(_config(place), "")[0]:
            raise FedbilevelError(f"{folder} has another run, with other settings: choose another folder with out=.")
        place.write_config(text)
        place.begin(**describe(built, folder))
        return _solved(place, built, callbacks, sample, more)


def _solved(place: RunFolder, built: Built, callbacks: Sequence[Any], sample: Any, more: dict[str, Any]) -> Result:
    experiment, task, algorithm, _ = built
    checkpoint = place.checkpoints(experiment.name) if experiment.engine == "simulation" else None
    with place.records() as records:

        class Record(Callback):
            def row(self, row: Mapping[str, Any]) -> None:
                records.append({"run": experiment.name, **row})

        try:
            result = solve(
                task, algorithm, experiment.rounds or 0, experiment.seed, sample,
                **{**more, "callbacks": [Record(), *callbacks], "checkpoint": checkpoint},
            )  # fmt: skip
        except KeyboardInterrupt as interrupt:
            place.enter("interrupted", failure="")
            stopped = Interrupted.of(interrupt)
            if stopped.result is not None:
                save_solution(stopped.result, place, task)
            stopped.saved = f"Continue with the same call and out='{place.path}'."
            raise stopped from None
        except Exception as error:
            place.fail(error)
            if isinstance(error, Diverged) and error.result is not None:
                save_solution(error.result, place, task)
            raise
    save_solution(result, place, task)
    summary = {**result.metrics, "rounds": result.metrics["round"], "seconds": result.seconds}
    about = {"algorithm": experiment.name, "task": plugins.short(experiment.task), "seed": experiment.seed}
    place.finish({**summary, **about, "folder": str(place.path)})
    return result


def _config(place: RunFolder) -> str:
    return (place.path / "config.toml").read_text()


def not_while_importing(call: str) -> None:
    """Refuse to start runs from a file that is only being imported for what is in it."""
    if plugins.LOADING:
        raise FedbilevelError(
            f"{plugins.LOADING[-1]} calls {call} whenever it is imported: put that under if __name__ == '__main__':."
        )


def _path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)


def _sample(sample: Any) -> str | None:
    """Who takes part, as the command line says it."""
    if sample is None or isinstance(sample, str | Everyone):
        return sample if isinstance(sample, str) else None
    if isinstance(sample, bool) or not isinstance(sample, int | float | list | tuple | Independent | Uniform):
        raise FedbilevelError(f"a run folder cannot say who takes part by {sample!r}: use a number or a list.")
    if isinstance(sample, list | tuple):
        return ",".join(map(str, sample)) + ","
    if isinstance(sample, int | float):
        return str(sample)
    value = sample.probability if isinstance(sample, Independent) else sample.size
    words = [word for word in ("resample", "replacement") if getattr(sample, word, False)]
    return " ".join([str(value), *words])
