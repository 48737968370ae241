"""What the page, the example and the notebook about PyTorch say is true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pytorch.md").read_text()
NOTEBOOK = ROOT / "examples" / "pytorch.ipynb"
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=1"}


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=cwd, env={**os.environ, **QUICK}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert run("-c", code, cwd=tmp_path).startswith("tensor([")


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    without, with_x = re.findall(
        r"accuracy \w+ x: (\d\.\d+)", run(str(ROOT / "examples" / "pytorch_model.py"), cwd=tmp_path)
    )
    assert float(with_x) > float(without) + 0.05


def test_the_notebook_is_executed_and_small() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert next(output.data["text/plain"] for cell in cells for output in cell.outputs) == "True"
    assert not re.search(r"/(tmp|home|root|work|Users)/", NOTEBOOK.read_text())


@pytest.mark.slow
def test_the_notebook_runs_and_gives_what_is_stored(tmp_path: Path) -> None:
    execute = ("-m", "nbconvert", "--to", "notebook", "--execute", str(NOTEBOOK), "--output-dir", str(tmp_path))
    run(*execute, cwd=tmp_path)
    accuracy = [
        float(nbformat.read(path, as_version=4).cells[-1].outputs[-1].data["text/plain"])
        for path in (tmp_path / NOTEBOOK.name, NOTEBOOK)
    ]
    assert accuracy[0] == pytest.approx(accuracy[1], abs=0.03)
    assert accuracy[1] > 0.9
