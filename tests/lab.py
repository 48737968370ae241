"""Somebody else's code: a file with an algorithm and a task, and an installed package with entry points."""

from pathlib import Path

import pytest

from fedbilevel.runs import plugins

METHOD = '''
from dataclasses import dataclass
from typing import NamedTuple

import fedbilevel as fb
from fedbilevel.core.vectors import Vector


class Model(NamedTuple):
    x: Vector
    y: Vector


@dataclass(frozen=True)
class Mine(fb.Algorithm):
    """Train y, and leave x where it is."""

    lr_lower: float = fb.parameter(0.3, "step size of the model y", above=0, tune=(1e-2, 1.0))

    def init(self, clients, x, y):
        return Model(x, y)

    def round(self, clients, server):
        return Model(server.x, server.y - self.lr_lower * clients.run(self.train, server.x, server.y).mean())

    def train(self, client, key, x, y):
        return client.g.dy(x, y, key)

    def solution(self, server, memory):
        return server.x, server.y
'''

TASK = '''
import fedbilevel as fb


def make_task(width: int, heterogeneity=0.5, note=None):
    """A quadratic."""
    return fb.tasks.quadratic(p=width, d=3, clients=3, heterogeneity=heterogeneity)
'''


def files(folder: Path) -> Path:
    """A folder with my_method.py and my_task.py."""
    (folder / "my_method.py").write_text(METHOD)
    (folder / "my_task.py").write_text(TASK)
    return folder


def package(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with two entry points, one of which leads nowhere; returns its folder."""
    site = folder / "site-packages"
    about = site / f"{name}-1.2.dist-info"
    (site / name).mkdir(parents=True)
    about.mkdir()
    (site / name / "__init__.py").write_text("")
    (site / name / "methods.py").write_text(METHOD)
    (site / name / "problems.py").write_text(TASK)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text(
        f"[fedbilevel.algorithms]\n{name}-mine = {name}.methods:Mine\n{name}-gone = {name}.methods:Gone\n"
        f"fedbio = {name}.methods:Mine\n[fedbilevel.tasks]\n{name}-task = {name}.problems:make_task\n"
    )
    monkeypatch.syspath_prepend(str(site))
    plugins._entries.cache_clear()
    return site / name
