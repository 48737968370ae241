"""Tasks on people's own tables by name: what an experiment with ``data = "my.csv"`` and a ``label`` runs."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedbilevel.core.task import Task
from fedbilevel.data import table
from fedbilevel.data.table_files import is_function
from fedbilevel.errors import FedbilevelError
from fedbilevel.runs.configuration import explained
from fedbilevel.runs.settings import NameList, Setting
from fedbilevel.tasks import OWN_TASKS, TASKS, on_table

NONE = NameList()
ENDINGS = (".csv", ".tsv", ".parquet", ".npz")


def _options(
    data: NameList = NONE,
    label: str = "",
    client: str = "",
    trusted: str = "",
    id: str = "",
    group: str = "",
    drop: NameList = NONE,
    categorical: NameList = NONE,
    numeric: NameList = NONE,
    client_from: str = "",
    features: str = "",
    weights: str = "equal",
) -> None:
    """What a table is read with.

    Args:
        data: a CSV, TSV, Parquet or NPZ file, several of them, one for each client, or a folder of pictures.
        label: the column with the labels.
        client: the column that says which client a row belongs to; without it, every file is a client.
        trusted: the column that says which labels were checked: these rows validate and test.
        id: the column with the names of the rows.
        group: the column with two groups of people, for fairness.
        drop: columns to leave out.
        categorical: columns whose values are names, even if they look like numbers.
        numeric: columns of numbers; other cells in them are errors.
        client_from: "folder": the folders of pictures are clients, and the folders in them classes.
        features: an .npy file with a row of features for each row of the table.
        weights: of the clients: "equal", or "size", by the number of training rows.
    """


def is_own(settings: Mapping[str, Any], make: Callable[..., Task]) -> bool:
    """Whether the settings of an experiment are about an own table, not about options of the task's own function."""
    if make not in TASKS.values():
        return False
    named = {Setting.parse(key).name: value for key, value in settings.items() if Setting.parse(key).is_for("task")}
    data = named.get("data", "")
    if "label" in named or "client_from" in named or not isinstance(data, str):
        return True
    return data.lower().endswith(ENDINGS) or "/" in data


@cache
def own_maker(name: str) -> Callable[..., Task]:
    """What makes the task of a name from a table: a function with the options of both as arguments."""
    if name == "data-cleaning":
        raise FedbilevelError("label errors in your own table are found with: fedbilevel clean TABLE --label COLUMN.")
    site = OWN_TASKS[name]
    of_table = inspect.signature(_options).parameters
    of_task = [p for p in inspect.signature(site.task).parameters.values() if p.default is not p.empty]

    def make(**given: Any) -> Task:
        if not given.get("data"):
            raise FedbilevelError("which table? Give its file with --data.")
        said = {p.name: p.default for p in (*of_table.values(), *of_task)} | given
        paths = NameList(path if is_function(path) else str(Path(path).absolute()) for path in said["data"])
        reading: dict[str, Any] = {key: said[key] or None for key in of_table if key not in ("data", "weights")}
        reading |= {key: said[key] for key in ("drop", "categorical", "numeric")}
        read = table(paths[0] if len(paths) == 1 else paths, **reading)
        if name == "fairness" and len(read.groups) != 2:
            raise FedbilevelError("fairness needs a column with two groups of people: --set group=COLUMN.")
        options = {p.name: given[p.name] for p in of_task if p.name in given}
        made = on_table(name, read, said["weights"], **options)
        return dataclasses.replace(made, options={**said, "data": paths})

    meanings = {**explained(_options), **explained(site.task)}
    lines = [f"    {key}: {said}" for key, said in meanings.items() if key not in ("examples", "facts")]
    make.__doc__ = "\n".join([(inspect.getdoc(site.task) or "").splitlines()[0], "", "Args:", *lines])
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*of_table.values(), *of_task)]
    make.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return make
