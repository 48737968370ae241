"""Algorithms and tasks of other people: found by their word, refused in one sentence, and remembered by run folders."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

import fedbilevel as fb
import lab
from fedbilevel.cli import catalogue
from fedbilevel.errors import UnknownName
from fedbilevel.runs import plugins
from fedbilevel.runs.execute import resume
from fedbilevel.runs.experiment import Experiment
from fedbilevel.storage.run_folder import RunFolder
from helpers import here


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    plugins._entries.cache_clear()


def test_a_word_leads_to_a_file_a_module_or_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.package(tmp_path, "lab_a", monkeypatch)
    monkeypatch.chdir(lab.files(tmp_path))
    kinds = [plugins.algorithm(word) for word in ("./my_method.py:Mine", "lab_a.methods:Mine", "lab_a-mine")]
    assert [kind.__name__ for kind in kinds] == ["Mine"] * 3
    assert kinds[1] is kinds[2]
    assert kinds[0] is plugins.algorithm(f"{tmp_path}/my_method.py:Mine")  # imported once
    assert plugins.algorithm("fedbio") is fb.FedBiO  # nobody takes the place of ours
    assert plugins.maker("lab_a-task")(3).problem is not None
    (tmp_path / "my_method.py").write_text(lab.METHOD.replace("0.3", "0.4"))
    assert plugins.algorithm("./my_method.py:Mine")().lr_lower == 0.4  # type: ignore[attr-defined]


def test_a_broken_entry_point_does_not_break_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.package(tmp_path, "lab_b", monkeypatch)
    found = {name: (origin, thing) for name, origin, thing in plugins.listed("algorithm")}
    assert found["fedbio"] == ("", fb.FedBiO)
    assert found["lab_b-mine"][0] == "lab_b 1.2"
    assert "lab_b-gone' of lab_b 1.2 cannot be loaded: AttributeError" in found["lab_b-gone"][1]
    monkeypatch.setattr(catalogue, "console", Console(width=300))
    catalogue.algorithms()
    catalogue.tasks()
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if "lab_b 1.2 │" in line]) == 3
    assert "lab_b-gone' of lab_b 1.2 cannot be loaded" in printed
    code, said = here("run", "quadratic", "--algorithm", "lab_b-gone", cwd=tmp_path)
    assert (code, len(said.strip().splitlines())) == (2, 1)


@pytest.mark.parametrize(
    ("text", "word", "sentence"),
    [
        ("def f(:\n", "odd.py:Mine", "odd.py cannot be imported: odd.py, line 1: invalid syntax."),
        ("import no_such_thing\n", "odd.py:Mine", "No module named 'no_such_thing' (odd.py, line 1)."),
        ("raise SystemExit('bye')\n", "odd.py:Mine", "SystemExit: bye (odd.py, line 1)."),
        (lab.METHOD, "odd.py", "is a file: say what in it, odd.py:Mine."),
        (lab.METHOD, "odd.py:Mein", "did you mean 'Mine'?"),
        (lab.METHOD, "odd.py:Model", "is not an algorithm: give a subclass of fedbilevel.Algorithm."),
        (
            lab.METHOD.replace("(frozen=True)", ""),
            "odd.py:Mine",
            "cannot inherit non-frozen dataclass from a frozen one",
        ),
        (lab.METHOD.replace("@dataclass(frozen=True)", ""), "odd.py:Mine", "must be a frozen dataclass"),
        (lab.METHOD.replace("def solution", "def other"), "odd.py:Mine", "does not have these methods yet: solution."),
        (lab.METHOD, "no_such.py:Mine", "the file no_such.py cannot be read: No such file or directory."),
        (lab.METHOD, "no.such:Mine", "the module no.such cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    text: str, word: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(text)
    with pytest.raises(fb.FedbilevelError) as refused:
        plugins.algorithm(word)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return {}['x']", "odd.make failed: KeyError: 'x' (odd.py, line 2)."),
        ("return 3", "odd.make must return a fedbilevel.Task, but returned int."),
    ],
)
def test_a_function_that_makes_no_task(body: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(f"def make(a=1):\n    {body}\n")
    with pytest.raises(fb.FedbilevelError) as refused:
        Experiment(f"{tmp_path}/odd.py:make").build()
    assert str(refused.value) == sentence


def test_options_of_a_function_have_their_types(tmp_path: Path) -> None:
    lab.files(tmp_path)
    experiment = Experiment(f"{tmp_path}/my_task.py:make_task", "fedbio")
    with pytest.raises(fb.FedbilevelError, match="make_task needs 'width': --set width=VALUE"):
        experiment.build()
    with pytest.raises(fb.FedbilevelError, match="width must be a whole number, not 'wide'"):
        experiment.changed({"width": "wide"}).build()
    with pytest.raises(UnknownName, match="did you mean 'width'"):
        experiment.changed({"widht": "3"}).build()
    built = experiment.changed({"width": "4", "note": "2"}).build()
    assert built.options["note"] == 2
    assert built.config()["task"] == {
        "name": f"{tmp_path}/my_task.py:make_task", "width": 4, "heterogeneity": 0.5, "note": 2,
    }  # fmt: skip


def test_a_run_knows_its_code(tmp_path: Path) -> None:
    """The folder says where the code came from; resume continues, and refuses other code; the report still works."""
    lab.files(tmp_path)
    (tmp_path / "my.toml").write_text(
        '[task]\nname = "./my_task.py:make_task"\nwidth = 2\n'
        '[algorithm]\nname = "my_method.py:Mine"\n[run]\nrounds = 4\n'
    )
    out = tmp_path / "out"
    finished = Experiment.read(tmp_path / "my.toml").run(out)
    info = RunFolder(out).info()
    assert (info["task"], info["algorithm"], info["title"]) == ("my_task.make_task", "my_method.Mine", "Mine")
    assert info["origins"]["algorithm"]["path"] == str(tmp_path / "my_method.py")
    assert (out / "code" / "my_method.py").read_text() == lab.METHOD
    assert resume(out, rounds=6).summary["rounds"] == 6
    assert finished.summary["rounds"] == 4
    (tmp_path / "my_method.py").write_text(lab.METHOD + "\n")
    with pytest.raises(
        fb.FedbilevelError, match=r"my_method.py.* has changed since it began: put it back .*code has a"
    ):
        resume(out, rounds=8)
    (tmp_path / "my_method.py").unlink()
    code, said = here("resume", str(out), cwd=tmp_path)
    assert code == 2
    assert "is gone" in said
    assert here("report", str(out), cwd=tmp_path)[0] == 0
    assert "my_method.py, from which this run has my_method.Mine, is gone" in (out / "report.html").read_text()
    assert json.loads((out / "run.json").read_text())["status"] == "finished"


def test_a_task_of_federations_alone_comes_from_here() -> None:
    """It is in no list of tasks for the command line, and its runs say so, like those of all tasks of ours."""
    assert plugins.origin("task", "label-errors") is None
    assert plugins.origin("task", "quadratic") is None
