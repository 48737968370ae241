"""What the build adds to the pages: formulas, the command line, the tutorial, the reproduction pages."""

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
    """Add the pages from outside docs/: the tutorial with its stored outputs, and those of ``fedbilevel reproduce``."""
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
    """Insert the help of the command line, and point links into other folders at the pages of the site."""
    markdown = markdown.replace("](../reproduction/", "](reproduction/").replace("](../docs/", "](../")
    return markdown.replace(COMMANDS, commands()) if COMMANDS in markdown else markdown


def commands() -> str:
    """Every command with its options, as Markdown."""
    ask = [sys.executable, "-m", "typer", "fedbilevel.cli", "utils", "docs", "--name", "fedbilevel"]
    text = subprocess.run(ask, check=True, capture_output=True, text=True).stdout
    return text[text.index("\n## ") :]  # without the title: the page has its own


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which browsers show without a script."""

    def formula(match: re.Match[str]) -> str:
        inside = match[1] == "span"
        shown = convert(html.unescape(match[2]).strip(), display="inline" if inside else "block")
        return shown if inside else f'<div class="formula">{shown}</div>'

    return FORMULA.sub(formula, content)
