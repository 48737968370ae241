"""The rules of the house: who may import whom, and that everything public is documented."""

import ast
import dataclasses
import inspect
import itertools
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel.core.schedules import parse

SOURCE = Path(fb.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """The modules of the library that a file imports, without the prefix."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedbilevel":
            base = node.module.removeprefix("fedbilevel").lstrip(".")
            found |= {base} if base else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted((SOURCE / "algorithms").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_algorithms_import_only_the_vocabulary(path: Path) -> None:
    mathematics = {"averages", "compression", "descent", "hypergradient", "neumann", "schedules", "vectors"}
    assert imports(path) <= {"core", "errors", *mathematics}


@pytest.mark.parametrize("path", sorted((SOURCE / "tasks").glob("*.py")), ids=lambda p: p.stem)
def test_tasks_do_not_import_engines(path: Path) -> None:
    assert not any(name.startswith("engines") for name in imports(path))


def test_nothing_but_the_command_line_imports_report() -> None:
    assert [path.name for path in FILES if "report" in imports(path)] == ["cli.py"]


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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
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
