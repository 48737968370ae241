"""Calls in processes: one that dies takes only its own call with it, and an interrupt reaches what is being done."""

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from fedbilevel import interrupts

DIED: Any = object()
"""What a call gave whose process died."""


class Worker(NamedTuple):
    """A process and the way to talk to it."""

    process: Any
    connection: Connection

    @classmethod
    def start(cls) -> "Worker":
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=_work, args=(there,), daemon=True)
        with _one_thread():
            process.start()
        there.close()  # so that its end is noticed
        return cls(process, here)


def calls(
    function: Callable[..., Any],
    arguments: Sequence[Sequence[Any]],
    workers: int,
    tell: Callable[[], None] | None = None,
) -> Iterator[tuple[int, Any]]:
    """The number and the result of each call, in the order in which they end; ``DIED`` if its process died. What a call
    raises is raised here. Then, or when nobody asks for the rest, the other calls are interrupted, and waited for: they
    save what they have.

    Args:
        function: called with each of the arguments, at most so many times at once.
        arguments: in the order in which they are begun.
        workers: processes of one thread each. What one call compiles or reads, a later one in the same process has.
        tell: called every half a second.
    """
    waiting = deque(enumerate(arguments))
    idle: list[Worker] = []
    busy: dict[Connection, tuple[int, Worker]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                number, some = waiting.popleft()
                worker = idle.pop() if idle else Worker.start()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # if it is dead, that is seen below
                    worker.connection.send((function, some))
                busy[worker.connection] = number, worker
            for connection in wait([*busy], timeout=0.5):
                assert isinstance(connection, Connection)
                number, worker = busy.pop(connection)
                try:
                    result, error = connection.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    yield number, DIED
                    continue
                idle.append(worker)
                if error is not None:
                    raise error
                yield number, result
            if tell is not None:
                tell()
    finally:
        for _, worker in busy.values():
            worker.process.terminate()
        for worker in (*idle, *(worker for _, worker in busy.values())):
            worker.connection.close()
            worker.process.join()


def cores() -> int:
    """How many processes can work at the same time."""
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


def _work(connection: Connection) -> None:
    """What a process does: one call after the other, until nobody has another one for it."""
    # Ctrl-C reaches every process of a terminal; here only the parent acts on it, and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.listen()
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
        while True:
            function, arguments = connection.recv()
            try:
                result, error = function(*arguments), None
            except Exception as raised:
                result, error = None, raised
            connection.send((result, error))
