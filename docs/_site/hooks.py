"""What the build of the documentation adds to the pages: formulas, the command line, the tutorial, reproductions."""

import html
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
COMMANDS = "<!-- the commands -->"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/: the tutorial, with the outputs that are stored in the notebook, and what
    ``fedbilevel reproduce`` has written.
    """
    notebook = nbformat.read(ROOT / "examples" / "tutorial.ipynb", as_version=4)
    text, resources = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": "tutorial"})
    text = text.replace("](../docs/", "](")
    text = re.sub(r'<style scoped>.*?</style>| border="1" class="dataframe"', "", text, flags=re.DOTALL)
    for name, content in resources["outputs"].items():
        files.append(File.generated(config, name, content=content))
    files.append(File.generated(config, "tutorial.md", content=text))
    for path in sorted((ROOT / "reproduction").glob("*.*")):
        files.append(File.generated(config, f"reproduction/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in what the command line says of itself; links into other folders lead to the pages of the site."""
    markdown = markdown.replace("](../reproduction/", "](reproduction/")
    return markdown.replace(COMMANDS, commands()) if COMMANDS in markdown else markdown


def commands() -> str:
    """All commands and their options, as Markdown."""
    ask = [sys.executable, "-m", "typer", "fedbilevel.cli", "utils", "docs", "--name", "fedbilevel"]
    text = subprocess.run(ask, check=True, capture_output=True, text=True).stdout
    return text[text.index("\n## ") :]  # without the title, which the page has


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers show without any script."""

    def formula(match: re.Match[str]) -> str:
        inside = match[1] == "span"
        shown = convert(html.unescape(match[2]).strip(), display="inline" if inside else "block")
        return shown if inside else f'<div class="formula">{shown}</div>'

    return FORMULA.sub(formula, content)
