"""Follow files that grow: only what is new is read, however long they are."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

CHECKED = 64
"""How many bytes before the new ones must be what they were; otherwise the file was replaced."""


class Tail:
    """The new lines of a file with one JSON object per line. A file that was cut or replaced begins again; the files
    ``NAME.NUMBER.jsonl`` with what was in it before are then read first.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.place, self.before, self.begun = path, 0, b"", False

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file began again since the last call, and its new objects. What is no object is skipped."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.place - len(self.before))
                content = file.read()
        except OSError:  # not there (any more)
            content = b""
        again = not content.startswith(self.before)
        if again:
            self.place, self.before = 0, b""
            with contextlib.suppress(OSError):
                content = self.path.read_bytes()
        new = content[len(self.before) :]
        whole = new[: new.rfind(b"\n") + 1]  # a line that is being written is read later
        self.place += len(whole)
        self.before = (self.before + whole)[-CHECKED:]
        older = b"" if self.begun and not again else self._older()
        self.begun = True
        return again, [row for line in (older + whole).splitlines() if (row := _object(line)) is not None]

    def _older(self) -> bytes:
        """What the earlier files have."""
        named = re.compile(re.escape(self.path.stem) + r"\.\d+" + re.escape(self.path.suffix))
        content = b""
        for path in sorted(each for each in self.path.parent.glob(f"{self.path.stem}.*") if named.fullmatch(each.name)):
            with contextlib.suppress(OSError):
                content += path.read_bytes() + b"\n"
        return content


def _object(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(row := json.loads(line), dict):
            return row
    return None


def last_lines(path: Path, most: int = 1 << 18) -> list[str]:
    """The last lines of a text file, of at most so many bytes; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most))
            lines = file.read(most).decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[1:] if size > most else lines
