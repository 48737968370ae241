"""Files that survive a crash."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedbilevel.engines.messaging.kept import Kept, Vault
from fedbilevel.storage.files import write_atomically


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is asked of the system, in its order: what reaches the disk, what gets its name, what is removed."""
    happened: list[tuple[str, str]] = []
    sync, replace, unlink = os.fsync, os.replace, Path.unlink

    def synced(number: int) -> None:
        path = Path(f"/proc/self/fd/{number}").resolve()
        happened.append(("sync", f"{path.name}/" if path.is_dir() else "draft"))
        sync(number)

    def renamed(draft: Path, path: Path) -> None:
        happened.append(("name", path.name))
        replace(draft, path)

    def removed(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            happened.append(("remove", path.name))
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(Path, "unlink", removed)
    return happened


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not name open files")
def test_contents_and_names_are_on_the_disk_in_an_order_that_no_loss_of_power_can_hurt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the contents, then the name, then the folder with it; new folders are in theirs before that."""
    happened = watched(monkeypatch)
    write_atomically(tmp_path / "run" / "clients" / "file", b"all")
    run, clients = ("sync", "run/"), ("sync", "clients/")
    assert sorted(happened[:2]) == sorted([("sync", f"{tmp_path.name}/"), run])
    assert happened[2:] == [("sync", "draft"), ("name", "file"), clients]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not name open files")
def test_what_a_client_needs_is_removed_when_what_follows_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = Vault(tmp_path / "memory", {})
    rounds = [Kept(number, {"start": np.zeros(2)}, None) for number in range(3)]
    vault.save(rounds[:2])
    (tmp_path / "memory" / "answer 0").write_bytes(b"provisional")
    happened = watched(monkeypatch)
    vault.save(rounds[1:])
    assert happened[:3] == [("sync", "draft"), ("name", "round 2"), ("sync", "memory/")]
    assert sorted(happened[3:5]) == [("remove", "answer 0"), ("remove", "round 0")]
    assert happened[5:] == [("sync", "memory/")]
