"""Double precision for the whole suite; the command line and the benchmarks run in single precision, as users do."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import settings

from fedbilevel.cache import cache_folder
from fedbilevel.data import sources
from fedbilevel.storage import compiled

jax.config.update("jax_enable_x64", True)
# Most of the time of the suite is compilation, of programs that then run for milliseconds: hardly optimised, they are
# there in half the time. What tests start as a command is optimised as for users.
QUICKLY = [
    "--xla_backend_optimization_level=1",  # level 0 computes NaN
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_disable_hlo_passes=call-inliner",
]
if jax.__version_info__ < (0, 11):  # later ones do not have it, and end at a flag that they do not know
    QUICKLY.append("--xla_cpu_use_fusion_emitters=false")
before = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = " ".join([before or "", *QUICKLY])
jax.devices()  # reads the flags
if before is None:
    del os.environ["XLA_FLAGS"]
else:
    os.environ["XLA_FLAGS"] = before
# What one run of the suite compiled, the next one finds, and so do the commands that tests start.
os.environ.setdefault(compiled.SWITCH, str(cache_folder() / "compiled-by-tests"))
compiled.enable()


def in_memory(place: Path = Path("/dev/shm"), room: float = 4e9) -> bool:
    """Whether this is a file system in memory that has room for the folders of all tests."""
    try:
        known = os.statvfs(place)
        return os.access(place, os.W_OK) and not known.f_flag & os.ST_NOEXEC and shutil.disk_usage(place).free > room
    except (AttributeError, OSError):
        return False


# Run folders, checkpoints and ledgers are synced to the disk at every step, some ten thousand times in all.
if in_memory():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


def note_who_reads_data_sets(notes: Path) -> None:
    """List the tests that open a file of a data set: `.ci/run` runs them a second time, without data sets."""
    ways = ({folder, folder.resolve()} for folder in sources.folders())  # it may be reached through a link
    places = tuple(f"{folder}{os.sep}" for way in ways for folder in way)
    others = os.environ[compiled.SWITCH]  # in the same cache
    noted = set()

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            path = os.fsdecode(arguments[0])
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]  # the stage follows
            if test not in {"", *noted} and path.startswith(places) and not path.startswith(others):
                noted.add(test)
                with notes.open("a") as lines:
                    lines.write(f"{test}\n")

    sys.addaudithook(look)


if notes := os.environ.get("FEDBILEVEL_TESTS_THAT_READ_DATA"):
    note_who_reads_data_sets(Path(notes))
settings.register_profile("suite", deadline=None, max_examples=8, derandomize=True)
settings.load_profile("suite")


FIRST = ("test_real_processes.py", "test_contract.py", "test_experiments.py", "test_comparison.py")
"""The files that take longest: begun last, they would keep one core busy while the other has nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(FIRST)))


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_in_memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The folders of tests are only kept where one failed."""
    yield
    if not request.session.testsfailed:
        shutil.rmtree(tmp_path_factory.getbasetemp(), ignore_errors=True)


COMPILED: list[str] = []
"""Programs since their memory maps were counted."""


def note_compiled(event: str, duration: float, **details: Any) -> None:
    """A listener to JAX."""
    if event.endswith("backend_compile_duration"):
        COMPILED.append(str(details.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(note_compiled)


@pytest.fixture(autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Every compiled program takes some hundred memory maps, of which a process has 65530 by default on Linux. To count
    them takes as long as a short test."""
    yield
    if len(COMPILED) > 50:
        COMPILED.clear()
        maps = Path("/proc/self/maps")
        if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
            jax.clear_caches()


@pytest.fixture
def steps() -> dict[str, float]:
    """Step sizes that suit the quadratic problems."""
    return {"lr_upper": 0.1, "lr_lower": 0.2, "lr_adjoint": 0.2}
