"""What clients tell of their columns: the same sums however rows are divided; and what cells are read as."""

from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.data.cells import Choices, written
from fedbilevel.data.columns import Table
from fedbilevel.data.encoding import fit
from fedbilevel.data.kinds import Cells, Counts, Moments, Profile

CELLS = st.one_of(
    st.none(), st.text(max_size=6), st.integers(-(10**20), 10**20), st.booleans(), st.floats(-1e9, 1e9),
    st.sampled_from(["1", "1.0", "01", "+1", "1e3", "true", "NA", "", "nan", "inf", "-0", "2020-01-31", "1.1.2020"]),
)  # fmt: skip
NUMBERS = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=30)


def cells(values: Any) -> Cells:
    table = Table("a.csv", ("a",), 2, lambda names: {"a": values})
    return Cells(table, "a", table.arrow("a", table.read(["a"])["a"]))


@given(NUMBERS, st.integers(1, 5))
def test_sums_of_clients_are_those_of_all_rows(values: list[float], clients: int) -> None:
    whole = np.array(values)
    parts = np.array_split(whole, clients)
    merged = reduce(add, map(Moments.of, parts))
    known = whole[~np.isnan(whole)]
    assert merged.number == len(known)
    if len(known):
        np.testing.assert_allclose(merged.mean, known.mean(), rtol=1e-9, atol=1e-6)
        np.testing.assert_allclose(merged.squares, ((known - known.mean()) ** 2).sum(), rtol=1e-7, atol=1e-3)


@given(st.lists(CELLS, min_size=1, max_size=30), st.integers(1, 4))
def test_what_clients_tell_does_not_depend_on_who_has_which_row(values: list[Any], clients: int) -> None:
    column = cells(values)
    rows = np.array_split(np.arange(len(values)), clients)
    assert reduce(add, (column.profile(part) for part in rows), Profile()) == column.profile()
    merged, whole = Counts.together(column.counts(part) for part in rows), column.counts()
    assert (merged.rows, dict(merged.values)) == (whole.rows, dict(whole.values))
    # A site reads its own rows only, and tells the same.
    alone = [cells([values[row] for row in part]) for part in rows if len(part)]
    merged = Counts.together(each.counts() for each in alone)
    assert dict(merged.values) == dict(whole.values)


@given(st.lists(CELLS, min_size=1, max_size=20))
def test_cells_mean_the_same_where_choices_cannot_tell_them_apart(values: list[Any]) -> None:
    """The values of a schema and those that are inferred are compared alike."""
    codes, words, _ = cells(values).words
    assert len(set(words)) == len(words)
    for value, code in zip(values, codes, strict=True):
        if code < 0:
            continue
        try:
            choices = Choices([value, "something else"], "the label")
        except fb.FedbilevelError:
            continue
        for other, its in zip(values, codes, strict=True):
            if its >= 0:
                assert (choices.find(other) == 0) == (its == code) or isinstance(value, bool) != isinstance(other, bool)


@given(CELLS)
def test_what_is_written_means_what_was_read(cell: Any) -> None:
    if cell is not None and cell == cell:
        assert written(written(cell)) == written(cell)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["3", " 4.5 ", "", "NA"], "number"),
        (["+1", ".5", "1.", "1e3"], "number"),
        (["007", "008"], "category"),  # these are names
        (["1234567890123456", "1234567890123457"], "category"),
        ([2**60, 1], "category"),
        (["yes", "no"], "category"),
        (["true", "FALSE", None], "boolean"),
        ([True, False], "boolean"),
        (["2020-01-31", "2020-02-01T10:00:00", "2020/03/01"], "date"),
        (["31.1.2020", "01.02.2020"], "date"),
        (["2020-02-31", "2020-01-01"], "category"),  # there is no such day
        (["1/2/2020", "3/4/2020"], "category"),  # nobody knows which is the month
        (["", None, "?"], "empty"),
        (["1_0", "٣"], "category"),
        (["1"] * 9 + ["?", "x"], "number"),
        (["1"] * 5 + ["x"], "category"),
        (np.array([1.5, np.nan]), "number"),
        (np.array(["a", "b"]), "category"),
    ],
)
def test_kinds(values: Any, kind: str) -> None:
    assert cells(values).profile().kind == kind


def test_dates_are_days() -> None:
    column = cells(["1970-01-02", "2.1.1970", "1970-01-01 12:00", "1970-01-01T01:00:00+01:00"])
    assert column.days.tolist() == [1, 1, 0.5, 0]


def test_values_that_few_rows_of_a_client_have_are_not_told() -> None:
    column = cells(["a"] * 6 + ["b"] * 3 + ["c"])
    assert dict(column.counts(least=3).values) == {"a": 6, "b": 3}
    encoding, _ = fit({"a": [(column, [slice(None)])]}, {}, least=4)
    assert encoding.titles == ("a: a", "a: other")


def test_large_numbers_with_a_small_spread_keep_it() -> None:
    """A sum of squares would lose it: this one is of distances from the mean."""
    values = 1.7e9 + np.arange(1000.0)
    merged = reduce(add, (Moments.of(part) for part in np.array_split(values, 7)))
    np.testing.assert_allclose(merged.deviation, values.std(), rtol=1e-9)
