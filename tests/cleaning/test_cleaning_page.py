"""The page about wrong labels, in a real browser: whatever rows, clients and classes are called."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import fedbilevel as fb
from fedbilevel.cleaning import page
from fedbilevel.cleaning.shares import Share
from planted import patients

SCRIPT = "<script>window.hacked = 1</script>"
PICTURE = '"><img src=x onerror="window.hacked = 1">'
JUNK = [SCRIPT, PICTURE, "{{ 7 * 7 }} {% raw %}", "\x1b[2J\u202eabc\n\n]]> --> &amp;", "x" * 500, "Ünïcödé 病院"]


@pytest.fixture(scope="module")
def junk() -> fb.Found:
    """The small table, with names that nobody should have."""
    frame, _ = patients()
    frame["hospital"] = np.array(JUNK[:4])[np.arange(240) % 4]
    frame["outcome"] = frame["outcome"].map({"yes": SCRIPT, "no": PICTURE})
    frame["patient"] = [f"{JUNK[n % 6]}{n}" for n in range(240)]
    frame["ward"] = np.where(np.arange(240) % 5 == 0, None, frame["ward"].map({"7": SCRIPT, "007": JUNK[2]}))
    frame = frame.rename(columns={"dose": PICTURE}).drop(columns="weight")
    return fb.clean(frame, label="outcome", client="hospital", trusted="checked", id="patient")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no Chromium here")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_runs_and_nothing_is_loaded(
    junk: fb.Found, browser: Browser, tmp_path: Path, width: int, scheme: Any
) -> None:
    path = page.write(junk, tmp_path / "report.html")
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(path.as_uri())
    assert tab.evaluate("window.hacked") is None
    assert tab.evaluate("document.querySelectorAll('script').length") == 0
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("h2").all_inner_texts() == [
        "Share of wrong labels", "Given and likely labels", "The most suspicious rows", "What cleaning gains",
        "What the clients exchanged", "Settings",
    ]  # fmt: skip
    assert SCRIPT in tab.locator("main").inner_text()  # as text
    assert "{{ 7 * 7 }}" in tab.locator("main").inner_text()
    ground, text = (tab.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    light = lambda colour: sum(map(int, re.findall(r"\d+", colour)[:3])) / 3
    assert (light(ground) > light(text)) == (scheme == "light")
    tab.close()


def test_the_numbers_are_those_of_the_tables(junk: fb.Found, browser: Browser, tmp_path: Path) -> None:
    path = page.write(junk, tmp_path / "report.html")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    issues = int(junk.suspects["is_label_issue"].sum())
    assert tab.locator("h1").inner_text().startswith(f"{issues} of 240 labels")
    shown = tab.locator("table.shares").first.locator("tbody tr")
    assert shown.count() == 4
    counts = [int(shown.nth(n).locator("td").nth(3).inner_text()) for n in range(4)]
    assert counts == junk.noise["label_issues"].tolist()
    confused = tab.locator("table.heat tbody td")
    matrix = np.array([int(text) for text in confused.all_inner_texts()]).reshape(2, 2)
    assert matrix.sum() == 240
    assert matrix[0, 1] + matrix[1, 0] == issues
    bars = shown.locator("i")
    for n, (low, high) in enumerate(junk.noise[["low", "high"]].to_numpy()):
        box, track = bars.nth(n).bounding_box(), shown.locator(".track").nth(n).bounding_box()
        assert box is not None
        assert track is not None
        scale = float(tab.locator(".scale span").nth(1).inner_text().removesuffix(" %")) / 100
        assert (box["x"] - track["x"]) / track["width"] == pytest.approx(low / scale, abs=0.02)
        assert box["width"] / track["width"] == pytest.approx((min(high, scale) - low) / scale, abs=0.02)
    tab.close()


def test_of_many_groups_the_largest_shares_are_shown() -> None:
    groups = [Share(f"h{n}", 10, 0, 0, n / 200, 0.0, 1.0) for n in range(120)]
    assert [each.name for each in page._largest(groups)] == [f"h{n}" for n in range(119, 19, -1)]
    assert page._largest(groups[:7]) == groups[:7]


def test_a_picture_that_cannot_be_read_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    assert page._thumbnail(tmp_path / "broken.png") is None
    assert page._thumbnail(tmp_path / "absent.png") is None
    Image.new("I;16", (900, 30)).save(tmp_path / "wide.png")
    assert str(page._thumbnail(tmp_path / "wide.png")).startswith("data:image/jpeg;base64,")


def test_missing_values_are_blank(junk: fb.Found) -> None:
    text = page.render(junk)
    assert "<td></td>" in text
    assert not re.search(r">\s*(nan|None)\s*<", text)
