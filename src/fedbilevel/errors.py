"""Errors and warnings for users: one sentence that says what is wrong and how to fix it."""

import difflib
import importlib
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def readable(text: str, most: int = 2000) -> str:
    """A text that may quote what others wrote, for a terminal: not too long, and nothing that a terminal obeys.

    >>> readable("a file called \\x1b[2J"), readable("x" * 10, most=3)
    ('a file called \\\\x1b[2J', 'xxx...')
    """
    short = text if len(text) <= most else f"{text[:most]}..."
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in short)


class FedbilevelError(Exception):
    """An error whose message is meant for the user. The command line prints it and exits with code 2."""

    def __str__(self) -> str:
        """The sentence, whatever it quotes."""
        return readable(Exception.__str__(self))  # a KeyError, which some are, too, would put it into quotes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for another process, whatever arguments it was made with; results stay where they are."""
        return _made, (type(self), self.args, {k: v for k, v in self.__dict__.items() if k != "result"})


def _made(kind: type[FedbilevelError], args: tuple[Any, ...], attributes: dict[str, Any]) -> FedbilevelError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class FedbilevelWarning(UserWarning):
    """Something the user should know, in one sentence; the run continues."""


class Stopped(BaseException):
    """A run ended early: it was :class:`Interrupted`, or :class:`Diverged`.

    ``result`` is the :class:`Result` of the rounds before, None if there were none; ``saved`` says where it is saved or
    how to continue, if known.

    >>> try:  # doctest: +SKIP
    ...     result = fb.solve(task, algorithm, rounds=10_000)
    ... except fb.Stopped as stopped:
    ...     result = stopped.result
    """

    result: Any = None
    saved: str = ""


class Diverged(FedbilevelError, Stopped):
    """A run produced NaN or infinity, in this ``round``, in these ``variables``."""

    def __init__(self, message: str, round: int, variables: tuple[str, ...], result: Any = None) -> None:
        super().__init__(message)
        self.round = round
        self.variables = variables
        self.result = result


class Interrupted(KeyboardInterrupt, Stopped):
    """A run was interrupted by Ctrl-C. It is a KeyboardInterrupt, too."""

    @classmethod
    def of(cls, interrupt: KeyboardInterrupt, result: Any = None, saved: str = "") -> "Interrupted":
        """An interrupt that carries a result; an Interrupted is kept and gets what is new."""
        stopped = interrupt if isinstance(interrupt, Interrupted) else cls().with_traceback(interrupt.__traceback__)
        stopped.result = stopped.result if result is None else result
        stopped.saved = saved or stopped.saved
        return stopped


class NoQuorum(FedbilevelError):
    """Too few clients of a federation replied; they may come back."""


class RoundLost(FedbilevelError):
    """A client of a federation lost what it computed in this ``round``: everybody goes back to the one before."""

    def __init__(self, message: str, round: int) -> None:
        super().__init__(message)
        self.round = round


class UnknownName(FedbilevelError, KeyError):
    """A name that is not in a table; the message suggests the nearest one."""

    def __init__(self, kind: str, name: str, known: Iterable[str], place: str = "") -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.5)
        near = near or [each for each in known if len(name) > 1 and each.startswith(name)]
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(known)}."
        super().__init__(f"{place}there is no {kind} called '{name[:60]}': {hint}")


class Names(dict[str, T]):
    """A table by name that suggests the nearest name when one is unknown."""

    def __init__(self, kind: str, table: dict[str, T]) -> None:
        super().__init__(table)
        self.kind = kind

    def check(self, name: str, place: str = "") -> None:
        """Refuse a name that is not in the table; ``place`` says where it was written."""
        if name not in self:
            raise UnknownName(self.kind, name, self, place)

    def __missing__(self, name: str) -> T:
        raise UnknownName(self.kind, name, self)


def needs(module: str, extra: str, what: str) -> Any:
    """Import a module that an extra of this package installs, or say how to install it.

    Args:
        module: its name, with dots.
        extra: in the brackets of ``pip install 'fedbilevel[extra]'``.
        what: what needs it, for the message: "tuning needs Optuna".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        why = f" ({error})" if str(error) and not absent else ""  # installed, but something that it needs is not
        raise FedbilevelError(f"{what}: pip install 'fedbilevel[{extra}]'{why}.") from None
