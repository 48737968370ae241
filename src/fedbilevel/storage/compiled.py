"""Compiled programs on disk: the second start of the same program does not compile it again.

Most of the time before the first round is compilation, and JAX can save compiled programs in a folder. This module
chooses that folder, bounds its size, and makes sure that a problem with it is never fatal.

`enable` changes settings of JAX for the whole process. A library should not do that when it is imported, so the owner
of a process calls it: the command line, worker processes, the processes of a federation, the tests.

JAX names an entry by a hash of the program, of the options that change what is compiled, of the version of jaxlib and
of the instructions that the processor has. So numbers are the same bit for bit with and without the cache, and two
kinds of machines may share a home folder: neither finds the entries of the other.
"""

import contextlib
import glob
import os
import re
import shutil
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from fedbilevel.cache import cache_folder
from fedbilevel.errors import FedbilevelWarning

SWITCH = "FEDBILEVEL_COMPILATION_CACHE"
"""The environment variable that names another folder, or switches the cache off with ``off``."""
LARGEST = 512 * 2**20
"""Bytes of all entries. A run of a task with its references adds one or two megabytes."""
WORTH_KEEPING = 0.3
"""Seconds of compilation below which an entry saves too little."""
FORGOTTEN = 7 * 24 * 3600
"""Seconds without use after which the folder of another version is removed."""


def enable(quiet: bool = False) -> Path | None:
    """Use what earlier processes compiled, and save what this one compiles. Call it before anything is compiled.

    Args:
        quiet: do not warn if the cache cannot be used, because the process that started this one has warned already.

    Returns:
        The folder of the entries; None if there is no cache, because it is switched off or cannot be written, or
        because `JAX_COMPILATION_CACHE_DIR` asks JAX for another one.
    """
    named = os.environ.get(SWITCH, "")
    if named.lower() == "off" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    root = Path(named).expanduser() if named else cache_folder() / "compiled"
    folder = root / f"fedbilevel-{version('fedbilevel')}-jaxlib-{version('jaxlib')}"
    try:
        _prepare(folder)
        _tidy(root, folder)
    except OSError as error:
        if not quiet:
            _warn(f"cannot save compiled programs in {folder} ({error.strerror or error})")
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX bounds the size only with the help of another package, and then waits for a lock at every access.
    jax.config.update("jax_compilation_cache_max_size", -1)
    jax.config.update("jax_raise_persistent_cache_errors", False)
    _explain_failures(folder, quiet)
    if not {"TF_CPP_MIN_LOG_LEVEL", "JAX_LOGGING_LEVEL"} & os.environ.keys():
        _silence_log()
    return folder


def _silence_log() -> None:
    """On some processors XLA logs an error for every entry that it reads, and uses it all the same: it takes a hint to
    the compiler, "prefer-no-gather", for an instruction (github.com/openxla/xla/issues/44565). What fails is raised.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jaxlib import utils  # pyright: ignore[reportAttributeAccessIssue]

        utils.absl_set_min_log_level(3)


def _prepare(folder: Path) -> None:
    """Make the folder, or raise OSError if this process cannot or should not use it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(folder)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(0, "it is read-only")
    if os.name == "posix":
        known = folder.stat()
        if known.st_mode & 0o022 or known.st_uid not in (os.getuid(), 0):
            # An entry is code that this process runs.
            raise PermissionError(0, "other users can write to it")


def _tidy(root: Path, folder: Path) -> None:
    """Remove unused other versions, then the entries unused for longest until the rest is small enough."""
    entries = []
    for other in root.glob("fedbilevel-*-jaxlib-*"):
        with contextlib.suppress(FileNotFoundError):  # another process may tidy at the same time
            if other != folder and time.time() - other.stat().st_mtime > FORGOTTEN:
                shutil.rmtree(other, ignore_errors=True)
            for path in other.glob("*-cache"):
                known = path.stat()
                entries.append((max(known.st_atime, known.st_mtime), known.st_size, path))
    total = 0
    for _, size, path in sorted(entries, reverse=True):
        total += size
        if total > LARGEST:
            path.unlink(missing_ok=True)


_FAILED = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (.*)", re.DOTALL)


def _explain_failures(folder: Path, quiet: bool) -> None:
    """JAX warns about every entry that it cannot read or write, and compiles. Warn only once, in one line, and remove
    what cannot be read, because JAX would never replace it.
    """
    usual, said = warnings.showwarning, quiet

    def show(message: Any, *details: Any, **more: Any) -> None:
        nonlocal said
        failed = _FAILED.fullmatch(str(message))
        if failed is None:
            usual(message, *details, **more)
            return
        doing, program, reason = failed.groups()
        if doing == "reading":
            for path in folder.glob(f"{glob.escape(program)}-*-cache"):
                with contextlib.suppress(OSError):
                    path.unlink()
        if not said:
            said = True
            verb = "read" if doing == "reading" else "write"
            _warn(f"cannot {verb} a compiled program in {folder} ({reason.partition(chr(10))[0]})")

    warnings.showwarning = show


def _warn(problem: str) -> None:
    advice = f"It is compiled again; results do not change. Set {SWITCH} to another folder, or to 'off'"
    warnings.warn(f"{problem}. {advice}.", FedbilevelWarning, stacklevel=3)
