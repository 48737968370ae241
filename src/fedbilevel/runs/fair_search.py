"""One search for several algorithms, with the same number of trials each, on the same held-out rows.

The folder has a folder for the search of each algorithm, and ``tuned.toml``, which ``compare --tuned`` takes.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedbilevel.core import Algorithm
from fedbilevel.errors import FedbilevelError
from fedbilevel.runs import configuration, plugins
from fedbilevel.runs.settings import plain
from fedbilevel.runs.tuning import BEST, Tuned, Tuning, tune
from fedbilevel.runs.validation import hold_out
from fedbilevel.storage.files import new_folder, write_atomically

TUNED = "tuned.toml"


@dataclass(frozen=True)
class Found:
    """What a search found: the task, and for each algorithm, by its word, the best hyper-parameters."""

    task: str
    rounds: int
    trials: int
    held_out: float
    seeds: Sequence[int]
    settings: Mapping[str, Any]
    best: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def read(folder: Path) -> "Found":
        """What the search of a folder found, of several algorithms or of one."""
        try:
            if (folder / TUNED).exists():
                return Found(**tomllib.loads((folder / TUNED).read_text()))
            if (folder / BEST).exists():
                return Found._of_one(configuration.read(folder / BEST)[0])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FedbilevelError(f"what was found in {folder} cannot be read ({error}).") from None
        raise FedbilevelError(f"{folder} has no search that has finished: give a folder that 'fedbilevel tune' wrote.")

    @staticmethod
    def _of_one(tables: Mapping[str, Mapping[str, Any]]) -> "Found":
        task, algorithm, run = (dict(tables[name]) for name in configuration.TABLES)
        name, word = task.pop("name"), algorithm.pop("name")
        settings = {f"task.{key}": value for key, value in task.items()}
        return Found(name, run["rounds"], 0, 0.0, [run.get("seed", 0)], settings, {word: algorithm})


@dataclass(frozen=True)
class Searched:
    """A finished search for several algorithms."""

    folder: Path
    found: Found
    members: Sequence[Tuned]

    @property
    def algorithms(self) -> dict[str, Algorithm]:
        """The algorithms with what was found, by name."""
        return {each.experiment.name: each.algorithm for each in self.members}

    @property
    def summary(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {"folder": str(self.folder), "algorithms": [each.summary for each in self.members]}


def search(
    asked: Sequence[Tuning],
    out: Path | None = None,
    progress: Callable[[int, int, float | None], None] | None = None,
) -> Searched:
    """Search for each; ``out`` is a new folder, or that of a search to continue. ``progress`` counts all trials."""
    if not asked:
        raise FedbilevelError("name the algorithms to search for.")
    first = asked[0].experiment
    names = [each.experiment.name for each in asked]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FedbilevelError(f"{twice[0]} is there twice: one search needs different algorithms.")
    for each in asked:
        built = each.experiment.build()
        built.check()  # before anything is tried
        hold_out(built.task, each.held_out)
    begun = out is not None and any((out / name).exists() for name in names)
    folder = out if begun and out is not None else new_folder(f"tune-{plugins.short(first.task)}", out)
    members: list[Tuned] = []
    for number, each in enumerate(asked):
        before = sum(one.trials for one in asked[:number])

        def tell(done: int, trials: int, best: float | None, before: int = before) -> None:
            if progress is not None:
                progress(before + done, sum(one.trials for one in asked), best)

        members.append(tune(each, folder / names[number], tell))
    settings = {key: plain(value) for key, value in first.settings.items()}
    best = {
        str(each.experiment.algorithm): {name: plain(value) for name, value in each.best.settings.items()}
        for each in members
    }
    rounds = members[0].experiment.rounds or 0
    seeds = [first.seed, *asked[0].seeds]
    found = Found(first.task, rounds, asked[0].trials, asked[0].held_out, seeds, settings, best)
    write_atomically(folder / TUNED, tomli_w.dumps(asdict(found)).encode())
    return Searched(folder, found, members)
