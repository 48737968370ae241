"""docs/security.md: every test that it names exists, and its list of what leaves a site is complete."""

import re
from pathlib import Path

from fedbilevel.engines.messaging.protocol import QUESTIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
TESTS = {
    f"{path.name}::{name}"
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(test_\w+\.py::\w+)`", PAGE))
    assert len(named) > 30
    assert not named - TESTS


def test_tests_that_exist_are_named_openly() -> None:
    """A comment holds the place of a test that was not there when the page was written."""
    assert not set(re.findall(r"<!-- test: (\S+) -->", PAGE)) & TESTS


def test_names_of_test_files_are_unique() -> None:
    """Otherwise the page would be ambiguous."""
    files = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) == len(set(files))


def test_every_attack_has_a_defence_and_a_test() -> None:
    sections = [part for part in PAGE.split("\n## ") if "| test |" in part]
    assert len(sections) == 6
    for section in sections:
        assert "**What remains**" in section
        for row in re.findall(r"^\| .* \|$", section, re.MULTILINE)[1:]:
            attack, defence, test = (cell.strip() for cell in row.strip("|").split(" | "))
            assert attack
            assert defence
            assert "::" in test, attack


def test_the_list_of_what_leaves_a_site_is_complete() -> None:
    table = PAGE.partition("## What leaves a site")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+), (.*?) \| (.*) \|$", table, re.MULTILINE)
    assert rows == [(kind.action, kind.when, kind.up) for kind in QUESTIONS]


def test_the_bill_of_materials_is_made_as_the_page_says() -> None:
    told, done = ((ROOT / name).read_text() for name in ("docs/security.md", ".ci/run"))
    options = re.compile(r"cyclonedx-py\S* (environment .*--output-file )")
    assert options.findall(told) == options.findall(done) != []
