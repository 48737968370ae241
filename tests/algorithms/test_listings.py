"""MEHA, MeFBO with STORM, Local-BSGM and AdaFBiO, step by step in numpy, on three different quadratic clients."""

import numpy as np

import derivations
import fedbilevel as fb
from fedbilevel.tasks import Quadratic
from fedbilevel.testing import largest_difference

Q = Quadratic.random(clients=3, p=2, d=3)
X, Y = np.zeros(2), np.zeros(3)
INVERSE = derivations.own_inverses(Q, 0.2, 4)


def gx(m: int, y: np.ndarray) -> np.ndarray:
    return -Q.B[m].T @ y


def gy(m: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return Q.A[m] @ y - Q.B[m] @ x - Q.b[m]


def fx(m: int, x: np.ndarray) -> np.ndarray:
    return Q.R[m] @ (x - Q.t[m])


def fy(m: int, y: np.ndarray) -> np.ndarray:
    return Q.P[m] @ (y - Q.s[m])


def own(m: int, z: np.ndarray) -> np.ndarray:
    """A client's own hypergradient, with a series of four terms, and its gradient of g."""
    x, y = z[:2], z[2:]
    return np.concatenate([fx(m, x) + Q.B[m].T @ INVERSE[m] @ fy(m, y), gy(m, x, y)])


def mean(of_client: object) -> np.ndarray:
    return np.mean([of_client(m) for m in range(3)], 0)  # pyright: ignore[reportCallIssue]


def check(algorithm: fb.Algorithm, rounds: int, x: np.ndarray, y: np.ndarray) -> None:
    found = fb.solve(Q.task(), algorithm, rounds=rounds, every=rounds)
    assert largest_difference((found.x, found.y), (x, y)) < 1e-12
    assert np.max(np.abs(x)) > 1e-3


def test_meha() -> None:
    x, y, theta = X, Y, Y
    for k in range(5):
        c = 2.0 * (k + 1) ** 0.25
        theta = theta - 0.1 * mean(lambda m: gy(m, x, theta) + (theta - y) / 0.5)  # noqa: B023
        x = x - 0.3 * mean(lambda m: fx(m, x) / c + gx(m, y) - gx(m, theta))  # noqa: B023
        y = y - 0.2 * mean(lambda m: fy(m, y) / c + gy(m, x, y) - (y - theta) / 0.5)  # noqa: B023
    check(fb.MEHA(0.3, 0.2, 0.1, "power(2, 0.25)", 0.5), 5, x, y)  # pyright: ignore[reportArgumentType]


def test_mefbo_with_storm() -> None:
    eta, step = np.repeat([0.1, 0.05, 0.1], [2, 3, 3]), np.repeat([0.3, 0.2, 0.1], [2, 3, 3])

    def along(m: int, z: np.ndarray) -> np.ndarray:
        """The mean direction of two local steps."""
        total = 0 * z
        for _ in range(2):
            x, y, theta = z[:2], z[2:5], z[5:]
            pull = (theta - y) / 0.5
            h = [fx(m, x) / 2 + gx(m, y) - gx(m, theta), fy(m, y) / 2 + gy(m, x, y) + pull, gy(m, x, theta) + pull]
            h = np.concatenate(h)
            z, total = z - eta * h, total + h / 2
        return total

    z, old, d, keep = np.zeros(8), np.zeros(8), np.zeros(8), 0.0
    for _ in range(5):
        d = mean(lambda m: along(m, z) - keep * along(m, old)) + keep * d  # noqa: B023
        z, old, keep = z - step * d, z, 0.6
    algorithm = fb.MeFBOStorm(
        *(0.3, 0.2, 0.1),
        penalty=2.0,
        prox=0.5,
        local_steps=2,
        forgetting=0.4,  # pyright: ignore[reportArgumentType]
    )
    check(algorithm, 5, z[:2], z[2:5])


def test_local_bsgm() -> None:
    z, d, beta = np.zeros(5), np.zeros(5), np.repeat([0.3, 0.2], [2, 3])
    alpha = np.repeat([0.5, 0.7], [2, 3])
    for _ in range(4):
        ends = []
        for m in range(3):
            w, e = z, d
            for _ in range(2):
                e = (1 - alpha * 0.8) * e + alpha * 0.8 * own(m, w)
                w = w - beta * 0.8 * e
            ends.append((w, e))
        z, d = (np.mean(each, 0) for each in zip(*ends, strict=True))
    check(fb.LocalBSGM(0.3, 0.2, 0.2, 3, 0.8, 0.5, 0.7, local_steps=2), 4, z[:2], z[2:])


def test_adafbio() -> None:
    z, a, b, t = np.zeros(5), np.zeros(2), 0.0, 1
    d = mean(lambda m: own(m, z))
    for _ in range(4):
        a, b = 0.9 * a + 0.1 * d[:2] ** 2, 0.9 * b + 0.1 * np.linalg.norm(d[2:])
        scale = np.concatenate([0.2 / (np.sqrt(a) + 0.1), np.full(3, 0.1 / (b + 0.1))])
        rate = lambda t: 1 / np.cbrt(1 + t)
        last = []
        for m in range(3):
            w, e = z, d
            for i in range(2):
                new = w - scale * rate(t + i) * e
                if i == 0:
                    e, w = own(m, new) + (1 - 0.2 * rate(t) ** 2) * (e - own(m, w)), new
            last.append((new, w, e))
        z = np.mean([new for new, _, _ in last], 0)
        keep = 1 - 0.2 * rate(t + 1) ** 2
        d = np.mean([own(m, z) + keep * (e - own(m, w)) for m, (_, w, e) in enumerate(last)], 0)
        t += 2
    check(fb.AdaFBiO(0.2, 0.1, 0.2, 3, local_steps=2), 4, z[:2], z[2:])
