"""What several tests need."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core import Client, Clients, Key
from fedbilevel.core.vectors import Vector, add, dot, norm

REAL = os.environ.get("FEDBILEVEL_DATA", "")
real = pytest.mark.skipif(
    not REAL or not all(Path(entry).is_dir() for entry in REAL.split(os.pathsep)),
    reason="FEDBILEVEL_DATA does not name a folder",
)

INTERRUPTIBLE = [
    sys.executable,
    "-c",
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "runpy.run_module('fedbilevel', run_name='__main__')",
]
"""The command line in a process that hears SIGINT: what is started in the background may ignore it, and so would its
children."""


def assert_same_counts(a: Any, b: Any) -> None:
    """Of every exchange, by its name."""
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


class Everything(NamedTuple):
    x: Vector
    y: Vector
    losses: jax.Array


class Visits(NamedTuple):
    times: jax.Array
    last: Vector


@dataclass(frozen=True)
class UsesEverything(fb.Algorithm):
    """An algorithm that makes no sense but uses every word of the vocabulary: memory for the run, sub-cohorts, other
    weights, loops of random length, stacked replies, the server's own randomness."""

    remembers: ClassVar[Literal["nothing", "round", "run"]] = "run"

    def memory(self, x: Vector, y: Vector) -> Visits:
        return Visits(jnp.zeros((), int), 0 * y)

    def init(self, clients: Clients, x: Vector, y: Vector) -> Everything:
        return Everything(x, y, jnp.zeros(3))

    def round(self, clients: Clients, server: Everything) -> Everything:
        x, y, _ = server
        few = clients.sample(3)
        losses = few.run(self.loss, x, y).stack()
        times = 1 + jax.random.randint(clients.next_key(), (), 0, 3)
        y = clients.repeat(times, lambda c, y: add(y, c.run(self.descend, x, y).mean()), y)
        y = few.repeat(2, lambda c, y: add(y, c.run(self.descend, x, y).mean()), y)
        weighted = clients.weighted(jnp.arange(1.0, 6.0)).run(self.upper, x, y)
        x = x - 0.1 * weighted.mean() - 0.01 * weighted.estimate()
        return Everything(
            x, y, losses[:3] + clients.run(self.loss, x, y).stack()[:3] * clients.run(self.loss, x, y).replied()[:3]
        )

    def loss(self, client: Client, memory: Visits, key: Key, x: Vector, y: Vector) -> tuple[Visits, jax.Array]:
        return memory, client.f.value(x, y, key) + dot(memory.last, memory.last)

    def descend(self, client: Client, memory: Visits, key: Key, x: Vector, y: Vector) -> tuple[Visits, Vector]:
        step = -0.1 * client.g.dy(x, y, key) - 0.01 * jax.random.uniform(key) * memory.last
        return Visits(memory.times + 1, step), step

    def upper(self, client: Client, memory: Visits, key: Key, x: Vector, y: Vector) -> tuple[Visits, Vector]:
        return memory, client.f.dx(x, y, key) / (1 + norm(memory.last) + client.weight)

    def solution(self, server: Everything, memory: Visits) -> tuple[Vector, Vector]:
        return server.x, memory.last


@dataclass(frozen=True)
class LocalHypergradients(fb.Algorithm):
    """The tempting mistake: average hypergradients that every client computes with its own Hessian."""

    lr: float = 0.2
    terms: int = 60

    def init(self, clients: Clients, x: Vector, y: Vector) -> Everything:
        return Everything(x, y, jnp.zeros(()))

    def round(self, clients: Clients, server: Everything) -> Everything:
        step = clients.run(self.step, server.x, server.y).mean()
        return Everything(server.x + step[0], server.y + step[1], server.losses)

    def step(self, client: Client, memory: None, key: Key, x: Vector, y: Vector) -> tuple[None, tuple[Vector, Vector]]:
        fx, v = client.f.gradients(x, y, key)

        def term(carry: tuple[Vector, Vector], key: Key, _: Any) -> tuple[Vector, Vector]:
            v, series = carry
            v = v - 0.3 * client.g.dyy(x, y, v, key)
            return v, series + v

        _, series = client.repeat(self.terms, term, (v, v), key)  # Neumann series of the own Hessian
        hyper = fx - client.g.dxy(x, y, 0.3 * series, key)
        return memory, (-self.lr * hyper, -self.lr * client.g.dy(x, y, key))

    def solution(self, server: Everything, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y


def sample_weights(clients: int = 5, samples: int = 6, private: bool = True) -> fb.Task:
    """A small problem with one upper variable per training sample, compiled fast: weighted least squares. Clients
    differ in size."""

    def lower(x: Any, y: Any, batch: Any) -> jax.Array:
        losses = (batch["a"] @ y - batch["b"]) ** 2
        return jnp.mean(jax.nn.sigmoid(x[batch["weight"]]) * losses) + 0.1 * (y @ y)

    def upper(x: Any, y: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["a"] @ y - batch["b"]) ** 2)

    rng = np.random.default_rng(0)

    def rows(n: int, first: int) -> dict[str, np.ndarray]:
        return {"a": rng.normal(size=(n, 3)), "b": rng.normal(size=n), "weight": first + np.arange(n, dtype=np.int32)}

    size = samples if private else samples * clients
    problem = fb.Problem(upper, lower, lambda key: (np.zeros(size), np.zeros(3)), private_x=private)
    first = lambda m: 0 if private else m * samples
    data = [{"train": rows(samples - m % 2, first(m)), "val": rows(3, 0)} for m in range(clients)]
    return fb.Task(problem, data, batch_size={"train": 2, "val": None})


@dataclass(frozen=True)
class Disk:
    """A file system of its own."""

    folder: Path

    def fill(self) -> None:
        """Until not one byte is left."""
        with (self.folder / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def read_only(self) -> None:
        """As a system does that finds an error on a disk."""
        subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True)

    def free(self) -> None:
        """There is space again, and it can be written."""
        subprocess.run(["mount", "-o", "remount,rw", str(self.folder)], check=True)
        (self.folder / "filling").unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "1m") -> Iterator[Disk]:
    """A real file system that can be full; skips the test where none can be mounted."""
    folder.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
        )
        if shutil.which("mount")
        else None
    )
    if mounted is None or mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fedbilevel(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, as people use it."""
    command = [sys.executable, "-m", "fedbilevel", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=300, env={**os.environ, "COLUMNS": "120"}
    )


def here(*arguments: str, cwd: Path) -> tuple[int, str]:
    """The command line in this process, which is faster: its exit code, and what it says of errors."""
    from fedbilevel.cli import main

    argv, folder, show, said = sys.argv, Path.cwd(), warnings.showwarning, io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = ["fedbilevel", *arguments]
    os.chdir(cwd)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as end:
        return int(end.code or 0), said.getvalue()
    finally:
        os.chdir(folder)
        sys.argv, warnings.showwarning = argv, show
        for number, handler in handlers.items():
            signal.signal(number, handler)
    raise AssertionError("it did not end")
