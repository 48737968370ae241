"""What was given from Python, instead of by words: tasks, functions that make tasks, and algorithms.

Such a run can be continued by the same call. Whoever has only its folder needs words: the place of a function or a
class that can be imported again.
"""

import functools
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel.core import Algorithm
from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError
from fedbilevel.runs import plugins
from fedbilevel.runs.plugins import OURS, Kind

Maker = Callable[..., Task]


@dataclass(frozen=True)
class Fixed:
    """A function that makes a task which is there already."""

    task: Task

    def __call__(self) -> Task:
        """The task."""
        return self.task


@dataclass(frozen=True)
class Given:
    """What an experiment was given besides its words."""

    make: Maker | None = None
    algorithm: Algorithm | type[Algorithm] | None = None
    only_python: Mapping[str, str] = field(default_factory=dict)  # what no word leads to: "task", and how it is called

    @property
    def obstacle(self) -> str:
        """Why it cannot be sent to another process, "" if it can."""
        return obstacle((self.make, self.algorithm))


@dataclass(frozen=True)
class Words:
    """A task as it is written down: a word and its settings; ``make`` is what was given, if it was not a word."""

    word: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    make: Maker | None = None
    only_python: Mapping[str, str] = field(default_factory=dict)


def words_of_task(task: "Task | Maker | str") -> Words:
    """A task, a function that makes one, or its word, as words."""
    if isinstance(task, str):
        return Words(plugins.absolute(task))
    if isinstance(task, Task):
        return Words(task.name, {}, Fixed(task), {"task": "the task"})
    if not callable(task):
        raise FedbilevelError(f"give a task, a function that makes one, or its name, not {type(task).__name__}.")
    settings: Mapping[str, Any] = {}
    function = task
    plain = lambda value: isinstance(value, bool | int | float | str | tuple)
    if isinstance(task, functools.partial) and not task.args and all(map(plain, task.keywords.values())):
        function, settings = task.func, {f"task.{name}": value for name, value in task.keywords.items()}
    if (word := word_of("task", function)) is not None:
        return Words(word, settings, function)
    named = getattr(function, "__name__", type(function).__name__).strip("<>")
    return Words(named, {}, task, {"task": f"the function {named}"})


def words_of_algorithm(
    algorithm: "Algorithm | type[Algorithm] | str",
) -> tuple[str, Algorithm | type[Algorithm] | None, dict[str, str]]:
    """An algorithm as a word, what was given if that was not a word, and what no word leads to."""
    if isinstance(algorithm, str):
        return plugins.absolute(algorithm), None, {}
    kind = algorithm if inspect.isclass(algorithm) else type(algorithm)
    if not issubclass(kind, Algorithm):
        raise FedbilevelError(f"give algorithms, such as FedBiO() or FedBiO, or their names, not {algorithm!r}.")
    word = word_of("algorithm", kind)
    return word or kind.__name__, algorithm, {} if word else {"algorithm": f"the algorithm {kind.__name__}"}


def word_of(kind: Kind, thing: Any) -> str | None:
    """The word that leads to a function or a class; None if there is none, as for a lambda."""
    for name, each in OURS[kind].items():
        if each is thing:
            return name
    module, name = sys.modules.get(getattr(thing, "__module__", "")), getattr(thing, "__qualname__", "<")
    if module is None or "<" in name:
        return None
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    file = getattr(module, "__file__", None)
    if found is not thing:
        return None
    if module.__name__ in ("__main__", "__mp_main__") or module.__name__.startswith("fedbilevel_file_"):
        return f"{Path(file).absolute()}:{name}" if file and Path(file).is_file() and file.endswith(".py") else None
    return f"{module.__name__}:{name}"


def obstacle(thing: Any) -> str:
    """What of a thing cannot be sent to another process, in words; "" if all of it can."""
    try:
        _Check(io.BytesIO()).dump(thing)
    except _Stays as stays:
        return f"{stays} cannot be sent to another process"
    except Exception as error:
        return f"{type(error).__name__} ({(str(error) or '-').splitlines()[0][:200]}): it cannot go to another process"
    return ""


class _Stays(Exception):
    """A function or a class that another process cannot import."""


class _Check(pickle.Pickler):
    """Pickles as the standard one does, and names what another process could not import."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType | type):
            name, here = obj.__qualname__, obj.__module__ == "__main__"
            if "<" in name or (here and not hasattr(sys.modules["__main__"], "__file__")):
                raise _Stays(_described(obj, name))
        return NotImplemented


def _described(thing: Any, name: str) -> str:
    code = getattr(thing, "__code__", None)
    where = f" in line {code.co_firstlineno} of {Path(code.co_filename).name}" if code is not None else ""
    if name.endswith("<lambda>"):
        return f"the lambda{where}"
    if "<" in name:
        return f"{name.rpartition('.')[2]}{where}, which is defined inside a function,"
    return f"{name}, which is defined in this session and in no file,"
