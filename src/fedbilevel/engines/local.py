"""Server and clients in one process that share nothing but serialized messages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm
from fedbilevel.engines.messages import rebuild
from fedbilevel.engines.messaging import Messaging, State, is_block
from fedbilevel.engines.participation import Everyone, Participation
from fedbilevel.engines.party import Party
from fedbilevel.engines.plan import Program, split_vectors, trace
from fedbilevel.task import Task
from fedbilevel.vectors import Vector


class Local(Messaging):
    """Runs an algorithm on a task by messages; the same numbers as
    :class:`~fedbilevel.engines.simulation.Simulation`. With a folder, clients keep there what is theirs, so that a
    saved state can be restored.
    """

    def __init__(
        self,
        task: Task,
        algorithm: Algorithm,
        participation: Participation | None = None,
        folder: Path | None = None,
    ) -> None:
        program = Program(task.problem, algorithm, task.layout, participation or Everyone())
        weights, sees_upper = task.normalised_weights, algorithm.upper_at == "clients"
        self.parties = [
            Party(
                task.only(m, sees_upper),
                algorithm,
                m,
                float(weights[m]),
                len(weights),
                None if folder is None else folder / f"client {m}",
            )
            for m in range(len(task.clients))
        ]
        super().__init__(program, trace(program, task.data), weights, self, task.data)

    def ask(self, messages: Mapping[int, bytes]) -> dict[int, bytes | str]:
        """Hand each client its message."""
        return {client: self.parties[client].handle(message) for client, message in messages.items()}

    def solution(self, state: State) -> tuple[Any, Any]:
        """The current x and y in the user's structure; private blocks and local y are gathered from the clients of
        this process.
        """
        remembers = self.program.algorithm.remembers == "run"
        if not remembers and not any(is_block(part) for part in split_vectors(state.server)[0]):
            x, y = self.program.algorithm.solution(state.server, None)
            return x.tree, y.tree
        parts, structure = split_vectors(state.server)
        blocks = {str(n): part.terms for n, part in enumerate(parts) if is_block(part)}
        header = {"action": "reveal", "blocks": blocks, "round": state.round}
        answers = [reply for _, reply in self._ask({m: (header, {}) for m in range(len(self.parties))}).values()]
        stacked = {name: jnp.stack([answer[name] for answer in answers]) for name in answers[0]}
        x0, y0 = jax.eval_shape(self.program.problem.start, state.key)
        memory = jax.eval_shape(self.program.algorithm.memory, x0, y0) if remembers else None
        shapes = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((len(self.parties), *s.shape), s.dtype),
            {"blocks": dict.fromkeys(blocks, x0.tree), "memory": memory},
        )
        seen = rebuild(shapes, stacked)
        whole = [
            Vector(seen["blocks"][str(n)], "x", owned=True) if is_block(part) else part for n, part in enumerate(parts)
        ]
        x, y = self.program.algorithm.solution(jax.tree.unflatten(structure, whole), seen["memory"])
        return x.tree, y.tree
