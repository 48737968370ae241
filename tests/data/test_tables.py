"""People's own tables: read the same from every kind of source; what is wrong with them is a sentence."""

import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import fedbilevel as fb
from fedbilevel.data.new_rows import new_rows
from fedbilevel.errors import FedbilevelWarning

RNG = np.random.default_rng(0)
ROWS = 120


def people(rows: int = ROWS) -> pd.DataFrame:
    """A table with a column of every kind."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(
        {
            "age": rng.normal(50, 10, rows).round(1),
            "town": rng.choice(["Oslo", "Kiel", "Rome"], rows),
            "seen": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, rows), "D"),
            "smoker": rng.random(rows) < 0.5,
            "zip": rng.choice(["01234", "99999"], rows),
            "name": [f"patient {n}" for n in range(rows)],
            "hospital": rng.choice(["north", "south", "east"], rows),
            "checked": rng.choice(["yes", "no"], rows),
            "outcome": rng.choice(["ill", "well"], rows),
        }
    )
    frame.loc[3:9, "age"] = np.nan
    return frame


def columns(table: fb.data.OwnTable) -> dict[str, str]:
    return {name: kind for name, kind, _ in table.understood}


Write = Callable[[pd.DataFrame, Path], Any]
WRITERS: dict[str, Write] = {
    "csv": lambda frame, folder: frame.to_csv(folder / "a.csv", index=False) or folder / "a.csv",
    "tsv": lambda frame, folder: frame.to_csv(folder / "a.tsv", index=False, sep="\t") or folder / "a.tsv",
    "parquet": lambda frame, folder: frame.to_parquet(folder / "a.parquet") or folder / "a.parquet",
    "frame": lambda frame, folder: frame,
}
ROLES: dict[str, Any] = {"label": "outcome", "client": "hospital", "trusted": "checked"}


@pytest.mark.parametrize("source", WRITERS)
def test_a_table_is_the_same_from_every_source(source: str, tmp_path: Path) -> None:
    frame = people()
    table = fb.data.table(WRITERS[source](frame, tmp_path), **ROLES)
    assert columns(table) == {
        "outcome": "label", "hospital": "client", "checked": "trusted", "age": "number", "town": "category",
        "seen": "date", "smoker": "boolean", "zip": "category", "name": "left out",
    }  # fmt: skip
    assert table.classes == ("ill", "well")
    assert table.clients == ("east", "north", "south")
    assert [table.classes[n] for n in table.labels] == frame.outcome.tolist()
    assert [table.clients[n] for n in table.client] == frame.hospital.tolist()
    assert table.trusted is not None
    assert table.trusted.tolist() == (frame.checked == "yes").tolist()
    # By hand, from all rows at once.
    age = frame.age
    expected = {
        "age": ((age - age.mean()) / age.std(ddof=0)).fillna(0),
        "age: missing": age.isna(),
        "town: Kiel": frame.town == "Kiel",
        "smoker": (frame.smoker - frame.smoker.mean()) / frame.smoker.std(ddof=0),
        "seen": (frame.seen - frame.seen.mean()) / frame.seen.std(ddof=0),
        "zip: 01234": frame.zip == "01234",
    }
    for title, column in expected.items():
        found = table.inputs[:, table.encoding.titles.index(title)]
        np.testing.assert_allclose(found, column.to_numpy(float), atol=1e-5, err_msg=title)
    assert table.inputs.dtype == np.float32
    assert not np.isnan(table.inputs).any()
    first = {"csv": "2", "tsv": "2", "parquet": "0", "frame": "0"}[source]
    assert (table.ids[0], len(table.ids)) == (first, ROWS)
    assert "120 rows, 3 clients, 2 classes" in str(table)


def test_a_file_for_each_client_gives_the_same_inputs_as_one_with_a_column(tmp_path: Path) -> None:
    frame = people().sort_values("hospital", kind="stable")
    paths = []
    for name, rows in frame.groupby("hospital"):
        paths.append(tmp_path / f"{name}.csv")
        rows.drop(columns="hospital").to_csv(paths[-1], index=False)
    several = fb.data.table(paths, label="outcome", trusted="checked")
    one = fb.data.table(frame, **ROLES)
    assert several.clients == ("east", "north", "south")
    assert several.client.tolist() == one.client.tolist()
    np.testing.assert_allclose(several.inputs, one.inputs, atol=1e-6)
    assert several.ids[0] == "2"
    assert several.part.tolist() == several.client.tolist()
    for part, rows in enumerate(paths):  # where each row is, to write cleaned copies
        assert several.row[several.part == part].tolist() == list(range(len(pd.read_csv(rows))))


def test_what_is_declared_is_not_inferred(tmp_path: Path) -> None:
    frame = people().assign(grade=RNG.integers(1, 4, ROWS))
    table = fb.data.table(frame, **ROLES, categorical="grade", numeric=["age", "zip"], drop=["smoker"])
    assert {name: columns(table)[name] for name in ("grade", "age", "zip", "smoker")} == {
        "grade": "category", "age": "number", "zip": "number", "smoker": "left out",
    }  # fmt: skip
    assert columns(fb.data.table(frame, **ROLES))["grade"] == "number"


def test_labels_are_compared_exactly(tmp_path: Path) -> None:
    """007 is not 7, 1000001 is not 1000002, and 1.0 is 1."""
    cells = ["007", "7", "7.0", "1000001", "1000002", "007", "1000001", "1000002", " 7 "]
    (tmp_path / "a.csv").write_text("x,label\n" + "\n".join(f"{n},{cell}" for n, cell in enumerate(cells)))
    with pytest.warns(FedbilevelWarning, match="fewer than 10 rows"):
        table = fb.data.table(tmp_path / "a.csv", label="label")
    assert table.classes == ("007", "7", "1000001", "1000002")
    assert table.labels.tolist() == [0, 1, 1, 2, 3, 0, 2, 3, 1]


def test_rare_values_are_others_and_new_ones_too() -> None:
    frame = people()
    frame.loc[0:3, "town"] = ["Bergen", "Bonn", "Bari", None]
    table = fb.data.table(frame, **ROLES)
    titles = [title for title in table.encoding.titles if title.startswith("town")]
    assert titles == ["town: Kiel", "town: Oslo", "town: Rome", "town: other", "town: missing"]
    at = table.encoding.titles.index("town: other")
    assert table.inputs[:4, at].tolist() == [1, 1, 1, 0]
    new = pd.concat([people(1).assign(town="Berlin"), people(1).assign(town=None)])
    (block,) = new_rows(table.encoding, new).blocks
    assert block[:, at].tolist() == [1, 0]
    assert block[:, at + 1].tolist() == [0, 1]


def test_an_encoding_survives_json() -> None:
    import json

    table = fb.data.table(people(), **ROLES)
    again = fb.data.Encoding.restore(json.loads(json.dumps(table.encoding.plain())))
    assert again == table.encoding
    (block,) = new_rows(again, people()).blocks
    np.testing.assert_array_equal(block, table.inputs)
    for broken in ({}, None, {"columns": [{"name": "a"}]}, {**table.encoding.plain(), "columns": 3}):
        with pytest.raises(fb.FedbilevelError, match="encoding cannot be read"):
            fb.data.Encoding.restore(broken)


def test_arrays_of_features(tmp_path: Path) -> None:
    features = RNG.normal(size=(60, 5)).astype(np.float32)
    features[2, 1] = np.nan
    labels, clients = RNG.integers(0, 3, 60), RNG.choice(["a", "b"], 60)
    table = fb.data.table(features, label=labels, client=clients)
    assert table.inputs.shape == (60, 6)
    assert table.inputs[2, 1:3].tolist() == [0, 1]
    np.save(tmp_path / "f.npy", features)
    pd.DataFrame({"y": labels, "site": clients}).to_csv(tmp_path / "labels.csv", index=False)
    other = fb.data.table(tmp_path / "labels.csv", label="y", client="site", features=tmp_path / "f.npy")
    np.testing.assert_array_equal(other.inputs, table.inputs)
    assert other.labels.tolist() == table.labels.tolist()


def pictures(folder: Path, owners: tuple[str, ...] = ("north", "south"), size: int = 9) -> Path:
    for owner in owners:
        for name, light in (("cat", 50), ("dog", 200)):
            (folder / owner / name).mkdir(parents=True)
            for n in range(6):
                pixels = np.full((size + n % 2, size), light + n, np.uint8)
                Image.fromarray(pixels).save(folder / owner / name / f"{n}.png")
    return folder


def test_folders_of_pictures(tmp_path: Path) -> None:
    table = fb.data.table(pictures(tmp_path / "pets"), client_from="folder")
    assert (table.clients, table.classes) == (("north", "south"), ("cat", "dog"))
    assert table.inputs.shape == (24, 32 * 32)  # they differ in size
    assert table.pictures[0] == tmp_path / "pets" / "north" / "cat" / "0.png"
    assert abs(table.inputs.mean()) < 1e-4
    assert abs(table.inputs.std() - 1) < 1e-3
    one = fb.data.table([tmp_path / "pets" / "north", tmp_path / "pets" / "south"])
    assert one.clients == ("north", "south")
    np.testing.assert_array_equal(one.inputs, table.inputs)


def test_a_table_that_names_pictures(tmp_path: Path) -> None:
    pictures(tmp_path)
    rows = [(f"{owner}/{name}/{n}.png", name, owner) for owner in ("north", "south") for name in ("cat", "dog")
            for n in (0, 2, 4, 0, 2)]  # fmt: skip
    frame = pd.DataFrame(rows, columns=pd.Index(["file", "kind", "owner"]))
    frame.to_csv(tmp_path / "labels.csv", index=False)
    for source in (tmp_path, tmp_path / "labels.csv"):
        table = fb.data.table(source, label="kind", client="owner")
        assert table.inputs.shape == (20, 81)
        assert table.clients == ("north", "south")
    frame.loc[3, "file"] = "north/nobody.png"
    frame.to_csv(tmp_path / "labels.csv", index=False)
    with pytest.raises(fb.FedbilevelError, match=r"labels\.csv, row 5, column 'file': there is no file"):
        fb.data.table(tmp_path, label="kind")


def test_bad_pictures_and_folders_are_named(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "pets")
    refused: Any = lambda sentence: pytest.raises(fb.FedbilevelError, match=sentence)
    (folder / "south" / "dog" / "9.png").write_bytes(b"no picture")
    with refused(r"south/dog/9\.png is not an image that can be read"):
        fb.data.table(folder, client_from="folder")
    (folder / "south" / "dog" / "9.png").unlink()
    with refused("clients can come from a column, or from the 'folder' of a picture, not from 'folders'"):
        fb.data.table(folder, client_from="folders")  # pyright: ignore[reportArgumentType]
    with refused(r"pets has no pictures: put them into a folder for each class"):
        fb.data.table(folder)
    (folder / "empty").mkdir()
    with refused(r"there is no file .*nowhere"):
        fb.data.table(folder / "nowhere")
    with refused(r"empty has no pictures"):
        fb.data.table(folder / "empty")
    read = fb.data.table(folder, client_from="folder")
    with refused("this model was trained on pictures, but .* names none"):
        new_rows(read.encoding, people())


# What must work.


def test_rows_without_a_label_are_left_out_and_keep_their_place(tmp_path: Path) -> None:
    frame = people()
    frame.loc[[4, 7], "outcome"] = None
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.warns(FedbilevelWarning, match=r"2 rows have no label.*a\.csv, row 6"):
        table = fb.data.table(tmp_path / "a.csv", **ROLES)
    assert len(table) == len(table.inputs) == ROWS - 2
    assert table.row[3:7].tolist() == [3, 5, 6, 8]
    assert table.ids[3:5] == ["5", "7"]
    frame = people()
    frame.loc[ROWS - 1, "outcome"] = None  # the last one
    with pytest.warns(FedbilevelWarning, match="1 row has no label"):
        table = fb.data.table(frame, **ROLES)
    assert len(table) == len(table.inputs) == ROWS - 1


def test_small_clients_and_clients_with_one_class_are_told() -> None:
    frame = people()
    frame.loc[:2, "hospital"] = "tiny"
    frame.loc[:2, "outcome"] = "ill"
    with pytest.warns(FedbilevelWarning) as said:
        table = fb.data.table(frame, **ROLES)
    assert [str(each.message) for each in said] == [
        "1 of 4 clients have fewer than 10 rows: tiny.",
        "1 of 4 clients have rows of one class only: tiny.",
    ]
    assert tuple(str(each.message) for each in said) == table.notes


def test_a_few_cells_that_are_no_numbers_are_missing_and_told(tmp_path: Path) -> None:
    frame = people().astype({"age": object})
    frame.loc[[5, 50], "age"] = ["?", "unknown"]
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.warns(FedbilevelWarning, match=r"a\.csv, row 52, column 'age': 'unknown' is not a number"):
        table = fb.data.table(tmp_path / "a.csv", **ROLES)
    assert columns(table)["age"] == "number"
    assert table.inputs[50, table.encoding.titles.index("age: missing")] == 1


def test_many_numbers_are_classes_if_they_count_or_are_declared() -> None:
    frame = pd.DataFrame({"x": RNG.normal(size=300), "class": np.arange(300) % 60, "price": np.arange(300) % 60 * 7.5})
    assert len(fb.data.table(frame, label="class", drop=["price"]).classes) == 60
    assert len(fb.data.table(frame, label="price", drop=["class"], categorical=["price"]).classes) == 60


# What must be refused: (what is done to the good table, options, the sentence).

GOOD = "age,site,checked,label\n" + "".join(
    f"{20 + n},{'ns'[n % 2]},{n % 3 % 2},{'ab'[n // 2 % 2]}\n" for n in range(40)
)


def line(number: int, text: str) -> Callable[[str], str]:
    """A change of one line, counted from 1."""

    def change(table: str) -> str:
        lines = table.splitlines()
        lines[number - 1] = text
        return "\n".join(lines) + "\n"

    return change


def column(name: str, cell: Callable[[int], Any]) -> Callable[[str], str]:
    """A change of one column."""

    def change(table: str) -> str:
        head, *rows = [row.split(",") for row in table.splitlines()]
        for n, row in enumerate(rows):
            row[head.index(name)] = str(cell(n))
        return "\n".join(",".join(row) for row in [head, *rows]) + "\n"

    return change


BAD: dict[str, tuple[Callable[[str], Any], dict[str, Any], str]] = {
    "no such label": (str, {"label": "lable"}, r"a\.csv has no column 'lable' \(the label\): did you mean 'label'\?$"),
    "no such client": (str, {"client": "qqq"}, r"a\.csv has no column 'qqq' \(the client\): it has age, site"),
    "no such trusted": (str, {"trusted": "chekced"}, r"'chekced' \(which rows are trusted\): did you mean 'checked'"),
    "no such drop": (str, {"drop": ["agee"]}, r"no column 'agee' \(--drop\): did you mean 'age'"),
    "no label given": (str, {"label": None}, r"which column of .*a\.csv is the label\? It has age"),
    "two roles": (str, {"client": "label"}, "the column 'label' is both the label and the client"),
    "dropped label": (str, {"drop": ["label"]}, "'label' is the label, not an input: leave it out of --drop"),
    "constant label": (column("label", lambda n: "a"), {}, r"a\.csv, column 'label': all rows have the label 'a'"),
    "too many labels": (
        lambda text: "age,label\n" + "".join(f"{n},c{n // 2}\n" for n in range(2010)),
        {"client": None},
        r"a\.csv, column 'label' has 1,005 different labels, but 1000 classes are the most",
    ),
    "a numeric target": (
        lambda text: "age,label\n" + "".join(f"{n},{n * 2.5}\n" for n in range(400)),
        {"client": None},
        r"column 'label' has 400 different numbers: this is for classification only",
    ),
    "a class with one row": (line(7, "25,n,0,c"), {}, r"row 7, column 'label': the class 'c' has this row only"),
    "no label at all": (column("label", lambda n: ""), {}, r"a\.csv has no row with a label in column 'label'"),
    "a client without rows": (
        lambda text: column("label", lambda n: "" if n == 1 else "ab"[n % 2])(line(3, "21,x,0,b")(text)),
        {},
        "the client 'x' has no row with a label",
    ),
    "nobody's row": (line(5, "23,,0,b"), {}, r"row 5, column 'site': expected the name of a client"),
    "not UTF-8": (
        lambda text: text.replace("30,n", "30,Z\xfcrich").encode("latin-1"),
        {},
        r"a\.csv, row 12, column 'site', is not UTF-8 text",
    ),
    "UTF-16": (lambda text: text.encode("utf-16"), {}, r"a\.csv is UTF-16 text, not UTF-8"),
    "UTF-16 without a mark": (lambda text: text.encode("utf-16-le"), {}, r"a\.csv, row 1 contains a NUL byte"),
    "ragged rows": (line(9, "27,n,1"), {}, r"a\.csv, row 9 has 3 values, but there are 4 columns"),
    "a blank line": (line(9, ""), {}, r"a\.csv, row 9 has 0 values, but there are 4 columns"),
    "repeated name": (line(1, "age,age,checked,label"), {"client": None}, r"a\.csv has 2 columns called 'age'"),
    "repeated header": (line(9, "age,site,checked,label"), {}, r"a\.csv, row 9 repeats the names of the columns"),
    "infinity": (line(9, "inf,n,1,a"), {}, r"a\.csv, row 9, column 'age': 'inf' is infinite"),
    "overflow": (line(9, "1e999,n,1,a"), {}, r"a\.csv, row 9, column 'age': '1e999' is infinite"),
    "too large": (line(9, "1e30,n,1,a"), {}, r"a\.csv, row 9, column 'age': '1e30' is larger than 1e\+15"),
    "text in numbers": (line(9, "old,n,1,a"), {"numeric": ["age"]}, r"row 9, column 'age': 'old' is not a number"),
    "empty": (lambda text: "", {}, r"a\.csv is empty"),
    "only a header": (lambda text: text.splitlines()[0], {}, r"a\.csv has no rows"),
    "one column": (lambda text: text.replace(",", ";"), {}, "has only one column.*separate columns with commas"),
    "an open quote": (line(9, '27,"n,1,a'), {}, r"a\.csv, line \d+ cannot be read"),
    "a giant field": (line(9, f"27,{'x' * 200_000},1,a"), {}, r"a\.csv, line 9 cannot be read: field larger than"),
    "trusted of one class": (
        column("checked", lambda n: int(n // 2 % 2 == 0)),
        {"trusted": "checked"},
        r"a\.csv, column 'checked': all 20 trusted rows have the label 'a', over all clients together",
    ),
    "half trusted": (line(9, "27,n,perhaps,a"), {"trusted": "checked"}, "row 9, column 'checked': expected true or"),
    "too few features": (str, {"features": np.zeros((39, 2))}, r"features has 39 rows, but .*a\.csv has 40"),
    "infinite features": (str, {"features": np.full((40, 2), np.inf)}, "features, row 0, column 0: inf is infinite"),
    "features of text": (str, {"features": np.full((40, 2), "a")}, "must be an array of numbers"),
    "no features": (str, {"features": "none.npy"}, r"there is no file none\.npy"),
    "folders of a table": (str, {"client_from": "folder"}, "clients can come from folders for pictures only"),
    "constant features": (str, {"features": np.ones((40, 2))}, "features has no column to learn from"),
    "features without a value": (str, {"features": np.full((40, 2), np.nan)}, "learn from .'0': it is empty"),
    "features that are a table": (str, {"features": "a.csv"}, r"a\.csv is not an \.npy file: save an array"),
    "a blank first line": (lambda text: "\n" + text, {}, r"a\.csv, line 1 is blank: it must have the names"),
    "UTF-32": (lambda text: text.encode("utf-32"), {}, r"a\.csv is UTF-32 text, not UTF-8"),
    "nothing to learn from": (str, {"drop": ["age", "checked"]}, "has no column besides the label to learn from"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, options, sentence = BAD[name]
    changed = change(GOOD)
    path = tmp_path / "a.csv"
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore", FedbilevelWarning)  # pytest restores it
    with pytest.raises(fb.FedbilevelError, match=sentence) as refused:
        fb.data.table(path, **{"label": "label", "client": "site", **options})
    assert "\n" not in str(refused.value)
    assert [each.name for each in tmp_path.iterdir()] == ["a.csv"]


def test_the_good_table_is_good(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(GOOD)
    assert len(fb.data.table(tmp_path / "a.csv", label="label", client="site", trusted="checked")) == 40


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    frame = people().drop(columns="hospital")
    frame.to_csv(tmp_path / "north.csv", index=False)
    frame.rename(columns={"age": "Age"}).to_csv(tmp_path / "south.csv", index=False)
    both = [tmp_path / "north.csv", tmp_path / "south.csv"]
    with pytest.raises(fb.FedbilevelError, match=r"south\.csv has no column 'age', which .*did you mean 'Age'"):
        fb.data.table(both, label="outcome")
    frame.assign(more=1).to_csv(tmp_path / "south.csv", index=False)
    with pytest.raises(fb.FedbilevelError, match=r"north\.csv has no column 'more', which .*south\.csv has"):
        fb.data.table(both, label="outcome")
    with pytest.raises(fb.FedbilevelError, match=r"there is no file .*west\.csv"):
        fb.data.table([*both, tmp_path / "west.csv"], label="outcome")


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the second reading would judge those of the first."""
    (tmp_path / "a.csv").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fb.FedbilevelError, match=r"\./a\.csv is given twice"):
        fb.data.table(["a.csv", "./a.csv"], label="label")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ([], "there is nothing to read"),
        ("", "there is nothing to read"),
        (None, "not from a NoneType"),
        ({"label": [0, 1]}, "not from a dict"),
        ("https://example.com/a.csv", r"a\.csv is an address: download the file first"),
    ],
)
def test_what_rows_do_not_come_from(source: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        fb.data.table(source, label="label")


def test_columns_that_are_called_by_numbers() -> None:
    frame = people()
    numbered = frame.rename(columns={name: n for n, name in enumerate(frame.columns)})
    place = list(frame.columns).index
    table = fb.data.table(numbered, label=place("outcome"), client=place("hospital"), drop=[place("age")])
    assert table.labels.tolist() == fb.data.table(frame, label="outcome", client="hospital").labels.tolist()
    assert str(place("age")) not in [column.name for column in table.encoding.columns]


def test_what_looks_like_a_mistake_is_said(tmp_path: Path) -> None:
    """It is neither refused nor corrected."""
    frame = pd.read_csv(io.StringIO(GOOD))
    frame["day"] = ["2024-02-30"] + ["2024-02-28", "2024-02-29", "2024-03-01"] * 13  # there is no such day
    frame.loc[frame.index % 4 == 2, "label"] = "B"
    frame.loc[6:7, "label"] = "none"
    frame["number"] = [7, *range(39)]
    frame.to_csv(tmp_path / "a.csv", index=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbilevelWarning)
        table = fb.data.table(tmp_path / "a.csv", label="label", client="site", id="number")
    assert table.classes == ("B", "a", "b")
    notes = " ".join(table.notes)
    assert re.search(r"2 rows have no label.*a\.csv, row 8, where 'none' counts as missing: if it is a label", notes)
    assert "column 'label': 'B' and 'b' look alike, but are two classes" in notes
    assert "ids are not unique: 2 rows of a client have '7' in column 'number'" in notes
    assert re.search(
        r"row 2, column 'day': '2024-02-30' is not a date such as .* counts as missing \(1 in all\)", notes
    )
    assert ("day", "date") in [(name, kind) for name, kind, _ in table.understood]


def test_own_features_need_no_pictures(tmp_path: Path) -> None:
    """They are looked at in place of pictures, which are shown if they are there."""
    features = np.random.default_rng(0).normal(size=(8, 3))
    names = [f"{n}.png" for n in range(8)]
    pd.DataFrame({"file": names, "label": ["a", "b"] * 4}).to_csv(tmp_path / "labels.csv", index=False)
    source = tmp_path / "labels.csv"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbilevelWarning)
        table = fb.data.table(source, label="label", features=features)
        assert (table.pictures, table.inputs.shape, table.ids[0]) == ([], (8, 3), "2")
        for name in names:
            Image.new("L", (4, 4)).save(tmp_path / name)
        table = fb.data.table(source, label="label", features=features)
    assert (table.pictures[0], table.inputs.shape, table.ids[0]) == (tmp_path / "0.png", (8, 3), "0.png")


def test_what_a_table_says_obeys_no_terminal() -> None:
    frame = people().rename(columns={"age": "\x1b[31mage\nof"})
    assert "\x1b" not in str(table := fb.data.table(frame, **ROLES))
    assert len(str(table).splitlines()) == 1 + len(table.understood)


def test_new_rows_must_fit(tmp_path: Path) -> None:
    encoding = fb.data.table(people(), **ROLES, numeric=["age"]).encoding
    with pytest.raises(fb.FedbilevelError, match=r"the data frame has no column 'age', which the model needs"):
        new_rows(encoding, people().drop(columns="age"))
    with pytest.raises(fb.FedbilevelError, match=r"row 3, column 'age': 'old' is not a number"):
        list(new_rows(encoding, people().astype({"age": object}).replace({"age": {people().age[3]: "old"}}).assign(
            age=lambda frame: ["old" if n == 3 else "40" for n in range(len(frame))])).blocks)  # fmt: skip


@pytest.mark.slow
def test_a_million_rows_fit_into_memory(tmp_path: Path) -> None:
    """2 GB are enough."""
    import subprocess
    import sys

    rows, rng = 10**6, np.random.default_rng(0)
    frame = pd.DataFrame({f"x{n}": rng.normal(size=rows).round(4) for n in range(10)})
    frame["town"] = rng.choice([f"t{n}" for n in range(100)], rows)
    frame["site"] = rng.choice([f"s{n}" for n in range(200)], rows)
    frame["label"] = rng.choice(["a", "b"], rows)
    frame.to_csv(tmp_path / "a.csv", index=False)
    code = (
        "import resource, fedbilevel as fb; t = fb.data.table('a.csv', label='label', client='site'); "
        "print(t.inputs.shape[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    read, kilobytes = map(int, done.stdout.split())
    assert read == rows
    assert kilobytes < 2e6
