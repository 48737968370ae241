"""Folders of pictures: one for each class, perhaps in one for each client; or with a table that names them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbilevel.data.columns import Table, check_file, unreadable
from fedbilevel.data.table_files import read_table
from fedbilevel.errors import FedbilevelError

SUFFIXES = frozenset([".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"])
"""Of the names of pictures."""
NAMED = ("file", "path", "image", "picture", "filename")
"""What a column with the names of pictures may be called."""


def entries(path: Path) -> list[Path]:
    """What is in a folder, hidden files aside."""
    try:
        return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except FileNotFoundError:
        raise FedbilevelError(f"there is no folder {path}.") from None
    except NotADirectoryError:
        check_file(path)
        raise FedbilevelError(f"{path} is a file: give a folder of images, or an .npz file.") from None
    except (OSError, ValueError) as error:
        raise unreadable(str(path), error) from None


def picture_table(path: Path, clients: bool) -> Table:
    """The pictures of a folder as a table: "file", "label" and, if asked for, "client".

    Args:
        path: has a labels.csv, or a folder of pictures for each class.
        clients: the folders in it are clients, and theirs are classes.
    """
    inside = entries(path)
    if (path / "labels.csv") in inside:
        return read_table(str(path / "labels.csv"))
    rows: list[tuple[str, ...]] = []
    for owner in [entry for entry in inside if entry.is_dir()] if clients else [path]:
        for folder in [entry for entry in entries(owner) if entry.is_dir()]:
            who = (owner.name,) if clients else ()
            rows += [(str(file.relative_to(path)), folder.name, *who) for file in entries(folder) if is_picture(file)]
    if not rows:
        deep = "a folder for each client, with a folder for each class in it" if clients else "a folder for each class"
        raise FedbilevelError(
            f"{path} has no pictures: put them into {deep}, or add a labels.csv with the columns file and label."
        )
    names = ("file", "label", "client") if clients else ("file", "label")
    columns: dict[str, Any] = dict(zip(names, (list(column) for column in zip(*rows, strict=True)), strict=True))
    return Table(str(path), names, 0, lambda wanted: {name: columns[name] for name in wanted})


def is_picture(path: Path | str) -> bool:
    """Whether a file is called like a picture."""
    return Path(path).suffix.lower() in SUFFIXES


def picture_column(table: Table) -> str | None:
    """The column with the names of pictures, if there is one."""
    return next((name for name in table.names if name.lower() in NAMED), None)


def picture_names(table: Table) -> list[str]:
    """The names of the pictures of a table, as it has them."""
    name = picture_column(table)
    return [] if name is None else [str(cell).strip() for cell in table.cells([name])[name]]


def pictures_of(table: Table, folder: Path, optional: bool = False) -> list[Path] | None:
    """The pictures that the rows of a table name, next to it; None if none of its columns does that, or if they are
    optional and one is not there.
    """
    name = picture_column(table)
    if name is None:
        return None
    cells: Sequence[Any] = table.cells([name])[name]
    if not cells or not any(isinstance(cell, str) and is_picture(cell.strip()) for cell in cells):
        return None
    files = []
    for row, cell in enumerate(cells):
        named = isinstance(cell, str) and cell.strip()
        if named and (file := folder / cell.strip()).is_file():
            files.append(file)
        elif optional:
            return None
        elif named:
            raise table.wrong(name, row, f"there is no file {folder / cell.strip()}")
        else:
            raise table.wrong(name, row, "expected the name of a picture, but found nothing")
    return files
