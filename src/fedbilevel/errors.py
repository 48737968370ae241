"""What goes wrong in a way the user can mend: one sentence that says what and how."""

import difflib
import importlib
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class FedbilevelError(Exception):
    """An error whose message is meant for the user. The command line prints it and exits with code 2."""

    def __reduce__(self) -> tuple[Any, ...]:
        """From one process to another, whatever arguments it was made of."""
        return _made, (type(self), self.args, self.__dict__)


def _made(kind: type[FedbilevelError], args: tuple[Any, ...], attributes: dict[str, Any]) -> FedbilevelError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class FedbilevelWarning(UserWarning):
    """Something the user should know, in one sentence; the run goes on."""


class Diverged(FedbilevelError):
    """A run produced NaN or infinity."""

    def __init__(self, message: str, round: int, variables: tuple[str, ...]) -> None:
        super().__init__(message)
        self.round = round
        self.variables = variables


class NoQuorum(FedbilevelError):
    """Too few clients of a federation answered; they may come back."""


class UnknownName(FedbilevelError, KeyError):
    """A name that is not in a table; the message suggests the nearest one."""

    def __init__(self, kind: str, name: str, known: Iterable[str], place: str = "") -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}."
        super().__init__(f"{place}there is no {kind} called '{name}': {hint}")

    # KeyError prints the representation of its argument; we want the sentence itself.
    __str__ = Exception.__str__


class Names(dict[str, T]):
    """A table by name that suggests the nearest name when one is unknown."""

    def __init__(self, kind: str, table: dict[str, T]) -> None:
        super().__init__(table)
        self.kind = kind

    def __missing__(self, name: str) -> T:
        raise UnknownName(self.kind, name, self)


def needs(module: str, extra: str, what: str) -> Any:
    """Import a module that an extra of this package installs, or say how to install it.

    Args:
        module: its name, with dots.
        extra: in the brackets of ``pip install 'fedbilevel[extra]'``.
        what: who needs what: "tuning needs Optuna".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        why = f" ({error})" if str(error) and not absent else ""  # it is there, but something that it needs is not
        raise FedbilevelError(f"{what}: pip install 'fedbilevel[{extra}]'{why}.") from None
