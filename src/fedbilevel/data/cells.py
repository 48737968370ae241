"""Cells of a table: which are missing, which are numbers, and which are one of some values, compared exactly."""

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from fedbilevel.errors import FedbilevelError

Value = str | int | float | bool
"""What a cell may be compared with: text, a number, true or false."""
MISSING = frozenset(["", "?", "na", "n/a", "nan", "null", "none"])
"""Words for a missing value, in any case."""
BLANKS = " \t\r\n\f\v"
"""What is stripped. Other spaces of Unicode are not: they are characters that somebody typed."""

# The digits of ASCII only, and no underscores: Python itself would read "1_0" and digits of any script.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
_USUAL = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?", re.ASCII)
_WORDS = {"true": True, "false": False}


def is_missing(cell: Any) -> bool:
    """Whether a cell has no value: None, NaN, or a word for it.

    >>> [is_missing(cell) for cell in (" NA ", "", None, float("nan"), "0", 0)]
    [True, True, True, True, False, False]
    """
    if isinstance(cell, str):
        return cell.strip(BLANKS).lower() in MISSING
    return cell is None or bool(cell != cell)


def number(cell: Any) -> Decimal | None:
    """The number that a cell is, exactly, however large; None if it is none, or not finite.

    >>> number(" 1.0 ") == number(1) == 1, number("9007199254740993") == 2**53 + 1, number("0.1") == number(0.1)
    (True, True, True)
    >>> [number(cell) for cell in ("1_0", "inf", "nan", "1,5", "", True, None)]
    [None, None, None, None, None, None, None]
    """
    if isinstance(cell, bool | np.bool_):
        return None
    if isinstance(cell, int | np.integer):
        return Decimal(int(cell))
    if isinstance(cell, float | np.floating):
        return Decimal(str(cell)) if np.isfinite(cell) else None  # the shortest text that means this float
    if isinstance(cell, str) and _NUMBER.fullmatch(text := cell.strip(BLANKS)):
        return Decimal(text)
    return None


def written(cell: Any) -> str:
    """The meaning of a cell as text: two cells mean the same where this is the same, whatever they were read from.

    Numbers written in a usual way are equal if they are the same number; everything else is compared as text.

    >>> [written(cell) for cell in (1, "1.0", " 1 ", "01", 2.50, "1e3", True, "TRUE", " a b ")]
    ['1', '1', '1', '01', '2.5', '1e3', 'true', 'true', 'a b']
    """
    if isinstance(cell, bool | np.bool_):
        return "true" if cell else "false"
    text = cell.strip(BLANKS) if isinstance(cell, str) else ""
    if text.lower() in _WORDS and text.isascii():
        return text.lower()
    if text and not _USUAL.fullmatch(text):
        return text
    exact = number(cell)
    if exact is None:
        return text or str(cell)
    digits = f"{exact:f}"
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits == "-0" else digits


def shown(cell: Any) -> str:
    """A cell for a message: short, and with codes where characters may look like others.

    >>> shown("yes"), shown("y\\u0435s"), shown(3), shown("a" * 100)
    ("'yes'", "'y\u0435s' ('y\\\\u0435s')", '3', "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...'")
    """
    if isinstance(cell, str):
        short = cell if len(cell) <= 40 else f"{cell[:40]}..."
        if not short.isprintable():
            return ascii(short)
        return f"'{short}'" if short.isascii() else f"'{short}' ({short!a})"
    if isinstance(cell, int) and not isinstance(cell, bool) and abs(cell) >= 10**20:
        return f"{Decimal(cell):.6e}"
    return str(cell)[:50]


class Choices:
    """Values of which a cell must be one, compared exactly.

    Text is that text, blanks at the ends aside. A number is that number written in a usual way: 1, 1.0, "1", "1.0" and
    " 1 ", but not "01", "+1", "1e0" or true. True and false are booleans, or these words.

    >>> choices = Choices([1, "x", 2.5], "the label")
    >>> [choices.find(cell) for cell in ("1.0", 1, " x ", "2.50", "X", "01", True)]
    [0, 0, 1, 2, None, None, None]

    Args:
        values: at least two, of which no two can mean the same cell.
        what: what has these values, for messages.
    """

    def __init__(self, values: Sequence[Any], what: str) -> None:
        if len(values) < 2:
            raise FedbilevelError(f"{what} needs at least two values.")
        places: dict[tuple[str, Any], int] = {}
        meanings: dict[tuple[str, Any], int] = {}
        kinds = {_key(value, what)[0] for value in values}
        if {"number", "boolean"} <= kinds:
            raise FedbilevelError(f"{what} has both numbers and true or false among its values: use one of the two.")
        for place, value in enumerate(values):
            key = _key(value, what)
            # Two values clash if one of them, as a cell, could also be read as the other.
            readings = list(_readings(value))
            same = [places[reading] for reading in readings if reading in places]
            same += [meanings[key]] if key in meanings else []
            if same:
                said = f"{shown(values[same[0]])} and {shown(value)}"
                raise FedbilevelError(f"{what} has the values {said}, which are the same.")
            places[key] = place
            meanings |= dict.fromkeys(readings, place)
        self.values = tuple(values)
        self._places = places
        # "none" may be one of the values: then it is not missing, and neither is "None", which is a mistake.
        self._words = {value.strip(BLANKS).lower() for value in values if isinstance(value, str)}

    def find(self, cell: Any) -> int | None:
        """Which of the values a cell is; None if it is none of them."""
        for reading in _readings(cell):
            if reading in self._places:
                return self._places[reading]
        return None

    def missing(self, cell: Any) -> bool:
        """Whether a cell has no value."""
        return is_missing(cell) and not (isinstance(cell, str) and cell.strip(BLANKS).lower() in self._words)

    def __str__(self) -> str:
        some = [shown(value) for value in self.values[:20]]
        return ", ".join([*some, "..."] if len(self.values) > 20 else some)


def _key(value: Any, what: str) -> tuple[str, Any]:
    """What kind of value it is, and its exact meaning."""
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, str) and (text := value.strip(BLANKS)):
        return "text", text
    if isinstance(value, int | float) and (exact := number(value)) is not None:
        return "number", exact
    raise FedbilevelError(
        f"{what} has the value {shown(value)}, but values are words, finite numbers, or true and false."
    )


def _readings(cell: Any) -> Iterator[tuple[str, Any]]:
    """Everything that a cell can mean."""
    if isinstance(cell, bool | np.bool_):
        yield "boolean", bool(cell)
        return
    if isinstance(cell, str):
        text = cell.strip(BLANKS)
        yield "text", text
        if text.isascii() and text.lower() in _WORDS:
            yield "boolean", _WORDS[text.lower()]
        if not _USUAL.fullmatch(text):  # 007 is somebody's number, but not the number 7; and 1e1 may be a name
            return
    if (exact := number(cell)) is not None:
        yield "number", exact
