"""What the cells of a column are: numbers, dates, true and false, or words; and what a client tells of its cells.

A client tells two things of a column: first a :class:`Profile`, which says what its cells look like; then, once
everybody knows what kind of column it is, :class:`Moments` or :class:`Counts`. All three are counts and sums over rows,
and the sum of two of them is that of both clients' rows together. No cell and no row is told.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from fedbilevel.data.cells import BLANKS, MISSING, shown, written
from fedbilevel.data.columns import Table
from fedbilevel.errors import FedbilevelError

Kind = Literal["number", "date", "boolean", "category", "empty"]
"""A date is a number of days; a boolean is 0 or 1; of an empty column no cell is known."""
Index = np.ndarray | slice

LARGEST = 1e15
"""A number of more than this is not a measurement; a whole one is a name for something."""
MOSTLY = 0.9
"""A column with this share of numbers, or dates, is one of these, in which other cells are missing."""
MOST_TOLD = 1000
"""Values that a client tells of one column, the most frequent ones."""

_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?$"
_INFINITE = r"^[+-]?(?i:inf|infinity|1\.#inf)$"
_CODE = r"^[+-]?(0\d+|\d{16,})$"  # 007, and the number of an account, are names
_DATE = r"^(\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?|\d{4}/\d{2}/\d{2}|\d{1,2}\.\d{1,2}\.\d{4})$"
_DAY = 86400.0


class Profile(NamedTuple):
    """How many cells of a column are of which kind: some are of several kinds."""

    rows: int = 0
    known: int = 0
    numbers: int = 0
    codes: int = 0  # numbers that are names, such as 007
    days: int = 0
    truths: int = 0

    def __add__(self, other: Any) -> "Profile":
        return Profile(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def kind(self) -> Kind:
        """What kind of column it is."""
        if not self.known:
            return "empty"
        if self.truths == self.known:
            return "boolean"
        if self.days >= MOSTLY * self.known:
            return "date"
        return "number" if self.numbers >= MOSTLY * self.known and not self.codes else "category"


class Moments(NamedTuple):
    """Sums over numbers: how many there are, their mean, and the sum of the squares of their distances from it.

    >>> Moments.of(np.array([1.0, 2.0])) + Moments.of(np.array([6.0])) == Moments.of(np.array([1.0, 2.0, 6.0]))
    True
    """

    number: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray) -> "Moments":
        """The moments of the values that are not NaN."""
        known = values[~np.isnan(values)]
        if not len(known):
            return cls()
        mean = float(known.mean(dtype=float))
        return cls(len(known), mean, float(((known - mean) ** 2).sum(dtype=float)))

    def __add__(self, other: Any) -> "Moments":
        number = self.number + other.number
        if not number:
            return self
        apart, share = other.mean - self.mean, other.number / number
        squares = self.squares + other.squares + self.number * share * apart**2
        return Moments(number, self.mean + share * apart, squares)

    @property
    def deviation(self) -> float:
        """The standard deviation; 0 where it is no more than rounding."""
        variance = self.squares / max(self.number, 1)
        return variance**0.5 if variance > 1e-28 * self.mean**2 else 0.0


class Counts(NamedTuple):
    """In how many rows a column has each of its values, as far as they are told; and how many rows it has."""

    rows: int
    values: Mapping[str, int]

    @classmethod
    def together(cls, parts: "Iterable[Counts]") -> "Counts":
        """The counts of several clients' rows."""
        rows, values = 0, Counter[str]()
        for part in parts:
            rows += part.rows
            values.update(part.values)
        return cls(rows, dict(values))


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one column of a table, taken apart when they are needed.

    >>> from fedbilevel.data.columns import Table
    >>> table = Table("a.csv", ("age",), 2, lambda names: {"age": ["3", " 4.5 ", "", "NA"]})
    >>> cells = Cells(table, "age", table.arrow("age", table.read(["age"])["age"]))
    >>> cells.numbers.tolist(), cells.profile().kind
    ([3.0, 4.5, nan, nan], 'number')
    """

    table: Table
    name: str
    array: Any  # of Arrow: numbers, booleans, dates or text

    def __len__(self) -> int:
        return len(self.array)

    def wrong(self, row: int, said: str) -> FedbilevelError:
        """An error about one cell."""
        return self.table.wrong(self.name, row, said)

    def cell(self, row: int) -> str:
        """One cell for a message."""
        return shown(self.array[row].as_py())

    @cached_property
    def _type(self) -> str:
        import pyarrow

        known = pyarrow.types
        if known.is_string(self.array.type) or known.is_large_string(self.array.type):
            return "text"
        if known.is_boolean(self.array.type):
            return "boolean"
        if known.is_date(self.array.type) or known.is_timestamp(self.array.type):
            return "date"
        return "null" if known.is_null(self.array.type) else "number"

    @cached_property
    def _text(self) -> Any:
        """The cells as text without blanks around it, null where they are missing."""
        import pyarrow

        compute = _compute()
        text = compute.utf8_trim(self.array, characters=BLANKS)
        words = pyarrow.array(sorted(MISSING), self.array.type)
        return compute.if_else(compute.is_in(compute.ascii_lower(text), value_set=words), None, text)

    def _matching(self, pattern: str) -> Any:
        compute = _compute()
        return compute.fill_null(compute.match_substring_regex(self._text, pattern), False)

    @cached_property
    def missing(self) -> np.ndarray:
        """Which cells have no value."""
        if self._type == "number":
            return np.isnan(self.array.cast("float64", safe=False).to_numpy(zero_copy_only=False)) | _flags(
                self.array.is_null()
            )
        return _flags((self._text if self._type == "text" else self.array).is_null())

    @cached_property
    def numbers(self) -> np.ndarray:
        """The cells as numbers; NaN where they are none."""
        compute = _compute()
        if self._type == "number":
            return self.array.cast("float64", safe=False).to_numpy(zero_copy_only=False)
        if self._type != "text":
            return np.full(len(self), np.nan)
        text = compute.if_else(self._matching(_NUMBER), self._text, None)
        plain = compute.replace_substring_regex(text, r"^\+", "")
        infinite = compute.if_else(self._matching(_INFINITE), np.inf, None)
        read = compute.coalesce(plain.cast("float64"), infinite)
        return read.to_numpy(zero_copy_only=False).astype(float)

    @cached_property
    def codes(self) -> np.ndarray:
        """Which numbers are names for something, such as 007."""
        if self._type == "text":
            return _flags(self._matching(_CODE))
        import pyarrow

        whole = pyarrow.types.is_integer(self.array.type)
        with np.errstate(invalid="ignore"):
            return np.abs(self.numbers) > LARGEST if whole else np.zeros(len(self), bool)

    @cached_property
    def days(self) -> np.ndarray:
        """The cells as days since 1970; NaN where they are no dates."""
        import pyarrow

        compute = _compute()
        if self._type == "date":
            if pyarrow.types.is_date(self.array.type):
                days = self.array.cast("date32").cast("int32").cast("float64")
                return days.to_numpy(zero_copy_only=False).astype(float)
            times = self.array.cast(pyarrow.timestamp("us", self.array.type.tz), safe=False).cast("int64")
            return times.cast("float64", safe=False).to_numpy(zero_copy_only=False).astype(float) / (1e6 * _DAY)
        if self._type != "text":
            return np.full(len(self), np.nan)
        dates = compute.if_else(self._matching(_DATE), self._text, None).dictionary_encode()
        places = dates.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return np.array([*map(_day, dates.dictionary.to_pylist()), np.nan])[places]

    @cached_property
    def truths(self) -> np.ndarray:
        """The cells as 0 and 1; NaN where they are not true or false."""
        if self._type == "boolean":
            return self.array.cast("int8").cast("float64").to_numpy(zero_copy_only=False).astype(float)
        if self._type != "text":
            return np.full(len(self), np.nan)
        true, false = (_flags(self._matching(f"^(?i:{word})$")) for word in ("true", "false"))
        return np.where(true, 1.0, np.where(false, 0.0, np.nan))

    @cached_property
    def words(self) -> tuple[np.ndarray, tuple[str, ...], tuple[Any, ...]]:
        """What each cell means, as the number of a word, -1 where it is missing; the words; and one of the cells for
        each, the most frequent one that means it.
        """
        found = (self._text if self._type == "text" else self.array).dictionary_encode()
        places = found.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        floats = self._type == "number" and str(found.dictionary.type) in ("halffloat", "float", "double")
        cells = list(found.dictionary.to_numpy()) if floats else found.dictionary.to_pylist()
        often = np.bincount(places[places >= 0], minlength=len(cells))
        meaning: dict[str, int] = {}
        spelled: list[tuple[int, Any]] = []
        codes = np.full(len(cells) + 1, -1)
        for place, cell in enumerate(cells):
            if cell is None or cell != cell:
                continue
            code = meaning.setdefault(written(cell), len(meaning))
            codes[place] = code
            entry = (int(often[place]), cell)
            if code == len(spelled):
                spelled.append(entry)
            elif entry[0] > spelled[code][0]:
                spelled[code] = entry
        return codes[places], tuple(meaning), tuple(cell for _, cell in spelled)

    def values(self, kind: Kind) -> np.ndarray:
        """The cells of a column of this kind as numbers; NaN where they are none."""
        return {"number": self.numbers, "date": self.days, "boolean": self.truths}[kind]

    # What a client tells of its rows.

    def profile(self, rows: Index = slice(None)) -> Profile:
        """How many cells of some rows are of which kind."""
        known = ~self.missing[rows]
        count = lambda values: int((~np.isnan(values[rows])).sum())
        codes = int(self.codes[rows].sum())
        return Profile(len(known), int(known.sum()), count(self.numbers), codes, count(self.days), count(self.truths))

    def check(self, kind: Kind, declared: bool, rows: Index = slice(None)) -> int:
        """Refuse cells that do not fit a column of this kind; where it was not declared, count them: they are missing.
        Infinite numbers and such that are too large are refused anyway.
        """
        if kind in ("category", "empty"):
            return 0
        values = self.values(kind)[rows]
        place = lambda found: int(np.arange(len(self))[rows][found[0]])
        with np.errstate(invalid="ignore"):
            if len(bad := np.flatnonzero(~(np.abs(values) <= LARGEST) & ~np.isnan(values))):
                row = place(bad)
                what = "infinite" if np.isinf(values[bad[0]]) else f"larger than {LARGEST:g}"
                raise self.wrong(row, f"{self.cell(row)} is {what}")
        strange = np.flatnonzero(np.isnan(values) & ~self.missing[rows])
        if declared and len(strange):
            row = place(strange)
            raise self.wrong(row, f"{self.cell(row)} is not {KIND_WORDS[kind]}")
        return len(strange)

    def moments(self, kind: Kind, rows: Index = slice(None)) -> Moments:
        """Sums over the numbers of some rows."""
        return Moments.of(self.values(kind)[rows])

    def counts(self, rows: Index = slice(None), least: int = 1) -> Counts:
        """How often some rows have each value; nothing of values that fewer than ``least`` of them have."""
        codes, words, _ = self.words
        mine = codes[rows]
        there, often = np.unique(mine[mine >= 0], return_counts=True)
        most = np.lexsort((there, -often))[:MOST_TOLD]
        return Counts(len(mine), {words[there[n]]: int(often[n]) for n in most if often[n] >= least})


KIND_WORDS = {"number": "a number", "date": "a date such as 2024-05-17", "boolean": "true or false"}


def _compute() -> Any:
    """Arrow's functions, which are made when it is imported."""
    from pyarrow import compute

    return compute


def _flags(array: Any) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False).astype(bool)


def _day(text: str) -> float:
    """A date as days since 1970, NaN if there is no such day."""
    try:
        if "." in text[:3]:
            day, month, year = map(int, text.split("."))
            when = datetime(year, month, day)
        else:
            when = datetime.fromisoformat(text.replace("/", "-"))
        return when.replace(tzinfo=when.tzinfo or UTC).timestamp() / _DAY
    except ValueError:
        return float("nan")
