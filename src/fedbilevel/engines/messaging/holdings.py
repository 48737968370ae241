"""What clients of a federation hold already, so that nothing is sent twice."""

import itertools
from collections.abc import Iterable
from typing import Any


class Holdings:
    """Arrays of broadcasts have serial numbers; a client holds what it confirmed since it last forgot.

    Args:
        clients: how many there are.
    """

    def __init__(self, clients: int) -> None:
        # By the id of an array, which is kept so that the id stays taken.
        self._serials: dict[int, tuple[str, Any]] = {}
        self._numbers = itertools.count()
        self._held: list[set[str]] = [set() for _ in range(clients)]

    def serial(self, leaf: Any) -> str:
        """The serial number of an array."""
        if id(leaf) not in self._serials:
            self._serials[id(leaf)] = (str(next(self._numbers)), leaf)
        return self._serials[id(leaf)][0]

    def has(self, client: int, leaf: Any) -> bool:
        """Whether a client holds an array."""
        return self.serial(leaf) in self._held[client]

    def add(self, client: int, serials: Iterable[str]) -> None:
        """A client has received these."""
        self._held[client].update(serials)

    def forget(self, client: int) -> None:
        """A client may hold nothing any more."""
        self._held[client].clear()

    def forget_all(self) -> None:
        """No client that is asked next holds anything."""
        self._held = [set() for _ in self._held]

    def keep(self, leaves: Iterable[Any]) -> list[str]:
        """Clients forget everything but these arrays, whose serial numbers are returned."""
        alive = {id(leaf) for leaf in leaves}
        self._serials = {k: v for k, v in self._serials.items() if k in alive}
        kept = {serial for serial, _ in self._serials.values()}
        self._held = [held & kept for held in self._held]
        return sorted(kept)
