"""Exchanges by name: every engine counts them alike, in nested loops, views and sub-cohorts, by construction."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core import Client, Clients, Key
from fedbilevel.core.vectors import Vector
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks import Quadratic
from fedbilevel.testing import largest_difference
from helpers import assert_same_counts

TASK = Quadratic.random(clients=4, p=3, d=2).task()


class Pair(NamedTuple):
    x: Vector
    y: Vector


@dataclass(frozen=True)
class Nested(fb.Algorithm):
    """Two loops inside of a loop, one of random length, with other weights and a sub-cohort in them; loops in init."""

    outer: int = 3

    def init(self, clients: Clients, x: Vector, y: Vector) -> Pair:
        return Pair(x, clients.repeat(2, lambda c, y: y + c.run(self.descend, x, y).mean(), y))

    def round(self, clients: Clients, server: Pair) -> Pair:
        x, y = server
        few = clients.sample(2)
        y = y + few.run(self.descend, x, y).mean()

        def body(clients: Clients, y: Vector) -> Vector:
            y = y + clients.weighted(np.arange(1.0, 5.0)).run(self.descend, x, y).mean()
            y = clients.repeat(2, lambda c, y: y + c.sample(3).run(self.descend, x, y).mean(), y)
            times = jax.random.randint(clients.next_key(), (), 0, 4)
            y = clients.repeat(times, lambda c, y: y + c.run(self.look, x, y).mean(), y)
            return y + clients.run(self.descend, x, y).mean()

        y = clients.repeat(self.outer, body, y)
        return Pair(x, few.repeat(2, lambda c, y: y + c.run(self.descend, x, y).mean(), y))

    def descend(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        return -0.1 * client.g.dy(x, y, key)

    def look(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        return -0.01 * client.f.dy(x, y, key)

    def solution(self, server: Pair, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y


def test_nested_loops_are_named_and_counted_alike() -> None:
    simulation, local = Simulation(TASK, Nested()), Local(TASK, Nested())
    a, b = (engine.advance(engine.start(seed=2), 3) for engine in (simulation, local))
    assert largest_difference(simulation.solution(a), local.solution(b)) < 1e-12
    assert_same_counts(a.served, b.served)
    assert_same_counts(a.calls, b.calls)
    assert list(simulation.plan.by_name) == [
        "start.0.0", "round.0", "round.1.0", "round.1.1.0", "round.1.2.0", "round.1.3", "round.2.0",
    ]  # fmt: skip
    made = {name: np.asarray(count).tolist() for name, count in a.calls.items()}
    assert made["start.0.0"] == [1, 1]
    assert made["round.0"] == 3
    assert made["round.1.0"] == made["round.1.3"] == [3, 6]
    assert made["round.1.1.0"] == [[3, 3], [6, 6]]
    assert int(np.sum(a.served["round.1.1.0"])) == 3 * 18


def test_costs_by_iteration() -> None:
    """What a client holds is not sent again: x not at all after the first exchange of the first round."""
    plan = fb.plan(TASK, Nested())
    assert plan.by_name["round.1.0"].down.tolist() == [2, 2]
    assert plan.by_name["round.1.1.0"].times().tolist() == [[1, 1], [2, 2]]
    assert plan.by_name["round.1.2.0"].loops == (3, None)
    assert plan.by_name["round.1.2.0"].times(4).tolist() == [[1, 3], [2, 6]]
    assert [plan.at(n).exchanges for n in (0, 1, 4)] == [1 + 3 * 4 + 2, 1 + 3 * 5 + 2, 1 + 3 * 8 + 2]


@dataclass(frozen=True)
class Outsider(Nested):
    """Uses the clients of the block around a loop inside of it, or a view of them: keys and memory would be wrong."""

    view: bool = False

    def round(self, clients: Clients, server: Pair) -> Pair:
        wrong = clients.sample(2) if self.view else clients
        body: Any = lambda _, y: y + wrong.run(self.descend, server.x, y).mean()
        return Pair(server.x, clients.repeat(2, body, server.y))


@pytest.mark.parametrize("view", [False, True])
def test_clients_from_around_a_loop_are_refused_inside(view: bool) -> None:
    with pytest.raises(fb.FedbilevelError, match="use the clients that the body is given"):
        fb.solve(TASK, Outsider(view=view), rounds=1)


@dataclass(frozen=True)
class Decides(Nested):
    """Looks at a float to decide what to compute."""

    momentum: float = 0.5
    scale: float = fb.parameter(0.5, "how much", static=True)

    def round(self, clients: Clients, server: Pair) -> Pair:
        factor = 2.0 if self.scale > 0.1 else 1.0
        step = clients.run(self.descend, *server).mean() * factor
        return Pair(server.x, server.y + (step if self.looked() else 2 * step))

    def looked(self) -> bool:
        return True


@dataclass(frozen=True)
class DecidesByANumber(Decides):
    """By one that is an argument of the compiled program."""

    def looked(self) -> bool:
        return self.momentum > 0


def test_a_number_that_decides_is_static_or_refused_with_the_remedy() -> None:
    one, other = (fb.solve(TASK, Decides(scale=scale), rounds=3).y for scale in (0.5, 0.05))
    assert largest_difference(one, other) > 1e-6
    with pytest.raises(fb.FedbilevelError, match=r"DecidesByANumber cannot be compiled .*static=True"):
        fb.solve(TASK, DecidesByANumber(), rounds=1)
