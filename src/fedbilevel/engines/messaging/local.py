"""Server and clients in one process that share nothing but serialized messages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbilevel.core import Algorithm
from fedbilevel.core.task import Task
from fedbilevel.engines.messaging.party import Party
from fedbilevel.engines.messaging.server import Messaging, State
from fedbilevel.engines.participation import Participation
from fedbilevel.engines.plan import trace
from fedbilevel.engines.program import Program


class Local(Messaging):
    """Runs an algorithm on a task by messages, with the same numbers as
    :class:`~fedbilevel.engines.simulation.Simulation`. With a folder, clients save their own state there, so that a
    saved run can be restored.
    """

    def __init__(
        self,
        task: Task,
        algorithm: Algorithm,
        participation: Participation | None = None,
        folder: Path | None = None,
    ) -> None:
        self.task = task
        program = Program.checked(task.problem, algorithm, task.layout, participation)
        weights, sees_upper = task.normalised_weights, algorithm.upper_at == "clients"
        self.parties = [
            Party(
                task.only(m, sees_upper),
                algorithm,
                m,
                float(weights[m]),
                len(weights),
                None if folder is None else folder / f"client {m}",
                reveals=True,
            )
            for m in range(len(task.clients))
        ]
        super().__init__(program, trace(program, task.data), weights, self, task.data)

    def ask(self, messages: Mapping[int, bytes], kind: str) -> dict[int, bytes | str]:
        """Hand each client its message."""
        return {client: self.parties[client].handle(message) for client, message in messages.items()}

    def metrics(self, state: State) -> Mapping[str, Any]:
        """What the task measures."""
        return self.task.measured(*self.solution(state))
