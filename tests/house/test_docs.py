"""The documentation: it builds without a warning, asks no other server for anything, and what it says is true."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.cli import app
from fedbilevel.diagnostics import DIAGNOSTICS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=1"}  # most of the time is compilation


def run(*command: str, cwd: Path = ROOT, **variables: str) -> str:
    """What a command prints, in a process of its own: other people's warnings are not our errors."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=cwd, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # Not with --quiet, which hides warnings from --strict, too.
    run("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    return folder


class Loads(HTMLParser):
    """Collects what a browser loads with a page: everything but the links that people click on."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"src", "srcset", "data", "poster"} | ({"href"} if tag != "a" else set())
        self.found += [value for name, value in attrs if name in names and value]


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    loaded = {address for page in pages for address in Loads(page.read_text()).found}
    assert len(pages) > 25
    assert any(address.endswith(".css") for address in loaded)
    assert not [address for address in loaded if re.match(r"(https?:)?//", address)]
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text()), style


def test_formulas_are_mathml(site: Path) -> None:
    page = (site / "concepts.html").read_text()
    assert page.count("<math ") > 40
    assert "arithmatex" not in page
    assert "$$" not in page


def test_the_reference_has_everything(site: Path) -> None:
    algorithms = (site / "reference" / "algorithms.html").read_text()
    for kind in fb.ALGORITHMS.values():
        assert f'id="fedbilevel.{kind.__name__}"' in algorithms
    tasks = (site / "reference" / "tasks.html").read_text()
    for make in fb.TASKS.values():
        assert f'id="{make.__module__}.{make.__name__}"' in tasks
    assert "step size of the upper variable x" in algorithms  # the help texts of hyper-parameters
    assert "parameter(" not in algorithms


def test_docstrings_become_markdown() -> None:
    assert run("-m", "doctest", str(DOCS / "_site" / "docstrings.py")) == ""


def test_docstrings_leave_no_marks_of_other_formats(site: Path) -> None:
    for page in (site / "reference").glob("*.html"):
        text = page.read_text()
        assert "====" not in text, page
        assert not re.search(r":(class|meth|func|data|mod):", text), page
        assert "::</p>" not in text, page
        assert "<blockquote>" not in text, page  # what becomes of >>>


def test_the_command_line_has_every_command(site: Path) -> None:
    page = (site / "command-line.html").read_text()
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        assert f"fedbilevel {name}</code>" in page


def test_every_diagnostic_is_listed() -> None:
    page = (DOCS / "reference" / "diagnostics.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(DIAGNOSTICS)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_repository_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text())
    assert links or name != "README.md"
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_first_page_repeats_the_readme() -> None:
    page, readme = (DOCS / "index.md").read_text(), (ROOT / "README.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith("    │")]
    assert len(shown) == 4
    assert not [line for line in shown if line not in readme]


def test_your_own_problem_gives_what_the_page_says(tmp_path: Path) -> None:
    (code,), (output,) = blocks("own-problem.md", "python"), blocks("own-problem.md", "text")
    printed = run("-c", code, cwd=tmp_path, **QUICK)
    assert [line.split(":")[0] for line in printed.splitlines()] == [line.split(":")[0] for line in output.splitlines()]
    np.testing.assert_allclose(numbers(printed), numbers(output), atol=0.02)


def test_messages_are_sent_as_the_page_says(tmp_path: Path) -> None:
    (code,) = blocks("federation.md", "python")
    down, up = numbers(run("-c", code, cwd=tmp_path, **QUICK))
    assert down > 0
    assert up > 0


def test_the_notebook_is_executed_and_small() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs) >= 3
    assert NOTEBOOK.stat().st_size < 300_000
    assert not re.search(r"/(tmp|home|root|work|Users)/", NOTEBOOK.read_text())


def test_the_notebook_runs_and_gives_what_is_stored(tmp_path: Path) -> None:
    execute = ("-m", "nbconvert", "--to", "notebook", "--execute", str(NOTEBOOK), "--output-dir", str(tmp_path))
    run(*execute, cwd=tmp_path, **QUICK, IPYTHONDIR=str(tmp_path))
    done, stored = (nbformat.read(path, as_version=4) for path in (tmp_path / NOTEBOOK.name, NOTEBOOK))

    def outputs(notebook: nbformat.NotebookNode) -> list[list[str]]:
        cells = (cell for cell in notebook.cells if cell.cell_type == "code")
        # Without what libraries say on stderr, for instance that a machine lacks a font.
        kept = ([output for output in cell.outputs if output.get("name") != "stderr"] for cell in cells)
        return [[key for output in each for key in output.get("data", {"text": 0})] for each in kept]

    assert outputs(done) == outputs(stored)
    table = lambda notebook: next(
        numbers(output.data["text/plain"])
        for cell in notebook.cells
        if "diagnostics.objective" in cell.source
        for output in cell.outputs
    )
    (loss, bias), (loss_exact, little) = np.reshape(table(done), (2, 2))
    np.testing.assert_allclose(table(done), table(stored), rtol=0.05, atol=1e-4)
    assert little < bias / 10  # what the text says of FedBiO and FedBiOAcc
    assert loss_exact < loss
