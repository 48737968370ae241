"""How the results of a task are shown, and what the command line runs by default."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.types import Tree


class Outcome(Protocol):
    """The result of a run, as far as a task uses it: ``fb.Result`` is one."""

    @property
    def x(self) -> Tree: ...
    @property
    def y(self) -> Tree: ...
    @property
    def history(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def metrics(self) -> Mapping[str, Any]: ...


Outcomes = Mapping[str, Outcome]
"""The run as "run", and the references by their labels."""


class Reference(NamedTuple):
    """A run to compare with: an algorithm from a given x (in the user's structure).

    Its results are called METRIC_label; ``title`` is for readers. A grid search has ``others`` to start from as well:
    all of them are run and counted as its cost, and the one with the smallest final value of the metric ``by`` wins.
    """

    label: str
    title: str
    algorithm: Algorithm
    x: Tree
    others: Sequence[Tree] = ()
    by: str = ""


class Sequel(NamedTuple):
    """A run that starts from the solution: ``make(x, y)`` gives its task and its algorithm, from x and y in the user's
    structure. Its results are called METRIC_label; ``title`` is for readers. It takes ``share`` of the rounds.
    """

    label: str
    title: str
    make: Callable[[Tree, Tree], tuple[Any, Algorithm]]
    share: float = 1.0


class Details(NamedTuple):
    """A table of words and numbers that shows a user the solution itself."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]


@dataclass(frozen=True)
class Presentation:
    """How the results of a task are shown. ``results`` holds the run as "run" and the references by their labels.

    Args:
        headline: the metrics of the summary table, as {name: heading}.
        compare_by: the metrics that a comparison draws (default: all of the headline).
        references: runs to compare with.
        sequel: a run that starts from the solution.
        details: ``details(results) -> Details``, a table of what the solution looks like.
        picture: ``picture(results, figure)`` draws the solution on an empty matplotlib figure, whose size it may set.
        files: ``files(results, folder)`` writes further files for users of this task.
        note: what to tell about the data before a run starts.
    """

    headline: Mapping[str, str] = field(default_factory=dict)
    compare_by: Sequence[str] = ()
    references: Sequence[Reference] = ()
    sequel: Sequel | None = None
    details: Callable[[Outcomes], Details] | None = None
    picture: Callable[[Outcomes, Any], None] | None = None
    files: Callable[[Outcomes, Path], None] | None = None
    note: str = ""


@dataclass(frozen=True)
class Suggestion:
    """What the command line runs by default.

    >>> Suggestion(hyper={"fedbio": {"lr_upper": 0.3}, "*": {"lr_upper": 0.1}}).for_algorithm("simfbo", ["lr_upper"])
    {'lr_upper': 0.1}

    Args:
        algorithm: its name.
        rounds: number of communication rounds.
        sample: which clients take part in a round.
        hyper: hyper-parameters that suit this task better than an algorithm's defaults, by the name of the algorithm
            or "*" for all others.
    """

    algorithm: str = "fedbioacc"
    rounds: int = 200
    sample: str = "everyone"
    hyper: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def for_algorithm(self, name: str, fields: Collection[str]) -> dict[str, Any]:
        """The suggested hyper-parameters for an algorithm by name, among the fields that it has."""
        hyper = self.hyper.get(name, self.hyper.get("*", {}))
        return {field: value for field, value in hyper.items() if field in fields}
