"""The runs of an experiment, and the searches for parameters before them."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedbilevel.errors import FedbilevelError, Interrupted
from fedbilevel.reproduction.curves import Curve, Reproduced
from fedbilevel.reproduction.files import Method, Reproduction, Search, mark, settings_of
from fedbilevel.runs import grid, processes
from fedbilevel.runs.grid import PlannedRun
from fedbilevel.runs.processes import DIED, cores
from fedbilevel.runs.settings import plain
from fedbilevel.runs.tuning import Tuned, Tuning, tune
from fedbilevel.storage.files import write_atomically
from fedbilevel.storage.load import runs
from fedbilevel.storage.run_folder import RunFolder


def run(
    made: Reproduction,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    jobs: int = 0,
) -> Reproduced:
    """Run every method under every condition with every seed; a folder with some of these runs is continued."""
    groups, members = [], []
    for panel, method in made.cases():
        name = _slug(f"{panel.title} {method.label} {method.parameters}")
        some = [
            (PlannedRun(folder / f"{name}-seed{seed}", made.experiment(panel, method, seed)), seed)
            for seed in made.seeds_of(panel, method)
        ]
        some[0][0].experiment.build().check()  # refuses errors before anything is run
        for place, _ in some:
            _check_same(place, f"{name}-*")
        groups.append([place for place, _ in some])
        members += [(place, panel, method, seed) for place, seed in some]
    try:
        grid.run(groups, progress, jobs)
    except KeyboardInterrupt as interrupt:
        raise Interrupted.of(interrupt, saved=f"Continue with the same command and --out {folder}") from None
    if unsettled := [place for place, *_ in members if not place.settled]:
        why = grid.Member(runs(unsettled[0].folder)[0]).failure
        raise FedbilevelError(
            f"{len(unsettled)} of {len(members)} runs have no result, the first of them {unsettled[0].folder.name}: "
            f"{why} To continue, run the same command with --out {folder}."
        )
    curves = []
    for place, panel, method, seed in members:
        member = grid.Member(runs(place.folder)[0])
        curves.append(Curve(panel, method, seed, member.history, member.failure))
    return Reproduced(made, curves)


def _check_same(place: PlannedRun, group: str) -> None:
    """Refuse a folder that has another run, finished or not."""
    if not RunFolder(place.folder).begun:
        return
    written = runs(place.folder)[0].config
    asked = place.experiment.build().config()
    differ = [
        f"{table}.{key}"
        for table in ("task", "algorithm", "run")
        for key, value in asked[table].items()
        if value is not None and written.get(table, {}).get(key) != value
    ]
    if differ:
        raise FedbilevelError(
            f"{place.folder} has another run ({', '.join(differ[:3])} differ): remove {place.folder.parent / group}, "
            "or choose another --out."
        )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def search(
    made: Reproduction, out: Path, progress: Callable[[int, int], None] | None = None, jobs: int = 0
) -> Reproduction:
    """Search for the parameters of all rows marked "found", each with the same budget; writes ``found.toml``."""
    asked = made.search
    wanted = [method for method in made.methods if method.parameters == "found"]
    if asked is None or asked.found or not wanted:
        raise FedbilevelError(f"{made.id} has nothing to search for.")
    searched: dict[int, list[dict[str, Any]]] = {}
    tell = lambda: progress(len(searched), len(wanted)) if progress else None
    tell()
    workers = min(jobs or cores(), cores())
    try:
        calls = processes.calls(_search_one, [(made, asked, method, out) for method in wanted], workers)
        with contextlib.closing(calls) as results:
            for number, some in results:
                if some is DIED:
                    raise FedbilevelError(
                        f"{made.id}: the process that searched for {wanted[number].label} died (out of memory?). "
                        f"To continue, run the same command with --out {out.parent}."
                    )
                searched[number] = some
                tell()
    except KeyboardInterrupt as interrupt:
        raise Interrupted.of(interrupt, saved=f"Continue with the same command and --out {out.parent}") from None
    lines = [line for number in sorted(searched) for line in searched[number]]
    write_atomically(out / "found.toml", tomli_w.dumps({"search": asked.conditions, "found": lines}).encode())
    return replace(made, found=settings_of({"found": lines}))


def _search_one(made: Reproduction, asked: Search, method: Method, out: Path) -> list[dict[str, Any]]:
    """What was found for one row, condition by condition; each search also tries what was found before."""
    fixed, lines, first = asked.fixed.get(method.label, {}), [], []
    for panel in (p for p, m in made.cases() if m == method and (not asked.panels or p.title in asked.panels)):
        experiment, start = made.searched(panel, method)
        name = _slug(f"{panel.title} {method.label}")
        if asked.grid:
            seeds = range(asked.seed, asked.seed + asked.seeds)
            tunings = [Tuning.on_grid(experiment.changed({"seed": n}), asked.grid, asked.held_out) for n in seeds]
            places = [out / f"{name}-seed{n}" for n in seeds]
        else:
            tuning = Tuning(
                experiment,
                asked.trials + len(first),
                ranges=asked.ranges,
                start=start,
                first=first,
                tied=asked.tied.get(method.label, {}),
                held_out=asked.held_out,
                prune=asked.prune,
            )
            tunings, places = [tuning], [out / name]
        try:
            tuned = [tune(tuning, place) for tuning, place in zip(tunings, places, strict=True)]
            loss, settings = _best(tuned)
        except FedbilevelError as error:
            raise FedbilevelError(f"{made.id}, {method.label}, {panel.title}: {error}") from error
        which = {"method": method.label, "panel": panel.title, "of": mark(experiment, start)}
        which |= {"trials": len(tuned[0].trials)}
        losses = {"loss": loss, "first_loss": float(np.mean([each.suggested.value for each in tuned]))}
        shown = {name: plain(value) for name, value in settings.items()}
        lines.append({**which, **losses, "settings": {**fixed, **shown}})
        first = [*first, {name: getattr(value, "scale", value) for name, value in settings.items()}]
    return lines


def _best(tuned: Sequence[Tuned]) -> tuple[float, Mapping[str, Any]]:
    """The lowest mean loss over seeds, among the settings that finished with all of them."""
    settings = {str(trial.settings): trial.settings for each in tuned for trial in each.trials}
    losses = [
        {str(trial.settings): trial.value for trial in each.trials if trial.state == "complete"} for each in tuned
    ]
    means = {
        point: float(np.mean([of[point] for of in losses])) for point in settings if all(point in of for of in losses)
    }
    if not means:
        raise FedbilevelError("no setting finished with every seed.")
    best = min(means, key=means.__getitem__)
    return means[best], settings[best]
