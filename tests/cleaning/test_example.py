"""The example of the documentation: a table with planted errors that everybody can make."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from helpers import fedbilevel

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "planted_errors.py"
PAGE = (ROOT / "docs" / "clean.md").read_text()


def test_the_script_plants_what_it_says() -> None:
    made = runpy.run_path(str(SCRIPT))
    table, truth = made["patients"]()
    again, _ = made["patients"]()
    pd.testing.assert_frame_equal(table, again)
    wrong = (truth["wrong"] == "yes").to_numpy()
    assert (wrong == (truth["diagnosis"] != table["diagnosis"]).to_numpy()).all()
    assert f"{wrong.sum()} diagnoses are wrong" in PAGE
    checked = (table["checked"] == "yes").to_numpy()
    assert not wrong[checked].any()
    for hospital, share in made["HOSPITALS"].items():
        own = (table["hospital"] == hospital).to_numpy()
        assert checked[own].sum() == made["CHECKED"] == 15
        assert wrong[own & ~checked].mean() == pytest.approx(share, abs=0.005)


@pytest.mark.slow
def test_the_page_says_what_is_found(tmp_path: Path) -> None:
    """In single precision, with some room for other machines."""
    subprocess.run([sys.executable, str(SCRIPT)], cwd=tmp_path, check=True)
    (command,) = re.findall(r"^    fedbilevel (clean patients.csv .* --out found)$", PAGE, re.MULTILINE)
    done = fedbilevel(*command.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    suspects = pd.read_csv(tmp_path / "found" / "suspects.csv")
    truth = pd.read_csv(tmp_path / "truth.csv").set_index("patient")
    wrong, issue = (truth["wrong"][suspects["row"]] == "yes").to_numpy(), suspects["is_label_issue"].to_numpy()
    said = re.search(r"Of the (\d+) label issues, (\d+) are planted errors, and (\d+) planted errors are missed", PAGE)
    assert said is not None
    seen = (issue.sum(), (issue & wrong).sum(), (wrong & ~issue).sum())
    assert seen == pytest.approx([int(number) for number in said.groups()], abs=4)
    first, second = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", first + second], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert f"{569 - issue.sum()} of 569 rows are left" in ran.stdout
    share = re.search(r"([\d.]+) of the wrong labels are found", ran.stdout)
    assert share is not None
    assert float(share[1]) > 0.8
    assert (tmp_path / "found.png").exists()
