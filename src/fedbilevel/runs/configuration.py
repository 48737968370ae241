"""Experiment files: TOML with the tables [task], [algorithm] and [run]; error messages have the line."""

import inspect
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomli_w

from fedbilevel.errors import FedbilevelError, UnknownName

TABLES = ("task", "algorithm", "run")


FEDERATION = ("federation", "schema")
"""The tables that only a federation of parties with their own data has."""


def read(path: Path, federated: bool = False) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Read the tables of an experiment file, and the place of every key: {"task.name": "my.toml, line 2: "}."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise FedbilevelError(f"the experiment file {path} cannot be read: {reason}.") from None
    return parse(text, str(path), federated)


def parse(text: str, source: str, federated: bool = False) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The same, of a text; ``source`` is what messages call it."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a ValueError is also a number with too many digits
        raise FedbilevelError(f"{source} is not valid TOML: {error}.") from None
    places = {key: f"{source}, line {line}: " for key, line in _lines(text).items()}
    content.pop("fedbilevel", None)  # the version that wrote it
    allowed = (*TABLES, *FEDERATION) if federated else TABLES
    for table, keys in content.items():
        if table in FEDERATION and not federated:
            raise FedbilevelError(
                f"{places.get(table, '')}[{table}] is for separate parties: run this file with 'fedbilevel federation "
                f"run {source}', or leave the table out."
            )
        if table not in allowed:
            raise UnknownName("table", table, allowed, places.get(table, f"{source}: "))
        if not isinstance(keys, dict):
            raise FedbilevelError(
                f'{places.get(table, "")}{table} must be a table: write [{table}] and below it name = "...".'
            )
        for key, value in keys.items():
            if isinstance(value, dict) and table in TABLES:
                raise UnknownName("table", f"{table}.{key}", TABLES, places.get(f"{table}.{key}", f"{source}: "))
    tables = {table: content.get(table, {}) for table in allowed}
    if not isinstance(tables["task"].get("name"), str):
        raise FedbilevelError(f'{source} does not name a task: write [task] and below it name = "data-cleaning".')
    return tables, places


def _lines(text: str) -> dict[str, int]:
    """The line of every table and key; of values over several lines the first."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.\-\"']+)\s*\]", line):
            table = header[1].replace('"', "").replace("'", "")
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w.\-\"']+)\s*=", line):
            name = key[1].replace('"', "").replace("'", "")
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def write(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables as an experiment file."""
    return tomli_w.dumps({"fedbilevel": version("fedbilevel"), **tables})


def commented(
    tables: Mapping[str, Mapping[str, Any]], meanings: Mapping[str, Mapping[str, str]], left_out: Collection[str] = ()
) -> str:
    """Tables as an experiment file in which every key is explained; keys that follow from others are left out."""
    lines = [
        "# An experiment: fedbilevel run THIS-FILE [--set algorithm.lr_upper=0.2]. Settings left out have defaults."
    ]
    for table, keys in tables.items():
        lines += ["", f"[{table}]"]
        for key, value in keys.items():
            meaning = meanings.get(table, {}).get(key, "")
            lines += [f"# {meaning}"] if meaning else []
            lines.append("# " * (f"{table}.{key}" in left_out) + tomli_w.dumps({key: value}).rstrip("\n"))
    return "\n".join(lines) + "\n"


def explained(function: Callable[..., Any]) -> dict[str, str]:
    """What a docstring says about each argument.

    >>> def f(a: int) -> None:
    ...     '''Do it.
    ...
    ...     Args:
    ...         a: how often,
    ...             at least once.
    ...     '''
    >>> explained(f)
    {'a': 'how often, at least once.'}
    """
    text = inspect.getdoc(function) or ""
    _, _, arguments = text.partition("Args:\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in arguments.splitlines():
        if line and not line.startswith(" "):
            break
        if begin := re.match(r"    ([\w, ]+): (.*)", line):
            names = [name.strip() for name in begin[1].split(",")]
            meanings |= dict.fromkeys(names, begin[2].strip())
        elif line.startswith("     ") and names:
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
    return meanings
