"""The picture of a history."""

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import fedbilevel as fb
from fedbilevel.tasks import Quadratic


@pytest.fixture(scope="module")
def result() -> fb.Result:
    algorithm = fb.FedBiO(lr_upper=0.1, lr_lower=0.2, lr_adjoint=0.2, local_steps=1)
    return fb.solve(Quadratic.scalar().task(), algorithm, rounds=400, every=40)


def test_all_metrics_against_rounds(result: fb.Result) -> None:
    figure = result.plot()
    assert isinstance(figure, Figure)
    assert [axes.get_title() for axes in figure.axes] == ["error", "hypergradient", "lower_gap"]
    for axes in figure.axes:
        (line,) = axes.lines
        assert list(line.get_xdata()) == [row["round"] for row in result.history]  # pyright: ignore
        assert list(line.get_ydata()) == [row[axes.get_title()] for row in result.history]  # pyright: ignore
    assert figure.axes[0].get_yscale() == "log"  # errors fall by orders of magnitude


def test_some_columns_against_another(result: fb.Result, tmp_path: Path) -> None:
    figure = result.plot("megabytes", against="seconds")
    (axes,) = figure.axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_yscale()) == ("megabytes", "seconds", "linear")
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert len(result.plot(["error", "floats", "Gf", "H"]).axes) == 4


def test_notebooks_show_it(result: fb.Result) -> None:
    assert result.plot()._repr_png_().startswith(b"\x89PNG")  # pyright: ignore


def test_wrong_columns_are_refused(result: fb.Result) -> None:
    with pytest.raises(fb.FedbilevelError, match="no column of this history called 'eror': did you mean 'error'"):
        result.plot("eror")
    with pytest.raises(fb.FedbilevelError, match="called 'rounds'"):
        result.plot(against="rounds")


def test_a_history_without_metrics_says_so() -> None:
    task = Quadratic.scalar().task()
    bare = fb.solve(fb.Task(task.problem, task.clients, batch_size=None), fb.FedBiO(), rounds=0)
    with pytest.raises(fb.FedbilevelError, match="no metrics to draw"):
        bare.plot()
    assert bare.plot("floats").axes


def test_the_library_does_not_import_matplotlib() -> None:
    code = "import sys, fedbilevel; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
