"""Tables of named columns, whatever they come from (``table_files.py`` reads them), and their messages.

Every defect is one sentence that names the source, the column and the row.
"""

import difflib
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.data.cells import shown, written
from fedbilevel.errors import FedbilevelError

KINDS = "numbers, text, or true and false"


@dataclass(frozen=True, eq=False)
class Table:
    """A table whose columns are read when they are asked for.

    Args:
        source: where it comes from, for messages.
        names: of its columns.
        first: the number of its first row, as its owner counts them.
        load: the columns of some names, as lists, or as arrays of numpy or Arrow.
        rows: how many it has; None where only its columns tell.
    """

    source: str
    names: tuple[str, ...]
    first: int
    load: Callable[[Sequence[str]], Mapping[str, Any]]
    rows: int | None = None

    def __len__(self) -> int:
        return len(self.read(self.names[:1])[self.names[0]]) if self.rows is None else self.rows

    def __post_init__(self) -> None:
        for name, times in Counter(self.names).items():
            if times > 1:
                called = f"called {shown(name)}" if name else "without a name"
                raise FedbilevelError(f"{self.source} has {times} columns {called}: rename or remove some.")

    def need(self, name: str, role: str = "") -> None:
        """Refuse a column that is not there; the message suggests the nearest name."""
        if name not in self.names:
            near = difflib.get_close_matches(name[:100], self.names, n=1, cutoff=0.5)
            hint = f"did you mean {shown(near[0])}?" if near else f"it has {listed(self.names)}."
            raise FedbilevelError(f"{self.source} has no column {shown(name)}{role}: {hint}")

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Some columns, as arrays or lists of the same length."""
        for name in names:
            self.need(name)
        try:
            columns = dict(self.load(names))
        except FedbilevelError:
            raise
        except Exception as error:  # whatever a damaged file makes its reader do
            raise unreadable(self.source, error) from None
        lengths = {}
        for name, column in columns.items():
            if not hasattr(column, "__len__") or (isinstance(column, np.ndarray) and not column.ndim):
                raise FedbilevelError(f"{self.source}: {shown(name)} is a single value, not a column.")
            lengths[name] = len(column)
        if len(set(lengths.values())) > 1:
            short, long = min(lengths, key=lambda n: lengths[n]), max(lengths, key=lambda n: lengths[n])
            raise FedbilevelError(
                f"{self.source}: the columns differ in length: {shown(short)} has {lengths[short]} rows, {shown(long)} "
                f"has {lengths[long]}."
            )
        return columns

    def cells(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """Some columns as lists of text, numbers, booleans and None, of the same length."""
        return {name: self.listed(name, column) for name, column in self.read(names).items()}

    def listed(self, name: str, column: Any) -> list[Any]:
        """A column as a list of cells; refuses what is not text, a number, a boolean or None."""
        if is_arrow(column):
            self._check_arrow(name, column.type)
            return _cells_of(column)
        if isinstance(column, np.ndarray) and column.ndim != 1:
            raise FedbilevelError(
                f"{self.source}: column {shown(name)} has {column.ndim} axes, but a column has one value for each row."
            )
        if isinstance(column, np.ndarray) and column.dtype.kind != "O":
            if column.dtype.kind not in "biufU" or (column.dtype.kind == "f" and column.dtype.itemsize > 8):
                raise FedbilevelError(f"{self.source}: column {shown(name)} has the type {column.dtype}, not {KINDS}.")
            try:
                # Floats of lower precision stay what they are: 0.1 must not become 0.10000000149.
                return list(column) if column.dtype.kind == "f" and column.dtype.itemsize < 8 else column.tolist()
            except ValueError as error:  # text that is none
                raise unreadable(self.source, error, name) from None
        for row, cell in enumerate(column):
            if cell is not None and not isinstance(
                cell, str | bool | int | float | np.bool_ | np.integer | np.floating
            ):
                raise self.wrong(name, row, f"expected {KINDS}, but found a {type(cell).__name__}")
        return list(column)

    def arrow(self, name: str, column: Any) -> Any:
        """A column as one array of Arrow: of numbers, booleans, dates or text; other cells become text."""
        import pyarrow  # here, so that importing the library does not import it

        if isinstance(column, pyarrow.ChunkedArray):
            column = column.combine_chunks()
        if is_arrow(column):
            self._check_arrow(name, column.type, dates=True)
            kind = pyarrow.types
            if kind.is_dictionary(column.type):
                column = column.dictionary_decode()
            if kind.is_string_view(column.type):
                return column.cast("large_string")
            return column.cast("float64") if kind.is_decimal(column.type) else column
        cells = self.listed(name, column)
        if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
            return pyarrow.array(column, from_pandas=True)
        try:
            if has_kinds(cells):
                raise TypeError  # Arrow would make numbers of true and false
            return pyarrow.array(cells, from_pandas=True)
        except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):  # of several kinds, or too large
            return pyarrow.array([None if cell is None or cell != cell else written(cell) for cell in cells])

    def _check_arrow(self, name: str, type: Any, dates: bool = False) -> None:
        import pyarrow

        known = pyarrow.types
        plain = type.value_type if known.is_dictionary(type) else type
        tests = [known.is_boolean, known.is_integer, known.is_floating, known.is_string, known.is_large_string,
                 known.is_string_view, known.is_decimal, known.is_null]  # fmt: skip
        tests += [known.is_date, known.is_timestamp] if dates else []
        if not any(test(plain) for test in tests):
            raise FedbilevelError(f"{self.source}: column {shown(name)} has the type {type}, not {KINDS}.")

    def wrong(self, name: str, row: int, said: str) -> FedbilevelError:
        """An error about one cell."""
        return FedbilevelError(f"{self.source}, row {row + self.first}, column {shown(name)}: {said}.")


def check_file(path: Path) -> None:
    """Refuse what is not a regular file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise FedbilevelError(f"there is no file {path}.") from None
    except (OSError, ValueError) as error:  # no permission, a loop of links, a name that cannot be
        raise unreadable(str(path), error) from None
    if stat.S_ISDIR(mode):
        raise FedbilevelError(f"{path} is a folder, not a file.")
    if not stat.S_ISREG(mode):
        raise FedbilevelError(f"{path} is not a regular file.")


def unreadable(source: str, error: BaseException, name: str = "") -> FedbilevelError:
    """What went wrong with a file, or with one column of it, in one sentence."""
    column = f", column {shown(name)}," if name else ""
    return FedbilevelError(f"{source}{column} cannot be read: {reason(error)}.")


def reason(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, MemoryError):
        return "it does not fit into memory"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = (text.strip().splitlines() or [""])[0][:200].rstrip(".")
    return (line if line.isprintable() else ascii(line)) or type(error).__name__


def listed(names: Sequence[str]) -> str:
    """Names for a message."""
    some = [name[:40] if name.isprintable() else ascii(name[:40]) for name in names[:30]]
    return ", ".join([*some, "..."] if len(names) > 30 else some) or "none"


def has_kinds(cells: Sequence[Any]) -> bool:
    """Whether there are true or false, and others, among some cells."""
    kinds = {isinstance(cell, bool | np.bool_) for cell in cells if cell is not None and cell == cell}
    return len(kinds) > 1


def is_arrow(column: Any) -> bool:
    """Whether it is an array of Arrow, in one piece or in several."""
    return type(column).__module__.partition(".")[0] == "pyarrow"


def _cells_of(column: Any) -> list[Any]:
    import pyarrow

    if pyarrow.types.is_floating(column.type):
        return list(column.to_numpy())  # in its own precision: 0.1 must not become 0.10000000149
    cells = column.to_pylist()
    return [None if cell is None else str(cell) for cell in cells] if pyarrow.types.is_decimal(column.type) else cells
