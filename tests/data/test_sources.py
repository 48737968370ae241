"""Files found, fetched and verified."""

import hashlib
import os
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel import cache as caching
from fedbilevel.data import sources, tables
from helpers import real
from serving import GOOD, QUICK, Server, files, source


@pytest.mark.parametrize("kind", ["good", "slow", "twice"])
def test_download_arrives_and_is_kept(kind: str, server: Server, cache: Path) -> None:
    path = fb.data.find(source(server, kind), **QUICK)
    assert path == cache / "things" / "things.bin"
    assert path.read_bytes() == GOOD
    assert files(cache) == ["things.bin"]
    asked = len(server.asked)
    assert asked == (3 if kind == "twice" else 1)
    assert fb.data.find(source(server, kind), **QUICK) == path
    assert len(server.asked) == asked  # from the cache


@pytest.mark.parametrize(
    ("kind", "tries", "reason"),
    [
        ("truncated", 3, "broke after 512000 of 1024000"),
        ("quiet", 3, "truncated"),
        ("stalled", 3, "no response within 0.5 seconds"),
        ("wrong", 1, "not the expected file"),
        ("long", 1, "longer than 1024000"),
        ("missing", 1, "404"),
    ],
)
def test_bad_download_leaves_nothing(kind: str, tries: int, reason: str, server: Server, cache: Path) -> None:
    with pytest.raises(fb.FedbilevelError, match=reason) as caught:
        fb.data.find(source(server, kind), **QUICK)
    assert len(server.asked) == tries
    assert files(cache) == []
    message = str(caught.value)
    for part in ("things.bin", str(cache / "things"), hashlib.sha256(GOOD).hexdigest(), "FEDBILEVEL_DATA"):
        assert part in message


def test_next_address_and_mirror(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fb.data.find(source(server, "missing", "wrong", "good"), **QUICK)
    assert [asked.split("/")[1] for asked in server.asked] == ["missing", "wrong", "good"]
    path.unlink()
    monkeypatch.setenv("FEDBILEVEL_MIRROR", server.address + "/good/")
    fb.data.find(source(server, "missing"), **QUICK)
    assert server.asked[-1] == "/good/things/things.bin"


def test_offline_is_one_sentence(cache: Path) -> None:
    with Server() as closed:
        there = source(closed, "good")
    with pytest.raises(fb.FedbilevelError, match="refused") as caught:
        fb.data.find(there, **QUICK)
    assert str(cache / "things") in str(caught.value)
    assert "sha256" in str(caught.value)


def test_folders_come_before_the_cache(
    server: Server, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = source(server, "good")
    cached = fb.data.find(wanted, **QUICK)
    second = tmp_path / "second" / "things"
    second.mkdir(parents=True)
    (tmp_path / "first").mkdir()
    (second / "things.bin").write_bytes(GOOD)
    monkeypatch.setenv("FEDBILEVEL_DATA", os.pathsep.join([str(tmp_path / "first"), str(tmp_path / "second")]))
    assert fb.data.find(wanted) == second / "things.bin" != cached
    (second / "things.bin").write_bytes(GOOD[:-1])
    with pytest.raises(fb.FedbilevelError, match=r"second/things/things\.bin is truncated \(1023999 bytes"):
        fb.data.find(wanted)
    (second / "things.bin").write_bytes(GOOD[:-1] + b"x")
    with pytest.raises(fb.FedbilevelError, match=r"second/things/things\.bin is not the expected file"):
        fb.data.find(wanted)
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(fb.FedbilevelError, match="nowhere, which is not a folder"):
        fb.data.find(wanted)


def test_cache_that_cannot_be_written(server: Server, cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(fb.FedbilevelError, match="cannot be written"):
        fb.data.find(source(server, "good"), **QUICK)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_for_terminals(
    terminal: bool, server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))  # rich looks at this
    monkeypatch.setattr(sources.sys.stdout, "isatty", lambda: terminal)
    fb.data.find(source(server, "good"), **QUICK)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("things.bin" in shown.err) == terminal


def test_cache_folder_of_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDBILEVEL_CACHE", raising=False)
    monkeypatch.setattr(caching.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fb.data.cache_folder() == tmp_path / "fedbilevel"
    monkeypatch.setattr(caching.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert fb.data.cache_folder() == tmp_path / "local" / "fedbilevel"
    monkeypatch.setattr(caching.sys, "platform", "darwin")
    assert fb.data.cache_folder().parts[-3:] == ("Library", "Caches", "fedbilevel")


@real
def test_sets_come_from_a_mirror(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBILEVEL_MIRROR", server.address + "/files")
    assert len(fb.data.load("adult").train.labels) == 32561
    assert len(files(cache)) == len(server.asked) == 2


def test_files_of_the_package_are_verified(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there without a cache, and a damaged or missing one is named."""
    assert len(fb.data.load("heart-disease").train.labels) == 920
    assert not cache.exists()
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "sources.py"))
    with pytest.raises(fb.FedbilevelError, match=r"processed\.cleveland\.data is missing: install fedbilevel again"):
        fb.data.load("heart-disease")
    damaged = tables.HEART_FILES["va"]
    (tmp_path / damaged.folder).mkdir()
    (tmp_path / damaged.folder / damaged.name).write_text("63.0,1.0\n")
    with pytest.raises(fb.FedbilevelError, match=r"processed\.va\.data is truncated"):
        sources.packaged(damaged)
