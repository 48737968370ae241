"""The cache of compiled programs: it is hit, bounded, and never a reason to fail."""

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest

from fedbilevel.errors import FedbilevelWarning
from fedbilevel.federation.worker import Settings
from fedbilevel.runs.processes import calls
from fedbilevel.storage import compiled

PROGRAM = """
import collections, json, sys, warnings
import jax, jax.numpy as jnp
from fedbilevel.errors import FedbilevelWarning
from fedbilevel.storage import compiled

usual = warnings.showwarning
def show(message, category, *rest):
    if issubclass(category, FedbilevelWarning):
        print(f"fedbilevel: {message}", file=sys.stderr)
    else:
        usual(message, category, *rest)
warnings.showwarning = show

compiled.WORTH_KEEPING = 0.0
folder = compiled.enable()
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))

@jax.jit
def descend(x):
    return jax.lax.fori_loop(0, 30, lambda i, x: x - 0.1 * jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(x), x)

found = descend(jnp.linspace(0, 1, 7))
print(json.dumps({"folder": str(folder), "bits": [float(v).hex() for v in found],
                  "hits": events["cache_hits"], "misses": events["cache_misses"]}))
"""


def start(setting: Path | str) -> tuple[dict[str, Any], str]:
    """A new process that compiles a small program: what it found, and what it said of errors."""
    environment = {**os.environ, compiled.SWITCH: str(setting)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*-cache"))


def test_the_second_process_compiles_nothing_and_has_the_same_bits(tmp_path: Path) -> None:
    without, said = start("off")
    assert (without["folder"], without["hits"], said) == ("None", 0, "")
    assert not entries(tmp_path)
    first, _ = start(tmp_path)
    kept = entries(tmp_path)
    assert first["hits"] == 0
    assert first["misses"] == len(kept) > 0
    assert {path.parent for path in kept} == {Path(first["folder"])}
    second, said = start(tmp_path)
    assert (second["hits"], second["misses"], said) == (len(kept), 0, "")
    assert entries(tmp_path) == kept
    assert without["bits"] == first["bits"] == second["bits"]


def test_a_damaged_entry_is_one_line_and_replaced(tmp_path: Path) -> None:
    first, _ = start(tmp_path)
    for path in entries(tmp_path):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if "descend" in path.name else b"nothing that was compiled")
    again, said = start(tmp_path)
    assert again["bits"] == first["bits"]
    assert said.count("\n") == 1
    assert said.startswith(f"fedbilevel: cannot read a compiled program in {first['folder']}")
    third, said = start(tmp_path)
    assert (third["misses"], said) == (0, "")
    assert third["hits"] == first["misses"]


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    found, said = start(tmp_path / "file")
    assert (found["folder"], found["misses"]) == ("None", 0)
    assert said.count("\n") == 1
    assert compiled.SWITCH in said
    assert "Not a directory" in said


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of JAX as they were."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)


@pytest.mark.usefixtures("restored")
def test_read_only_and_public_folders_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, str(tmp_path))
    folder = compiled.enable()
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.warns(FedbilevelWarning, match="other users can write to it"):
        assert compiled.enable() is None
    folder.chmod(0o700)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.warns(FedbilevelWarning, match="it is read-only"):
        assert compiled.enable() is None
    assert compiled.enable(quiet=True) is None  # and says nothing


@pytest.mark.usefixtures("restored")
def test_the_size_is_bounded_and_old_versions_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, str(tmp_path))
    monkeypatch.setattr(compiled, "LARGEST", 250)
    folder = compiled.enable()
    assert folder is not None
    other = tmp_path / "fedbilevel-0.0.1-jaxlib-0.10.2"
    foreign = tmp_path / "somebody's own"
    now = time.time()
    for place, name, age in ((folder, "new", 1), (other, "middle", 2), (folder, "old", 3), (foreign, "oldest", 4)):
        place.mkdir(exist_ok=True)
        (place / f"{name}-cache").write_bytes(bytes(100))
        os.utime(place / f"{name}-cache", (now - age, now - age))
    compiled.enable()
    assert [path.name for path in sorted(tmp_path.rglob("*-cache"))] == ["middle-cache", "new-cache", "oldest-cache"]
    os.utime(other, (now, now - compiled.FORGOTTEN - 1))
    os.utime(foreign, (now, now - compiled.FORGOTTEN - 1))
    compiled.enable()
    assert not other.exists()
    assert foreign.exists()


def test_it_is_off_when_asked_and_when_jax_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "OFF")
    assert compiled.enable() is None
    monkeypatch.setenv(compiled.SWITCH, str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
    assert compiled.enable() is None
    assert not list(tmp_path.iterdir())


def test_importing_the_library_changes_no_setting_of_jax() -> None:
    code = "import jax; before = dict(jax.config.values); import fedbilevel; assert dict(jax.config.values) == before"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("command", [["fedbilevel", "algorithms"], ["fedbilevel.federation.worker", "SITE"]])
def test_commands_use_it(command: list[str], tmp_path: Path) -> None:
    Settings("west", "builtin").save(tmp_path)
    whole = [sys.executable, "-m", *(str(tmp_path) if word == "SITE" else word for word in command)]
    environment = {**os.environ, compiled.SWITCH: str(tmp_path / "kept")}
    done = subprocess.run(
        whole, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [path.is_dir() for path in (tmp_path / "kept").iterdir()] == [True]


def _in_use() -> str | None:
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def test_worker_processes_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, str(tmp_path))
    assert [Path(folder).parent for _, folder in calls(_in_use, [()], 1)] == [tmp_path]
