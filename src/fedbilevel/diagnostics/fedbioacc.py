"""The Lyapunov function of the FedBiOAcc paper."""

from functools import partial
from typing import Any

import jax

from fedbilevel.core import Problem
from fedbilevel.core.data import Data, Layout
from fedbilevel.core.vectors import dot, sub
from fedbilevel.diagnostics.average import Average
from fedbilevel.diagnostics.snapshot import Snapshot, check_needs
from fedbilevel.mathematics.hypergradient import Point, directions

NEEDED = ("momenta", "shared")


@partial(jax.jit, static_argnames=("problem", "layout"))
def mean_directions(problem: Problem, layout: Layout, data: Data, z: Point) -> Point:
    """The mean of what the momenta estimate."""
    average = Average(problem, layout, data, z.x)
    return average.sum(lambda c, x: directions(c, z, jax.random.key(0), shared_batch=True))


def lyapunov(
    engine: Any, state: Any, curvature: float = 1.0, smoothness: float = 1.0, batch: int | None = None
) -> float:
    """The Lyapunov function of a state of FedBiOAcc, eq. (9) of its paper::

        G_t = h(x) + 18 eta Lt^2 / (mu gamma) ( |y - y*(x)|^2 + |u - u*(x)|^2 )
                   + 9 b M eta / (64 alpha_t) ( |nu - grad_x f + d2xy g u|^2 + |omega - grad_y g|^2
                                                + |q - d2yy g u + grad_y f|^2 )

    with u*(x) at y*(x), and exact means over all M clients in place of what the momenta nu, omega and q estimate.
    (After a round all clients are at the server's point.) eta, gamma and alpha_t are the algorithm's.

    Args:
        engine, state: of FedBiOAcc.
        curvature: mu, the strong convexity of g in y.
        smoothness: Lt with Lt^2 = L^2 + 2 L2^2 C^2 / mu^2: L and L2 are the Lipschitz constants of the first and
            second derivatives of f and g, C bounds grad f. On quadratics Lt = L. (The proof, in the appendix, gives
            the gap of u the factor 18 eta L^2 / (mu tau) instead.)
        batch: b; by default that of the task for g.
    """
    moment = Snapshot(engine, state)
    check_needs("lyapunov", NEEDED, moment)
    return lyapunov_of(moment, curvature, smoothness, batch)


def lyapunov_of(moment: Snapshot, curvature: float = 1.0, smoothness: float = 1.0, batch: int | None = None) -> float:
    """The Lyapunov function at one moment of a run."""
    task, algorithm, (z, d, t) = moment.task, moment.algorithm, moment.state.server
    layout, solved = task.layout, moment.solved
    squared = lambda v: float(dot(v, v))
    gaps = squared(z.y - solved.y) + squared(z.u - solved.u)
    errors = sum(squared(v) for v in sub(d, mean_directions(task.problem, layout, task.data, z)))
    eta, gamma, alpha = algorithm.lr_upper, algorithm.lr_lower, float(algorithm.rate(t))
    b = batch or layout.batch_sizes[0] or layout.longest[0]
    return (
        float(solved.value)
        + 18 * eta * smoothness**2 / (curvature * gamma) * gaps
        + 9 * b * layout.clients * eta / (64 * alpha) * errors
    )
