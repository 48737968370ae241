"""Reads tables: CSV, TSV, Parquet and NPZ files, data frames, and functions that return columns.

    table = read_table("patients.csv")
    cells = table.cells(["age", "sex"])

Nothing is executed and nothing unpacked; a file that would take far more memory than its size suggests is refused. The
cells of a text file are kept as Arrow's arrays of text, which take about as much memory as the file.
"""

import codecs
import csv
import importlib
import math
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.data.cells import BLANKS, shown
from fedbilevel.data.columns import KINDS, Table, check_file, has_kinds, reason, unreadable
from fedbilevel.errors import FedbilevelError

LARGEST = 1 << 30
"""Bytes that the columns of a compressed file may take, or EXPANSION times the file if that is more."""
EXPANSION = 20
AT_ONCE = 10_000
"""Rows of a text file that are held as lists before they become columns."""
_OTHER_TEXT = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
"""How text starts that is not UTF-8. One mark is the beginning of another, so the order counts."""


def read_table(source: str) -> Table:
    """A table of a .csv, .tsv, .parquet or .npz file, or of a function "package.module:function" that returns columns
    by name.
    """
    if "://" in source:
        raise FedbilevelError(f"{source} is an address: download the file first, and give its name.")
    if is_function(source):
        return _of_function(source)
    path = Path(source)
    check_file(path)
    readers = {".csv": _of_text, ".tsv": _of_text, ".npz": _of_npz, ".parquet": _of_parquet}
    if path.suffix.lower() not in readers:
        raise FedbilevelError(
            f"{source} is not a table: give a .csv, .tsv, .parquet or .npz file, or package.module:function."
        )
    return readers[path.suffix.lower()](path)


def is_function(source: str) -> bool:
    """Whether a source names a function, not a file."""
    return ":" in source and not os.path.lexists(source)


def frame_table(frame: Any, source: str = "the data frame") -> Table:
    """A table of a pandas data frame."""
    import pyarrow

    columns = {str(name): frame.iloc[:, place] for place, name in enumerate(frame.columns)}

    def load(names: Sequence[str]) -> dict[str, Any]:
        loaded = {}
        for name in names:
            try:
                if columns[name].dtype == object and has_kinds(list(columns[name])):
                    raise TypeError
                loaded[name] = pyarrow.Array.from_pandas(columns[name])
            except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):  # cells of several kinds
                loaded[name] = list(columns[name])
        return loaded

    return Table(source, tuple(str(name) for name in frame.columns), 0, load, len(frame))


def _of_text(path: Path) -> Table:
    """A table of text with commas, or with tabs if its name ends so."""
    import pyarrow

    source = str(path)
    mark, word = ("\t", "tabs") if path.suffix.lower() == ".tsv" else (",", "commas")
    try:
        with path.open("rb") as file:
            start = file.read(4)
        for name, marks in _OTHER_TEXT.items():
            if start.startswith(marks):
                raise FedbilevelError(f"{source} is {name} text, not UTF-8: save it as 'CSV UTF-8'.")
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=mark, strict=True)  # so that a quote that is never closed is an error
            try:
                head, pieces = _text_columns(source, reader, word)
            except csv.Error as error:
                raise FedbilevelError(f"{source}, line {reader.line_num} cannot be read: {error}.") from None
    except UnicodeDecodeError:
        raise FedbilevelError(
            f"{source}{_where_not_utf8(path, mark)} is not UTF-8 text: save it as 'CSV UTF-8'."
        ) from None
    except (OSError, MemoryError) as error:
        raise unreadable(source, error) from None
    columns = {name: pyarrow.chunked_array(pieces[place], pyarrow.large_string()) for place, name in enumerate(head)}
    rows = len(columns[head[0]]) if head else 0
    return Table(source, tuple(head), 2, lambda names: {name: columns[name] for name in names}, rows)


def _text_columns(source: str, reader: Iterator[list[str]], word: str) -> tuple[list[str], list[list[Any]]]:
    """The names of the columns, and the pieces of each."""
    import pyarrow

    names = next(reader, None)
    if names is None:
        raise FedbilevelError(f"{source} is empty.")
    if not names:
        raise FedbilevelError(f"{source}, line 1 is blank: it must have the names of the columns.")
    _check_cells(source, 1, names)
    head = [name.strip(BLANKS) for name in names]
    if len(head) == 1 and any(mark in head[0] for mark in ",;\t|"):
        raise FedbilevelError(f"{source} has only one column, {shown(head[0])}: separate columns with {word}.")
    pieces: list[list[Any]] = [[] for _ in head]
    number, blank = 1, 0  # rows so far, and the first of the blank lines at the end
    while rows := list(islice(reader, AT_ONCE)):
        whole = []
        for row in rows:
            number += 1
            if not row:
                blank = blank or number
                continue
            if blank or len(row) != len(head):
                at, size = (blank, 0) if blank else (number, len(row))
                raise FedbilevelError(f"{source}, row {at} has {size} values, but there are {len(head)} columns.")
            _check_cells(source, number, row)
            if row == names and len(row) > 1:
                raise FedbilevelError(f"{source}, row {number} repeats the names of the columns: remove it.")
            whole.append(row)
        for place, cells in enumerate(zip(*whole, strict=True)):
            pieces[place].append(pyarrow.array(cells, pyarrow.large_string()))
    return head, pieces


def _check_cells(source: str, number: int, row: Sequence[str]) -> None:
    if "\0" in "".join(row):
        raise FedbilevelError(
            f"{source}, row {number} contains a NUL byte: the file is damaged or is not UTF-8 text; save it as "
            "'CSV UTF-8'."
        )


def _where_not_utf8(path: Path, mark: str) -> str:
    """The row and the column of the first byte that is not UTF-8, as words."""
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        names: list[str] = []
        for number, row in enumerate(csv.reader(file, delimiter=mark), 1):
            names = names or row
            for place, cell in enumerate(row):
                if not cell.isascii() and any("\ud800" <= letter <= "\udfff" for letter in cell):
                    column = f", column {shown(names[place])}," if number > 1 and place < len(names) else ""
                    return f", row {number}{column}"
    return ""


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
    import pyarrow
    from pyarrow import parquet

    source = str(path)
    try:
        with parquet.ParquetFile(path) as file:
            names, rows = tuple(file.schema_arrow.names), file.metadata.num_rows
    except Exception as error:
        raise unreadable(source, error) from None
    if rows < 0:
        raise FedbilevelError(f"{source} cannot be read: it claims to have {rows} rows.")

    def load(names: Sequence[str]) -> dict[str, Any]:
        _check_size(path, 8 * rows * len(names))
        batches: list[Any] = []
        size = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(4096, columns=list(names)):
                size += batch.nbytes  # a small file can hold the same long text a million times
                _check_size(path, size)
                batch.validate(full=True)  # text that is none, for instance
                batches.append(batch)
            kinds = {name: file.schema_arrow.field(name).type for name in names}
        columns = {n: pyarrow.chunked_array([batch.column(n) for batch in batches], kinds[n]) for n in names}
        views = [name for name in names if pyarrow.types.is_string_view(kinds[name])]
        return columns | {name: columns[name].cast("large_string") for name in views}  # others cannot be filtered

    return Table(source, names, 0, load, rows)


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
