"""What the papers' theorems ask of step sizes, given the constants of a task, in words.

The theorems are sufficient, and careful: steps in practice are often ten to a thousand times larger. Where a paper's
constants hide in an O(...), or the paper was not at hand, this says what no method of its kind can do without.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isinf, sqrt

from fedbilevel.diagnostics.constants import Constants


@dataclass(frozen=True)
class Bound:
    """A value, or the largest one, that a theorem allows for a hyper-parameter."""

    name: str
    value: float
    why: str
    exact: bool = False  # the theorem's own choice, not an upper bound

    def __str__(self) -> str:
        return f"{self.name} {'=' if self.exact else '<='} {self.value:.3g}: {self.why}"


def _tilde(c: Constants) -> tuple[float, float]:
    """L_1~ and L_2~ of the FedBiO paper, below its Lemmas C.2 and C.3."""
    of = lambda change: sqrt(c.smooth**2 + 2 * (change * c.radius) ** 2) if change else c.smooth
    return of(c.cross_change), of(c.hessian_change)


def fedbio(c: Constants, local_steps: int) -> list[Bound]:
    """Theorem C.24 of Li, Huang, Huang (2023)."""
    first, second = _tilde(c)
    tau = min(1 / (128 * local_steps * second), 1 / (144 * c.condition * c.smooth))
    gamma = min(
        1 / (8 * local_steps * second),
        tau / (36 * c.condition * max(first, second)),
        1 / (4 * max(first, second)),
        1 / (8 * local_steps * first),
    )
    return [
        Bound("lr_adjoint", tau, "min(1 / (128 I L2~), 1 / (144 kappa L))", exact=True),
        Bound("lr_lower", gamma, "min(1 / (8 I L~), tau / (36 kappa L~), 1 / (4 L~)), and less for long runs"),
        Bound("lr_upper", c.convex * gamma / (36 * c.condition * first), "mu gamma / (36 kappa L1~)", exact=True),
        Bound("radius", c.radius, "C_f / mu", exact=True),
    ]


def fedbioacc(c: Constants, local_steps: int, batch: int, clients: int) -> list[Bound]:
    """Theorem C.14 of Li, Huang, Huang (2023). With exact gradients (sigma = 0) it says nothing about the rate."""
    tilde, many = max(_tilde(c)), batch * clients
    c_upper = 64 / (9 * many) + 2 / (3 * many**2)
    c_lower = 48**2 / (many * c.convex**2) + 2 / (3 * many**2)
    C1 = 1 / 64 + 81 * c.condition**2 / 32 + 9 * tilde**2
    common = min(1 / (8 * sqrt(C1)), tilde / (4 * sqrt(C1)), tilde**2 / c_lower, 1 / (2 * c.smooth), 1.0)
    gamma = min(common, tilde**2 / c_upper)
    eta = min(c.convex * gamma / (36 * c.condition * tilde), common)
    bounds = [
        Bound("lr_lower", gamma, "Theorem C.14: 1 / (8 sqrt(C1)) and 1 / (2 L), C1 = O(kappa^2)"),
        Bound("lr_upper", eta, "mu gamma / (36 kappa L~)"),
        Bound("lr_adjoint", min(gamma, 0.5), "as lr_lower, and 1 / 2"),
        Bound("c_upper", c_upper, "64 / (9 b M) + 2 / (3 b^2 M^2)", exact=True),
        Bound("c_lower", c_lower, "48^2 / (b M mu^2) + 2 / (3 b^2 M^2)", exact=True),
        Bound("c_adjoint", c_lower, "the same", exact=True),
        Bound("radius", c.radius, "C_f / mu", exact=True),
    ]
    if c.noise > 0:
        u0 = (many * c.noise) ** 2 * max(2, 16**2 * local_steps**3 * tilde**2, c_upper**1.5, c_lower**1.5)
        delta = (many * c.noise) ** (2 / 3) / (16 * tilde) ** (1 / 3)
        bounds += [
            Bound("delta of the rate", delta, "(b M sigma)^(2/3) / (16 L~)^(1/3)", exact=True),
            Bound("u0 of the rate", u0, "(b M sigma)^2 max(2, 256 I^3 L~^2, c^(3/2))", exact=True),
        ]
    return bounds


def mefbo(c: Constants, local_steps: int, prox: float) -> list[Bound]:
    """Theorem 3.4 and Lemma D.8 of MeFBO; L_2 is the smoothness of g."""
    bounds = [Bound("prox", 1 / (2 * c.g_smooth), "1 / (2 L_2) (Theorem 3.4)")]
    gamma = min(prox, 0.99 * bounds[0].value)
    rho = 1 / gamma - c.g_smooth
    theta = 4 / (5 * rho)
    curvature = c.g_smooth**2 + 1 / gamma**2
    local = min(1 / (18 * curvature * local_steps * theta), gamma / (6 * sqrt(local_steps * theta)))
    with_prox = f"with prox = {gamma:.3g}, rho = 1 / prox - L_2 = {rho:.3g}"
    return [
        *bounds,
        Bound("lr_prox", theta, f"4 / (5 rho) (eq. 78), {with_prox}"),
        *(Bound(f"local_lr_{name}", local, "eq. (83), with this lr_prox") for name in ("upper", "lower", "prox")),
    ]


def stable(c: Constants, series: bool) -> list[Bound]:
    """What gradient steps on y, and a series or steps for the adjoint, need anyway."""
    adjoint = (1.0, "1 / L_y, so that the Neumann series converges from one side")
    return [
        Bound("lr_lower", 2 / c.y_smooth, "2 / L_y: beyond that, y diverges"),
        Bound("lr_adjoint", (adjoint[0] if series else 2.0) / c.y_smooth, adjoint[1] if series else "2 / L_y"),
    ]


def bounds(
    c: Constants, local_steps: int = 5, batch: int = 64, clients: int = 10, prox: float = 0.015
) -> Mapping[str, list[Bound]]:
    """By algorithm: what its theorem asks for; an empty list where g is not strongly convex, as it then asks for more
    than this task has.

    >>> from fedbilevel import tasks
    >>> from fedbilevel.diagnostics.constants import measure_constants
    >>> for bound in bounds(measure_constants(tasks.quadratic("T2")), prox=0.1)["mefbo"][:2]:
    ...     print(bound)
    prox <= 0.167: 1 / (2 L_2) (Theorem 3.4)
    lr_prox <= 0.114: 4 / (5 rho) (eq. 78), with prox = 0.1, rho = 1 / prox - L_2 = 7
    """
    convex = not isinf(c.condition)
    return {
        "fedbio": fedbio(c, local_steps) if convex else [],
        "fedbioacc": fedbioacc(c, local_steps, batch, clients) if convex else [],
        "mefbo": mefbo(c, local_steps, prox),
        "simfbo": stable(c, series=False) if convex else [],
        "fednest": stable(c, series=True) if convex else [],
    }


def words(c: Constants) -> list[str]:
    """The constants, one sentence each."""
    mu = (
        f"g is strongly convex in y with mu >= {c.convex:.3g} (kappa = L / mu = {c.condition:.3g})."
        if c.convex > 0
        else f"g is not strongly convex in y: its smallest curvature is {c.convex:.3g}. Weight decay would help."
    )
    return [
        f"f is smooth with L = {c.f_smooth:.3g}, g with L = {c.g_smooth:.3g}, in y alone with L_y = {c.y_smooth:.3g}.",
        mu,
        f"The cross term d2xy g is at most {c.cross:.3g}, and the gradient of f at most C_f = {c.gradient:.3g}.",
        f"Clients differ by zeta_f = {c.f_differ:.3g} and zeta_g = {c.g_differ:.3g} in gradients, and by "
        f"{c.hessian_differ:.3g} and {c.cross_differ:.3g} in d2yy g and d2xy g.",
        "Gradients are those of all rows: no noise."
        if c.noise == 0
        else f"The gradient of one batch has noise sigma = {c.noise:.3g}.",
        f"Seen at {c.clients} clients, at the start and where y has descended from there.",
    ]
