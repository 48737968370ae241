"""What the columns of people's own tables mean: labels, clients, trusted rows, names of rows."""

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.data.cells import number, shown, written
from fedbilevel.data.columns import Table, listed
from fedbilevel.data.inputs import Opened
from fedbilevel.data.kinds import Cells
from fedbilevel.errors import FedbilevelError

MOST_CLASSES = 1000
NUMERIC = 20
"""A label with more different numbers than this is no class, unless they are 0, 1, 2 and so on, or declared to be."""
FEW = 10
"""Fewer rows than this are few for a client."""
_TRUSTED = {"true": True, "yes": True, "y": True, "1": True, "false": False, "no": False, "n": False, "0": False}

_WORDS = {"trusted": "the mark of trusted rows", "group": "the group of people"}


def _word(role: str) -> str:
    """A role in a message."""
    return _WORDS.get(role, f"the {role}")


Given = str | int | Sequence[Any] | np.ndarray | None
"""The name of a column, which is a number in some data frames, or its values."""


def check_roles(
    roles: Mapping[str, Given], drop: Sequence[str], categorical: Sequence[str], numeric: Sequence[str]
) -> None:
    """Refuse a column that is two things at once."""
    taken: dict[str, str] = {}
    for role, given in roles.items():
        if not isinstance(given, str):
            continue
        if given in taken:
            raise FedbilevelError(
                f"the column {shown(given)} is both {_word(taken[given])} and {_word(role)}: use two columns."
            )
        taken[given] = role
        if given in drop or given in numeric or (given in categorical and role != "label"):
            raise FedbilevelError(
                f"the column {shown(given)} is {_word(role)}, not an input: leave it out of "
                f"--{'drop' if given in drop else 'numeric' if given in numeric else 'categorical'}."
            )
    for name in categorical:
        if name in numeric or name in drop:
            raise FedbilevelError(
                f"the column {shown(name)} cannot be categorical and {'numeric' if name in numeric else 'dropped'}."
            )


def cells_of_role(tables: Sequence[Table], role: str, given: Any) -> list[Cells]:
    """The cells of a column in every table, or the given values."""
    if isinstance(given, str):
        cells = []
        for part in tables:
            part.need(given, " (which rows are trusted)" if role == "trusted" else f" ({_word(role)})")
            cells.append(Cells(part, given, part.arrow(given, part.read([given])[given])))
        return cells
    if len(tables) > 1:
        raise FedbilevelError(f"with several files, the {role} must be the name of a column.")
    values = given.to_numpy() if hasattr(given, "to_numpy") else given
    own = Table(
        f"the values of {role}",
        (role,),
        0,
        lambda names: {role: values if isinstance(values, np.ndarray) else list(values)},
    )
    raw = own.read([role])[role]
    if len(raw) != len(tables[0]):
        raise FedbilevelError(
            f"there are {len(raw):,} values of {role}, but {tables[0].source} has {len(tables[0]):,} rows."
        )
    return [Cells(own, role, own.arrow(role, raw))]


def codes_of(cells: Sequence[Cells]) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """What each row of each table has, as numbers of names, -1 where nothing; and the names as most rows write them."""
    often: Counter[str] = Counter()
    spelled: dict[str, Counter[str]] = {}
    for each in cells:
        codes, words, cells_of = each.words
        counts = np.bincount(codes[codes >= 0], minlength=len(words))
        for word, cell, count in zip(words, cells_of, counts, strict=True):
            often[word] += int(count)
            spelling = cell.strip() if isinstance(cell, str) else written(cell)
            spelled.setdefault(word, Counter())[spelling] += int(count)
    numbers = {word: number(word) for word in often}
    whole = all(value is not None for value in numbers.values())
    order = sorted(often, key=lambda word: (numbers[word], word) if whole else word)  # pyright: ignore
    place = {word: n for n, word in enumerate(order)}
    names = tuple(spelled[word].most_common(1)[0][0] for word in order)
    return [np.array([*(place[word] for word in each.words[1]), -1])[each.words[0]] for each in cells], names


def check_labelled(cells: Sequence[Cells], kept: Sequence[np.ndarray], label: str, notes: list[str]) -> None:
    """Refuse a table without labels; say which rows have none."""
    without = [(each, len(each) - len(rows)) for each, rows in zip(cells, kept, strict=True)]
    for each, rows in zip(cells, kept, strict=True):
        if not len(rows):
            raise FedbilevelError(f"{each.table.source} has no row with a label in column {shown(label)}.")
    if count := sum(n for _, n in without):
        each = next(each for each, n in without if n)
        row = int(np.flatnonzero(each.missing)[0])
        cell = each.array[row].as_py()
        word = ""
        if isinstance(cell, str) and cell.strip():
            word = f", where {shown(cell)} counts as missing: if it is a label, write it in another way"
        rows = f"{count:,} row{'s have' if count > 1 else ' has'} no label and {'are' if count > 1 else 'is'} left out"
        notes.append(f"{rows}; the first is {each.table.source}, row {row + each.table.first}{word}.")


def check_classes(
    cells: Cells, label: str, classes: tuple[str, ...], labels: np.ndarray, declared: bool, opened: Opened,
    kept: Sequence[np.ndarray],
) -> None:  # fmt: skip
    """Refuse labels that are no classes, and classes of one row."""
    source = opened.tables[0].source if len(opened.tables) == 1 else f"{len(opened.tables)} files"
    where = f"{source}, column {shown(label)}"
    if len(classes) == 1:
        raise FedbilevelError(f"{where}: all rows have the label {shown(classes[0])}, so there is nothing to learn.")
    numbers = [number(name) for name in classes]
    if len(classes) > NUMERIC and not declared and all(value is not None for value in numbers):
        counted = all(value == int(value) for value in numbers) and 0 <= min(numbers) <= 1  # pyright: ignore
        if not counted or max(numbers) > 2 * len(classes):  # pyright: ignore
            raise FedbilevelError(
                f"{where} has {len(classes):,} different numbers: this is for classification only, where a label is "
                "one of a few classes. If they are the names of classes, use --categorical with this column."
            )
    if len(classes) > MOST_CLASSES:
        raise FedbilevelError(
            f"{where} has {len(classes):,} different labels, but {MOST_CLASSES} classes are the most."
        )
    counts = np.bincount(labels, minlength=len(classes))
    if len(single := np.flatnonzero(counts == 1)):
        place = int(np.flatnonzero(labels == single[0])[0])
        for part, rows in zip(opened.tables, kept, strict=True):
            if place < len(rows):
                raise FedbilevelError(
                    f"{part.source}, row {int(rows[place]) + part.first}, column {shown(label)}: the class "
                    f"{shown(classes[single[0]])} has this row only: correct the label, or remove the row."
                )
            place -= len(rows)


def clients_of(
    cells: Sequence[Cells] | None, opened: Opened, kept: Sequence[np.ndarray]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Who has each row, and the names of all clients."""
    if cells is None:
        names = [name if opened.names.count(name) == 1 else f"{n}-{name}" for n, name in enumerate(opened.names)]
        return np.repeat(np.arange(len(names), dtype=np.int32), [len(rows) for rows in kept]), tuple(names)
    codes, names = codes_of(cells)
    for each, code, rows in zip(cells, codes, kept, strict=True):
        if len(unknown := rows[code[rows] < 0]):
            raise each.wrong(int(unknown[0]), "expected the name of a client, but found nothing")
    who = np.concatenate([code[rows] for code, rows in zip(codes, kept, strict=True)])
    there, who = np.unique(who, return_inverse=True)
    if len(there) < len(names):
        absent = [name for n, name in enumerate(names) if n not in set(there.tolist())]
        here = next(each for each, code in zip(cells, codes, strict=True) if (code == names.index(absent[0])).any())
        row = int(np.flatnonzero(codes[cells.index(here)] == names.index(absent[0]))[0])
        raise here.wrong(row, f"the client {shown(absent[0])} has no row with a label: remove it, or label its rows")
    return who.astype(np.int32), names


def trusted_of(
    cells: Sequence[Cells] | None,
    kept: Sequence[np.ndarray],
    labels: np.ndarray,
    classes: tuple[str, ...],
    notes: list[str],
) -> np.ndarray | None:
    """Which labels were checked."""
    if cells is None:
        return None
    found = []
    for each, rows in zip(cells, kept, strict=True):
        codes, words, _ = each.words
        known = np.array([*(_TRUSTED.get(word.lower(), -1) for word in words), 0], int)
        if len(strange := np.flatnonzero(known[codes] < 0)):
            row = int(strange[0])
            raise each.wrong(row, f"expected true or false, yes or no, 1 or 0, but found {each.cell(row)}")
        found.append(known[codes][rows] == 1)
    sure = np.concatenate(found)
    seen = np.unique(labels[sure])
    if len(seen) == 1:
        raise FedbilevelError(
            f"{cells[0].table.source}, column {shown(cells[0].name)}: all {int(sure.sum()):,} trusted rows have the "
            f"label {shown(classes[seen[0]])}, over all clients together: trust rows of another class, too."
        )
    if not len(seen):
        notes.append(
            f"no row is trusted: column {shown(cells[0].name)} of {cells[0].table.source} is false everywhere."
        )
        return None
    return sure


def groups_of(cells: Sequence[Cells] | None, kept: Sequence[np.ndarray]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The group of each row, and the names of all groups."""
    if cells is None:
        return None, ()
    codes, names = codes_of(cells)
    for each, code, rows in zip(cells, codes, kept, strict=True):
        if len(unknown := rows[code[rows] < 0]):
            raise each.wrong(int(unknown[0]), "expected a group, but found nothing")
    return np.concatenate([code[rows] for code, rows in zip(codes, kept, strict=True)]), names


def shown_id(cells: Cells, row: int) -> str:
    """What a row is called: the cell of the id, or its line."""
    codes, words, _ = cells.words
    return words[codes[row]] if codes[row] >= 0 else str(row + cells.table.first)


def note_classes(classes: Sequence[str], called: str, notes: list[str]) -> None:
    """Say which labels differ so little that they may be meant to be the same; they are kept apart."""
    alike: dict[str, str] = {}
    for name in classes:
        plain = "".join(c for c in unicodedata.normalize("NFKC", name) if c.isprintable()).casefold()
        plain = " ".join(plain.split())
        if (other := alike.setdefault(plain, name)) != name:
            notes.append(
                f"column {shown(called)}: {shown(other)} and {shown(name)} look alike, but are two classes; if they "
                "mean the same, write them in the same way."
            )


def note_ids(ids: Sequence[str], who: np.ndarray, called: str, notes: list[str]) -> None:
    """Say which rows of a client have the same id."""
    often = Counter(zip(ids, who.tolist(), strict=True))
    name, _ = max(often, key=lambda key: often[key])
    if (most := max(often.values())) > 1:
        notes.append(f"ids are not unique: {most:,} rows of a client have {shown(name)} in column {shown(called)}.")


def note_clients(clients: Sequence[str], who: np.ndarray, labels: np.ndarray, classes: int, notes: list[str]) -> None:
    """Say which clients have few rows or one class only."""
    sizes = np.bincount(who, minlength=len(clients))
    seen = np.bincount(np.unique(who.astype(np.int64) * classes + labels) // classes, minlength=len(clients))
    for which, said in ((sizes < FEW, f"fewer than {FEW} rows"), (seen < 2, "rows of one class only")):
        some = [clients[int(m)] for m in np.flatnonzero(which)]
        if some:
            notes.append(f"{len(some)} of {len(clients)} clients have {said}: {listed(some)}.")
