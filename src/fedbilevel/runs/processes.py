"""Calls in processes: a process that dies loses only its own call, and an interrupt reaches running calls."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from fedbilevel.errors import FedbilevelError
from fedbilevel.runs import interrupts
from fedbilevel.storage import compiled

DIED: Any = object()
"""What a call gave whose process died."""
UNGUARDED = 77
"""The exit code of a process that would start others, because the file that it imports does."""


class WorkerProcess(NamedTuple):
    """A process and the way to talk to it."""

    process: Any
    connection: Any

    @classmethod
    def start(cls) -> "WorkerProcess":
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # it is importing the user's file
            os._exit(UNGUARDED)
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=_work, args=(there,), daemon=True)
        with _one_thread(), _deaf_to_interrupts():
            process.start()
        there.close()  # so that its end is noticed
        return cls(process, here)


def calls(
    function: Callable[..., Any],
    arguments: Sequence[Sequence[Any]],
    workers: int,
    tell: Callable[[], None] | None = None,
) -> Generator[tuple[int, Any]]:
    """Yield the number and the result of each call, in the order in which they end; ``DIED`` if its process died. What
    a call raises is raised here. Then, or when the generator is closed, the other calls are interrupted, and this waits
    until they have saved their results.

    Args:
        function: called with each of the arguments, in at most ``workers`` processes at once.
        arguments: in the order in which the calls start.
        workers: processes of one thread each. Later calls in a process reuse what earlier ones compiled or read.
        tell: called every half a second.
    """
    waiting = deque(enumerate(arguments))
    everyone: list[WorkerProcess] = []
    busy: dict[Any, tuple[int, WorkerProcess]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                idle = [worker for worker in everyone if worker.connection not in busy]
                if not idle:
                    everyone.append(WorkerProcess.start())
                    continue
                number, some = waiting.popleft()
                busy[idle[0].connection] = number, idle[0]
                with contextlib.suppress(OSError):  # if it is dead, that is seen below
                    idle[0].connection.send((function, some))
            for connection in wait([*busy], timeout=0.5):
                number, worker = busy[connection]
                try:
                    result, error = worker.connection.recv()
                except (EOFError, OSError):
                    everyone.remove(worker)
                    worker.process.join()
                    result, error = DIED, _unguarded() if worker.process.exitcode == UNGUARDED else None
                del busy[connection]
                if error is not None:
                    raise error
                yield number, result
            if tell is not None:
                tell()
    finally:
        for _, worker in busy.values():
            worker.process.terminate()
        for worker in everyone:
            worker.connection.close()
        for worker in everyone:
            worker.process.join()


def _unguarded() -> FedbilevelError:
    file = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "the file")
    return FedbilevelError(
        f"{file} starts runs whenever it is imported, and other processes import it: put what starts them under "
        "if __name__ == '__main__':, or use jobs=1."
    )


def cores() -> int:
    """The number of processes that can work at the same time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Processes that are started here compute with one thread."""
    before = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{before} --xla_cpu_multi_thread_eigen=false".strip()
    try:
        yield
    finally:
        os.environ["XLA_FLAGS"] = before


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal. Those that are started here leave it to this one, which gets it after
    this.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Any) -> None:
    """The main function of a process: make one call after the other, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.listen()
    compiled.enable(quiet=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, KeyboardInterrupt, OSError):
        while True:
            function, arguments = connection.recv()
            try:
                result, error = function(*arguments), None
            except Exception as raised:
                result, error = None, raised
            try:
                message = pickle.dumps((result, error))
                pickle.loads(message)  # some errors cannot be made again
            except Exception:
                message = pickle.dumps((None, FedbilevelError(f"{type(error).__name__}: {error}")))
            connection.send_bytes(message)


def _end_with_parent() -> None:
    """Interrupt this process when the one that started it is gone: it saves what it has."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
