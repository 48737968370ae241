"""Step sizes that change from round to round, and an adjoint that does not start at 0: trajectories in numpy."""

from pathlib import Path

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.schedules import Schedule, cube_root, power
from fedbilevel.engines.simulation import Simulation
from fedbilevel.runs.experiment import Experiment
from fedbilevel.tasks import Quadratic
from fedbilevel.testing import largest_difference

Q = Quadratic.random(clients=3, p=3, d=4)
U = np.array([1.0, -2.0, 0.5, 3.0])
FALLING = fb.FedBiO("power(0.2, -0.5)", cube_root(0.4, 2.0), 0.3, local_steps=2)  # pyright: ignore[reportArgumentType]


def fedbio(rounds: int, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FedBiO with two local steps, steps 0.2 / sqrt(1 + t), 0.4 / (2 + t)^(1/3) and 0.3 in round t."""
    x, y = np.zeros(3), np.zeros(4)
    for t in range(rounds):
        eta, gamma = 0.2 / np.sqrt(1 + t), 0.4 / np.cbrt(2 + t)
        ends = []
        for m in range(3):
            z = (x, y, u)
            for _ in range(2):
                a, b, v = z
                z = (
                    a - eta * (Q.R[m] @ (a - Q.t[m]) + Q.B[m].T @ v),
                    b - gamma * (Q.A[m] @ b - Q.B[m] @ a - Q.b[m]),
                    v - 0.3 * (Q.A[m] @ v - Q.P[m] @ (b - Q.s[m])),
                )
            ends.append(z)
        x, y, u = (np.mean(each, 0) for each in zip(*ends, strict=True))
    return x, y


@pytest.mark.parametrize("engine", ["simulation", "local"])
def test_schedules_and_the_first_adjoint(engine: str) -> None:
    result = fb.solve(Q.task(), FALLING, rounds=5, u=U, engine=engine)  # pyright: ignore[reportArgumentType]
    assert largest_difference((result.x, result.y), fedbio(5, U)) < 1e-12
    assert largest_difference(fedbio(5, U), fedbio(5, 0 * U)) > 1e-3


def test_a_round_knows_its_number_after_a_restart(tmp_path: Path) -> None:
    fb.solve(Q.task(), FALLING, rounds=2, every=10, checkpoint=tmp_path)
    continued = fb.solve(Q.task(), FALLING, rounds=5, every=10, checkpoint=tmp_path)
    assert largest_difference((continued.x, continued.y), fedbio(5, 0 * U)) < 1e-12


def test_the_first_adjoint_of_other_algorithms() -> None:
    """The first step of x is along grad_x f - d2xy g u, wherever u is a part of the state."""
    expected = -0.1 * (np.mean(np.einsum("mij,mj->mi", Q.R, -Q.t), 0) + np.mean(Q.B, 0).T @ U)
    for algorithm in (fb.SimFBO(0.1, local_steps=1), fb.FedMSA(0.1, local_steps=1)):
        assert Simulation(Q.task(), algorithm).plan.starts_u
        np.testing.assert_allclose(fb.solve(Q.task(), algorithm, rounds=1, u=U).x, expected)


def test_schedules_by_name() -> None:
    assert fb.FedBiO(lr_upper="0.5").lr_upper == 0.5  # pyright: ignore[reportArgumentType]
    assert fb.FedBiO(lr_upper=power(0.5, 0.0)).lr_upper == 0.5  # pyright: ignore[reportArgumentType]
    built = Experiment("quadratic", "fedbio").changed({"lr_upper": "power(0.2, -0.5)"}).build()
    assert built.algorithm.lr_upper == power(0.2, -0.5)  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(FALLING.lr_lower, Schedule)
    assert FALLING.at(3).lr_upper == pytest.approx(0.1)
    assert fb.FedBiO().at(3) == fb.FedBiO()


def test_what_is_refused() -> None:
    with pytest.raises(fb.FedbilevelError, match=r"^FedBiO: lr_upper must be greater than 0"):
        fb.FedBiO(lr_upper="power(-1, -0.5)")  # pyright: ignore[reportArgumentType]
    with pytest.raises(fb.FedbilevelError, match="the offset of its schedule must be greater than 0"):
        fb.FedBiO(lr_upper="power(1, -0.5, 0)")  # pyright: ignore[reportArgumentType]
    with pytest.raises(fb.FedbilevelError, match=r"FedMSA: forgetting must be at most 1"):
        fb.FedMSA(forgetting="power(1, -0.5, 0.5)")  # pyright: ignore[reportArgumentType]
    with pytest.raises(fb.FedbilevelError, match="StocBiO keeps no adjoint from round to round"):
        fb.solve(Q.task(), fb.StocBiO(), rounds=1, u=U)
    with pytest.raises(fb.FedbilevelError, match="the given u has the shape"):
        fb.solve(Q.task(), fb.FedBiO(), rounds=1, u=np.zeros(2))
