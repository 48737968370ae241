"""Interrupts that are not lost.

Python raises KeyboardInterrupt wherever the program happens to be. Inside a finalizer or a callback of the garbage
collector, of which JAX has some, it is printed and forgotten, and a long run would go on. So an interrupt is also noted
here, and ``solve`` looks between rounds.
"""

import signal
from typing import Any


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


_noted: type[KeyboardInterrupt] | None = None


def listen() -> None:
    """Note and raise what Ctrl-C and SIGTERM ask for; for programs, not for libraries."""

    def on(kind: type[KeyboardInterrupt]) -> Any:
        def handler(number: int, frame: Any) -> None:
            global _noted
            _noted = kind
            raise kind

        return handler

    signal.signal(signal.SIGTERM, on(Terminated))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where interrupts are ignored
        signal.signal(signal.SIGINT, on(KeyboardInterrupt))


def check() -> None:
    """Raise an interrupt that was noted, and has not been seen to."""
    if _noted is not None:
        raise _noted


def seen() -> None:
    """The interrupt is being dealt with."""
    global _noted
    _noted = None
