"""What clients do between averages: the drift of MeFBO as its paper defines it, and virtual averages."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedbilevel.algorithms.mefbo import MoreauPenalty, Triple
from fedbilevel.core import Client, Key, Problem
from fedbilevel.core.data import Data, Layout
from fedbilevel.core.vectors import dot, norm, sub
from fedbilevel.diagnostics.quantities import defined, solved_at
from fedbilevel.diagnostics.snapshot import Snapshot
from fedbilevel.engines.program import round_keys
from fedbilevel.engines.simulation import Simulation


def mefbo_drift(moment: Snapshot) -> dict[str, float]:
    """The client drift of MeFBO in the next round, eq. (29) of its paper: for z = x, y and theta::

        sum_m w_m 1 / tau sum_{k=0}^{tau-1} |z_m^k - z|^2

    over all clients, whoever takes part, and with the batches of the next round in place of the expectation.
    """
    task, state = moment.task, moment.state
    _, work = round_keys(state.key, state.round)
    key = jax.random.fold_in(work, 0)  # the first exchange of the round
    drifts = _drifts(moment.algorithm, task.problem, task.layout, task.data, key, state.server.z, state.server.t)
    return {f"mefbo_drift_{name}": float(value) for name, value in drifts.items()}


@partial(jax.jit, static_argnames=("problem", "layout"))
def _drifts(
    algorithm: MoreauPenalty, problem: Problem, layout: Layout, data: Data, key: Key, z: Triple, t: jax.Array
) -> dict[str, jax.Array]:
    def of_client(id: jax.Array) -> dict[str, jax.Array]:
        client: Client = layout.client(problem, data, id, data.weights[id])

        def step(carry: tuple[Triple, Any], key: Key, _: Any) -> tuple[Triple, Any]:
            now, sums = carry
            away = {name: dot(gap, gap) for name, gap in sub(now, z)._asdict().items()}
            return algorithm.step(client, now, t, key)[0], jax.tree.map(jnp.add, sums, away)

        nothing = {name: jnp.zeros_like(norm(v)) for name, v in z._asdict().items()}
        _, sums = client.repeat(algorithm.local_steps, step, (z, nothing), jax.random.fold_in(key, id))
        return {name: each / algorithm.local_steps for name, each in sums.items()}

    each = lax.map(of_client, jnp.arange(layout.clients))
    return {name: jnp.dot(data.weights.astype(of.dtype), of) for name, of in each.items()}


def virtual_hypergradient(moment: Snapshot) -> dict[str, float]:
    """|grad h|^2 at the virtual averages of the next round, in the mean: the average of the clients' x after i of their
    I local steps, for i = 0 .. I - 1. This is what the proofs sum up, and what no server ever sees for i > 0.

    A round with i local steps draws the same batches, so that its average is the virtual one.
    """
    engine, algorithm = moment.engine, moment.algorithm
    x, y = moment.point
    squares = []
    for steps in range(algorithm.local_steps):
        if steps:
            program = engine.program
            shorter = Simulation(
                moment.task, replace(algorithm, local_steps=steps), program.participation, program.batching
            )
            x, _ = shorter.solution(shorter.advance(moment.state, 1))
        gradient = defined(solved_at(moment.task, x, y)).hypergradient
        squares.append(float(dot(gradient, gradient)))
    return {"virtual_hypergradient": math.sqrt(sum(squares) / len(squares))}
