"""Ledgers: whatever is done to one afterwards shows, and whatever a crash does is repaired and said."""

import io
import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import fedbilevel as fb
from fedbilevel.federation import ledger, project, setup
from fedbilevel.federation.ledger import DONE, EXCHANGES, LEDGER, Ledger, verify
from fedbilevel.federation.ledgers import ledger as show
from helpers import here


def written(folder: Path, count: int = 10) -> Path:
    log = Ledger(folder / LEDGER, "north")
    for number in range(count):
        log.note({"action": "run", "round": number}, caller="server")
    return log.path


def shown(console: Console) -> str:
    """What was printed."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def changed(path: Path, number: int, change: Callable[[bytes], bytes]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = change(lines[number])
    path.write_bytes(b"".join(lines))


def test_lines_are_numbered_and_chained_and_name_the_caller(tmp_path: Path) -> None:
    path = written(tmp_path)
    found = list(ledger.lines(path))
    assert [line["n"] for line in found] == list(range(10))
    assert found[0]["ledger"] == "north"
    assert {line["caller"] for line in found} == {"server"}
    known = verify(path, "north")
    assert known.lines == 10
    assert known.since == found[0]["time"]
    assert not known.remarks


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (3, lambda line: line.replace(b'"round": 3', b'"round": 4'), r"line 4 was changed"),
        (9, lambda line: line.replace(b'"server"', b'"nobody"'), r"line 10 was changed"),
        (0, lambda line: line.replace(b'"north"', b'"south"'), r"says that this is the ledger of 'south'"),
        (5, lambda line: b"", r"line 6 has the number 6, but 5 should follow"),
        (0, lambda line: b"", r"line 1 has the number 1, but 0 should follow"),
        (9, lambda line: b"", r"ends with number 8, but 9 was written"),
        (9, lambda line: line[:20], r"ends with number 8, but 9 was written"),
        (4, lambda line: line + line, r"line 6 has the number 4, but 5 should follow"),
        (4, lambda line: b"[" * 100_000 + b"\n", r"line 5 is damaged"),
        (4, lambda line: b"\xff\xfe\n", r"line 5 is damaged"),
    ],
)
def test_every_change_shows(tmp_path: Path, number: int, change: Callable[[bytes], bytes], said: str) -> None:
    path = written(tmp_path)
    changed(path, number, change)
    with pytest.raises(fb.FedbilevelError, match=said):
        verify(path, "north")
    Ledger(path, "north").note({"action": "more"})  # it stays visible
    with pytest.raises(fb.FedbilevelError):
        verify(path, "north")


def test_another_ledger_in_its_place_shows(tmp_path: Path) -> None:
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "rootCA.pem").write_text("one")
    first = ledger.owner(tmp_path, "north")
    (tmp_path / "startup" / "rootCA.pem").write_text("two")
    assert ledger.owner(tmp_path, "north") != first
    path = written(tmp_path)
    with pytest.raises(fb.FedbilevelError, match="the ledger of 'north'"):
        verify(path, first)


def test_a_missing_note_of_the_last_hash_shows_for_good(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.with_name(f"{LEDGER}.last").unlink()
    with pytest.raises(fb.FedbilevelError, match=r"served\.jsonl\.last, with the last hash, is missing"):
        verify(path)
    Ledger(path, "north").note({"action": "more"})
    with pytest.raises(fb.FedbilevelError, match="line 11 says that the last hash was missing"):
        verify(path)


def test_a_crash_in_the_middle_of_a_line_is_repaired_and_said(tmp_path: Path) -> None:
    path = written(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"n": 10, "bef')
    assert verify(path).remarks == ("The last line is incomplete: a process ended while it was writing.",)
    Ledger(path, "north").note({"action": "more"})
    known = verify(path)
    assert known.lines == 11
    assert "14 bytes of an incomplete line were removed" in known.remarks[0]


def test_a_crash_between_a_line_and_its_note_is_nothing(tmp_path: Path) -> None:
    path = written(tmp_path)
    note = path.with_name(f"{LEDGER}.last")
    before = note.read_bytes()
    Ledger(path, "north").note({"action": "more"})
    note.write_bytes(before)
    assert verify(path).lines == 11
    Ledger(path, "north").note({"action": "more"})
    assert verify(path).lines == 12


def test_the_chain_goes_on_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "FULL", 1000)
    path = written(tmp_path, 40)
    files = sorted(each.name for each in tmp_path.glob("served.*.jsonl"))
    assert len(files) >= 4
    assert files[0] == "served.0000000000.jsonl"
    assert verify(path, "north").lines == 40
    assert [line["round"] for line in ledger.lines(path)] == list(range(40))
    changed(tmp_path / files[2], 1, lambda line: line.replace(b"run", b"ran"))
    with pytest.raises(fb.FedbilevelError, match=rf"{files[2]}, line 2 was changed"):
        verify(path)
    (tmp_path / files[2]).unlink()
    with pytest.raises(fb.FedbilevelError, match="should follow"):
        verify(path)


def add(path: Path) -> None:
    log = Ledger(path, "north")
    for number in range(50):
        log.note({"round": number})


def test_several_writers_write_one_chain(tmp_path: Path) -> None:
    """Processes of one site, or of one coordinator: each opens the files for itself."""
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add, [tmp_path / LEDGER] * 3))
    assert verify(tmp_path / LEDGER, "north").lines == 150


def test_refusals_do_not_fill_the_disk(tmp_path: Path) -> None:
    log = Ledger(tmp_path / LEDGER, "north")
    for _ in range(5000):
        log.note({"error": "no"}, refused=True)
    assert verify(log.path).lines == ledger.MOST_REFUSED
    log.note({"action": "run"})
    assert list(ledger.lines(log.path))[-1]["left_out"] == 5000 - ledger.MOST_REFUSED


@pytest.mark.parametrize("kind", ["f4", "f8", "f2", "i4", "u1", "?"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_what_leaves_is_described_by_shapes_and_norms(kind: str, shape: tuple[int, ...]) -> None:
    """In double precision, whatever the type: 200 * 200 is too large for u1."""
    array = np.full(shape, 200).astype(kind)
    exact = math.sqrt(sum(float(each) ** 2 for each in array.ravel()))
    (found,) = ledger.described({"x": array}).values()
    assert found["shape"] == list(shape)
    assert found["norm"] == pytest.approx(exact, rel=1e-12)
    assert ("value" in found) == (shape == ())


def test_the_command_says_whether_ledgers_are_intact(tmp_path: Path) -> None:
    site = tmp_path / "north"
    site.mkdir()
    (site / "kit.json").write_text(json.dumps({"party": "north"}))
    path = written(site)
    assert here("federation", "log", "--verify", str(site), cwd=tmp_path) == (0, "")
    changed(path, 3, lambda line: line.replace(b"3", b"4", 1))
    assert here("federation", "log", "--verify", str(site), cwd=tmp_path) == (
        2,
        "fedbilevel: 1 of 1 ledgers are not intact.\n",
    )
    (tmp_path / "empty").mkdir()
    code, said = here("federation", "log", "--verify", str(tmp_path / "empty"), cwd=tmp_path)
    assert code == 2
    assert "has no ledger" in said


def test_the_coordinator_keeps_ledgers_of_the_same_kind(tmp_path: Path) -> None:
    home = tmp_path / "hospitals"
    (home / "runs" / "r").mkdir(parents=True)
    given = project.Issued("b", f"{1:040x}", "key", 2e9)
    project.save(project.Project("hospitals", "localhost", 8102, {"a": "site", "b": "site"}, "", (given,)), home)
    (home / "server").mkdir()
    setup.revoke(home, "b")
    project.note(home, "run requested", run="r")
    done = list(ledger.lines(home / DONE))
    assert [line["action"] for line in done] == ["revoked", "run requested"]
    assert all(line["caller"] for line in done)
    facts = {"method": "descend", "answered": ["a"], "bytes_down": 1234, "bytes_up": 567, "seconds": 0.1, "traffic": {}}
    log = Ledger(home / "runs" / "r" / EXCHANGES, ledger.owner(home, "r"))
    log.note({"round": 0, "failed": {"b": "it is offline."}, **facts})
    said = Console(file=io.StringIO(), width=100)
    show(home / "runs" / "r", said, last=1)
    assert re.search(r"descend .* 1 .* 1,234 .* 567 .* b \(1\)", shown(said))
    assert "b: it is offline." in shown(said)
    assert here("federation", "log", "--verify", str(home), cwd=tmp_path) == (0, "")
    assert here("federation", "log", "--verify", str(home / "runs" / "r"), cwd=tmp_path) == (0, "")
    assert here("federation", "log", str(home), cwd=tmp_path) == (0, "")
    project.note(home, "approved", party="a", until=2e9)
    said = Console(file=io.StringIO(), width=100)
    show(home, said)
    assert f"{datetime.fromtimestamp(2e9):%Y-%m-%d %H:%M:%S}" in shown(said)  # people do not read seconds
    changed(home / "runs" / "r" / EXCHANGES, 0, lambda line: line.replace(b'"round": 0', b'"round": 1'))
    assert here("federation", "log", "--verify", str(home), cwd=tmp_path)[0] == 2
