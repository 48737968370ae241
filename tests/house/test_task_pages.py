"""Every task has a page with its command, its picture and all its options."""

import inspect
from pathlib import Path

import pytest

from fedbilevel.tasks import TASKS

PAGES = Path(__file__).parents[2] / "docs" / "tasks"
MADE_UP = {"nonconvex", "quadratic", "client-weighting-toy"}


@pytest.mark.parametrize("name", sorted(set(TASKS) - MADE_UP))
def test_the_page_of_a_task(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    assert f"    fedbilevel run {name}\n" in page or f"    fedbilevel run {name} " in page
    assert f"]({name}.png)" in page
    assert (PAGES / f"{name}.png").stat().st_size < 300_000
    missing = [option for option in inspect.signature(TASKS[name]).parameters if option not in page]
    assert not missing
    assert f"[`{name}`]({name}.md)" in (PAGES / "index.md").read_text()
    assert "(docs/tasks/index.md)" in (PAGES.parents[1] / "README.md").read_text()


def test_every_task_explains_itself() -> None:
    for make in TASKS.values():
        text = inspect.getdoc(make) or ""
        assert all(f"{option}:" in text or f"{option}, " in text for option in inspect.signature(make).parameters), make
        assert inspect.getdoc(inspect.getmodule(make))
