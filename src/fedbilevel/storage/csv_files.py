"""Tables as CSV text in which every cell can be read back as it is."""

import csv
from collections.abc import Iterable, Sequence
from typing import Any, TextIO


class CsvWriter:
    r"""Writes rows, which end with a line feed.

    If lines end with a line feed, Python's own writer leaves a carriage return within a cell without quotes, and
    readers see two rows there. So it is told that lines end with both.

    >>> import io
    >>> CsvWriter(text := io.StringIO()).rows([["a", "b, c"], ["d\re", None]])
    >>> text.getvalue()
    'a,"b, c"\n"d\re",\n'

    Args:
        file: opened with ``newline=""``.
        mark: between cells.
    """

    def __init__(self, file: TextIO, mark: str = ",") -> None:
        self._file = file
        self._table = csv.writer(self, delimiter=mark, lineterminator="\r\n")

    def write(self, line: str) -> None:
        """One line of Python's writer."""
        self._file.write(f"{line[:-2]}\n")

    def rows(self, rows: Iterable[Sequence[Any]]) -> None:
        """Write some rows."""
        self._table.writerows(rows)
