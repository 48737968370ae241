"""Values are compared exactly, whatever kind of file they come from: what differs is kept apart or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.data.cells import Choices, number
from fedbilevel.data.table_files import read_table
from fedbilevel.federation import schema
from fedbilevel.federation.rows import load


def of_csv(folder: Path, columns: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    words = lambda cell: f'"{cell}"' if "," in str(cell) else str(cell)
    lines = [",".join(columns), *(",".join(map(words, row)) for row in zip(*columns.values(), strict=True))]
    (folder / "a.csv").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "a.csv")


def of_npz(folder: Path, columns: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    np.savez(folder / "a.npz", **{name: np.array(cells) for name, cells in columns.items()})  # pyright: ignore
    return str(folder / "a.npz")


def of_parquet(folder: Path, columns: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
    return str(folder / "a.parquet")


def of_function(folder: Path, columns: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"rows_{abs(hash(str(columns)))}"
    (folder / f"{name}.py").write_text(f"def give():\n    return {columns!r}\n")
    monkeypatch.syspath_prepend(folder)
    return f"{name}:give"


Source = Callable[[Path, dict[str, list[Any]], pytest.MonkeyPatch], str]
SOURCES: list[Source] = [of_csv, of_npz, of_parquet, of_function]
everywhere = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__[3:])


def labels(path: str, values: list[Any], column: str = "label") -> list[int]:
    wanted = schema.read({"label": {"column": column, "values": values}, "features": {"a": {}}})
    return load(path, wanted, {}, "north").labels.tolist()


@everywhere
@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ([1000001, 1000002], [1000001, 1000002, 1000001]),  # one number in float32
        ([16777216, 16777217], [16777216, 16777217, 16777216]),
        ([9007199254740992, 9007199254740993], [9007199254740993, 9007199254740992, 9007199254740993]),  # in float64
        (["1000001", "1000002"], ["1000001", "1000002", "1000001"]),
        (["7", "007"], ["7", "007", "7"]),
        (["a", "A"], ["a", "A", "a"]),
        (["e\u0301", "\u00e9"], ["e\u0301", "\u00e9", "e\u0301"]),  # they look the same
        (["0", "\u0660"], ["0", "\u0660", "0"]),
        ([0.1, 0.30000000000000004], [0.1, 0.30000000000000004, 0.1]),
        (["yes", "1e1"], ["yes", "1e1", "yes"]),
    ],
)
def test_values_that_differ_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source, values: list[Any], cells: list[Any]
) -> None:
    path = source(tmp_path, {"a": [1, 2, 3], "label": cells}, monkeypatch)
    assert labels(path, values) == [values.index(cell) for cell in cells]


@everywhere
@pytest.mark.parametrize(
    "cell",
    ["1_0", "0x10", "\uff11", "\u0661", "007", "01", "+1", "1e0", "1.", ".1e1", "1,0", "inf", "nan", "None", "", "true",
     "10e-1", "1 0"],
)  # fmt: skip
def test_a_number_is_written_in_the_usual_way_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source, cell: str
) -> None:
    path = source(tmp_path, {"a": ["1", "2"], "label": ["0", cell]}, monkeypatch)
    with pytest.raises(fb.FedbilevelError, match=r"row [13], column 'label': expected one of 0, 1"):
        labels(path, [0, 1])


@everywhere
@pytest.mark.parametrize(
    "cell", ["1_0", "0x10", "\uff11", "\u0661", "inf", "-inf", "1e999x", "1,5", "true", "1 0", "--1"]
)
def test_what_is_no_number_is_none_of_a_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source, cell: str
) -> None:
    path = source(tmp_path, {"a": ["1", cell], "label": ["0", "1"]}, monkeypatch)
    with pytest.raises(fb.FedbilevelError, match=r"row [13], column 'a': .* is not a number"):
        labels(path, [0, 1])


@pytest.mark.parametrize("source", [of_npz, of_parquet, of_function])
def test_truth_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source) -> None:
    path = source(tmp_path, {"a": [True, False], "label": [0, 1]}, monkeypatch)
    with pytest.raises(fb.FedbilevelError, match="True is not a number"):
        labels(path, [0, 1])
    path = source(tmp_path, {"a": [1, 0], "label": [True, False]}, monkeypatch)
    with pytest.raises(fb.FedbilevelError, match="expected one of 0, 1, but found True"):
        labels(path, [0, 1])
    assert labels(path, [False, True]) == [1, 0]


@everywhere
def test_the_same_number_may_be_written_with_decimals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source
) -> None:
    """As spreadsheets and data frames do."""
    path = source(tmp_path, {"a": [1, 2, 3], "label": ["1.0", "0", " 1 "]}, monkeypatch)
    assert labels(path, [0, 1]) == [1, 0, 1]
    path = source(tmp_path, {"a": [1, 2], "label": [1.0, 0.0]}, monkeypatch)
    assert labels(path, [0, 1]) == [1, 0]


@pytest.mark.parametrize(
    "values",
    [[1, 1.0], [1, "1"], ["1", "1.0", 1], [" a", "a"], [True, 1], ["true", True], [10, "10.0"], [0, -0.0]],
)
def test_values_of_a_schema_that_mean_the_same_cell_are_refused(values: list[Any]) -> None:
    with pytest.raises(fb.FedbilevelError, match=r"the same|both numbers and true or false"):
        Choices(values, "the label")


@pytest.mark.parametrize(
    "values", [[], [1], [float("nan"), 1], [float("inf"), 1], [None, 1], ["", 1], [" ", "a"], [[1], 2]]
)
def test_values_that_are_none_are_refused(values: list[Any]) -> None:
    with pytest.raises(fb.FedbilevelError):
        Choices(values, "the label")


def test_repeated_headers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,label,label\n1,0,1\n")
    with pytest.raises(fb.FedbilevelError, match="has 2 columns called 'label'"):
        read_table(str(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_text("a,label , label\n1,0,1\n")  # blanks aside
    with pytest.raises(fb.FedbilevelError, match="has 2 columns called 'label'"):
        read_table(str(tmp_path / "b.csv"))
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    twice = pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(fb.FedbilevelError, match="has 2 columns called 'a'"):
        read_table(str(tmp_path / "a.parquet"))


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_repeated_names_in_an_archive_are_refused(tmp_path: Path) -> None:
    import io
    import zipfile

    inside = io.BytesIO()
    np.save(inside, np.arange(2))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        for name in ("a.npy", "label.npy", "label.npy"):
            file.writestr(name, inside.getvalue())
    with pytest.raises(fb.FedbilevelError, match="has 2 columns called 'label'"):
        read_table(str(tmp_path / "a.npz"))


def test_two_columns_of_a_schema_are_two_columns_of_the_site(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,label\n1,0\n")
    wanted = schema.read({"label": {"column": "label", "values": [0, 1]}, "features": {"a": {}, "b": {}}})
    with pytest.raises(fb.FedbilevelError, match="are both 'a' at this site"):
        load(str(tmp_path / "a.csv"), wanted, {"b": "a"}, "north")


@pytest.mark.parametrize("text", ["9" * 4000, "1e9999", "-1e-9999", "1e00001"])
def test_extreme_numbers_are_exact_or_none(text: str) -> None:
    exact = number(text)
    assert exact is None or str(exact).replace("E", "e").rstrip("0123456789+-.e") == ""
