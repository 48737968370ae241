"""MRBO."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedbilevel.core import Clients, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.mathematics.averages import DoubleMomentum
from fedbilevel.mathematics.hypergradient import Pair


@dataclass(frozen=True)
class MRBO(DoubleMomentum):
    """MRBO: one step on x and on y at once, both along STORM momenta, with the whole Neumann series.

    Every gradient and product is the mean over the clients. With independent batches for all parts::

        Phi(x, y; xi) = grad_x f - d2xy g eta sum_{q=0}^Q prod_{j=1}^q ( I - eta d2yy g(xi_j) ) grad_y f
        y_{t+1} = y_t - lambda_t u,      u <- grad_y g(t+1; xi) + (1 - beta_t) ( u - grad_y g(t; xi) )
        x_{t+1} = P( x_t - gamma_t v ),  v <- Phi(t+1; xi) + (1 - alpha_t) ( v - Phi(t; xi) )

    The same batches serve both points; the momenta start as the first gradients.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    gamma_t   lr_upper         step of x, a number or a schedule: t^(-1/3) in the theory
    lambda_t  lr_lower         ... of y
    eta       lr_adjoint       step of the series, below 1 / L
    alpha_t   forget_upper     forgetting of the momentum of x, from 0 to 1: t^(-2/3) in the theory
    beta_t    forget_lower     ... of y
    Q         neumann_steps    Hessian products of the series, which has Q + 1 terms
    ========  ==============   =====================

    With partial participation the momenta are estimates from the clients of the round. If the problem has constraints,
    the server projects.
    """

    citation = 'Yang, Ji, Liang: "Provably Faster Algorithms for Bilevel Optimization", NeurIPS 2021'
    source = "reconstruction without the paper's text: SUSTAIN with the full series"
    assumes = "g strongly convex in y"
    exact = "exact up to the remainder (I - eta d2yy g)^(Q+1) of the series"
    alone = "MRBO"
    costs = (
        "Q + 2 exchanges per round: p + (2Q + 3)d floats down with full participation (p + d more for a client that "
        "missed the last round), 3p + (2Q + 3)d up; 2 Gg, 2 Gf, 2Q H and 2 J per client. If the server holds f, one "
        "exchange, 2 (p + d) floats up and the Gf less. The first momenta cost one more round"
    )

    neumann_steps: int = parameter(10, "Hessian products of the Neumann series", least=0)

    def adjoints(self, clients: Clients, points: Sequence[Pair], fy: tuple[Vector, ...]) -> tuple[Vector, ...]:
        return self.neumann(clients, points, fy, self.lr_adjoint, self.neumann_steps, whole=True)
