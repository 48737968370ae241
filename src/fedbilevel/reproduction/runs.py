"""The runs of an experiment, and the searches for parameters before them."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedbilevel import grid
from fedbilevel.errors import FedbilevelError
from fedbilevel.experiment import new_folder, plain
from fedbilevel.grid import Place
from fedbilevel.records import runs, write_atomically
from fedbilevel.reproduction.files import Column, Method, Panel, Reproduction, Search, settings_of
from fedbilevel.tuning import Tuning, tune


@dataclass(frozen=True)
class Member(grid.Member):
    """One run."""

    panel: Panel
    method: Method
    seed: int


@dataclass(frozen=True)
class Reproduced:
    """All runs of an experiment."""

    reproduction: Reproduction
    members: Sequence[Member]
    folder: Path

    def of(self, panel: Panel, method: Method) -> list[Member]:
        return [m for m in self.members if m.panel.title == panel.title and m.method == method]

    @cached_property
    def minutes(self) -> float:
        """Of all runs together, without compiling."""
        return grid.seconds(self.members) / 60

    def value(self, panel: Panel, method: Method, column: Column, over: str = "end") -> tuple[float, float]:
        """Mean and standard deviation over seeds; NaN where a run did not come to its end."""
        members = self.of(panel, method)
        if not members or not all(m.done for m in members):
            return math.nan, math.nan
        if over == "rounds":
            values = [column.scale * float(np.mean([row[column.metric] for row in m.history])) for m in members]
        else:
            values = [column.of(m.history) for m in members]
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def run(
    made: Reproduction,
    out: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    jobs: int = 0,
) -> Reproduced:
    """Run every method under every condition with every seed; a folder that holds some of it is continued."""
    folder = out if out is not None and out.is_dir() else new_folder(f"reproduce-{made.id}", out)
    groups, members = [], []
    for panel, method in made.cases():
        name = _slug(f"{panel.title} {method.label} {method.parameters}")
        some = [
            (Place(folder / f"{name}-seed{seed}", made.experiment(panel, method, seed)), seed)
            for seed in made.seeds_of(panel, method)
        ]
        some[0][0].experiment.build().check()  # refuses what is wrong before anything is run
        _check_same(some[0][0])
        groups.append([place for place, _ in some])
        members += [(place, panel, method, seed) for place, seed in some]
    try:
        grid.run(groups, progress, jobs)
    except KeyboardInterrupt as interrupt:
        interrupt.saved = f"Go on with the same command and --out {folder}"  # pyright: ignore
        raise
    done = [Member(runs(place.folder)[0], panel, method, seed) for place, panel, method, seed in members]
    return Reproduced(made, done, folder)


def _check_same(place: Place) -> None:
    """Refuse a folder with a run of something else."""
    if not place.settled:
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
            f"{place.folder} holds another run ({', '.join(differ[:3])} differ): remove it, or choose another --out."
        )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def search(made: Reproduction, out: Path, progress: Callable[[int, int], None] | None = None) -> Reproduction:
    """Look for the parameters of all rows that have "found", each with the same budget; writes ``found.toml``."""
    asked = made.search
    wanted = [method for method in made.methods if method.parameters == "found"]
    if asked is None or asked.found or not wanted:
        raise FedbilevelError(f"{made.id} has nothing to search for.")
    found: list[dict[str, Any]] = []
    with grid.processes(min(grid.cores(), len(wanted))) as pool:
        searches = [grid.submit(pool, _search_one, made, asked, method, out) for method in wanted]
        try:
            for number, search in enumerate(searches):
                if progress is not None:
                    progress(number, len(wanted))
                found += search.result()
        except KeyboardInterrupt:
            grid.end(pool, searches)
            raise
    how = {"trials": asked.budget, "rounds": asked.rounds, "seed": asked.seed, "kept_apart": asked.kept_apart}
    write_atomically(out / "found.toml", tomli_w.dumps({"search": how, "found": found}).encode())
    return replace(made, found=settings_of({"found": found}))


def _search_one(made: Reproduction, asked: Search, method: Method, out: Path) -> list[dict[str, Any]]:
    """What was found for one row, condition by condition; each search begins with what was found before."""
    fixed, found, first = asked.fixed.get(method.label, {}), [], []
    for panel in (p for p, m in made.cases() if m == method and p.title in asked.panels):
        experiment = replace(made, found={(method.label, panel.title): fixed}).experiment(panel, method, asked.seed)
        experiment = experiment.changed({f"task.{name}": value for name, value in asked.task.items()})
        experiment = experiment.changed({"rounds": asked.rounds}) if asked.rounds else experiment
        tuning = (
            Tuning.on_grid(experiment, asked.grid, asked.kept_apart)
            if asked.grid
            else Tuning(experiment, asked.trials + len(first), first=first, kept_apart=asked.kept_apart)
        )
        tuned = tune(tuning, out / _slug(f"{panel.title} {method.label}"))
        settings = {name: plain(value) for name, value in tuned.best.settings.items()}
        losses = {"loss": tuned.best.value}
        if not asked.grid:
            losses["suggested_loss"] = tuned.suggested.value
        which = {"method": method.label, "panel": panel.title, "trials": len(tuned.trials)}
        found.append({**which, **losses, "settings": {**fixed, **settings}})
        first = [*first, {name: getattr(value, "scale", value) for name, value in tuned.best.settings.items()}]
    return found
