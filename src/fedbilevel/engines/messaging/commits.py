"""What the server knows of the clients' memories: who has acknowledged which round, and who still has to."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from fedbilevel.engines.messaging.protocol import Commit, checked


@dataclass(frozen=True)
class _Saved:
    """Commits as they are saved: clients are words in JSON."""

    acknowledged: dict[str, int]
    pending: dict[str, Commit]


@dataclass(frozen=True)
class Commits:
    """A part of the server's state. ``acknowledged`` is the last round that each client is known to have kept, -1 if it
    only has its starting point; ``pending`` are commits that are not acknowledged yet, at most one for each client.
    """

    acknowledged: Mapping[int, int] = field(default_factory=dict)
    pending: Mapping[int, Commit] = field(default_factory=dict)

    def base(self, client: int) -> int:
        """The round whose memory the server counts on, once what is pending has arrived."""
        return self.pending[client].round if client in self.pending else self.acknowledged.get(client, -1)

    def done(self, client: int) -> "Commits":
        """The client has acknowledged what it was sent."""
        if client not in self.pending:
            return self
        pending = {other: commit for other, commit in self.pending.items() if other != client}
        return Commits({**self.acknowledged, client: self.pending[client].round}, pending)

    def back(self, client: int, round: int) -> "Commits":
        """The client lost what is later than this round, and continues from there."""
        pending = {other: commit for other, commit in self.pending.items() if other != client}
        return Commits({**self.acknowledged, client: max(-1, min(round, self.base(client) - 1))}, pending)

    def add(self, commits: Mapping[int, Commit]) -> "Commits":
        """More to be acknowledged."""
        return replace(self, pending={**self.pending, **commits})

    def of_round(self, round: int) -> tuple[int, int]:
        """How many clients have acknowledged a round, and how many should."""
        done = sum(kept == round for kept in self.acknowledged.values())
        return done, done + sum(commit.round == round for commit in self.pending.values())

    def array(self) -> np.ndarray:
        """As bytes, for a checkpoint."""
        saved = _Saved(
            {str(client): round for client, round in self.acknowledged.items()},
            {str(client): commit for client, commit in self.pending.items()},
        )
        return np.frombuffer(json.dumps(asdict(saved)).encode(), np.uint8)

    @staticmethod
    def of(array: np.ndarray) -> "Commits":
        """From the bytes of a checkpoint."""
        saved = checked(_Saved, json.loads(array.tobytes()))
        numbers = lambda known: {int(client): value for client, value in known.items()}
        return Commits(numbers(saved.acknowledged), numbers(saved.pending))
