"""Options that several commands share, and how what is typed becomes an experiment."""

import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedbilevel.errors import FedbilevelError, Stopped
from fedbilevel.runs import interrupts
from fedbilevel.runs.experiment import Experiment

console = Console()

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a hyper-parameter or an option of the task. May be repeated.",
    ),
]
Sample = Annotated[
    str | None,
    typer.Option(
        help="Which clients take part in a round: a number (10), a probability (0.5) or a list (0,3,5). '10 resample' "
        "draws a new cohort for every exchange, '10 replacement' draws with replacement. Default: everyone."
    ),
]

AlgorithmName = Annotated[
    str | None,
    typer.Option(
        help="Name of an algorithm (see 'fedbilevel algorithms'), or yours: ./my_method.py:MyMethod or "
        "package.module:MyMethod. Default: the task's own."
    ),
]
DataName = Annotated[str | None, typer.Option(help="Name of a data set (see 'fedbilevel tasks TASK').")]
DataNames = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Name of a data set (see 'fedbilevel tasks TASK'); or your own table: a CSV, TSV or Parquet file, or a "
        "folder of pictures. May be repeated: then every file is a client.",
    ),
]
Label = Annotated[str | None, typer.Option(help="Column of your table with the labels.")]
Client = Annotated[str | None, typer.Option(help="Column that says which client a row belongs to.")]
Trusted = Annotated[str | None, typer.Option(help="Column that marks labels which somebody has checked: yes or no.")]
Id = Annotated[str | None, typer.Option("--id", help="Column with the names of the rows. Default: their lines.")]
Drop = Annotated[list[str] | None, typer.Option(help="Column to leave out. May be repeated.")]
Categorical = Annotated[
    list[str] | None,
    typer.Option(help="Treat numbers in a column as names. May be repeated."),
]
Numeric = Annotated[list[str] | None, typer.Option(help="Refuse anything but numbers in a column. May be repeated.")]
ClientFrom = Annotated[
    str | None, typer.Option(help="'folder': the folders of pictures are clients, the folders in them classes.")
]
Features = Annotated[
    str | None, typer.Option(help="An .npy file with a row of features for each row, in place of the columns.")
]
ClientCount = Annotated[int | None, typer.Option(help="Number of clients.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as a JSON object, without progress bars.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the results. Default: a new folder in runs/.")]


Seeds = Annotated[str | None, typer.Option(help="Seeds, for instance 0..4 or 0,3,7. Default: 0.")]
TaskOrFile = Annotated[
    str,
    typer.Argument(
        metavar="TASK|FILE",
        help="Name of a task (see 'fedbilevel tasks'), an experiment file (my.toml), or a function of yours: "
        "./my_task.py:make_task or package.module:make_task.",
    ),
]


def settings_of(
    pairs: list[str] | None, clients: int | None = None, data: Sequence[str] | str | None = None
) -> dict[str, Any]:
    """The settings of ``--set``, ``--clients`` and ``--data`` by name."""
    settings: dict[str, Any] = {} if clients is None else {"clients": str(clients)}
    if data:
        settings["data"] = data if isinstance(data, str) else data[0] if len(data) == 1 else tuple(data)
    return settings | by_key(pairs, "--set needs KEY=VALUE, for instance --set lr_upper=0.5")


def by_key(pairs: list[str] | None, needs: str) -> dict[str, str]:
    """The values of all KEY=VALUE pairs by their key."""
    values: dict[str, str] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise FedbilevelError(f"{needs}, not '{pair}'.")
        values[key.strip()] = value.strip()
    return values


def experiment_of(what: str, settings: Mapping[str, Any], comparing: bool = False) -> Experiment:
    """The experiment of a file, or of a task by its name. Where algorithms are compared, a setting may begin with the
    name of one of them.
    """
    given = Experiment.read(what) if what.lower().endswith(".toml") else Experiment(what)
    mine = {key: value for key, value in settings.items() if not comparing or key in ("rounds", "sample", "run.rounds")}
    others = {key: value for key, value in settings.items() if key not in mine}
    changed = given.changed(mine)
    return dataclasses.replace(changed, settings={**changed.settings, **others}) if others else changed


@contextlib.contextmanager
def ending_well(go_on: str = "") -> Iterator[None]:
    """Ctrl-C and SIGTERM end with a sentence that says how to go on (Typer would end without a word)."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        saved = interrupt.saved if isinstance(interrupt, Stopped) else ""
        print(f"fedbilevel: interrupted. {saved or go_on}".strip(), file=sys.stderr)
        # At once: shutting down in the middle of a compilation can crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(143 if isinstance(interrupt, interrupts.Terminated) else 130)


def first_line(documented: Any) -> str:
    """The first line of a docstring."""
    return next(iter((inspect.getdoc(documented) or "").splitlines()), "-")
