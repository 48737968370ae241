"""Potential functions of the proofs, and the errors they are made of."""

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedbilevel.algorithms.fedbioacc_local import FedBiOAccLocalState
from fedbilevel.core import Problem
from fedbilevel.core.data import Data, Layout
from fedbilevel.core.vectors import Vector, dot, norm, sub
from fedbilevel.diagnostics.average import KEY, Average
from fedbilevel.diagnostics.fedbioacc import mean_directions
from fedbilevel.diagnostics.mefbo import envelope_gap
from fedbilevel.diagnostics.quantities import NotDefined, defined, nearest, solved_at, vectors
from fedbilevel.diagnostics.snapshot import Snapshot


def fedbio_potential(
    moment: Snapshot, curvature: float = 1.0, smoothness: float = 1.0, smoothness_upper: float = 1.0
) -> float:
    """The potential function of FedBiO, from the proof of Theorem C.24::

        G_t = h(x) + 9 eta L1^2 / (mu gamma) |y - y*(x)|^2 + 9 eta L^2 / (mu tau) |u - u*(x)|^2

    Args:
        moment: of a run of FedBiO. After a round all clients are at the server's point.
        curvature: mu, the strong convexity of g in y.
        smoothness: L, the Lipschitz constant of the gradients of f and g.
        smoothness_upper: L1 with L1^2 = L^2 + 2 Lxy^2 C^2 / mu^2; on quadratics it is L.
    """
    a, solved, z = moment.algorithm, moment.solved, moment.state.server
    gaps = sub((z.y, z.u), (solved.y, solved.u))
    of_y, of_u = (float(dot(gap, gap)) for gap in gaps)
    of_y *= smoothness_upper**2 / a.lr_lower
    of_u *= smoothness**2 / a.lr_adjoint
    return float(solved.value) + 9 * a.lr_upper / curvature * (of_y + of_u)


def local_potential(
    moment: Snapshot,
    curvature: float = 1.0,
    smoothness: float = 1.0,
    smoothness_upper: float = 1.0,
    batch: int | None = None,
) -> float:
    """The potential function of FedBiO-Local (Theorem D.19)::

        G_t = h(x) + 9 eta L1^2 / (mu gamma) mean |y_m - y_m*(x)|^2

    and of FedBiOAcc-Local (Theorem D.12), where the factor 9 is 18 and two errors of momenta are added::

        9 b M eta / (16 alpha_t) ( |nu - grad h(x)|^2 + (L1 / L)^2 mean |omega_m - grad_y g_m(x, y_m)|^2 )

    Args:
        moment: of a run of one of them. After a round all clients have the server's x.
        curvature, smoothness: mu and L, as for FedBiO.
        smoothness_upper: the Lipschitz constant of the clients' own hypergradients Phi_m in (x, y).
        batch: b; by default that of the task for g.
    """
    a, solved, state, task = moment.algorithm, moment.solved, moment.state, moment.task
    weights = task.normalised_weights
    gaps = _squares(vectors((), moment.point[1])[1] - solved.y)
    value = float(solved.value)
    accelerated = isinstance(state.server, FedBiOAccLocalState)
    value += (18 if accelerated else 9) * a.lr_upper * smoothness_upper**2 / (curvature * a.lr_lower) * weights @ gaps
    if accelerated:
        errors = momentum_errors(moment)
        b = batch or task.layout.batch_sizes[0] or task.layout.longest[0]
        factor = 9 * b * task.layout.clients * a.lr_upper / (16 * float(a.rate(state.server.t)))
        of_y = (smoothness_upper / smoothness) ** 2 * errors["momentum_error_y"] ** 2
        value += factor * (errors["momentum_error_x"] ** 2 + of_y)
    return float(value)


def momentum_errors(moment: Snapshot) -> dict[str, float]:
    """How far the momenta of FedBiOAcc and FedBiOAcc-Local are from what they estimate, on all data.

    For FedBiOAcc the norms of nu - (grad_x f - d2xy g u), of omega - grad_y g and of q - (d2yy g u - grad_y f), with
    means over clients; for FedBiOAcc-Local |nu - grad h(x)|, and the root of the mean over clients of |omega_m - grad_y
    g_m(x, y_m)|^2.
    """
    task, server = moment.task, moment.state.server
    if not isinstance(server, FedBiOAccLocalState):
        errors = sub(server.d, mean_directions(task.problem, task.layout, task.data, server.z))
        return {f"momentum_error_{name}": float(norm(error)) for name, error in errors._asdict().items()}
    x, y = vectors(*moment.point)
    omega = moment.state.memory.d.y - _own_slopes(task.problem, task.layout, task.data, x, y)
    return {
        "momentum_error_x": float(norm(server.nu - moment.solved.hypergradient)),
        "momentum_error_y": math.sqrt(task.normalised_weights @ _squares(omega)),
    }


@partial(jax.jit, static_argnames=("problem", "layout"))
def _own_slopes(problem: Problem, layout: Layout, data: Data, x: Vector, y: Vector) -> Vector:
    """grad_y g_m(x, y_m) of every client."""

    def one(m: tuple[jax.Array, Vector]) -> Vector:
        id, y = m
        alone = Average(problem, layout, data, x, id[None], jnp.ones(1, data.weights.dtype))
        return alone.sum(lambda c, x: c.g.dy(x, y, KEY))

    return lax.map(one, (jnp.arange(layout.clients), y))


def _squares(v: Vector) -> np.ndarray:
    """The squared norm of every client's part."""
    return sum(np.sum(np.square(a), axis=tuple(range(1, np.ndim(a)))) for a in jax.tree.leaves(v.tree))  # pyright: ignore[reportReturnType]


def adjoint_error(moment: Snapshot) -> float:
    """|u - u*(x)|, where u*(x) is the adjoint at y*(x), not at the current y."""
    assert moment.adjoint is not None
    return float(norm(moment.adjoint - moment.solved.u))


def mefbo_potential(
    moment: Snapshot, smoothness: float = 1.0, lipschitz: float = 1.0, least: float = 0.0
) -> dict[str, float]:
    """The potential function of MeFBO, eq. (31) of its paper, and the gap of theta in it::

        Psi = (f(x, y) - F) / c_t + g(x, y) - v(x, y) + K |theta - theta*(x, y)|^2
        K = (L^2 + 3 / gamma^2)^(1/2) / (2 l)

    with the Moreau envelope v(x, y) = min over feasible theta of g(x, theta) + |theta - y|^2 / (2 gamma).

    Args:
        moment: of a run of MeFBO.
        smoothness: L, the Lipschitz constant of the gradient of g.
        lipschitz: l, that of theta*.
        least: F, a lower bound of f.
    """
    a, server = moment.algorithm, moment.state.server
    c = float(a.penalty(server.t))
    value, theta = envelope_gap(moment.task, server.z.x, server.z.y, c, a.prox)
    gap = float(norm(server.z.theta - theta))
    K = math.sqrt(smoothness**2 + 3 / a.prox**2) / (2 * lipschitz)
    return {"mefbo_potential": value - least / c + K * gap**2, "mefbo_theta_gap": gap}


def moreau_gradient(moment: Snapshot, weight: float = 10.0) -> float:
    """The norm of the gradient of the Moreau envelope of h, the measure of Theorem 2 of the primal-dual paper::

        rho |x - x^|,   x^ = argmin over feasible z of h(z) + rho / 2 |z - x|^2

    ``weight`` is rho, which must be larger than the curvature of h, so that x^ is unique. x^ is found by projected
    gradient steps with exact hypergradients.
    """
    task, (x, y) = moment.task, vectors(*moment.point)
    at, tree = x, y.tree
    for _ in range(1000):
        solved = defined(solved_at(task, at.tree, tree))
        tree = solved.y.tree
        new = nearest(task.problem, at - (solved.hypergradient + weight * (at - x)) / (2 * weight))
        moved, at = float(norm(new - at)), new
        if moved <= 1e-10 * (1 + float(norm(x))):
            return float(weight * norm(x - at))
    raise NotDefined(f"the Moreau envelope has no minimum that was found with weight = {weight:g}: try a larger one.")


def averaged_square(moment: Snapshot) -> Mapping[str, float]:
    """|grad h|^2 now, and (1 / T) times its sum over all rounds so far, which is linear between evaluations."""
    now = float(dot(moment.solved.hypergradient, moment.solved.hypergradient))
    mean, round = now, int(moment.state.round)
    if moment.history and round > 0:
        last = moment.history[-1]
        done, square = last["round"], last["squared_hypergradient"]
        mean = (done * last["mean_squared_hypergradient"] + (round - done) * (square + now) / 2) / round
    return {"squared_hypergradient": now, "mean_squared_hypergradient": mean}
