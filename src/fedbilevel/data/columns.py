"""Tables of named columns: from a CSV, Parquet or NPZ file, or from a function. Every defect is one sentence.

    table = read_table("patients.csv")
    cells = table.cells(["age", "sex"])

Nothing is executed and nothing unpacked; a file that would take far more memory than its size suggests is refused.
"""

import csv
import importlib
import math
import os
import stat
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.data.cells import BLANKS, shown
from fedbilevel.errors import FedbilevelError, needs

LARGEST = 1 << 30
"""Bytes that the columns of a compressed file may take, or EXPANSION times the file if that is more."""
EXPANSION = 20
KINDS = "numbers, text, or true and false"


@dataclass(frozen=True, eq=False)
class Table:
    """A table whose columns are read when they are asked for.

    Args:
        source: where it comes from, for messages.
        names: of its columns.
        first: the number of its first row, as its owner counts them.
        load: the columns of some names, as arrays or lists.
    """

    source: str
    names: tuple[str, ...]
    first: int
    load: Callable[[Sequence[str]], Mapping[str, Any]]

    def __post_init__(self) -> None:
        for name, times in Counter(self.names).items():
            if times > 1:
                raise FedbilevelError(f"{self.source} has {times} columns called {shown(name)}: rename or remove some.")

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Some columns, as arrays or lists of the same length."""
        for name in names:
            if name not in self.names:
                raise FedbilevelError(f"{self.source} has no column {shown(name)}: it has {listed(self.names)}.")
        try:
            columns = dict(self.load(names))
        except FedbilevelError:
            raise
        except Exception as error:  # whatever a damaged file makes its reader do
            raise unreadable(self.source, error) from None
        lengths = {}
        for name, column in columns.items():
            if np.ndim(column) == 0:
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

    def wrong(self, name: str, row: int, said: str) -> FedbilevelError:
        """An error about one cell."""
        return FedbilevelError(f"{self.source}, row {row + self.first}, column {shown(name)}: {said}.")


def read_table(source: str) -> Table:
    """A table of a .csv, .parquet or .npz file, or of a function "package.module:function" that returns columns by
    name.
    """
    if is_function(source):
        return _of_function(source)
    path = Path(source)
    check_file(path)
    readers = {".csv": _of_csv, ".npz": _of_npz, ".parquet": _of_parquet}
    if path.suffix.lower() not in readers:
        raise FedbilevelError(
            f"{source} is not a table: give a .csv, .parquet or .npz file, or package.module:function."
        )
    return readers[path.suffix.lower()](path)


def is_function(source: str) -> bool:
    """Whether a source names a function, not a file."""
    return ":" in source and not os.path.lexists(source)


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


def _of_csv(path: Path) -> Table:
    source, rows = str(path), []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)  # otherwise a quote that is never closed would swallow the rest
            try:
                for row in reader:
                    rows.append(row)
                    if any("\0" in cell for cell in row):
                        raise FedbilevelError(
                            f"{source}, row {len(rows)} contains a NUL byte: the file is damaged or is not UTF-8 text; "
                            "save it as 'CSV UTF-8'."
                        )
            except csv.Error as error:
                raise FedbilevelError(f"{source}, line {reader.line_num} cannot be read: {error}.") from None
    except UnicodeDecodeError:
        raise FedbilevelError(f"{source} is not UTF-8 text: save it as 'CSV UTF-8'.") from None
    except (OSError, MemoryError) as error:
        raise unreadable(source, error) from None
    while rows and not rows[-1]:  # blank lines at the end
        rows.pop()
    if not rows:
        raise FedbilevelError(f"{source} is empty.")
    head = [name.strip(BLANKS) for name in rows.pop(0)]
    if len(head) == 1 and any(mark in head[0] for mark in ";\t|"):
        raise FedbilevelError(f"{source} has only one column, {shown(head[0])}: separate columns with commas.")
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            raise FedbilevelError(f"{source}, row {number} has {len(row)} values, but there are {len(head)} columns.")
    place = {name: n for n, name in enumerate(head)}
    return Table(source, tuple(head), 2, lambda names: {name: [row[place[name]] for row in rows] for name in names})


def _of_npz(path: Path) -> Table:
    source, ending = str(path), ".npy"
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(ending): info for info in archive.infolist()}
            names = tuple(info.filename.removesuffix(ending) for info in archive.infolist())
    except Exception as error:
        raise unreadable(source, error) from None

    def load(names: Sequence[str]) -> dict[str, Any]:
        _check_size(path, sum(members[name].file_size for name in names))
        columns = {}
        with zipfile.ZipFile(path) as archive:
            for name in names:
                try:
                    columns[name] = _npy(archive, members[name])
                except Exception as error:
                    raise unreadable(source, error, name) from None
        return columns

    return Table(source, names, 0, load)


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """An array of an archive; numpy's own reader would believe any size that the header of a damaged file claims."""
    with archive.open(member) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers that Python 2 wrote
        version = np.lib.format.read_magic(file)
        heads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in heads:
            raise ValueError(f"its version {version} is not known")
        shape, fortran, kind = heads[version](file)
        if kind.hasobject or kind.names is not None or not kind.itemsize:
            raise ValueError(f"it has the type {kind}, not {KINDS}")
        size = math.prod(shape) * kind.itemsize
        if size != member.file_size - file.tell() or min(shape, default=0) < 0:
            raise ValueError(f"it is {member.file_size - file.tell()} bytes long, not {size}")
        raw = file.read()
    return np.frombuffer(raw, kind).reshape(shape, order="F" if fortran else "C")


def _check_size(path: Path, size: int) -> None:
    most = max(LARGEST, EXPANSION * path.stat().st_size)
    if size > most:
        raise FedbilevelError(
            f"{path} would take {size / 1e9:.1f} GB in memory, more than {most / 1e9:.1f} GB: split it, or compress it "
            "less."
        )


def _of_parquet(path: Path) -> Table:
    source = str(path)
    parquet = needs("pyarrow.parquet", "federation", "Parquet files need pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            names, rows = tuple(file.schema_arrow.names), file.metadata.num_rows
    except Exception as error:
        raise unreadable(source, error) from None
    if rows < 0:
        raise FedbilevelError(f"{source} cannot be read: it claims to have {rows} rows.")

    def load(names: Sequence[str]) -> dict[str, Any]:
        _check_size(path, 8 * rows * len(names))
        columns: dict[str, list[Any]] = {name: [] for name in names}
        size = 0
        with parquet.ParquetFile(path) as file:
            for name in names:
                _check_arrow(source, name, file.schema_arrow.field(name).type)
            for batch in file.iter_batches(4096, columns=list(names)):
                size += batch.nbytes  # a small file can hold the same long text a million times
                _check_size(path, size)
                for name in names:
                    columns[name] += _arrow_cells(batch.column(name))
        return columns

    return Table(source, names, 0, load)


def _check_arrow(source: str, name: str, kind: Any) -> None:
    import pyarrow

    known = pyarrow.types
    plain = kind.value_type if known.is_dictionary(kind) else kind
    tests = (known.is_boolean, known.is_integer, known.is_floating, known.is_string, known.is_large_string,
             known.is_decimal, known.is_null)  # fmt: skip
    if not any(test(plain) for test in tests):
        raise FedbilevelError(f"{source}: column {shown(name)} has the type {kind}, not {KINDS}.")


def _arrow_cells(column: Any) -> list[Any]:
    import pyarrow

    if pyarrow.types.is_floating(column.type):
        return list(column.to_numpy(zero_copy_only=False))  # in its own precision
    cells = column.to_pylist()
    return [None if cell is None else str(cell) for cell in cells] if pyarrow.types.is_decimal(column.type) else cells


def _of_function(source: str) -> Table:
    module, _, name = source.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module can fail in any way
        raise FedbilevelError(f"there is no function {source}: {reason(error)}.") from None
    try:
        columns = function()
    except Exception as error:
        raise FedbilevelError(f"{source} failed with {type(error).__name__}: {reason(error)}.") from error
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns):
        raise FedbilevelError(f"{source} must return columns by name, not {type(columns).__name__}.")

    def load(names: Sequence[str]) -> dict[str, Any]:
        return {name: _sequence(source, name, columns[name]) for name in names}

    return Table(source, tuple(columns), 0, load)


def _sequence(source: str, name: str, column: Any) -> Any:
    if isinstance(column, list | tuple):
        return list(column)
    try:
        array = np.asarray(column)
    except Exception as error:
        raise unreadable(source, error, name) from None
    if isinstance(column, str | bytes | Mapping) or (array.ndim == 0 and array.dtype.kind == "O"):
        raise FedbilevelError(f"{source}: {shown(name)} is a {type(column).__name__}, not a column.")
    return array
