"""The file formats of the data sets, read without executing anything: no pickles, nothing unpacked.

Errors name the file that cannot be read.
"""

import csv
import gzip
import hashlib
import io
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbilevel.errors import FedbilevelError

BROKEN = (OSError, EOFError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile, tarfile.TarError)
"""What the readers of the standard library raise for a broken file."""


def _refuse(path: Path, why: object) -> FedbilevelError:
    return FedbilevelError(f"{path} cannot be read ({why}): replace it with the original.")


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes in the idx format of MNIST, compressed with gzip."""
    try:
        with gzip.open(path, "rb") as file:
            raw = file.read()
    except BROKEN as error:
        raise _refuse(path, error) from None
    dimensions = raw[3] if len(raw) >= 4 else 0
    start = 4 + 4 * dimensions
    if raw[:3] != b"\0\0\x08" or not dimensions or len(raw) < start:
        raise _refuse(path, "it is not an idx file of bytes")
    shape = np.frombuffer(raw, ">u4", dimensions, 4).astype(int)
    if len(raw) - start != shape.prod():
        raise _refuse(path, f"it has {len(raw) - start} bytes of data, not {shape.prod()}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


CIFAR_RECORD = 1 + 3 * 32 * 32


def decode_cifar(raw: bytes, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 32, 32, 3) and labels of one batch in the binary format of CIFAR-10.

    The file stores the colours of an image one after the other; they become the last axis, as convolutions need it.
    """
    if not raw or len(raw) % CIFAR_RECORD:
        raise _refuse(path, f"{len(raw)} bytes are not a whole number of records of {CIFAR_RECORD} bytes")
    records = np.frombuffer(raw, np.uint8).reshape(-1, CIFAR_RECORD)
    if records[:, 0].max() > 9:
        raise _refuse(path, f"it has a label {records[:, 0].max()}, but the largest allowed is 9")
    images = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, records[:, 0].astype(np.int32)


def read_tar(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read the members of a compressed tar file with these names into memory; nothing is unpacked."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name in names and (file := archive.extractfile(member)):
                    found[name] = file.read()
    except BROKEN as error:
        raise _refuse(path, error) from None
    if missing := [name for name in names if name not in found]:
        raise _refuse(path, f"{missing[0]} is not in it")
    return found


class Drawing(NamedTuple):
    """One drawing of Omniglot, still in PNG."""

    alphabet: str
    character: str
    name: str
    png: bytes


class OmniglotContents(NamedTuple):
    """What an Omniglot archive contains, however it was packed. The digest is over sorted names and PNG bytes."""

    alphabets: int
    characters: int
    drawings: int
    digest: str

    def __str__(self) -> str:
        return (
            f"{self.alphabets} alphabets with {self.characters} characters and {self.drawings} drawings, "
            f"digest {self.digest}"
        )


_DRAWING = re.compile(r"[^/]+/([^/]+)/(character\d+)/(\d+_\d+\.png)")
LARGEST_DRAWING = 1 << 16  # bytes of one PNG; the largest of Omniglot has 522


def omniglot_drawings(path: Path) -> Iterator[Drawing]:
    """The drawings of an Omniglot archive, sorted by name. Other entries are skipped, unsafe paths refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
                if entry.filename.startswith("/") or "\\" in entry.filename or ".." in entry.filename.split("/"):
                    raise _refuse(path, f"its entry {entry.filename!r} points outside the archive")
                if match := _DRAWING.fullmatch(entry.filename):
                    if entry.file_size > LARGEST_DRAWING:
                        raise _refuse(path, f"its entry {entry.filename} is too large for a drawing")
                    yield Drawing(match[1], match[2], entry.filename, archive.read(entry))
    except BROKEN as error:
        raise _refuse(path, error) from None


def omniglot_contents(path: Path) -> OmniglotContents:
    """Count and digest the drawings of an Omniglot archive."""
    digest, characters, drawings = hashlib.sha256(), set(), 0
    for drawing in omniglot_drawings(path):
        digest.update(drawing.name.encode() + b"\0" + drawing.png)
        characters.add((drawing.alphabet, drawing.character))
        drawings += 1
    return OmniglotContents(len({a for a, _ in characters}), len(characters), drawings, digest.hexdigest())


def decode_drawing(drawing: Drawing, path: Path, size: int) -> np.ndarray:
    """The pixels of a drawing: 0 is ink, 255 is paper. Sizes other than 105 are made with Lanczos's filter."""
    from PIL import Image  # here because few runs read pictures

    try:
        with Image.open(io.BytesIO(drawing.png), formats=["PNG"]) as image:
            if image.size != (105, 105):
                raise ValueError(f"{drawing.name} is not 105 x 105")
            grey = image.convert("L")
    except (*BROKEN, SyntaxError) as error:
        raise _refuse(path, error) from None
    return np.asarray(grey if size == 105 else grey.resize((size, size), Image.Resampling.LANCZOS))


def read_picture(path: Path, size: int) -> np.ndarray:
    """Read a colour image of any common format, as (size, size, 3) bytes."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.LANCZOS))
    except (*BROKEN, SyntaxError, Image.DecompressionBombError) as error:
        raise _refuse(path, error) from None


def read_rows(path: Path, columns: int) -> list[list[str]]:
    """Read the rows of a UCI table: comma separated; empty lines and lines that start with | are skipped."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file, skipinitialspace=True) if row and not row[0].startswith("|")]
    except (*BROKEN, csv.Error) as error:
        raise _refuse(path, error) from None
    for number, row in enumerate(rows, 1):
        if len(row) != columns:
            raise _refuse(path, f"row {number} has {len(row)} columns, not {columns}")
    return rows
