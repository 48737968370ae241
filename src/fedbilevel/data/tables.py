"""Tables (heart disease, Adult and breast cancer), and how to standardise them."""

from typing import Any, NamedTuple

import numpy as np

from fedbilevel.data import formats
from fedbilevel.data.samples import DataSet, Samples, read_only
from fedbilevel.data.sources import Source, find, packaged
from fedbilevel.errors import FedbilevelError

_HEART_COLUMNS = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal",
)  # fmt: skip
HEART_FILES = {
    hospital: Source("heart_disease", f"processed.{hospital}.data", (), size, sha256)
    for hospital, size, sha256 in (
        ("cleveland", 18461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
        ("hungarian", 10263, "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
        ("switzerland", 4109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
        ("va", 6737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
    )
}
"""The files of the four hospitals, which are part of the package."""


def heart_disease(impossible_is_missing: bool = True) -> DataSet:
    """UCI heart disease: 303, 294, 123 and 200 patients of four hospitals (Janosi and others 1989; CC BY 4.0).

    The files come with the package. 13 features; the label says whether any disease was found (`num > 0`). The group
    "hospital" is the natural client; "sex" is a group as well. There is no split. Missing values (`?`) are NaN:
    `np.isnan` is the mask, and `Scaling` fills them in with what it learned from training rows only.

    Args:
        impossible_is_missing: a cholesterol or a blood pressure of 0 is not a measurement. All 123 patients of
            Switzerland and 49 of VA have cholesterol 0. True makes these NaN; False leaves them as stored.
    """
    tables = [
        np.array(
            [
                [float(cell) if cell != "?" else np.nan for cell in row]
                for row in formats.read_rows(packaged(source), 14)
            ]
        )
        for source in HEART_FILES.values()
    ]
    hospitals = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    table = np.concatenate(tables)
    if impossible_is_missing:
        for column in ("trestbps", "chol"):
            values = table[:, _HEART_COLUMNS.index(column)]
            values[values == 0] = np.nan
    train = read_only(table[:, :13], table[:, 13] > 0, {"hospital": hospitals, "sex": table[:, 1]})
    groups = {"hospital": tuple(HEART_FILES), "sex": ("female", "male")}
    return DataSet("heart-disease", train, None, ("healthy", "disease"), features=_HEART_COLUMNS, groups=groups)


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country",
)  # fmt: skip
_ADULT_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_ADULT_GROUPS = ("sex", "race")
ADULT_FILES = (
    Source(
        "adult",
        "adult.data",
        (f"{_UCI}adult/adult.data",),
        3974305,
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    ),
    Source(
        "adult",
        "adult.test",
        (f"{_UCI}adult/adult.test",),
        2003153,
        "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    ),
)
"""The two files of Adult."""


def adult() -> DataSet:
    """UCI Adult (census income): 32,561 + 16,281 people (Becker and Kohavi 1996; CC BY 4.0). Is their income above 50K?

    Numbers stay as they are (`Scaling` standardises them). A column of words becomes one column of 0 and 1 for each
    word, in alphabetical order of the training rows, named "workclass=Private"; a missing word (`?`) is a word of its
    own. Sex and race are not among the features: they are the groups "sex" and "race". (The feature "relationship"
    still reveals the sex of husbands and wives.)
    """
    rows, test_rows = (formats.read_rows(find(source), 15) for source in ADULT_FILES)
    words = {
        column: tuple(sorted({row[i] for row in rows}))
        for i, column in enumerate(_ADULT_COLUMNS)
        if column not in _ADULT_NUMBERS
    }
    features = [*_ADULT_NUMBERS]
    features += [f"{column}={word}" for column in words if column not in _ADULT_GROUPS for word in words[column]]

    def read(rows: list[list[str]]) -> Samples:
        columns = {column: np.array([row[i] for row in rows]) for i, column in enumerate(_ADULT_COLUMNS)}
        inputs = [columns[column].astype(np.float32) for column in _ADULT_NUMBERS]
        inputs += [
            (columns[column] == word).astype(np.float32)
            for column in words
            if column not in _ADULT_GROUPS
            for word in words[column]
        ]
        # Lines of the test file end with a dot.
        labels = [row[14].rstrip(".") == ">50K" for row in rows]
        groups = {column: np.searchsorted(words[column], columns[column]) for column in _ADULT_GROUPS}
        return read_only(np.stack(inputs, 1), labels, groups)

    names = {column: words[column] for column in _ADULT_GROUPS}
    return DataSet("adult", read(rows), read(test_rows), ("<=50K", ">50K"), features=tuple(features), groups=names)


def breast_cancer() -> DataSet:
    """Breast cancer: 569 tumours of Wisconsin with 30 features, from scikit-learn. There is no split."""
    from sklearn.datasets import load_breast_cancer

    raw: Any = load_breast_cancer()
    features = tuple(map(str, raw.feature_names))
    return DataSet(
        "breast-cancer", read_only(raw.data, raw.target), None, tuple(raw.target_names.tolist()), None, features
    )


class Scaling(NamedTuple):
    """How to fill in and standardise the columns of a table, learned from training rows.

    A missing value (NaN) becomes the median of its column; then every column gets mean 0 and deviation 1. A column
    with a single value becomes 0, and so does one that is missing in all rows that were seen.

    >>> table = np.array([[1.0, np.nan], [3.0, 5.0]])
    >>> scaling = Scaling.fit(table)
    >>> scaling(table).tolist()
    [[-1.0, 0.0], [1.0, 0.0]]
    """

    median: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, rows: np.ndarray) -> "Scaling":
        """Learn the scaling from training rows, of one client or of all."""
        rows = np.array(rows, float)
        if rows.ndim != 2 or not len(rows):
            raise FedbilevelError("a scaling needs a table with at least one row to learn from.")
        known = ~np.isnan(rows)
        medians = [np.median(rows[here, i]) if here.any() else 0.0 for i, here in enumerate(known.T)]
        median = np.array(medians)
        filled = np.where(known, rows, median)
        deviation = filled.std(0)
        return cls(median, filled.mean(0), np.where(deviation > 0, deviation, np.inf))

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The rows, filled in and standardised, as float32."""
        rows = np.where(np.isnan(rows), self.median, rows)
        return ((rows - self.mean) / self.deviation).astype(np.float32)
