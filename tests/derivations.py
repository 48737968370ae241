"""Where algorithms must end, derived from the matrices of a quadratic problem: numpy only, no run of ours."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fedbilevel.tasks import Quadratic

Array = np.ndarray


def root(affine: Callable[[Array], Array], size: int) -> Array:
    """The zero of an affine function."""
    offset = affine(np.zeros(size))
    return np.linalg.solve(np.stack([affine(e) - offset for e in np.eye(size)], axis=1), -offset)


def series(A: Array, step: float, terms: int) -> Array:
    """step sum_{k < terms} (I - step A)^k, which tends to the inverse of A; of one matrix or of each of several."""
    factor, power, total = np.eye(A.shape[-1]) - step * A, np.eye(A.shape[-1]), 0
    for _ in range(terms):
        total, power = total + power, power @ factor
    return step * np.broadcast_to(total, A.shape)


def means(q: Quadratic) -> tuple[Array, ...]:
    """Mean A, B, b, P, P s, R, R t."""
    Ps, Rt = np.einsum("mij,mj->mi", q.P, q.s), np.einsum("mij,mj->mi", q.R, q.t)
    return tuple(q.mean(v) for v in (q.A, q.B, q.b, q.P, Ps, q.R, Rt))


def truncated(q: Quadratic, step: float, terms: int) -> Array:
    """Where the hypergradient vanishes if the inverse of the MEAN Hessian is a series of this many terms."""

    def hypergradient(x: Array) -> Array:
        pull = q.mean(np.einsum("mij,mj->mi", q.P, q.lower(x) - q.s))
        direct = q.mean(np.einsum("mij,mj->mi", q.R, x - q.t))
        return direct + q.mean(q.B).T @ series(q.mean(q.A), step, terms) @ pull

    return root(hypergradient, q.B.shape[-1])


def own_inverses(q: Quadratic, step: float, terms: int | None) -> Array:
    """Every client's inverse of its OWN Hessian, or the series for it."""
    return np.linalg.inv(q.A) if terms is None else series(q.A, step, terms)


def own_hypergradients(q: Quadratic, x: Array, y: Array, inverse: Array) -> Array:
    """Phi_m = R_m (x - t_m) + B_m' S_m P_m (y_m - s_m), a row for each client."""
    pull = np.einsum("mij,mj->mi", q.P, y - q.s)
    return np.einsum("mij,mj->mi", q.R, x - q.t) + np.einsum("mki,mkl,ml->mi", q.B, inverse, pull)


def mean_of_own(q: Quadratic, step: float, terms: int | None) -> Array:
    """Where the mean of the clients' own hypergradients is 0, at y*(x) of this lower level: right for a local lower
    level (up to the series), wrong for a global one."""
    inverse = own_inverses(q, step, terms)
    return root(lambda x: q.mean(own_hypergradients(q, x, q.lower(x), inverse)), q.B.shape[-1])


def drifted(q: Quadratic, eta: float, gamma: float, tau: float, local_steps: int) -> Array:
    """The fixed point of local steps on (x, y, u) at once: every client applies z -> S z + c a few times, and the mean
    of the displacements is 0."""
    p, d = q.B.shape[-1], q.B.shape[-2]
    powers: Any = 0
    constants: Any = 0
    for m, weight in enumerate(q.weights):
        S = np.eye(p + 2 * d)
        S[:p, :p] -= eta * q.R[m]
        S[:p, p + d :] -= eta * q.B[m].T
        S[p : p + d, :p] += gamma * q.B[m]
        S[p : p + d, p : p + d] -= gamma * q.A[m]
        S[p + d :, p : p + d] += tau * q.P[m]
        S[p + d :, p + d :] -= tau * q.A[m]
        c = np.concatenate([eta * q.R[m] @ q.t[m], gamma * q.b[m], -tau * q.P[m] @ q.s[m]])
        powers = powers + weight * np.linalg.matrix_power(S, local_steps)
        constants = constants + weight * sum(np.linalg.matrix_power(S, k) @ c for k in range(local_steps))
    return np.linalg.solve(np.eye(p + 2 * d) - powers, constants)[:p]


def drifted_locally(
    q: Quadratic,
    eta: float,
    gamma: float,
    tau: float,
    terms: int,
    local_steps: int,
    lower_steps: int = 1,
    restart: bool = False,
) -> Array:
    """The same for a local lower level: x is averaged, y is not. For each step of x, y makes some, or the same number
    from 0 with the hypergradient at their end."""
    clients, d, p = q.B.shape
    inverse = own_inverses(q, tau, terms)

    def moved(z: Array) -> Array:
        x, y = np.broadcast_to(z[:p], (clients, p)), z[p:].reshape(clients, d)
        for _ in range(local_steps):
            new = descended(q, x, 0 * y if restart else y, gamma, lower_steps)
            x, y = x - eta * own_hypergradients(q, x, new if restart else y, inverse), new
        return np.concatenate([q.mean(x), y.ravel()]) - z

    return root(moved, p + clients * d)[:p]


def descended(q: Quadratic, x: Array, y: Array, gamma: float, steps: int) -> Array:
    """Every client's y (and x, a row for each) after gradient steps on its own lower loss."""
    for _ in range(steps):
        y = y - gamma * (np.einsum("mij,mj->mi", q.A, y) - np.einsum("mij,mj->mi", q.B, x) - q.b)
    return y


def restarted(q: Quadratic, gamma: float, steps: int, tau: float, terms: int) -> Array:
    """Where the mean of the clients' own hypergradients is 0, each at the y that some steps from 0 lead to."""
    clients, d, p = q.B.shape
    inverse = own_inverses(q, tau, terms)

    def mean(x: Array) -> Array:
        y = descended(q, np.broadcast_to(x, (clients, p)), np.zeros((clients, d)), gamma, steps)
        return q.mean(own_hypergradients(q, x, y, inverse))

    return root(mean, p)


def lfednest(q: Quadratic, a: Any) -> Array:
    """Where a round of LFedNest stands still: averages of local steps on y, then of local steps on x."""
    p, d = q.B.shape[-1], q.B.shape[-2]
    inverse = own_inverses(q, a.lr_adjoint, a.hessian_steps + 1)

    def moves(z: Array) -> Array:
        x, y = z[:p], z[p:]
        move = np.zeros(p + d)
        for m, weight in enumerate(q.weights):
            y_m, x_m = y, x
            for _ in range(a.local_steps):
                y_m = y_m - a.lr_lower * (q.A[m] @ y_m - q.B[m] @ x - q.b[m])
            u = inverse[m] @ q.P[m] @ (y - q.s[m])
            for _ in range(a.local_steps_upper):
                x_m = x_m - a.lr_upper * (q.R[m] @ (x_m - q.t[m]) + q.B[m].T @ u)
            move += weight * np.concatenate([x_m - x, y_m - y])
        return move

    return root(moves, p + d)[:p]


def mefbo(q: Quadratic, c: float, gamma: float) -> Array:
    """The saddle point: h_x = h_y = h_theta = 0, linear in (x, y, theta)."""
    A, B, b, P, Ps, R, Rt = means(q)
    E = np.eye(len(b)) / gamma
    system = np.block([[R / c, -B.T, B.T], [-B, P / c + A - E, E], [-B, -E, A + E]])
    return np.linalg.solve(system, np.concatenate([Rt / c, Ps / c + b, b]))[: B.shape[1]]


def f2sa(q: Quadratic, penalty: float) -> Array:
    """The zero of the three directions, linear in (x, y, z)."""
    A, B, b, P, Ps, R, Rt = means(q)
    zero = np.zeros_like(A)
    system = np.block([[R, -penalty * B.T, penalty * B.T], [-B, P / penalty + A, zero], [-B, zero, A]])
    return np.linalg.solve(system, np.concatenate([Rt, Ps / penalty + b, b]))[: B.shape[1]]


def alternated(q: Quadratic, eta: float, local_steps: int) -> Array:
    """Where local steps of x along its own gradient of f end: every client contracts its distance from t_m by the power
    of I - eta R_m, and the mean of the displacements is 0. With one step, the minimum of the mean of f in x."""
    eye = np.eye(q.R.shape[-1])
    moved = eye - np.array([np.linalg.matrix_power(eye - eta * R, local_steps) for R in q.R])
    return np.linalg.solve(q.mean(moved), q.mean(np.einsum("mij,mj->mi", moved, q.t)))
