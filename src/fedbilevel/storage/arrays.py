"""Named arrays with a header of plain values as bytes, for messages and files, in a format that cannot execute code.

The bytes are a safetensors file. Its metadata have one entry, since more would be in no particular order: a checksum of
header and arrays, so that a torn file or a flipped bit is noticed, and the header, as JSON. (Against forgery there are
signatures.)
"""

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from fedbilevel.errors import FedbilevelError

NOT_A_MESSAGE = (
    safetensors.SafetensorError,
    struct.error,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,  # a type of arrays that numpy does not have
    RecursionError,  # brackets in brackets in brackets
)
_NUMBERS = {"F": ("f2", "f4", "f8"), "I": ("i1", "i2", "i4", "i8"), "U": ("u1", "u2", "u4", "u8")}
TYPES = {np.dtype(f"<{kind}"): f"{word}{8 * int(kind[1])}" for word, kinds in _NUMBERS.items() for kind in kinds}
TYPES[np.dtype(bool)] = "BOOL"


def encode(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
    """Put a header and named arrays into bytes.

    The format is that of safetensors, whose own function copies large arrays several times.
    """
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        made = np.asarray(array)
        if made.dtype.newbyteorder("<") not in TYPES:
            raise FedbilevelError(f"messages cannot contain {made.dtype} arrays such as '{name}': use float32.")
        found[name] = np.ascontiguousarray(made, made.dtype.newbyteorder("<")).reshape(made.shape)
    text, place = json.dumps(header), 0
    table: dict[str, Any] = {"__metadata__": {"header": f"{_checksum(text, found)} {text}"}}
    names = sorted(found, key=lambda name: (-found[name].itemsize, name))  # so that all of them are aligned
    for name in names:
        array = found[name]
        kind, end = TYPES[array.dtype], place + array.nbytes
        table[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [place, end]}
        place = end
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([struct.pack("<Q", len(head)), head, *(_raw(found[name]) for name in names)])


def _raw(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _checksum(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    checksum = zlib.crc32(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        checksum = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), checksum)
        checksum = zlib.crc32(_raw(array), checksum)
    return f"{checksum:08x}"


def decode(message: bytes, most: int | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays of a message; refuses a header of more than ``most`` bytes before it reads it.

    >>> decode(encode({"method": "descend"}, {"y": np.zeros(3)}))
    ({'method': 'descend'}, {'y': array([0., 0., 0.])})
    """
    try:
        (length,) = struct.unpack("<Q", message[:8])
        if most is not None and length > most:
            raise ValueError(f"its header has {length} bytes, where at most {most} are allowed")
        arrays = safetensors.numpy.load(message)
        checksum, _, text = json.loads(message[8 : 8 + length])["__metadata__"]["header"].partition(" ")
        if checksum != _checksum(text, arrays):
            raise FedbilevelError("its contents are damaged.")
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
    except NOT_A_MESSAGE as error:
        raise FedbilevelError(f"this is not a message of fedbilevel: {error}.") from error
    return header, arrays


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their path, for instance ``{"0.x.tree": ...}``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise FedbilevelError("two arrays have the same path: do not use dots in the names of your variables.")
    return named


def rebuild(shapes: Any, arrays: Mapping[str, Any]) -> Any:
    """Build a tree of the given shapes from its arrays; refuses arrays that do not fit."""
    leaves = []
    for name, shape in named_leaves(shapes).items():
        if name not in arrays:
            raise FedbilevelError(f"the message lacks the array '{name}'.")
        array = arrays[name]
        if tuple(np.shape(array)) != tuple(shape.shape) or array.dtype != shape.dtype:
            raise FedbilevelError(
                f"the array '{name}' is {array.dtype}{list(np.shape(array))}, "
                f"but should be {shape.dtype}{list(shape.shape)}."
            )
        leaves.append(array)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)
