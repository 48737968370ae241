"""The live pages of a federation: what they say, also in a real browser, and that nothing ends them; health."""

import dataclasses
import datetime
import json
import shutil
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from playwright.sync_api import Browser, Page, sync_playwright

import fedbilevel as fb

pytest.importorskip("nvflare")

from fedbilevel.federation import health, presence, project, setup
from fedbilevel.federation.ledger import EXCHANGES, LEDGER
from fedbilevel.federation.watch import page_of
from fedbilevel.federation.watch.progress import DRAWN, RunProgress, Thinned
from fedbilevel.federation.worker import SETTINGS
from fedbilevel.report.watch import Watch
from fedbilevel.storage.files import alone
from fedbilevel.storage.run_folder import RECORDS
from fedbilevel.storage.tail import Tail

SITES = ["cleveland", "va"]
HURT = "<img src=x onerror='window.hurt = 1'><script>window.hurt = 2</script>"
NOW = time.time()


def exchange(round: int, failed: dict[str, str] | None = None, at: float | None = None) -> dict[str, Any]:
    answered = [name for name in SITES if name not in (failed or {})]
    traffic = {name: [1000 * round, 500 * round] for name in SITES}
    return {
        "time": NOW + round if at is None else at, "round": round, "method": "descend", "answered": answered,
        "failed": failed or {}, "bytes_down": 2000, "bytes_up": 1000, "seconds": 0.125, "traffic": traffic,
    }  # fmt: skip


def record(round: int) -> dict[str, Any]:
    own = {f"auc_{name}": 0.6 + 0.1 * n + 0.001 * (round % 100) for n, name in enumerate(SITES)}
    return {"run": "fedbio", "round": round, "seconds": 2.0 * round, "megabytes": 0.1 * round, "auc": 0.65, **own}


def append(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def run(home: Path, name: str, status: str = "running", rounds: int = 20, **facts: Any) -> Path:
    """A run as the coordinator writes it."""
    folder = home / "runs" / name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[task]\nname = "regularization"\n[run]\nrounds = 40\nseed = 0\n')
    about = {
        "task": "regularization", "title": "FedBiO", "algorithm": "fedbio", "main": "fedbio", "rounds": 40, "seed": 0,
        "round": rounds, "headline": {"auc": "mean test AUC"}, "sites": SITES, "asked": NOW, "name": name,
        "labels": {"fedbio": "FedBiO"}, "bytes_down": 40_000, "bytes_up": 20_000, "environment": {},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({**about, "status": status, **facts}))
    append(folder / EXCHANGES, *(exchange(n) for n in range(1, rounds + 1)))
    append(folder / RECORDS, *(record(n) for n in range(0, rounds + 1, 2)))
    return folder


def certificate(name: str, days: float, root: bool = False) -> bytes:
    """A certificate that ends after so many days."""
    key = ec.generate_private_key(ec.SECP256R1())
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer = named if root else x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hospitals")])
    made = x509.CertificateBuilder(issuer, named, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(end - datetime.timedelta(days=days + 1)).not_valid_after(end)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A federation with certificates where they lie."""
    folder = tmp_path / "hospitals"
    parties = {**dict.fromkeys(SITES, "site"), "anna": "coordinator"}
    names = {"server/startup/server.crt": "localhost", "coordinator/startup/client.crt": "coordinator@hospitals.org"}
    for path, name in names.items():
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_bytes(certificate(name, 359.5))
    (folder / "server" / "startup" / "rootCA.pem").write_bytes(certificate("hospitals", 3649.5, root=True))
    (folder / "kits").mkdir()
    for name in SITES:
        with zipfile.ZipFile(folder / "kits" / f"{name}.zip", "w") as kit:
            kit.writestr("startup/client.crt", certificate(name, 300))  # and a renewed one
            kit.writestr("client.crt", certificate(name, 359.5))
    project.save(project.Project("hospitals", "localhost", 8102, parties, '[task]\nname = "quadratic"\n'), folder)
    return folder


@pytest.fixture
def serving(home: Path) -> Iterator[Path]:
    """The coordinator is there: this process."""
    since = {name: time.time() - 3600 for name in SITES}
    with alone(home):
        presence.note(home / presence.COORDINATOR, connected=SITES, since=since, began=time.time() - 7200)
        yield home


def site(folder: Path, rows: int = 10) -> Path:
    """The folder of a site that has taken part in a run."""
    folder.mkdir(parents=True)
    consent = {"approved": ["0123456789abcdef"], "rules": None, "limits": {"min_rows": 10, "tasks": ["regularization"]}}
    settings = {"name": "cleveland", "data": "/data/patients.csv", "columns": {}, "consent": consent}
    (folder / SETTINGS).write_text(json.dumps(settings))
    kit = {"party": "cleveland", "federation": "hospitals", "host": "localhost", "port": 8102}
    (folder / "kit.json").write_text(json.dumps(kit))
    append(folder / LEDGER, *(line for n in range(rows) for line in (ledger("run", n), ledger("evaluate", n))))
    return folder


def ledger(action: str, round: int, error: str = "", run: str = "heart", **more: Any) -> dict[str, Any]:
    step = {"x.tree": {"shape": [22], "type": "float32", "norm": 1.5}}
    loss = {"loss": {"shape": [], "type": "float64", "norm": 2.0, "value": -2.0 + 0.1 * round}}
    return {
        "time": NOW + round, "run": run, "action": action, "method": "descend" if action == "run" else "",
        "round": round, "bytes_in": 1200, "bytes_out": 700, "left": step if action == "run" else loss, "error": error,
        **more,
    }  # fmt: skip


# --- what they say ---


def test_the_coordinators_page_says_who_is_there_and_how_the_run_goes(serving: Path) -> None:
    folder = run(serving, "heart", seen=NOW)
    run(serving, "before", "finished", asked=NOW - 1e5, summary={"auc": 0.8125}, undelivered=["va"])
    run(serving, "later", "waiting", 0, asked=NOW + 5, waits="waiting for boston.")
    append(folder / EXCHANGES, exchange(21, {"va": "it did not answer in time."}))
    page = page_of(serving)
    made = page.content()
    assert made.title == "hospitals: federation"
    for part in ("cleveland", "connected", "administrator", "of 2", "everybody is there", "359 days"):
        assert part in made.above, part
    assert '<dd class="value">21 <small>of 40</small>' in made.above
    assert "125 ms each (median)" in made.above
    assert "21 kB</td>" in made.above  # to a site
    assert "10.5 kB</td>" in made.above  # from it
    assert "it did not answer in time. (round 21)" in made.above
    assert "Certificate of the authority: 36" in made.above
    for part in ("waiting for boston.", "0.8125", "without its result so far: va.", 'href="report/before"'):
        assert part in made.below, part
    lines = {each["name"]: each for each in made.chart["series"]}
    assert list(lines) == [*SITES, "mean"]
    assert lines["va"]["metrics"]["auc"]["mean"][-1] == pytest.approx(0.72)
    assert made.chart["metrics"] == {"auc": "mean test AUC"}
    assert "<h1>FedBiO on regularization</h1>" in (page.part("report/before") or "")
    for wrong in ("report/none", "report/../before", "report/", "before", "report/before/run.json"):
        assert page.part(wrong) is None


def test_a_revoked_site_is_shown_as_such(serving: Path) -> None:
    (serving / "server").mkdir(exist_ok=True)
    given = project.Issued("va", f"{1:040x}", "key", 2e9)
    project.save(dataclasses.replace(project.load(serving), certificates=(given,)), serving)
    setup.revoke(serving, "va")
    above = page_of(serving).content().above
    assert above.count(">revoked<") == 1
    assert "1 <small>of 1</small>" in above  # the others are there


def test_a_coordinator_that_is_not_there_is_not_shown_as_there(serving: Path) -> None:
    run(serving, "heart")
    content = page_of(serving).content()
    assert "not running" not in content.above
    state = json.loads((serving / presence.COORDINATOR).read_text())
    (serving / presence.COORDINATOR).write_text(json.dumps({**state, "time": time.time() - 200}))
    assert "has not said anything for 200 seconds" in page_of(serving).content().above
    (serving / presence.COORDINATOR).write_text(json.dumps({**state, "pid": 2**22}))  # nobody's number
    content = page_of(serving).content()
    assert "The server is not running: start it with &#39;fedbilevel federation start" in content.above
    assert ">connected<" not in content.above
    assert content.above.count(">offline<") == 2


def test_a_sites_page_says_what_has_left_it(tmp_path: Path) -> None:
    folder = site(tmp_path / "cleveland")
    append(folder / LEDGER, ledger("hello", -1, "the study 0123 was not approved.", "other"))
    append(folder / LEDGER, ledger("run", 3, "this message is from va.", caller="va"))
    with alone(folder):
        presence.note(folder / presence.SITE, changed=NOW, connected=NOW, problem="")
        made = page_of(folder).content()
    assert "<h1>cleveland</h1>" in made.above
    assert ">connected<" in made.above
    assert "15.4" in made.above  # kB in all
    assert "in 22 answers to the server" in made.above
    assert "the study 0123 was not approved." in made.below
    assert "run descend from va" in made.below
    assert "x[22]" in made.below
    assert "0123456789ab" in made.below
    (line,) = made.chart["series"]
    assert line["metrics"]["loss"]["mean"][:2] == [-2.0, -1.9]  # with its sign, which a norm does not have
    assert "not running" in page_of(folder).content().above


def test_names_and_reasons_are_text_and_nothing_else(serving: Path, tmp_path: Path) -> None:
    folder = run(
        serving, HURT.replace("/", "|"), task=HURT, title=HURT, failure=HURT, waits=HURT, headline={"auc": HURT},
        refused={HURT: HURT}, sites=[*SITES, HURT], status=HURT,
    )  # fmt: skip
    append(folder / EXCHANGES, exchange(21, {HURT: HURT}))
    append(folder / RECORDS, {**record(22), f"auc_{HURT}": 0.5, HURT: 1.0})
    (serving / "server.log").write_text(f"2026-11-18 20:10:47,936 - {'x'} - ERROR - [run=1] - {HURT}\n")
    own = site(tmp_path / "site")
    append(own / LEDGER, ledger("run", 1, HURT, HURT, method=HURT, caller=HURT))
    for place in (serving, own):
        page = page_of(place)
        made, whole = page.content(), page.page()
        assert HURT[:10] not in made.above + made.below
        assert "&lt;img" in made.below
        assert whole.count("</script>") == 3
        assert "default-src 'none'" in whole
        assert "unsafe-inline'; img-src" in whole  # of styles only
        assert "script-src 'sha256-" in whole


def test_warnings_of_the_server_are_shown_once(serving: Path) -> None:
    lines = [f"2026-11-18 20:10:{n:02d},000 - Cell - WARNING - [run=1] - connection {n} was lost" for n in range(30)]
    noise = ["2026-11-18 20:10:47,936 - Cell - INFO - all is well", "Traceback (most recent call last):", "\x00\xff"]
    (serving / "server.log").write_text("\n".join([*lines, *noise]))
    made = page_of(serving).content()
    assert "connection 29 was lost" in made.below
    assert "30 times" in made.below
    assert "all is well" not in made.below


# --- nothing ends them ---


def test_a_long_run_is_sent_in_few_numbers_and_read_once(serving: Path) -> None:
    folder = run(serving, "heart", rounds=0)
    append(folder / EXCHANGES, *(exchange(n) for n in range(1, 10_001)))
    append(folder / RECORDS, *(record(n) for n in range(1, 10_001)))
    page = page_of(serving)
    first = page.content()
    rounds = first.chart["series"][0]["axes"]["round"]
    assert DRAWN <= len(rounds) <= 2 * DRAWN + 1
    assert (rounds[0], rounds[-1]) == (0, 10_000)
    assert len(page.news().content) < 150_000
    assert "of 10001 evaluations" in first.chart["caption"]
    append(folder / RECORDS, record(10_001))
    began = time.process_time()
    page.content()
    assert page.content().chart["series"][0]["axes"]["round"][-1] == 10_001
    assert time.process_time() - began < 1.0  # seconds of work, where all lines again would be several


TABLES = ("round", "time", "since", "began", "connected", "limits", "consent", "asked", "sites")
LISTS = ("pid", "rounds", "bytes_down", "left", "failed", "traffic", "headline", "summary", "run")
STRANGE = json.dumps({**{name: {"a": []} for name in TABLES}, **{name: [{}] for name in LISTS}}).encode()


@pytest.mark.parametrize("kind", ["coordinator", "site"])
def test_folders_that_are_damaged_or_removed_do_not_end_the_page(serving: Path, tmp_path: Path, kind: str) -> None:
    folder = run(serving, "heart")
    place = serving if kind == "coordinator" else site(tmp_path / "site")
    page = page_of(place)
    with Watch(page) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        assert server.news().content
        for path in [path for path in place.rglob("*.json*") if "startup" not in path.parts]:
            whole = path.read_bytes()
            for content in (whole[: len(whole) // 2], b"", b"null", b"[1, 2]", STRANGE, b"\xff\x00"):
                path.write_bytes(content)
                if path.name == project.FILE:  # without which there is no federation
                    with pytest.raises(fb.FedbilevelError):
                        page.content()
                else:
                    assert page.content().title, (path, content)
            path.write_bytes(whole)
        if kind == "coordinator":
            for name in ("kits/cleveland.zip", "server/startup/server.crt", "coordinator"):
                target = serving / name
                shutil.rmtree(target) if target.is_dir() else target.write_bytes(b"-----BEGIN CERTIFICATE-----\n")
            assert "cleveland" in page_of(place).content().above
            shutil.rmtree(folder)
            assert "No run yet" in page.content().above
        shutil.rmtree(place)
        with pytest.raises((fb.FedbilevelError, OSError)):
            server.news()  # which the handler answers with a sentence
        server.shutdown()


def test_a_file_that_grows_is_read_once_and_one_that_was_replaced_again(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_text('{"n": 1}\n{"n": 2}\n{"n"')
    assert tail.read() == (False, [{"n": 1}, {"n": 2}])
    append(path, {"torn": 1})
    append(path, {"n": 3})
    assert tail.read() == (False, [{"n": 3}])  # the torn line is none
    path.write_text('{"n": 9}\n')
    assert tail.read() == (True, [{"n": 9}])
    path.write_text('{"m": 8}\n{"m": 7}\n{"m": 6}\n' + "x" * 200)  # longer, but another one
    assert tail.read() == (True, [{"m": 8}, {"m": 7}, {"m": 6}])
    path.rename(tmp_path / "lines.0000000000.jsonl")  # a full ledger goes on in another file
    path.write_text('{"m": 5}\n')
    assert tail.read() == (True, [{"m": 8}, {"m": 7}, {"m": 6}, {"m": 5}])
    append(path, {"m": 4})
    assert tail.read() == (False, [{"m": 4}])
    (tmp_path / "lines.0000000000.jsonl").unlink()
    path.unlink()
    assert tail.read() == (True, [])
    path.write_text('{"n": 1}\n')
    assert tail.read() == (False, [{"n": 1}])


def test_a_run_that_goes_back_has_no_round_twice() -> None:
    rows = Thinned()
    for round in [*range(10), *range(5, 8)]:
        rows.add({"round": round})
    assert [row["round"] for row in rows.shown()] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_speed_is_that_of_the_last_exchanges_and_fades(tmp_path: Path) -> None:
    now = time.time()
    append(tmp_path / EXCHANGES, *(exchange(n, at=now - 5 + n / 10) for n in range(50)))
    progress = RunProgress(tmp_path)
    progress.update()
    assert progress.rate() == pytest.approx(10, rel=0.2)
    assert progress.seconds_per_round() == pytest.approx(0.1, rel=0.01)
    old = tmp_path / "old"
    old.mkdir()
    append(old / EXCHANGES, *(exchange(n, at=now - 600 + n / 10) for n in range(50)))
    progress = RunProgress(old)
    progress.update()
    assert progress.rate() < 0.01


# --- health ---


def test_health_is_one_line_and_an_exit_code(serving: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(serving, "heart")
    found = health.of(serving)
    assert found.healthy, found.line()
    assert found.days == 359
    line = found.line()
    assert "\n" not in line
    for part in ("hospitals: healthy", "up since", "last exchange", "GB free", "certificate valid for 359 days"):
        assert part in line
    assert json.loads(found.json())["healthy"] is True
    (serving / "coordinator.log").write_text("2026-11-18 20:10:47,936 - x - ERROR - the disk is full\n")
    assert "last error: the disk is full (2026-11-18 20:10:47)" in health.of(serving).line()
    (serving / presence.COORDINATOR).unlink()
    assert "NOT HEALTHY: the server is not running" in health.of(serving).line()


def test_a_site_is_healthy_when_it_is_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site(tmp_path / "cleveland")
    assert "this site is not running" in health.of(folder).line()
    with alone(folder):
        presence.note(folder / presence.SITE, changed=time.time(), connected=0.0, problem="")
        assert health.of(folder).healthy  # it has time to connect
        presence.note(folder / presence.SITE, changed=time.time() - 1000, connected=0.0, problem="the port is closed.")
        assert health.of(folder).problems == ("the port is closed.",)
        presence.note(folder / presence.SITE, changed=time.time() - 1000, connected=NOW, problem="")
        assert health.of(folder).healthy
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        assert health.of(folder).problems == ("the disk is almost full: free some space.",)


def test_certificates_that_end_are_a_problem(serving: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 340 * 86_400)
    assert '"number soon">19 days' in page_of(serving).content().above
    monkeypatch.setattr(time, "time", lambda: now + 365 * 86_400)
    page = page_of(serving).content()
    assert '"number bad">expired' in page.above
    assert "The certificate of the server has expired." in page.above
    assert "the certificate has expired: renew it." in health.of(serving).problems


# --- in a real browser ---

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def until(view: Page, condition: str) -> None:
    """Wait for something that the page will do soon; it forbids what Playwright's own waiting needs."""
    end = time.monotonic() + 60
    while not view.evaluate(condition):
        assert time.monotonic() < end, condition
        view.wait_for_timeout(50)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("kind", ["coordinator", "site"])
def test_pages_fit_follow_what_happens_and_run_nothing_else(
    chromium: Browser, serving: Path, tmp_path: Path, kind: str
) -> None:
    folder = run(serving, "heart", refused={HURT: HURT})
    place = serving if kind == "coordinator" else site(tmp_path / "site")
    append(folder / EXCHANGES, exchange(21, {"va": HURT + "x" * 300}))
    long = "an-entry-" + 20 * "without-end"
    append(
        site(tmp_path / "other", 0) / LEDGER if kind == "coordinator" else place / LEDGER, ledger("run", 3, HURT, long)
    )
    with Watch(page_of(place)) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        for width in (1280, 390):
            context = chromium.new_context(viewport={"width": width, "height": 800})
            view = context.new_page()
            wrong: list[str] = []
            asked: list[str] = []
            view.set_default_timeout(120_000)
            view.on("console", lambda message, wrong=wrong: wrong.append(message.text))
            view.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
            view.on("request", lambda request, asked=asked: asked.append(request.url))
            view.goto(server.url)
            view.wait_for_selector("#chart .scatterlayer .trace path.js-line")
            assert view.evaluate("document.documentElement.scrollWidth") == width
            if kind == "coordinator":
                more = 22 if width == 1280 else 24
                append(folder / EXCHANGES, exchange(more))
                append(folder / RECORDS, record(more))
                until(view, f"document.querySelectorAll('.value')[1].textContent.startsWith('{more} of 40')")
                until(view, f"Math.max(...chart.data[0].x) === {more}")
                assert view.locator("td .badge", has_text="connected").count() == 2
            else:
                more = 20 if width == 1280 else 30
                append(place / LEDGER, ledger("evaluate", more))
                until(view, f"Math.max(...chart.data.flatMap(line => line.x)) === {more}")
            assert view.evaluate("document.documentElement.scrollWidth") == width
            assert view.evaluate("window.hurt") is None
            assert HURT in (view.locator("body").text_content() or "")
            assert wrong == []
            assert {url.removeprefix(server.url) for url in asked} == {"", "data"}
            context.close()
        server.shutdown()
