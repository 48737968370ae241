"""FedAvg."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.vectors import Vector


class Server(NamedTuple):
    """The upper variable, which stays as it is, and the model."""

    x: Vector
    y: Vector


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """FedAvg: train y at a fixed x, the reference without bilevel learning.

    McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", AISTATS 2017.

    Every client makes tau steps ``y <- y - gamma grad_y g(x, y)`` on its training loss; the server averages. Weights
    are the task's; ``Task(weights="size")`` gives the paper's n_m / n.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    eta       lr_lower         step of y
    E, B      local_steps      local steps between averages (given as steps, not as epochs)
    ========  ==============   =====================

    One exchange per round: d floats down and up (x once, to each client, if it is shared); tau Gg per client. Follows
    the paper. With more than one local step and constant steps the limit is displaced by client drift.
    """

    lr_lower: float = parameter(0.5, "step of the model y", above=0, tune=(1e-3, 2.0))
    local_steps: int = parameter(5, "local steps between averages", least=1)

    def init(self, clients: Clients, x: Vector, y: Vector) -> Server:
        return Server(x, y)

    def round(self, clients: Clients, server: Server) -> Server:
        x, y = server
        return Server(x, clients.project_y(y + clients.run(self.train, x, y).mean()))

    def train(self, client: Client, memory: None, key: Key, x: Vector, y: Vector) -> tuple[None, Vector]:
        def step(y: Vector, key: Key, _: Any) -> Vector:
            y = client.project_y(y)
            return y - self.lr_lower * client.g.dy(x, y, key)

        return memory, client.repeat(self.local_steps, step, y, key) - y

    def solution(self, server: Server, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
