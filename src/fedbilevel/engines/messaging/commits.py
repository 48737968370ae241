"""What the server knows of the clients' memories: who has acknowledged which round, and who still has to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from fedbilevel.engines.messaging.post import Answers
from fedbilevel.engines.messaging.protocol import Commit, Failed, checked
from fedbilevel.errors import RoundLost

MOST_RETURNS = 3
"""How often one client may make all others go back."""


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


class Returns:
    """Reads in answers who has acknowledged what, and decides what happens to who has lost something."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.before: dict[int, set[int]] = {}  # who has made the others go back, and to before which rounds

    def heard(self, commits: Commits, answers: Answers, last: int) -> tuple[Commits, Answers]:
        """Note who has acknowledged what was pending. Who has lost the last round sends everybody back, once; if that
        was earlier, or too often, this client alone continues from what it has.
        """
        heard = dict(answers)
        for client, (answer, arrays) in answers.items():
            if not isinstance(answer, Failed):
                commits = commits.done(client)
            elif answer.reason == "stale" and answer.round is not None:
                before = self.before.setdefault(client, set())
                if commits.base(client) == last and last not in before and len(before) < MOST_RETURNS:
                    before.add(last)
                    raise RoundLost(f"round {last} is made again: {self.names[client]}: {answer.error}", last)
                commits = commits.back(client, answer.round)
                error = f"{answer.error} It continues from round {commits.base(client)}."
                heard[client] = (replace(answer, error=error), arrays)
        return commits, heard
