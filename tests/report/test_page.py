"""The report: its numbers, and the page itself in a real browser."""

import base64
import json
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import matplotlib
import numpy as np
import pytest
import tomli_w
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import fedbilevel as fb
from fedbilevel.cli import main
from fedbilevel.report import figures, page, watch
from fedbilevel.report.page import series as grouping
from fedbilevel.storage.files import plain_json

ALGORITHMS = {
    "fedbio": fb.FedBiO(lr_upper=0.1, lr_lower=0.2, lr_adjoint=0.2, local_steps=1),
    "fedavg": fb.FedAvg(),
    "simfbo": fb.SimFBO(),
}
ROUNDS = 30
HEADLINE = {"error": "|x - x*|", "hypergradient": "|grad h|"}


@pytest.fixture(scope="module")
def histories() -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Short real runs, by algorithm and seed."""
    task = {seed: fb.tasks.quadratic(seed=seed) for seed in range(3)}
    return {
        (name, seed): fb.solve(task[seed], algorithm, rounds=ROUNDS, seed=seed, every=2).history
        for name, algorithm in ALGORITHMS.items()
        for seed in range(3)
    }


def write_run(
    folder: Path,
    history: list[dict[str, Any]],
    algorithm: str = "fedbio",
    seed: int = 0,
    references: dict[str, list[dict[str, Any]]] | None = None,
    hyper: dict[str, Any] | None = None,
    **info: Any,
) -> Path:
    """A run folder as a run writes it."""
    folder.mkdir(parents=True)
    title = {"fedbio": "FedBiO", "fedavg": "FedAvg", "simfbo": "SimFBO"}.get(algorithm, algorithm)
    config = {
        "task": {"name": "quadratic", "seed": seed, "clients": 5},
        "algorithm": {"name": algorithm, **({"lr_upper": 0.1} if hyper is None else hyper)},
        "run": {"rounds": ROUNDS, "seed": seed, "sample": "everyone"},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    about = {
        "name": folder.name, "task": "quadratic", "algorithm": algorithm, "title": title, "seed": seed,
        "rounds": ROUNDS, "clients": 5, "headline": HEADLINE, "main": algorithm,
        "labels": {**{label: f"reference {label}" for label in references or {}}, algorithm: title},
        "environment": {"fedbilevel": fb.__version__, "python": "3.11", "device": "cpu"},
        "process": os.getpid(), "started": f"2026-11-16T05:5{seed}:00+00:00", "status": "finished", **info,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(about))
    for label, rows in {**(references or {}), algorithm: history}.items():
        append(folder, label, rows)
    return folder


def append(folder: Path, label: str, rows: list[dict[str, Any]]) -> None:
    """More records."""
    with (folder / "records.jsonl").open("a") as file:
        file.writelines(json.dumps(plain_json({"run": label, **row})) + "\n" for row in rows)


@pytest.fixture
def comparison(tmp_path: Path, histories: dict[tuple[str, int], list[dict[str, Any]]]) -> Path:
    """Three algorithms with three seeds each; what they are compared with is the same for all."""
    for (name, seed), history in histories.items():
        references = {"base": histories["fedavg", seed]}
        write_run(tmp_path / "all" / f"{name}-seed{seed}", history, name, seed, references)
    return tmp_path / "all"


def series_of(path: Path) -> list[grouping.Series]:
    return grouping.together(grouping.find([path]))[0]


def test_runs_that_differ_in_their_seed_are_one_series(comparison: Path, histories: Any) -> None:
    series = series_of(comparison)
    assert [(each.name, each.seeds, each.reference) for each in series] == [
        ("FedAvg", [0, 1, 2], ""),
        ("FedBiO", [0, 1, 2], ""),
        ("SimFBO", [0, 1, 2], ""),
        ("reference base", [0, 1, 2], "base"),
    ]
    errors = np.array([[row["error"] for row in histories["fedbio", seed]] for seed in range(3)])
    curve = series[1].curve("error")
    assert series[1].rounds == [row["round"] for row in histories["fedbio", 0]]
    np.testing.assert_allclose(curve.mean, errors.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(curve.deviation, errors.std(axis=0, ddof=1), rtol=1e-12)
    assert series[1].last("error") == pytest.approx((errors[:, -1].mean(), errors[:, -1].std(ddof=1)))
    counts = [histories["fedbio", 0][-1][name] for name in grouping.ORACLES]
    assert series[1].last("oracles")[0] == sum(counts) > 0


def test_configurations_of_one_algorithm_say_how_they_differ(tmp_path: Path, histories: Any) -> None:
    for step in (0.1, 0.2):
        write_run(tmp_path / f"step-{step}", histories["fedbio", 0], hyper={"lr_upper": step, "lr_lower": 1})
    assert [each.name for each in series_of(tmp_path)] == ["FedBiO, lr_upper = 0.1", "FedBiO, lr_upper = 0.2"]
    assert "<title>FedBiO on quadratic, 2 configurations</title>" in page.render([tmp_path])


def test_only_what_differs_is_listed(comparison: Path, histories: Any) -> None:
    write_run(
        comparison / "fedbio-other", histories["fedbio", 0], hyper={"lr_upper": 0.1, "local_steps": 3},
        environment={"fedbilevel": fb.__version__, "python": "3.12", "device": "cpu"},
    )  # fmt: skip
    mains = [each for each in series_of(comparison) if not each.reference]
    table = dict(page._differences(mains))
    other = [each.name for each in mains].index("FedBiO, local_steps = 3")
    assert set(table) == {"algorithm.name", "algorithm.local_steps", "run.seed", "task.seed", "environment.python"}
    assert [values[other] for values in table.values()] == ["0", "fedbio", "0", "3.12", "3"]
    assert [value for n, value in enumerate(table["algorithm.local_steps"]) if n != other] == ["-"] * 3


def test_runs_that_failed_do_not_make_the_others_look_better(tmp_path: Path, histories: Any) -> None:
    for seed in range(3):
        write_run(tmp_path / f"seed{seed}", histories["fedbio", seed], seed=seed)
    shutil.rmtree(tmp_path / "seed2")
    write_run(tmp_path / "seed2", histories["fedbio", 2][:4], seed=2, status="failed", failure="round 7: x became NaN.")
    (each,) = series_of(tmp_path)
    finished = [histories["fedbio", seed][-1]["error"] for seed in range(2)]
    assert each.last("error")[0] == pytest.approx(np.mean(finished))
    assert each.curve("error").seeds.tolist() == [3] * 4 + [2] * (len(each.rounds) - 4)
    text = page.render([tmp_path])
    assert "2 of 3 finished" in text
    assert "1 of 3 failed" in text
    assert "round 7: x became NaN." in text
    only = page.content([tmp_path / "seed2"]).above
    assert "<td>6 of 30</td>" in only
    assert "<td>-</td>" in only  # what it had before it failed is no result


def test_nothing_is_a_dash_and_numbers_have_four_digits(tmp_path: Path, histories: Any) -> None:
    rows = [{**row, "hypergradient": None, "error": 0.123456789} for row in histories["fedbio", 0]]
    above = page.content([write_run(tmp_path / "run", rows)]).above
    assert "<td>0.1235</td><td>-</td>" in above
    assert "nan" not in above.lower().replace("finance", "")


def test_later_records_and_later_runs_count(tmp_path: Path, histories: Any) -> None:
    history = histories["fedbio", 0]
    folder = write_run(tmp_path / "first", history)
    append(folder, "fedbio", [{**history[-1], "error": 7.0}])
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"run": "fedbio", "round": 3')  # torn when the run was killed
    (each,) = series_of(tmp_path)
    assert each.last("error")[0] == 7.0
    write_run(tmp_path / "again", history, started="2027-01-01T00:00:00+00:00")
    (each,) = series_of(tmp_path)
    assert len(each.runs) == 1
    assert each.last("error")[0] == history[-1]["error"]
    assert "first is left out: again has the same configuration and seed and is later" in page.render([tmp_path])


def test_what_a_reference_does_not_change_is_not_its_own(tmp_path: Path, histories: Any) -> None:
    reference = [{**row, "hypergradient": 0.5} for row in histories["fedavg", 0]]
    folder = write_run(tmp_path / "run", histories["fedbio", 0], references={"base": reference}, status="running")
    own, base = series_of(folder)
    assert "hypergradient" in own.metrics
    assert "hypergradient" not in base.metrics
    assert (own.states(), base.states()) == (["running"], ["finished"])  # the reference has all its rounds
    dead = write_run(tmp_path / "dead", histories["fedbio", 0], status="running", process=2**22)  # nobody's number
    assert series_of(dead)[0].states() == ["killed"]


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [], status="running")
    made = page.content([folder])
    assert made.chart["metrics"] == {}
    assert "<td>0 of 30</td>" in made.above
    with pytest.raises(fb.FedbilevelError, match="no figures to draw yet"):
        figures.write([folder], tmp_path / "figures")


def test_pictures_and_details_of_the_task_are_on_the_page(tmp_path: Path, histories: Any) -> None:
    details = {"title": "What was found", "headings": ["client", "share"], "rows": [["a", 0.123456], ["b", None]]}
    folder = write_run(tmp_path / "run", histories["fedbio", 0], details=details)
    for name in ("picture", "curves", "more"):
        Image.new("RGB", (3, 2)).save(folder / f"{name}.png")
    below = page.content([folder]).below
    assert "What was found" in below
    assert "<td>0.1235</td>" in below
    picture = base64.b64encode((folder / "picture.png").read_bytes()).decode()
    assert f'<img src="data:image/png;base64,{picture}" alt="' in below
    assert below.count("<img") == 2  # the chart replaces curves.png


EVIL = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'><b>&amp;"


def evil_run(folder: Path, history: list[dict[str, Any]]) -> Path:
    """Everything that somebody can choose tries to run a script."""
    rows = [{**row, EVIL: 1.0 + row["round"]} for row in history]
    return write_run(
        folder / "<img src=x onerror='window.hurt = 3'>", rows, EVIL, references={"b" + EVIL: rows},
        hyper={EVIL: EVIL}, headline={"error": EVIL, EVIL: "metric " + EVIL}, status=EVIL, failure=EVIL, task=EVIL,
        environment={EVIL: EVIL}, started=EVIL,
        details={"title": EVIL, "headings": [EVIL, "n"], "rows": [[EVIL, 1]]},
    )  # fmt: skip


def test_names_are_text_and_nothing_else(tmp_path: Path, histories: Any) -> None:
    text = page.render([evil_run(tmp_path, histories["fedbio", 0])])
    assert "<script>window.hurt" not in text
    assert "<img src=x" not in text
    assert text.count("</script>") == 3  # the numbers, plotly and the page's own
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert EVIL in json.loads(data)["metrics"]


def test_figures_for_a_paper(tmp_path: Path, histories: Any) -> None:
    for seed in range(2):
        write_run(tmp_path / "runs" / f"seed{seed}", histories["fedbio", seed], seed=seed, headline={"error": "$|x|"})
    before = matplotlib.rcParams["pdf.fonttype"]
    made = figures.write([tmp_path / "runs"], tmp_path / "figures")
    assert matplotlib.rcParams["pdf.fonttype"] == before
    assert {path.name for path in made} == {
        f"error-{axis}.{kind}"
        for axis in ("round", "megabytes", "oracles", "seconds")
        for kind in ("pdf", "svg", "png")
    }
    pdf = (tmp_path / "figures" / "error-round.pdf").read_bytes()
    assert b"/FontFile2" in pdf  # a TrueType font that is embedded
    assert b"/Type3" not in pdf
    width, height = (float(n) for n in pdf.partition(b"/MediaBox [ 0 0 ")[2].partition(b" ]")[0].split())
    assert width == pytest.approx(3.3 * 72)
    assert height < width


def command(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fedbilevel", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_command_writes_beside_the_first_run(
    tmp_path: Path, histories: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        write_run(tmp_path / name, histories[name, 0], name, headline={"error": "|x - x*|"})
        for name in ("fedbio", "simfbo")
    )
    assert command("report", str(first), str(second), "--figures", monkeypatch=monkeypatch) == 0
    assert "FedBiO and SimFBO on quadratic" in (first / "report.html").read_text()
    assert (first / "figures" / "error-round.pdf").exists()
    assert f"Report in {first / 'report.html'}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["report", "watch"])
def test_what_is_no_run_is_one_sentence(
    name: str, tmp_path: Path, histories: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sentence(path: Path) -> str:
        assert command(name, str(path), monkeypatch=monkeypatch) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    assert "nowhere is not a folder" in sentence(tmp_path / "nowhere")
    assert "there are no runs in" in sentence(tmp_path)
    folder = write_run(tmp_path / "run", histories["fedbio", 0])
    assert "is not a folder" in sentence(folder / "run.json")
    (folder / "run.json").write_text('{"task": ')
    assert "run.json" in sentence(tmp_path) or str(folder) in sentence(tmp_path)


# --- the live page ---


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def live(runs: Path, histories: Any) -> Iterator[watch.Watch]:
    """A run that goes on, and its page."""
    write_run(runs / "one", histories["fedbio", 0][:5], status="running")
    with watch.Watch(watch.Runs(runs)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: watch.Watch, path: str, **headers: str) -> tuple[int, bytes, str | None]:
    """Status, body and mark of an answer."""
    return request(server.url + path, "GET", **headers)


def request(address: str, method: str = "GET", **headers: str) -> tuple[int, bytes, str | None]:
    """Status, body and mark of an answer."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=sent, method=method)) as answer:
            return answer.status, answer.read(), answer.headers["ETag"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers["ETag"]


def test_news_come_when_something_has_changed(live: watch.Watch, runs: Path, histories: Any) -> None:
    status, body, mark = ask(live, "data")
    assert status == 200
    assert mark is not None
    assert json.loads(body)["chart"]["series"][0]["axes"]["round"] == [0, 2, 4, 6, 8]
    assert ask(live, "data", If_None_Match=mark) == (304, b"", mark)
    append(runs / "one", "fedbio", histories["fedbio", 0][5:6])
    status, body, new = ask(live, "data", If_None_Match=mark)
    assert (status, new != mark) == (200, True)
    assert json.loads(body)["chart"]["series"][0]["axes"]["round"] == [0, 2, 4, 6, 8, 10]
    write_run(runs / "two", histories["simfbo", 0], "simfbo")
    assert len(json.loads(ask(live, "data")[1])["chart"]["series"]) == 2
    shutil.rmtree(runs)
    assert ask(live, "data")[0] == 503  # a sentence, not the end


def test_only_this_machine_gets_the_page_and_nothing_else(live: watch.Watch) -> None:
    assert live.server_address[0] == "127.0.0.1"
    assert b"Plotly" in ask(live, "")[1]
    assert ask(live, "", Host=f"localhost:{live.server_port}")[0] == 200
    for host in ("evil.example", f"evil.example:{live.server_port}", "127.0.0.1.evil.example", "127.0.0.1:1", ""):
        assert ask(live, "data", Host=host)[0] == 403, host
    for path in ("one/run.json", "../runs/one/run.json", "one/", "page.js", "data/"):
        assert ask(live, path)[0] == 404, path
    for secret in ("", f"{live.secret}x/", f"{live.secret[:-1]}/", "%00/", "\u00e9/"):  # other accounts of this machine
        assert b"Plotly" not in request(f"http://127.0.0.1:{live.server_port}/{quote(secret)}data")[1], secret
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert request(live.url + "data", method)[0] == 501
    with urllib.request.urlopen(live.url) as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"


@pytest.mark.parametrize(("port", "reason"), [(None, "in use"), (70_000, "no such port")])
def test_a_port_that_cannot_be_had_is_one_sentence(live: watch.Watch, port: int | None, reason: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=rf"cannot serve on port \d+: .*{reason}.*--port"):
        watch.Watch(live.shown, live.server_port if port is None else port)


# --- in a real browser ---

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser_needed = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all tests."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


# Bands have an outline of width zero.
LINES = "[...document.querySelectorAll('#chart path.js-line')].filter(p => parseFloat(p.style.strokeWidth) > 0).length"


class Reader:
    """Somebody who reads a page, and notices what goes wrong on it."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("#chart .scatterlayer .trace path.js-line")

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def lines(self) -> int:
        """How many curves are drawn."""
        return self.page.evaluate(LINES)

    def bands(self) -> int:
        """How many bands are drawn."""
        return self.page.locator("#chart .fills path.js-fill").count()

    def until(self, condition: str) -> None:
        """Wait for something that the page will do soon."""
        end = time.monotonic() + 10
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, condition
            self.page.wait_for_timeout(30)


@browser_needed
def test_the_chart_does_what_its_reader_asks(chromium: Browser, comparison: Path, tmp_path: Path) -> None:
    address = page.write([comparison], tmp_path / "report.html").as_uri()
    with Reader(chromium, address) as reader:
        view = reader.page
        assert (reader.lines(), reader.bands()) == (4, 4)
        view.get_by_role("button", name="SimFBO").click()  # line and band
        reader.until(f"{LINES} === 3")
        assert reader.bands() == 3
        view.get_by_role("button", name="hide all").click()
        view.get_by_role("button", name="show all").click()
        assert (reader.lines(), reader.bands()) == (4, 4)
        view.get_by_label("Bands", exact=True).select_option("none")
        reader.until(f"{LINES} === 4")
        assert reader.bands() == 0
        before = view.locator("#chart path.js-line").first.get_attribute("d")
        titles = set()
        for axis in view.locator("#axis option").evaluate_all("all => all.map(each => each.value)"):
            view.get_by_label("Against", exact=True).select_option(axis)
            titles.add(view.locator("#chart .xtitle").text_content())
        assert len(titles) == len(grouping.CHART_AXES)
        view.get_by_label("log x").check()
        assert view.evaluate("chart._fullLayout.xaxis.type") == "log"
        view.get_by_label("log y").set_checked(not view.get_by_label("log y").is_checked())
        view.get_by_label("Metric", exact=True).select_option("hypergradient")
        assert view.locator("#chart .ytitle").text_content() == "|grad h|"
        reader.until(f"document.querySelector('#chart path.js-line').getAttribute('d') !== {json.dumps(before)}")
        view.get_by_label("focus on the end").check()
        assert view.locator("table.summary tbody tr").count() == 4
        assert reader.wrong == []
        assert reader.requests == [address]


@browser_needed
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_and_follows_the_scheme(
    chromium: Browser, comparison: Path, tmp_path: Path, histories: Any, width: int
) -> None:
    long = "a-name-" + 20 * "without-end"
    write_run(
        comparison / long, histories["fedbio", 0], "longest", hyper={long: long}, title=long, environment={long: long}
    )
    address = page.write([comparison], tmp_path / "report.html").as_uri()
    parts = {
        "body": "backgroundColor",
        ".card": "backgroundColor",
        "#chart .xtick text": "fill",
        "#chart .trace:last-child path.js-line": "stroke",
    }
    colours = ", ".join(f"getComputedStyle(document.querySelector('{part}')).{kind}" for part, kind in parts.items())
    look = f"[{colours}]"
    with Reader(chromium, address, viewport={"width": width, "height": 800}, color_scheme="light") as reader:
        light = reader.page.evaluate(look)
        assert reader.page.evaluate("document.documentElement.scrollWidth") == width
        reader.page.emulate_media(color_scheme="dark")
        reader.until(f"{look}[3] !== '{light[3]}'")
        dark = reader.page.evaluate(look)
        assert all(a != b for a, b in zip(light, dark, strict=True)), (light, dark)
        assert reader.wrong == []


@browser_needed
def test_names_cannot_run_scripts(chromium: Browser, tmp_path: Path, histories: Any) -> None:
    address = page.write([evil_run(tmp_path, histories["fedbio", 0])], tmp_path / "report.html").as_uri()
    with Reader(chromium, address) as reader:
        view = reader.page
        view.get_by_label("Metric", exact=True).select_option(index=1)
        assert view.locator("#chart .ytitle").text_content() == "metric " + EVIL
        assert view.locator("h1").text_content() == f"{EVIL} on {EVIL}"
        assert view.evaluate("window.hurt") is None
        assert reader.wrong == []
        assert reader.requests == [address]


@browser_needed
def test_the_live_page_shows_news_and_keeps_the_choices(
    chromium: Browser, live: watch.Watch, runs: Path, histories: Any
) -> None:
    with Reader(chromium, live.url) as reader:
        view = reader.page
        view.get_by_label("Against", exact=True).select_option("seconds")
        view.get_by_label("log x").check()
        view.get_by_role("button", name="FedBiO").click()
        view.locator("#configuration-1 summary").click()  # closes it
        view.evaluate("scrollTo(0, 300)")
        append(runs / "one", "fedbio", histories["fedbio", 0][5:])
        reader.until("document.querySelector('table.summary tbody tr').textContent.includes('30')")
        write_run(runs / "two", histories["simfbo", 0], "simfbo", status="failed", failure="it fell over.")
        view.get_by_role("button", name="SimFBO").wait_for()
        reader.until(f"{LINES} === 1")
        assert view.get_by_label("Against", exact=True).input_value() == "seconds"
        assert view.get_by_label("log x").is_checked()
        assert view.get_by_role("button", name="FedBiO").get_attribute("aria-pressed") == "false"
        assert view.locator("#configuration-1").get_attribute("open") is None
        assert view.evaluate("scrollY") == 300
        view.get_by_role("button", name="FedBiO").click()
        assert view.evaluate("Math.max(...chart.data.find(t => t.name === 'FedBiO').x)") == pytest.approx(
            histories["fedbio", 0][-1]["seconds"], rel=1e-6
        )
        assert "it fell over." in (view.locator(".failures").text_content() or "")
        assert {url.removeprefix(live.url) for url in reader.requests} == {"", "data"}
        live.shutdown()
        live.server_close()
        reader.until("document.getElementById('news').textContent.includes('does not answer')")
