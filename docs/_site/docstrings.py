"""Docstrings as Markdown: converts their reStructuredText, and adds the help of every hyper-parameter."""

import ast
import importlib
import re
from typing import Any

import griffe

RULER = re.compile(r"=+( +=+)+")
FACTS = ("citation", "source", "assumes", "exact", "alone", "costs")
STAR = re.compile(r"(?<![\w*])(\w(?:_\w)?|theta)\*(?![\w*])")  # y* is a name, *word* is emphasis


class Docstrings(griffe.Extension):
    """Rewrites docstrings between the source and the pages."""

    def on_instance(self, *, node: Any, obj: Any, agent: Any, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, agent: Any, **_: Any) -> None:
        """Split ``parameter(default, help, ...)``: signatures show the default."""
        value = attr.value
        if isinstance(value, griffe.ExprCall) and str(value.function) == "parameter":
            attr.value, help_text = value.arguments[0], value.arguments[1]
            attr.extra["fedbilevel"] = {"help": ast.literal_eval(str(help_text))}

    def on_package(self, *, pkg: griffe.Module, loader: Any, **_: Any) -> None:
        """Add its facts and hyper-parameters, also those that it inherits, to the docstring of every algorithm."""
        for module in pkg["algorithms"].modules.values():
            for kind in module.classes.values():
                known = {name: member.extra.get("fedbilevel") for name, member in kind.all_members.items()}
                helps = [f"    {name}: {texts['help']}." for name, texts in known.items() if texts]
                if helps:
                    real = getattr(importlib.import_module(module.path), kind.name)  # facts may be put together
                    facts = ((name, getattr(real, name)) for name in FACTS)
                    kind.docstring.value += "".join(
                        f"\n\n**{name}:** {markdown(text)}." for name, text in facts if text
                    )
                    kind.docstring.value += "\n\nArgs:\n" + "\n".join(helps)


def markdown(text: str) -> str:
    """Convert the reStructuredText of a docstring to Markdown.

    >>> print(markdown("As in :class:`Stopped`, y* is::"))
    As in `Stopped`, y\\* is:
    """
    return "\n\n".join(_paragraph(part) for part in _tables(text).split("\n\n"))


def _paragraph(text: str) -> str:
    margin = " " * (len(text) - len(text.lstrip(" ")))
    if text.lstrip().startswith(">>> "):
        return f"{margin}```pycon\n{text}\n{margin}```"
    if margin and ":" not in text.splitlines()[0]:
        return text  # code
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text)
    text = re.sub(r"::$", ":", text)
    # Only outside code.
    return "".join(
        part if part.startswith("`") else STAR.sub(r"\1\\*", part) for part in re.split(r"(`+[^`]*`+)", text)
    )


def _tables(text: str) -> str:
    """Convert simple tables, whose columns start where the rulers of equality signs start."""
    lines, done = text.splitlines(), []
    while lines:
        if not RULER.fullmatch(lines[0].strip()):
            done.append(lines.pop(0))
            continue
        margin = len(lines[0]) - len(lines[0].lstrip())
        starts = [match.start() for match in re.finditer("=+", lines[0])]
        rulers = [number for number, line in enumerate(lines) if RULER.fullmatch(line.strip())][:3]
        rows = [line for line in lines[: rulers[2]] if not RULER.fullmatch(line.strip())]
        lines = lines[rulers[2] + 1 :]
        cells = [
            [line[a:b].strip().replace("|", r"\|") for a, b in zip(starts, [*starts[1:], None], strict=True)]
            for line in rows
        ]
        cells.insert(1, ["---"] * len(starts))
        done += [" " * margin + "| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(done)
