"""The rules of the house: who may import whom, and that everything public is documented."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel.core.schedules import parse

SOURCE = Path(fb.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def _short(path: Path) -> str:
    return str(path.relative_to(SOURCE))


LAYERS = (
    "core", "mathematics", "algorithms", "storage", "uplink", "engines", "models", "pytorch", "data", "tasks",
    "diagnostics", "drawing", "runs", "testing", "report", "cleaning", "reproduction", "federation", "cli",
)  # fmt: skip
"""A folder imports only those before it; ``errors`` and ``cache`` are for all of them."""
WITHOUT = {
    "algorithms": {"core", "mathematics"},
    "engines": {"core", "storage", "uplink"},
    "models": {"core"},
    "pytorch": {"core", "models"},  # it makes problems; nothing else needs to know where they come from
    "data": {"core", "models"},
    "tasks": {"core", "mathematics", "algorithms", "models", "data"},
    "drawing": {"core", "engines"},
}
"""Folders that do with fewer than all of those before them."""


def imports(path: Path) -> set[str]:
    """The modules of the library that a file imports, wherever in the file, without the prefix."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedbilevel":
            base = node.module.removeprefix("fedbilevel").lstrip(".")
            modules |= {base} if base else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names = (alias.name for alias in node.names if alias.name.startswith("fedbilevel."))
            modules |= {name.removeprefix("fedbilevel.") for name in names}
    return modules


def test_every_folder_has_its_layer() -> None:
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders <= set(LAYERS), folders - set(LAYERS)
    top = {path.name for path in SOURCE.glob("*.py")}
    assert top == {"__init__.py", "__main__.py", "cache.py", "errors.py"}


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent != SOURCE], ids=lambda p: str(p.relative_to(SOURCE))
)
def test_a_folder_imports_only_folders_above_it(path: Path) -> None:
    folder = path.relative_to(SOURCE).parts[0]
    allowed = WITHOUT.get(folder, set(LAYERS[: LAYERS.index(folder)])) | {folder, "errors", "cache"}
    strange = {name for name in imports(path) if name.split(".")[0] not in allowed}
    assert not strange, f"{folder} may import {sorted(allowed)} only"


@pytest.mark.parametrize("path", FILES, ids=_short)
def test_files_are_short(path: Path) -> None:
    """400 lines are the most; the vocabulary has 200 lines of code, blank lines, comments and docstrings aside."""
    text = path.read_text()
    assert text.count("\n") <= 400
    if path.parent.name == "core":
        assert code_lines(text) <= 200


def code_lines(text: str) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [
        node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node) is not None
    ]
    skipped = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in skipped for n, line in lines)


def is_there(name: str) -> bool:
    """Whether the extra that a module needs is installed."""
    return not name.startswith("fedbilevel.pytorch.") or find_spec("torchax") is not None


def does_something(method: object) -> bool:
    """Whether a method has a body: more than to raise an exception, or to return a constant."""
    function = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
    if not inspect.isfunction(function) or getattr(function, "__isabstractmethod__", False):
        return False
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    first = node.body[ast.get_docstring(node) is not None :][:1]
    constant = [isinstance(each, ast.Return) and isinstance(each.value, ast.Constant | None) for each in first]
    return bool(first) and not (constant[0] or isinstance(first[0], ast.Raise | ast.Pass))


def test_no_method_that_does_something_is_overridden() -> None:
    """A class is what its base says it is: only abstract methods, and hooks that do nothing, are filled in."""
    names = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in FILES]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__") and is_there(name)]
    kinds = {kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)}
    ours = {kind for kind in kinds if kind.__module__.startswith("fedbilevel")}
    overridden = [
        f"{kind.__module__}.{kind.__name__}.{name}"
        for kind in ours
        for name, method in vars(kind).items()
        for base in kind.__mro__[1:]
        if base in ours and not name.startswith("__") and does_something(vars(base).get(name))
        if inspect.isfunction(getattr(method, "__func__", method)) or isinstance(method, property)
    ]
    assert not overridden


@pytest.mark.parametrize("path", sorted(SOURCE.glob("*/__init__.py")), ids=lambda p: p.parent.name)
def test_a_folder_says_what_lives_there_and_who_may_import_it(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert len(text) > 80
    assert "import" in text, "who may import it?"


@pytest.mark.parametrize("name", sorted(fb.ALGORITHMS))
def test_algorithms_are_documented(name: str) -> None:
    """Citation, table of symbols, costs, and whether it follows the paper; every hyper-parameter has a help text."""
    kind = fb.ALGORITHMS[name]
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    text = " ".join(" ".join(paragraphs).split())
    for part in ("=====", "paper"):
        assert part in text, part
    for before, paragraph in itertools.pairwise(paragraphs):  # formulas stand in blocks
        assert paragraph.startswith("    ") or "<-" not in paragraph, paragraph
        assert before.endswith("::") <= paragraph.startswith("    "), paragraph
    for part in ("per round", "per client"):
        assert part in kind.costs, part
    assert kind.source.startswith(("follows the paper", "reconstruction"))
    for fact in (kind.citation, kind.assumes, kind.exact, kind.costs):
        assert fact
        assert not fact.endswith("."), fact
    for field in dataclasses.fields(kind):
        assert field.metadata["help"], field.name
        assert field.name in text or field.name == "shared_batch", field.name
    assert dataclasses.is_dataclass(kind)
    assert kind() == kind()
    assert hash(kind()) == hash(kind())


@pytest.mark.parametrize("path", FILES, ids=_short)
def test_everything_public_is_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "module"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node) or node.name in ("is_vector",), node.name


def test_schedules_survive_printing() -> None:
    for text in ("constant(0.3)", "cube_root(30.0, 10000.0)", "power(2.7, 0.001, 1.0)"):
        assert repr(parse(text)) == text
        assert parse(repr(parse(text))) == parse(text)
