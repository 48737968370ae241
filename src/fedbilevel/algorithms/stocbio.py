"""stocBiO."""

from dataclasses import dataclass

from fedbilevel.core import Clients, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.mathematics.averages import Averages
from fedbilevel.mathematics.hypergradient import Pair


@dataclass(frozen=True)
class StocBiO(Averages):
    """stocBiO: gradient steps on y, then one on x with a Neumann series of independent Hessians.

    Every gradient and product is the mean over the clients. Every round starts from the last y::

        y <- y - alpha mean grad_y g(x, y)                                       D times
        v_0 = mean grad_y f(x, y),   v_q = v_{q-1} - eta mean d2yy g(x, y; B_q) v_{q-1}     q = 1 .. Q
        x <- P( x - beta ( mean grad_x f(x, y) - eta mean d2xy g(x, y) sum_{q=0}^Q v_q ) )

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    beta      lr_upper         step of x
    alpha     lr_lower         step of y
    eta       lr_adjoint       step of the series, below 1 / L
    D         inner_rounds     steps of y in a round
    Q         neumann_steps    Hessian products of the series, which has Q + 1 terms
    ========  ==============   =====================

    With partial participation the clients of the round serve all its exchanges. If the problem has constraints, the
    server projects.
    """

    citation = 'Ji, Yang, Liang: "Bilevel Optimization: Convergence Analysis and Enhanced Design", ICML 2021'
    source = "reconstruction of the paper's formula without its text (the authors' code differs from the formula)"
    assumes = "g strongly convex in y"
    exact = "exact up to the remainder (I - eta d2yy g)^(Q+1) of the series; mini-batches do not change this mean"
    alone = "stocBiO"
    costs = (
        "D + Q + 2 exchanges per round: p + (D + Q + 1)d floats down with full participation (d more for a client "
        "that missed the last round), 2p + (D + Q + 1)d up; D Gg, 1 Gf, Q H and 1 J per client. If the server holds "
        "f, one exchange, p + d floats up and the Gf less"
    )

    lr_upper: float = parameter(0.1, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.3, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.3, "step size of the Neumann series, below 1 / L", above=0, tune=(1e-3, 2.0))
    inner_rounds: int = parameter(5, "steps of y in a round", least=1)
    neumann_steps: int = parameter(10, "Hessian products of the Neumann series", least=0)

    def init(self, clients: Clients, x: Vector, y: Vector) -> Pair:
        return Pair(x, y)

    def round(self, clients: Clients, server: Pair) -> Pair:
        z = self.descend(clients, server, self.lr_lower, self.inner_rounds)
        (f,) = self.upper(clients, z)
        (v,) = self.neumann(clients, [z], (f.y,), self.lr_adjoint, self.neumann_steps, whole=True)
        return Pair(clients.project_x(z.x - self.lr_upper * (f.x - self.cross(clients, z, v))), z.y)

    def solution(self, server: Pair, memory: None) -> tuple[Vector, Vector]:
        return server
