"""The copies of tables without label issues, and what people see of them. Nothing is searched: findings are made up."""

import csv
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import fedbilevel as fb
from fedbilevel.cleaning import cleaned, page
from fedbilevel.cleaning.findings import Exchanged, Findings
from fedbilevel.cleaning.folder import _write_frame

CELLS = [
    "plain",
    " lead",
    'q"uote',
    "a,b",
    "line\nbreak",
    "return\rhere",
    "both\r\nof them",
    "",
    "NA",
    "\u2028",
    "007",
    "1.0",
]
WRONG = 3


def made_up(data: fb.data.OwnTable, relabel: bool = False) -> fb.Found:
    """One row is a label issue beyond doubt."""
    rows = len(data)
    issue = np.arange(rows) == WRONG
    likely = np.where(issue, (data.labels + 1) % len(data.classes), data.labels)
    wrong, quality = np.where(issue, 1.0, 0.1), np.where(issue, 1e-7, 0.9)
    model: Any = None
    spent = Exchanged(1.0, 1, 1.0, "sums")
    found = Findings(wrong, quality, likely, issue, quality, (), True, "", model, None, None, spent, ())
    return fb.Found(data, found, {}, relabel)


def rows_of(path: Path, mark: str = ",") -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file, delimiter=mark))


@pytest.mark.parametrize(("suffix", "mark"), [(".csv", ","), (".tsv", "\t")])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_cell_survives(tmp_path: Path, suffix: str, mark: str, end: str) -> None:
    """Among them line breaks of all kinds, quotes, blanks, and numbers with zeros."""
    table = [[CELLS[n % len(CELLS)], f"{n}.50", "ab"[n % 2]] for n in range(36)]
    with (tmp_path / f"a{suffix}").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=mark, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(
            [["word", "number", "label"], *table]
        )
    data = fb.data.table(tmp_path / f"a{suffix}", label="label")
    (tmp_path / "out").mkdir()
    [path] = cleaned.write(made_up(data), tmp_path / "out")
    assert rows_of(path, mark) == [["word", "number", "label"], *table[:WRONG], *table[WRONG + 1 :]]
    [path] = cleaned.write(made_up(data, relabel=True), tmp_path / "out")
    table[WRONG][2] = "a"
    assert rows_of(path, mark)[1:] == table


ARROW: dict[str, pa.Array] = {
    "whole numbers": pa.array([0, 1] * 6, pa.int8()),
    "fractions": pa.array([0.5, 1.5] * 6),
    "decimals": pa.array([Decimal("1.50"), Decimal("2.00")] * 6),
    "booleans": pa.array([True, False] * 6),
    "dates": pa.array([date(2020, 1, 1), date(2021, 1, 1)] * 6),
    "text": pa.array(["a", "b"] * 6),
    "categories": pa.array(["a", "b"] * 6).dictionary_encode(),
}


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.FedbilevelWarning")  # the first file is small
@pytest.mark.parametrize("name", ARROW)
def test_a_corrected_label_has_the_type_of_its_column(name: str, tmp_path: Path) -> None:
    """Also where no row of this file has it."""
    label = ARROW[name]
    table = pa.table({"number": pa.array(range(12)), "label": label, "list": pa.array([[1]] * 12)})
    parquet.write_table(table, tmp_path / "a.parquet")
    parquet.write_table(table.take(pa.array([1, 3, 5, 7])), tmp_path / "b.parquet")
    data = fb.data.table([tmp_path / "b.parquet", tmp_path / "a.parquet"], label="label", drop=["list"])
    (tmp_path / "out").mkdir()
    copy = parquet.read_table(cleaned.write(made_up(data, relabel=True), tmp_path / "out")[0])
    assert copy.schema.equals(table.schema)
    assert copy["label"].to_pylist() == [label[n].as_py() for n in (1, 1, 1, 0)]


def test_names_are_written_in_full(tmp_path: Path) -> None:
    """Only what was estimated is rounded: two labels never become one."""
    frame = pd.DataFrame({"row": ["a\rb", "c"], "given_label": [1000001.0, 1000002.0], "label_quality": [1 / 3, 1.0]})
    _write_frame(tmp_path / "suspects.csv", frame)
    assert rows_of(tmp_path / "suspects.csv")[1:] == [["a\rb", "1000001.0", "0.333333"], ["c", "1000002.0", "1"]]


def test_the_page_shows_what_belongs_to_own_features(tmp_path: Path) -> None:
    """The columns that are not looked at; or, if there are any, the pictures."""
    frame = pd.DataFrame(
        {"label": ["a", "b"] * 6, "text": [f"a long text{' with many words' * 9}, number {n}" for n in range(12)]}
    )
    frame.to_csv(tmp_path / "labels.csv", index=False)
    features = np.random.default_rng(0).normal(size=(12, 2))
    shown = page.render(made_up(fb.data.table(tmp_path / "labels.csv", label="label", features=features)))
    assert f"with many words, number {WRONG}" in shown
    assert "&gt; 99.9 %" in shown
    assert "100 %" not in shown.partition("The most suspicious rows")[2]
    for n in range(12):
        Image.new("L", (4, 4)).save(tmp_path / f"{n}.png")
    frame.assign(file=[f"{n}.png" for n in range(12)]).to_csv(tmp_path / "labels.csv", index=False)
    data = fb.data.table(tmp_path / "labels.csv", label="label", features=features)
    assert page.render(made_up(data)).count('<img src="data:image/') == 12
    assert made_up(data).suspects["row"].tolist()[0] == f"{WRONG}.png"
    (tmp_path / "out").mkdir()
    files = cleaned.write(made_up(data), tmp_path / "out")
    assert [path.name for path in files] == ["labels.csv", "labels-features.npy"]
    assert rows_of(files[0])[1][2] == "../0.png"
    np.testing.assert_array_equal(np.load(files[1]), np.delete(features, WRONG, 0))


def test_relabel_finds_columns_that_are_called_by_numbers() -> None:
    frame = pd.DataFrame({0: np.arange(12.0), 1: ["a", "b"] * 6})
    data = fb.data.table(frame, label=1)
    found = fb.Found(data, made_up(data).findings, {}, relabel=True, given=frame)
    assert found.cleaned[1].tolist() == ["a", "b", "a", "a", *["a", "b"] * 4]
