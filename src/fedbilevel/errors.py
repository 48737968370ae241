"""What goes wrong in a way the user can mend: one sentence that says what and how."""

import difflib
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

    def check(self, name: str, place: str = "") -> None:
        """Refuse a name that is not in the table; ``place`` says where it was written."""
        if name not in self:
            raise UnknownName(self.kind, name, self, place)

    def __missing__(self, name: str) -> T:
        raise UnknownName(self.kind, name, self)
