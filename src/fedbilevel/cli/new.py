"""``new``: files to start from, with a test."""

import keyword
import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fedbilevel.cli.options import console
from fedbilevel.errors import FedbilevelError, UnknownName

KINDS = ("algorithm", "task")


def new(
    kind: Annotated[str, typer.Argument(help="'algorithm' or 'task'.")],
    name: Annotated[str, typer.Argument(help="Its name, such as MyMethod or my-task.")],
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path(),
) -> None:
    """Write a commented algorithm or task to start from, and a test for it."""
    if kind not in KINDS:
        raise UnknownName("kind of file", kind, KINDS)
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    snake = "_".join(word.lower() for word in words)
    if not snake.isidentifier() or keyword.iskeyword(snake) or re.sub(r"[\w -]", "", name):
        raise FedbilevelError(f"{name!r} cannot be a name: use letters, digits and '-', and begin with a letter.")
    camel = name if name[0].isupper() and name.isidentifier() else "".join(w[:1].upper() + w[1:] for w in words)
    names = {"name": snake, "Name": camel, "dashed": snake.replace("_", "-")}
    source = files("fedbilevel.cli") / "skeletons"
    written = {
        out / f"{prefix}{snake}.py": Template((source / f"{prefix}{kind}.py.txt").read_text()).substitute(names)
        for prefix in ("", "test_")
    }
    for path in written:
        if path.exists():
            raise FedbilevelError(f"{path} already exists: choose another name, or another folder with --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, text in written.items():
            path.write_text(text)
    except OSError as error:
        raise FedbilevelError(f"cannot write to {out}: {error.strerror}.") from error
    code, test = written
    word = f"{code}:{camel if kind == 'algorithm' else snake}"
    run = f"fedbilevel run quadratic --algorithm {word}" if kind == "algorithm" else f"fedbilevel run {word}"
    console.print(
        f"Wrote {code} and {test}. Try: {run}, and: pytest {test}", soft_wrap=True, highlight=False, markup=False
    )
