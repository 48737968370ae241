"""An empty cache, and a server to download from."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and no other folder."""
    monkeypatch.delenv("FEDBILEVEL_DATA", raising=False)
    monkeypatch.delenv("FEDBILEVEL_MIRROR", raising=False)
    monkeypatch.setenv("FEDBILEVEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.release.set()
        running.shutdown()
        thread.join()
