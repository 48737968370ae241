"""Reads people's own tables and pictures: :func:`table`."""

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedbilevel.data.cells import shown
from fedbilevel.data.columns import Table, listed, unreadable
from fedbilevel.data.encoding import Encoding, check_declared, fit, fit_features, fit_pixels
from fedbilevel.data.image_files import common_shape, read_resized
from fedbilevel.data.inputs import open_inputs
from fedbilevel.data.kinds import KIND_WORDS, Cells, Index, Kind
from fedbilevel.data.own_tables import OwnTable, Part
from fedbilevel.data.roles import (
    Given,
    cells_of_role,
    check_classes,
    check_labelled,
    check_roles,
    clients_of,
    codes_of,
    groups_of,
    note_classes,
    note_clients,
    note_ids,
    shown_id,
    trusted_of,
)
from fedbilevel.errors import FedbilevelError, FedbilevelWarning


def table(
    source: Any,
    *,
    label: Given = None,
    client: Given = None,
    trusted: Given = None,
    id: Given = None,
    group: Given = None,
    drop: Sequence[str | int] = (),
    categorical: Sequence[str | int] = (),
    numeric: Sequence[str | int] = (),
    client_from: Literal["folder"] | None = None,
    features: Any = None,
    least: int = 1,
) -> OwnTable:
    """Read labelled rows of several clients.

    Args:
        source: a CSV, TSV, Parquet or NPZ file; several files, one for each client; a folder of pictures with a folder
            for each class, or with a labels.csv; a pandas data frame; or an array with a row for each sample.
        label: the column with the labels, or the labels. Pictures in folders do without.
        client: the column that says which client a row belongs to, or the client of each row. Without it, every file is
            a client.
        trusted: the column that says whether a label was checked: true or false, yes or no, 1 or 0; a missing value
            is no. Or a value for each row.
        id: the column with the names of the rows. Without it, their lines name them.
        group: the column with groups of people, for tasks about groups.
        drop: columns to leave out.
        categorical: columns whose values are names, even if they look like numbers.
        numeric: columns of numbers; other cells in them are errors.
        client_from: "folder": the folders of pictures are clients, and the folders in them classes.
        features: an array with a row of numbers for each row of the table, or an .npy file with it, which are the
            inputs in place of the columns.
        least: clients do not tell of values that fewer of their rows have.
    """
    try:
        label, client, trusted, id, group = map(_name, (label, client, trusted, id, group))
        return _table(source, label, client, trusted, id, group, _names(drop), _names(categorical), _names(numeric),
                      client_from, features, least)  # fmt: skip
    except MemoryError as error:
        raise unreadable("the table", error) from None


def _table(
    source: Any, label: Given, client: Given, trusted: Given, id: Given, group: Given, drop: tuple[str, ...],
    categorical: tuple[str, ...], numeric: tuple[str, ...], client_from: str | None, features: Any, least: int,
) -> OwnTable:  # fmt: skip
    opened = open_inputs(source, client_from, features)
    tables = opened.tables
    folders = opened.pictures[0] is not None and {"file", "label"} <= set(tables[0].names)
    if label is None and not folders:
        if not tables[0].names:
            raise FedbilevelError("an array needs labels, too: give one for each of its rows.")
        raise FedbilevelError(f"which column of {tables[0].source} is the label? It has {listed(tables[0].names)}.")
    label = "label" if label is None else label
    if client is None and client_from == "folder":
        client = "client"
    for option, names in (("drop", drop), ("categorical", categorical), ("numeric", numeric)):
        check_declared(names, tables, f"--{option}")
    roles = {"label": label, "client": client, "trusted": trusted, "id": id, "group": group}
    check_roles(roles, drop, categorical, numeric)
    cells = {role: cells_of_role(tables, role, given) for role, given in roles.items() if given is not None}
    for part in tables:
        if not len(part):
            raise FedbilevelError(f"{part.source} has no rows.")

    notes: list[str] = []
    called = label if isinstance(label, str) else "label"
    codes, classes = codes_of(cells["label"])
    kept = [np.flatnonzero(code >= 0) for code in codes]
    check_labelled(cells["label"], kept, called, notes)
    labels = np.concatenate([code[rows] for code, rows in zip(codes, kept, strict=True)]).astype(np.int32)
    check_classes(cells["label"][0], called, classes, labels, called in categorical, opened, kept)
    who, clients = clients_of(cells.get("client"), opened, kept)
    sure = trusted_of(cells.get("trusted"), kept, labels, classes, notes)
    belongs, groups = groups_of(cells.get("group"), kept)

    wanted = _inputs(tables, roles, drop) if opened.features is None and not opened.are_pictures else []
    kinds: dict[str, Kind] = {**dict.fromkeys(categorical, "category"), **dict.fromkeys(numeric, "number")}
    parts, first = [], 0
    for n, part in enumerate(tables):
        raw = part.read(wanted)
        mine = {name: _cells(part, name, raw.pop(name)) for name in wanted}
        matrix = None if opened.features is None else opened.features[first : first + len(part)]
        first += len(part)
        parts.append(Part(part, opened.names[n], kept[n], mine, opened.pictures[n], matrix))
    rows = _rows_by_client(parts, who)
    pixels = None
    if opened.are_pictures:
        files = [part.pictures[row] for part in parts if part.pictures for row in part.rows]
        pixels = read_resized(files, common_shape(files))
        starts = np.cumsum([0, *(len(part.rows) for part in parts)])
        encoding, left_out = fit_pixels(pixels, [slice(a, b) for a, b in itertools.pairwise(starts)]), {}
    elif opened.features is not None:
        encoding, left_out = _of_features(parts, rows)
    else:
        encoding, left_out = _of_columns(parts, rows, kinds, least, notes)
    if encoding.source != "pictures" and not encoding.columns:
        why = "; ".join(f"{shown(name)}: {reason}" for name, reason in list(left_out.items())[:5])
        raise FedbilevelError(f"{opened.looked_at} has no column to learn from ({why}).")
    names = None
    if "id" in cells:
        names = [shown_id(cells["id"][n], int(row)) for n, rows in enumerate(kept) for row in rows]
        note_ids(names, who, id if isinstance(id, str) else "id", notes)
    elif opened.called is not None:
        names = [opened.called[int(row)] for row in kept[0]]
    note_classes(classes, called, notes)
    note_clients(clients, who, labels, len(classes), notes)
    for note in notes:
        warnings.warn(note, FedbilevelWarning, stacklevel=4)
    words = {
        "label": f"{len(classes):,} classes: {listed(classes)}",
        "client": f"{len(clients):,} clients: {listed(clients)}",
        "trusted": f"{0 if sure is None else int(sure.sum()):,} rows are trusted",
        "group": f"{len(groups)} groups: {listed(groups)}",
    }
    understood = _understood(encoding, left_out, roles, words, drop)
    title = tables[0].source if len(tables) == 1 else f"{len(tables)} files"
    return OwnTable(title, tuple(parts), called, classes, labels, clients, who, sure, encoding, understood,
                    tuple(notes), names, belongs, groups, pixels)  # fmt: skip


def _name(given: Given) -> Given:
    """The name of a column, or its values; columns of a data frame may be called by numbers."""
    return str(given) if isinstance(given, int | np.integer) else given


def _names(given: Sequence[str | int] | str) -> tuple[str, ...]:
    """The names of columns: one, or several, in a list or with commas."""
    parts = given.split(",") if isinstance(given, str) else map(str, given)
    return tuple(part.strip() for part in parts if part.strip())


def _inputs(tables: Sequence[Table], roles: Mapping[str, Given], drop: Sequence[str]) -> list[str]:
    """The columns that become inputs: those that all tables have."""
    taken = {given for given in roles.values() if isinstance(given, str)} | set(drop)
    wanted = [name for name in tables[0].names if name not in taken]
    for part in tables[1:]:
        for name in wanted:
            part.need(name, f", which {tables[0].source} has (--drop leaves a column out)")
        if more := [name for name in part.names if name not in taken and name not in wanted]:
            raise FedbilevelError(
                f"{tables[0].source} has no column {shown(more[0])}, which {part.source} has: --drop leaves it out."
            )
    if not wanted:
        raise FedbilevelError(
            f"{tables[0].source} has no column besides the label to learn from: it has {listed(tables[0].names)}."
        )
    return wanted


def _cells(part: Table, name: str, column: Any) -> Cells:
    """The cells of an input; says how to go on without those that cannot be one."""
    try:
        return Cells(part, name, part.arrow(name, column))
    except FedbilevelError as error:
        raise FedbilevelError(f"{str(error).rstrip('.')}: --drop leaves the column out.") from None


def _rows_by_client(parts: Sequence[Part], who: np.ndarray) -> list[list[Index]]:
    """Of every part, the rows of each client that has some there."""
    first, found = 0, []
    for part in parts:
        mine = who[first : first + len(part.rows)]
        first += len(part.rows)
        order, counts = np.argsort(mine, kind="stable"), np.bincount(mine)
        several = np.split(part.rows[order], np.cumsum(counts[counts > 0])[:-1])
        found.append([part.index] if len(several) == 1 else several)
    return found


def _of_features(parts: Sequence[Part], rows: Sequence[Sequence[Index]]) -> tuple[Encoding, dict[str, str]]:
    """How arrays of features become inputs."""
    arrays = [part.features for part in parts if part.features is not None]
    return fit_features([(array, each) for array, mine in zip(arrays, rows, strict=True) for each in mine])


def _of_columns(
    parts: Sequence[Part], rows: Sequence[Sequence[Index]], kinds: Mapping[str, Kind], least: int, notes: list[str]
) -> tuple[Encoding, dict[str, str]]:
    """How the columns of tables become inputs; says where cells are not what the others in their column are."""
    columns = {
        name: [(part.cells[name], mine) for part, mine in zip(parts, rows, strict=True)] for name in parts[0].cells
    }
    encoding, left_out = fit({name: column for name, column in columns.items() if name}, kinds, least)
    left_out |= {} if "" not in columns else {"": "it has no name"}
    for column in encoding.columns:
        if column.kind in ("number", "date") and not column.declared:
            strange = [
                (cells, np.flatnonzero(~cells.missing & np.isnan(cells.values(column.kind))))
                for cells, _ in columns[column.name]
            ]
            cells, places = next((cells, places) for cells, places in strange if len(places))
            first, many = int(places[0]), sum(len(rows) for _, rows in strange)
            said = cells.wrong(first, f"{cells.cell(first)} is not {KIND_WORDS[column.kind]}")
            notes.append(
                f"{said} In this column, what is not a {column.kind} counts as missing ({many:,} in all); "
                "--categorical keeps it as a value."
            )
    return encoding, left_out


def _understood(
    encoding: Encoding, left_out: Mapping[str, str], roles: Mapping[str, Given], words: Mapping[str, str],
    drop: Sequence[str],
) -> tuple[tuple[str, str, str], ...]:  # fmt: skip
    """Of every column, what it is and what becomes of it, in words."""
    rows = [(given, role, words.get(role, "")) for role, given in roles.items() if isinstance(given, str)]
    if encoding.source == "pictures":
        rows.append(("pictures", "pixels", " x ".join(map(str, encoding.shape))))
    elif encoding.source == "features":
        rows.append(("features", "numbers", f"{len(encoding.columns)} columns"))
    else:
        for column in encoding.columns:
            said = {
                "category": f"{len(column.values)} values" + " and others" * column.others,
                "number": f"mean {column.mean:.4g}, deviation {column.deviation:.4g}",
                "date": f"days, deviation {column.deviation:.4g}",
                "boolean": f"true in {column.mean:.0%}",
            }[column.kind]
            rows.append((column.name, column.kind, said + ", some missing" * column.gaps))
        rows += [(name, "left out", why) for name, why in left_out.items()]
    return (*rows, *((name, "left out", "dropped") for name in drop))
