"""What the server of a federation notes: who answered an exchange, and who did not and why."""

from typing import NamedTuple


class Failure(NamedTuple):
    """Why a client did not answer an exchange."""

    round: int
    method: str
    client: int
    reason: str


class Served(NamedTuple):
    """A record of one exchange: who answered, who did not and why, bytes sent, and seconds taken."""

    round: int
    method: str
    answered: tuple[str, ...]
    failed: dict[str, str]
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
