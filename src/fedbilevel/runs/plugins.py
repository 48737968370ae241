"""Algorithms and tasks by word: a name of this package, one that another installed package gives (an entry point), or a
place, ``package.module:Name`` or ``./file.py:Name``.

Nothing of other people's is imported before it is asked for by its word.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core import Algorithm
from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.tasks import TASKS

Kind = Literal["algorithm", "task"]
GROUPS: Mapping[Kind, str] = {"algorithm": "fedbilevel.algorithms", "task": "fedbilevel.tasks"}
"""The entry points of other packages."""
OURS: dict[Kind, Mapping[str, Any]] = {"algorithm": ALGORITHMS, "task": TASKS}


class Place(NamedTuple):
    """Where a word says that something is: a file or a module, and the name there."""

    source: str
    name: str

    @property
    def is_file(self) -> bool:
        """Whether it is a file, not a module."""
        return self.source.lower().endswith(".py")

    @property
    def word(self) -> str:
        """As it is written."""
        return f"{self.source}:{self.name}"


def place_of(word: str) -> Place | None:
    """What a word with a colon, or the name of a Python file, says; None for a plain name.

    >>> place_of("./mine.py:Mine").name, place_of("lab.methods:Mine").source, place_of("fedbio")
    ('Mine', 'lab.methods', None)
    """
    if word.lower().endswith(".py"):
        return Place(word, "")
    source, colon, name = word.rpartition(":")
    return Place(source, name) if colon else None


def absolute(word: str, base: Path | None = None) -> str:
    """A word that can be used from any folder: a file is looked for in ``base``, then here."""
    place = place_of(word)
    if place is None or not place.is_file:
        return word
    path = Path(place.source).expanduser()
    if base is not None and (base / path).is_file():
        path = base / path
    return f"{os.path.abspath(path)}:{place.name}" if place.name else os.path.abspath(path)


def short(word: str) -> str:
    """A word as a name of a run: without the folder.

    >>> short("/home/me/mine.py:Mine"), short("lab.methods:Mine"), short("fedbio")
    ('mine.Mine', 'methods.Mine', 'fedbio')
    """
    place = place_of(word)
    if place is None:
        return word
    return f"{Path(place.source).stem if place.is_file else place.source.rpartition('.')[2]}.{place.name}".rstrip(".")


# What there is.


@cache
def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def installed(kind: Kind) -> dict[str, EntryPoint]:
    """What other packages give by name. A name of this package stays what it is."""
    return {each.name: each for each in _entries(GROUPS[kind]) if each.name not in OURS[kind]}


def origin_of(entry: EntryPoint) -> str:
    """The package of an entry point, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def listed(kind: Kind) -> Iterable[tuple[str, str, Any]]:
    """Everything by name: its origin, and what it is, or the sentence that says why it cannot be used."""
    for name, thing in OURS[kind].items():
        yield name, "", thing
    for name, entry in sorted(installed(kind).items()):
        try:
            yield name, origin_of(entry), algorithm(name) if kind == "algorithm" else maker(name)
        except FedbilevelError as error:
            yield name, origin_of(entry), str(error)


# From words to things.


def algorithm(word: str, where: str = "") -> type[Algorithm]:
    """The algorithm of a word; ``where`` says where it was written, for messages."""
    found = _find("algorithm", word, where)
    if not inspect.isclass(found) or not issubclass(found, Algorithm):
        raise FedbilevelError(f"{where}{word} is not an algorithm: give a subclass of fedbilevel.Algorithm.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise FedbilevelError(f"{where}{word} does not have these methods yet: {missing}.")
    if "__dataclass_fields__" not in vars(found) or not found.__dataclass_params__.frozen:  # pyright: ignore
        raise FedbilevelError(f"{where}{word} must be a frozen dataclass: write @dataclass(frozen=True) above it.")
    return found


def maker(word: str, where: str = "") -> Callable[..., Task]:
    """The function that makes the task of a word."""
    found = _find("task", word, where)
    if isinstance(found, Task):
        raise FedbilevelError(
            f"{where}{word} is a task: give a function that returns it, so that it can be made again."
        )
    if not callable(found):
        raise FedbilevelError(f"{where}{word} is {type(found).__name__}, but should be a function that returns a Task.")
    function: Any = found
    return function


def make(function: Callable[..., Task], given: Mapping[str, Any], word: str = "") -> Task:
    """A task from its function; what goes wrong in somebody else's becomes a sentence with the line."""
    name = word or getattr(function, "__name__", "the function")
    try:
        task = function(**given)
    except FedbilevelError:
        raise
    except Exception as error:
        if getattr(function, "__module__", "").startswith("fedbilevel."):
            raise
        raise FedbilevelError(f"{name} failed: {_said(error)}") from error
    if not isinstance(task, Task):
        raise FedbilevelError(f"{name} must return a fedbilevel.Task, but returned {type(task).__name__}.")
    return task


def _find(kind: Kind, word: str, where: str) -> Any:
    place = place_of(word)
    if place is not None:
        return _named(kind, place, load(place, where), where)
    if word in OURS[kind]:
        return OURS[kind][word]
    entries = installed(kind)
    if word not in entries:
        raise UnknownName(kind, word, [*OURS[kind], *entries], where)
    entry = entries[word]
    try:
        return entry.load()
    except Exception as error:
        raise FedbilevelError(
            f"{where}the {kind} '{word}' of {origin_of(entry)} cannot be loaded: {_said(error)}"
        ) from error


def _named(kind: Kind, place: Place, module: ModuleType, where: str) -> Any:
    own = {
        name: thing
        for name, thing in vars(module).items()
        if getattr(thing, "__module__", None) == module.__name__ and not name.startswith("_")
    }
    if kind == "algorithm":
        own = {name: thing for name, thing in own.items() if inspect.isclass(thing) and issubclass(thing, Algorithm)}
    else:
        own = {name: thing for name, thing in own.items() if inspect.isfunction(thing)}
    if not place.name:
        which = " or ".join(f"{place.source}:{name}" for name in own) or f"{place.source}:NAME"
        raise FedbilevelError(f"{where}{place.source} is a file: say what in it, {which}.")
    thing: Any = module
    for part in place.name.split("."):
        thing = getattr(thing, part, None)
    if thing is None:
        raise UnknownName(f"{kind} in {place.source}", place.name, own, where)
    return thing


LOADING: list[str] = []
"""Files that are being imported."""


def load(place: Place, where: str = "") -> ModuleType:
    """The module of a place; a file is imported once, as long as it does not change."""
    if not place.is_file:
        return _module(place, where)
    path = Path(absolute(place.source))
    try:
        text = path.read_bytes()
    except OSError as error:
        raise FedbilevelError(f"{where}the file {place.source} cannot be read: {error.strerror}.") from None
    name = "fedbilevel_file_" + hashlib.sha256(str(path).encode() + b"\0" + text).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # what lies beside it can be imported, and hides nothing
    sys.modules[name] = module
    LOADING.append(place.source)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, FedbilevelError):
            raise
        raise FedbilevelError(f"{where}{place.source} cannot be imported: {_said(error)}") from error
    finally:
        LOADING.pop()
    return module


def _module(place: Place, where: str) -> ModuleType:
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(place.source)
    except (Exception, SystemExit) as error:
        raise FedbilevelError(f"{where}the module {place.source} cannot be imported: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """An error in somebody else's code: its type, its first line, and the last line of that code."""
    reason = type(error).__name__ + (f": {str(error).strip().splitlines()[0]}" if str(error).strip() else "")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}, line {error.lineno}: {error.msg}."
    ours = Path(__file__).parents[1]
    known = ("importlib", "<frozen")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(ours) and not any(word in frame.filename for word in known)
    ]
    at = f" ({Path(frames[0].filename).name}, line {frames[0].lineno})" if frames else ""
    return f"{reason.rstrip('.')}{at}."


# Where things came from.


@dataclass(frozen=True)
class Origin:
    """Code of other people that a run used: the package, or the file, and a hash of all of it."""

    word: str
    package: str
    path: str
    hash: str

    @property
    def trouble(self) -> str:
        """What became of it since: "" if it is as it was."""
        if not Path(self.path).exists():
            return f"{self.path}, from which this run has {self.word}, is gone"
        if hash_of(Path(self.path)) != self.hash:
            return f"{self.path}, from which this run has {self.word}, has changed since it began"
        return ""


def origin(kind: Kind, word: str) -> Origin | None:
    """Where a word leads; None for what is in this package. Imports nothing."""
    place = place_of(word)
    if place is None and not _is_installed(kind, word):
        return None
    if place is not None and place.is_file:
        path = Path(absolute(place.source))
        return Origin(short(word), "", str(path), hash_of(path))
    package = package_of(kind, word)
    path = folder_of(package)
    entry = None if place is not None else installed(kind).get(word)
    return Origin(short(word), origin_of(entry) if entry else package, str(path), hash_of(path))


def _is_installed(kind: Kind, word: str) -> bool:
    """Whether a word is that of an entry point. A federation has tasks of ours that are in no list of :data:`OURS`."""
    return word not in OURS[kind] and word in installed(kind)


def package_of(kind: Kind, word: str) -> str:
    """The name under which the package of a word is imported."""
    place = place_of(word)
    if place is None:
        entries = installed(kind)
        if word not in entries:
            raise UnknownName(kind, word, [*OURS[kind], *entries])
        return entries[word].module.partition(".")[0]
    return place.source.partition(".")[0]


def folder_of(package: str) -> Path:
    """The folder of an installed package, or its file; it is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise FedbilevelError(f"there is no package called '{package}' here: install it.")
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    if spec.origin is None or not Path(spec.origin).is_file():
        raise FedbilevelError(f"{package} is not a package with files.")
    return Path(spec.origin)


def hash_of(path: Path) -> str:
    """A hash of a file, or of all files of a package."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    hashed = hashlib.sha256()
    for each in files:
        if "__pycache__" not in each.parts:
            name = "" if each == path else each.relative_to(path).as_posix()
            hashed.update(f"{name}\0".encode() + hashlib.sha256(each.read_bytes()).digest())
    return hashed.hexdigest()


def check_listed(kind: Kind, word: str, packages: Mapping[str, str] | None) -> str:
    """Refuse code of other people unless its package is listed, as it is now. Imports nothing. Returns the name of the
    package, "" for what is in this one.

    Args:
        kind: "algorithm" or "task".
        word: the word for it.
        packages: those that are allowed, by the name under which they are imported, with their :func:`hash_of`; None
            allows all that are installed.
    """
    place = place_of(word)
    if place is None and not _is_installed(kind, word):
        return ""  # ours, or nobody's
    if place is not None and place.is_file:
        raise FedbilevelError(
            f"'{short(word)}' is a file: a federation runs installed packages only, which every site lists."
        )
    package = package_of(kind, word)
    if packages is None:
        return package
    if package not in packages:
        raise FedbilevelError(
            f"this site does not list the package '{package}', which has the {kind} '{word}': install it, look at it, "
            f"and join with --plugin {package}."
        )
    if hash_of(folder_of(package)) != packages[package]:
        raise FedbilevelError(
            f"the package '{package}' is not the one that this site listed: look at it, and join with --plugin "
            f"{package}."
        )
    return package
