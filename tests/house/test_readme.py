"""The README and the overviews that it links to: what they say is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
OVERVIEW = (ROOT / "docs" / "command-line.md").read_text()
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_examples_run(number: int, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKS[number]], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_two_commands_are_there() -> None:
    assert "pip install . && fedbilevel run data-cleaning " in README
    assert "pip install '.[test]' && pytest " in README


def test_every_command_of_the_readme_and_of_the_overview_exists() -> None:
    lines = [line for line in (README + OVERVIEW).splitlines() if line.startswith(("    ", "| `fedbilevel "))]
    commands = set(re.findall(r"fedbilevel (\w+)", "\n".join(lines)))
    assert commands <= {group.name for group in app.registered_groups} | {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    assert {"run", "plan", "algorithms", "tasks"} <= commands


def test_the_table_of_algorithms_is_true() -> None:
    names = [line.split("|")[1] for line in CHOOSING.splitlines() if line.startswith("| `")]
    assert {name for cell in names for name in re.findall(r"`([\w-]+)`", cell)} == set(fb.ALGORITHMS)


def test_the_readme_fits_on_one_screen() -> None:
    assert len(README.splitlines()) <= 100
