"""The search space of tuning: the hyper-parameters of an algorithm, their ranges and choices."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedbilevel.core import Algorithm
from fedbilevel.core.schedules import Schedule, scale_of
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.runs.experiment import Built
from fedbilevel.runs.settings import Setting, convert

AROUND = 30.0
"""Where the task suggests a value, the search goes from a 30th of it to 30 times it."""


class Range(NamedTuple):
    """Numbers to search in, on a log scale; only these ``values``, if there are any."""

    low: float
    high: float
    suggested: float
    values: tuple[float, ...] = ()


class Choice(NamedTuple):
    """Values to choose from."""

    values: tuple[Any, ...]
    suggested: Any


Space = dict[str, Range | Choice]


def search_space(
    built: Built,
    fixed: Mapping[str, Any],
    vary: Mapping[str, str],
    grid: Mapping[str, Sequence[float]] | None = None,
    ranges: Mapping[str, Sequence[float]] | None = None,
    start: Mapping[str, float] | None = None,
) -> Space:
    """The hyper-parameters to tune. A suggestion of 0 is kept, as it has no log scale. Of ``ranges``, those of
    hyper-parameters that the algorithm has are used: the same ones may be given for several algorithms.
    """
    experiment, task, algorithm, _ = built
    fields = {f.name: f for f in dataclasses.fields(algorithm)}
    suggested = task.suggested.for_algorithm(str(experiment.algorithm), fields)
    set_by_user = {setting.name for setting in map(Setting.parse, fixed) if setting.table != "task"}
    space: Space = {}
    ranges, start = ranges or {}, start or {}
    for name in (*vary, *start, *(grid or ())):
        if name not in fields:
            raise UnknownName(f"hyper-parameter of {experiment.algorithm}", name, fields)
    if grid:
        return {name: Range(min(some), max(some), some[0], tuple(some)) for name, some in grid.items()}
    for name, entry in fields.items():
        value, tune = getattr(algorithm, name), entry.metadata.get("tune")
        if name in vary or name in set_by_user or tune is None or scale_of(getattr(algorithm, name)) <= 0:
            continue
        value = start.get(name, scale_of(getattr(algorithm, name)))
        low, high = (value / AROUND, value * AROUND) if name in suggested else tune
        low, high = ranges.get(name, (low, high))
        space[name] = Range(min(low, value), max(high, value), value)
    for name, text in vary.items():
        if isinstance(fields[name].default, tuple | Schedule):
            raise FedbilevelError(f"--vary cannot change {name}: it is neither a number nor a word.")
        values = [convert(name, part.strip(), fields[name].default) for part in text.split(",") if part.strip()]
        for value in values:
            dataclasses.replace(algorithm, **{name: value})  # refuses wrong ones
        space[name] = Choice(tuple(dict.fromkeys([getattr(algorithm, name), *values])), getattr(algorithm, name))
    return space


def as_fields(
    algorithm: Algorithm, numbers: Mapping[str, Any], tied: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Hyper-parameters as the algorithm has them: the number of a schedule is its scale; tied ones with the others."""
    sums = {name: sum(factor * numbers[other] for other, factor in others.items()) for name, others in tied.items()}
    numbers = {**numbers, **sums}
    held = {name: getattr(algorithm, name) for name in numbers}
    return {
        name: dataclasses.replace(held[name], scale=value) if isinstance(held[name], Schedule) else value
        for name, value in numbers.items()
    }
