"""The server's engine of a federation: what it knows at the end."""

from contract import CONTRACT
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.engine import Federation
from fedbilevel.testing import largest_difference, noisy


def test_the_server_knows_x_and_y_although_clients_remember() -> None:
    """FedMSA: what clients keep for the run, and do not show, is no part of the solution."""
    algorithm, task = CONTRACT["fedmsa"].small, noisy("global", weighting=False)
    simulation, local = Simulation(task, algorithm), Local(task, algorithm)
    for party in local.parties:
        party.reveals = False
    engine = Federation(local.program, local.plan, local.weights, local, task.data)
    x, y = engine.solution(engine.advance(engine.start(3), 3))
    expected = simulation.solution(simulation.advance(simulation.start(3), 3))
    assert largest_difference((x, y), expected) < 1e-12
