"""Interrupts that are not lost.

Python raises KeyboardInterrupt wherever the program happens to be. Inside a finalizer or a callback of the garbage
collector, of which JAX has one, it is printed and forgotten, and a long run would continue. So an interrupt that comes
there is delayed for a moment. Some finalizers cannot be told from other functions; so an interrupt is also recorded
here, and ``solve`` checks between rounds.
"""

import signal
import threading
from types import FrameType
from typing import Any

from fedbilevel.errors import Interrupted

MOMENT = 0.02  # seconds
NOT_HERE = ("__del__", "_xla_gc_callback")
"""Functions in which an exception would be forgotten."""


class Terminated(Interrupted):
    """The process was asked to end (SIGTERM)."""


_noted: type[KeyboardInterrupt] | None = None


def listen() -> None:
    """Record and raise interrupts by Ctrl-C and SIGTERM; for programs, not for libraries."""

    def on(kind: type[KeyboardInterrupt]) -> Any:
        def handler(number: int, frame: FrameType | None) -> None:
            global _noted
            _noted = kind
            while frame is not None:
                if frame.f_code.co_name in NOT_HERE:
                    again = threading.Timer(MOMENT, _send, (number,))
                    again.daemon = True
                    again.start()
                    return
                frame = frame.f_back
            raise kind

        return handler

    signal.signal(signal.SIGTERM, on(Terminated))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where interrupts are ignored
        signal.signal(signal.SIGINT, on(KeyboardInterrupt))


def _send(number: int) -> None:
    """Send a signal to this process, such that it wakes the main thread, where there is a way to."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


def check() -> None:
    """Raise an interrupt that was recorded and not handled yet."""
    if _noted is not None:
        raise _noted


def seen() -> None:
    """Mark the interrupt as handled."""
    global _noted
    _noted = None
