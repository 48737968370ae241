"""Mutated input of every kind, from a seed: what comes of it is fine, or a sentence for people; nothing else.

``fuzzed.py`` says what is fuzzed. Every input has a number, from which it can be made again.
"""

import copy
import csv
import io
import json
import math
import random
import resource
import signal
import struct
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedbilevel.errors import FedbilevelError, FedbilevelWarning
from fedbilevel.storage.arrays import decode, encode

SECONDS = 20.0
"""Of computing, for one input."""
GROWTH = 1 << 30
"""Bytes by which the memory of the process may grow while it reads inputs of one kind."""

ODD_NUMBERS: list[Any] = [
    0, -1, 1, 2, 3, 255, 256, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63, 10**18, 10**30, 10**400, -(10**400), 0.5, -0.0,
    1e-320, 1e16, 1e300, -1e308, math.inf, -math.inf, math.nan,
]  # fmt: skip
ODD_TEXT = [
    "", " ", "0", "1_0", "0x10", "1e1", "\uff11", "nan", "NaN", "inf", "None", "true", "\0", "\x1b[31m", "a\nb", "..",
    "../up", "/etc/passwd", "CON", "C:\\x", "%s%n", "{}", "'", '"', "\u202e", "\ud7ff", "\U0010ffff", "x" * 5000,
    "[" * 3000, '{"a":' * 3000, "9" * 5000, "label", "part", "train", "regularization", "fedbio", "key", "x", "y",
]  # fmt: skip


def odd(rng: random.Random) -> Any:
    """A value that nobody expects."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice(ODD_TEXT)
    if kind == 1:
        return rng.choice([True, False])
    if kind == 2:
        return []
    if kind == 3:
        return {}
    if kind == 4:
        return [odd(rng) for _ in range(rng.randrange(1, 4))]
    if kind == 5:
        return {rng.choice(ODD_TEXT): odd(rng)}
    return rng.choice(ODD_NUMBERS)


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bits flipped, bytes overwritten, cut out, repeated, or moved."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        place, length = rng.randrange(len(out) + 1), rng.choice([1, 1, 2, 4, 8, 64, 1000])
        kind = rng.randrange(8)
        if kind == 0 and out:
            out[place % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[place : place + length] = rng.randbytes(length)
        elif kind == 2:
            del out[place : place + length]
        elif kind == 3:
            out[place:place] = out[place : place + length]
        elif kind == 4:
            del out[place:]
        elif kind == 5:
            number = rng.choice([0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1])
            order = rng.choice("<>")
            out[place : place + 8] = struct.pack(f"{order}Q", number)[:: rng.choice([1, -1])][: rng.choice([2, 4, 8])]
        elif kind == 6:
            other = rng.randrange(len(out) + 1)
            out[place : place + length] = out[other : other + length]
        elif out:
            out[place % len(out)] = rng.choice(b"\0\xff \n,;\"'[]{}0")
    return bytes(out)


def mutated_value(rng: random.Random, value: Any) -> Any:
    """A tree of plain values with something odd in one place of it."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def collect(tree: Any) -> None:
        for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
            places.append((tree, key))
            collect(tree[key])

    collect(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if not places:
            return odd(rng)
        tree, key = rng.choice(places)
        if (isinstance(tree, dict) and key not in tree) or (isinstance(tree, list) and key >= len(tree)):
            continue
        kind = rng.randrange(7)
        if kind == 0:
            del tree[key]
        elif kind == 1 and isinstance(tree, dict):
            tree[rng.choice(ODD_TEXT)] = tree.pop(key)
        elif kind == 2 and isinstance(tree, dict):
            tree[rng.choice(ODD_TEXT)] = odd(rng)
        elif kind == 3 and isinstance(tree, list):
            tree.append(tree[key])
        elif kind == 4 and type(tree[key]) in (int, float):
            tree[key] = rng.choice(ODD_NUMBERS)
        else:
            tree[key] = odd(rng)
    return value


def mutated_array(rng: random.Random, array: np.ndarray) -> np.ndarray:
    """An array of another shape, another type, or with odd numbers."""
    kind = rng.randrange(6)
    if kind == 0:
        return array.reshape(-1)[: rng.randrange(3)]
    if kind == 1:
        return np.stack([array] * rng.randrange(1, 4))
    if kind == 2:
        with np.errstate(all="ignore"):
            return array.astype(rng.choice(["f2", "f4", "f8", "i1", "i8", "u1", "u4", "u8", "?"]))
    if kind == 3:
        return np.zeros((0, *array.shape), array.dtype)
    if kind == 4:
        return np.zeros(rng.choice([1, 1000, 100_000]), array.dtype)
    out = array.copy().reshape(-1)
    if out.size and out.dtype.kind == "f":
        with np.errstate(over="ignore"):
            out[rng.randrange(out.size)] = rng.choice([np.nan, np.inf, -np.inf, 1e300, -1e30, 1e-320])
    elif out.size and out.dtype.kind in "iu":
        out[rng.randrange(out.size)] = rng.choice([0, 1, 100])
    return out.reshape(array.shape)


def mutated_message(rng: random.Random, data: bytes) -> bytes:
    """A message whose checksum is right, but not what it says; or damaged bytes."""
    kind = rng.randrange(10)
    if kind == 0:
        return mutated_bytes(rng, data)
    header, arrays = decode(data)
    if kind == 1:  # whatever JSON allows, with the right checksum
        text = mutated_bytes(rng, json.dumps(header).encode()).decode(errors="replace")
        return _raw(text)
    if kind < 4 and arrays:
        name = rng.choice(sorted(arrays))
        if rng.randrange(3):
            arrays[name] = mutated_array(rng, arrays[name])
        elif rng.randrange(2):
            arrays[rng.choice(ODD_TEXT)] = arrays.pop(name)
        else:
            del arrays[name]
    else:
        header = mutated_value(rng, header)
    try:
        return encode(header, arrays)
    except Exception:  # the library does not write what others may send
        return _raw(json.dumps(header))


def _raw(text: str) -> bytes:
    checksum = zlib.crc32(text.encode(errors="replace"))
    head = json.dumps({"__metadata__": {"header": f"{checksum:08x} {text}"}}).encode()
    return struct.pack("<Q", len(head)) + head


def mutated_toml(rng: random.Random, tables: dict[str, Any]) -> str:
    """A text that is nearly the one of these tables."""
    if rng.randrange(4):
        for _ in range(10):
            try:
                return tomli_w.dumps(mutated_value(rng, tables))
            except (TypeError, ValueError, AttributeError, RecursionError):
                continue
    text = tomli_w.dumps(tables)
    kind = rng.randrange(4)
    lines = text.splitlines()
    if kind == 0:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    elif kind == 1:
        place = rng.randrange(len(lines))
        name = lines[place].partition("=")[0]
        wide = [
            "9" * 5000,
            "[" * 2000,
            "1979-05-27",
            "07:32:00",
            "0xff",
            "1_0",
            "+nan",
            "'''",
            "{a.b = 1}",
            "[[[[1]]]]",
        ]
        lines[place] = f"{name}= {rng.choice(wide)}"
    elif kind == 2:
        del lines[rng.randrange(len(lines))]
    else:
        return mutated_bytes(rng, text.encode()).decode(errors="replace")
    return "\n".join(lines)


def mutated_csv(rng: random.Random, rows: list[list[str]]) -> bytes:
    """A table with odd cells, rows or bytes."""
    rows = [list(row) for row in rows]
    for _ in range(rng.choice([1, 1, 2, 5])):
        row = rows[rng.randrange(len(rows))]
        kind = rng.randrange(5)
        if kind == 0:
            rows.append(list(rng.choice(rows)))
        elif kind == 1 and row:
            row.pop()
        elif kind == 2:
            row.append(str(odd(rng)))
        elif row:
            row[rng.randrange(len(row))] = str(odd(rng))
    out = io.StringIO()
    writer = csv.writer(out, delimiter=rng.choice([",", ",", ",", ";", "\t"]), escapechar="\\")
    writer.writerows(rows)
    data = out.getvalue().encode(errors="replace")
    return mutated_bytes(rng, data) if rng.randrange(3) == 0 else data


@dataclass
class Outcome:
    """What came of many inputs. ``others`` are neither accepted nor refused with a sentence: defects."""

    accepted: int = 0
    refused: int = 0
    others: dict[str, int] = field(default_factory=dict)  # what happened, and the first input that did it
    times: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    growth: int = 0

    def __str__(self) -> str:
        lines = [
            f"{self.accepted} accepted, {self.refused} refused, {sum(self.times.values())} others; the slowest took "
            f"{self.slowest:.2f} s; memory grew by {self.growth >> 20} MB"
        ]
        lines += [f"  {self.times[what]} times, first input {first}: {what}" for what, first in self.others.items()]
        return "\n".join(lines)


class Unexpected(Exception):
    """An outcome that is wrong though nothing was raised."""


@contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"it took longer than {SECONDS:g} seconds")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def sentence(error: BaseException) -> bool:
    """Whether an error is one that people can read."""
    said = str(error)
    return isinstance(error, FedbilevelError) and 0 < len(said) < 3000 and "\x1b" not in said and "\0" not in said


def run(attempt: Callable[[random.Random], object], count: int, seed: int = 0, first: int = 0) -> Outcome:
    """Try many inputs; each is made from its own number, so that it can be made again."""
    outcome, memory = Outcome(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(first, first + count):
        rng, began = random.Random(f"{seed} {number}"), time.process_time()
        try:
            with _limited(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FedbilevelWarning)
                attempt(rng)
            outcome.accepted += 1
        except (Exception, RecursionError) as error:
            if sentence(error):
                outcome.refused += 1
            else:
                frames = [f for f in traceback.extract_tb(error.__traceback__) if "fedbilevel" in f.filename]
                at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "fuzz"
                what = f"{type(error).__name__} at {at}: {str(error)[:150]!r}"
                key = what if isinstance(error, Unexpected) else f"{type(error).__name__} at {at}"
                known = next((each for each in outcome.others if each.startswith(key)), what)
                outcome.others.setdefault(known, number)
                outcome.times[known] += 1
        outcome.slowest = max(outcome.slowest, time.process_time() - began)
    outcome.growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory)
    return outcome
