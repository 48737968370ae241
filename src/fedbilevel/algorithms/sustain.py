"""SUSTAIN."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from fedbilevel.core import Clients, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.mathematics.averages import DoubleMomentum
from fedbilevel.mathematics.hypergradient import Pair


@dataclass(frozen=True)
class SUSTAIN(DoubleMomentum):
    """SUSTAIN: one step on x and on y at once, both along STORM momenta, with one random term of the Neumann series.

    Every gradient and product is the mean over the clients. With k uniform on 0 .. K-1 and independent batches for all
    parts::

        Phi(x, y; xi) = grad_x f - d2xy g (K / L) prod_{i=1}^k ( I - d2yy g(xi_i) / L ) grad_y f
        y_{t+1} = y_t - beta_t h_g,     h_g <- grad_y g(t+1; xi) + (1 - eta_g) ( h_g - grad_y g(t; xi) )
        x_{t+1} = P( x_t - alpha_t h_f ),    h_f <- Phi(t+1; xi) + (1 - eta_f) ( h_f - Phi(t; xi) )

    The same k and the same batches serve both points; the momenta start as the first gradients. ``full_series`` sums
    the K terms instead of drawing one.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    alpha_t   lr_upper         step of x, a number or a schedule: t^(-1/3) in the theory
    beta_t    lr_lower         ... of y
    1 / L     lr_adjoint       step of the series; L bounds the curvature of g in y
    eta_f     forget_upper     forgetting of the momentum of x, from 0 to 1: t^(-2/3) in the theory
    eta_g     forget_lower     ... of y
    K         terms            terms of the series
    -         full_series      all terms of the series instead of a random one
    ========  ==============   =====================

    A random k leaves noise that grows with K, so that x settles only with decreasing steps. With partial participation
    the momenta are estimates from the clients of the round. If the problem has constraints, the server projects.
    """

    citation = (
        'Khanduri, Zeng, Hong, Wai, Wang, Yang: "A Near-Optimal Algorithm for Stochastic Bilevel Optimization via '
        'Double-Momentum", NeurIPS 2021'
    )
    source = "reconstruction without the paper's text"
    assumes = "g strongly convex in y"
    exact = "exact up to the remainder (I - d2yy g / L)^K of the series"
    alone = "SUSTAIN"
    costs = (
        "k + 2 exchanges per round, k = K - 1 for the full series: p + (2k + 3)d floats down with full participation "
        "(p + d more for a client that missed the last round), 3p + (2k + 3)d up; 2 Gg, 2 Gf, 2k H and 2 J per "
        "client. If the server holds f, one exchange, 2 (p + d) floats up and the Gf less. The first momenta cost one "
        "more round"
    )

    terms: int = parameter(10, "terms of the Neumann series", least=1)
    full_series: bool = parameter(False, "sum all terms of the series instead of drawing one")

    def adjoints(self, clients: Clients, points: Sequence[Pair], fy: tuple[Vector, ...]) -> tuple[Vector, ...]:
        if self.full_series or self.terms == 1:
            return self.neumann(clients, points, fy, self.lr_adjoint, self.terms - 1, whole=True)
        k = jax.random.randint(clients.next_key(), (), 0, self.terms)
        drawn = self.neumann(clients, points, fy, self.lr_adjoint, k, whole=False)
        return tuple(self.terms * term for term in drawn)
