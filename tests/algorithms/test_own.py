"""An algorithm of somebody else, outside of the package: it needs neither texts nor an entry in any list."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core import Client, Clients, Key
from fedbilevel.core.vectors import Vector
from fedbilevel.mathematics.averages import DoubleMomentumState
from fedbilevel.mathematics.hypergradient import Pair
from fedbilevel.report import catalogue
from fedbilevel.tasks import Quadratic


class Model(NamedTuple):
    x: Vector
    y: Vector


@dataclass(frozen=True)
class Mine(fb.Algorithm):
    lr: float = 0.3

    def init(self, clients: Clients, x: Vector, y: Vector) -> Model:
        return Model(x, y)

    def round(self, clients: Clients, server: Model) -> Model:
        x, y = server
        return Model(x, y - self.lr * clients.run(self.gradient, x, y).mean())

    def gradient(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        return client.g.dy(x, y, key)

    def solution(self, server: Model, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y


QUADRATIC = Quadratic.random(clients=3, p=2, d=4)


@pytest.mark.parametrize("engine", ["simulation", "local"])
def test_it_is_solved_and_planned(engine: str) -> None:
    task = QUADRATIC.task()
    result = fb.solve(task, Mine(), rounds=200, every=200, engine=engine)
    np.testing.assert_allclose(result.y, QUADRATIC.lower(np.asarray(result.x)), atol=1e-9)
    cost = fb.plan(task, Mine())
    assert (cost.exchanges, cost.down, cost.up, cost.oracles) == (1, 4, 4, {"Gg": 1})


def test_it_has_an_entry_without_texts() -> None:
    entry = catalogue.entry("mine", Mine)
    assert (entry.summary, set(entry.facts.values())) == ("-", {"-"})
    assert (entry.exchanges, entry.down, entry.up, entry.oracles) == ("1", "d", "d", "1 Gg")
    text = catalogue.markdown({"mine": Mine})
    assert "| `mine` | global lower level | 1 | d | d | 1 Gg |" in text
    assert "| `mine` | - | - | - |" in text


class Theta(NamedTuple):
    theta: Vector
    adjoint: Vector


@dataclass(frozen=True)
class OtherNames(Mine):
    """Calls its model theta, and its step lr; keeps an adjoint."""

    steps: ClassVar[Mapping[str, str]] = {"theta": "lr"}

    def init(self, clients: Clients, x: Vector, y: Vector) -> Any:
        return Theta(y, 0 * y)

    def round(self, clients: Clients, server: Any) -> Any:
        x = Vector(np.zeros(2), "x")
        return Theta(server.theta - self.lr * clients.run(self.gradient, x, server.theta).mean(), server.adjoint)

    def solution(self, server: Any, memory: None) -> tuple[Vector, Vector]:
        return Vector(np.zeros(2), "x"), server.theta

    def variables(self, server: Theta) -> Mapping[str, Vector]:
        return {"y": server.theta, "u": server.adjoint}


def test_names_of_its_own() -> None:
    """Diagnostics find the adjoint, and a diverging run names the step to lower."""
    task = QUADRATIC.task()
    row = fb.solve(task, OtherNames(), rounds=3, diagnostics=["adjoint_gap"]).history[0]
    x, y = np.zeros(2), task.problem.start(jax.random.key(0))[1].tree
    np.testing.assert_allclose(row["adjoint_gap"], np.linalg.norm(QUADRATIC.adjoint(x, np.asarray(y))), rtol=1e-9)
    with pytest.raises(fb.Diverged, match=r"theta became NaN or infinite: try a smaller lr \(now 1e\+06\)"):
        fb.solve(task, OtherNames(lr=1e6), rounds=100)


def test_vectors_are_found_by_the_names_of_fields() -> None:
    """Those of the point, not those of the momenta."""
    a, b = (Pair(Vector(np.full(2, v), "x"), Vector(np.full(3, v), "y")) for v in (1.0, 2.0))
    found = Mine().variables(DoubleMomentumState(a, b, jnp.asarray(0)))
    assert found == {"x": a.x, "y": a.y}


def test_texts_may_hold_anything() -> None:
    @dataclass(frozen=True)
    class Described(Mine):
        """Mine: with texts.

        And a second paragraph.
        """

        citation = "Me (2030). A title: with a colon. And a second sentence."
        assumes = "|x| <= 1\n   on two lines"
        exact = "exact"

    entry = catalogue.entry("described", Described)
    assert entry.summary == "Mine: with texts."
    assert entry.facts["assumes"] == "|x| <= 1 on two lines"
    assert entry.facts["source"] == "-"
    assert r"| `described` | \|x\| <= 1 on two lines | exact | - |" in catalogue.markdown({"described": Described})
