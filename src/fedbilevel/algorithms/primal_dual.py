"""The primal-dual method for client weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector, dot, project_ball


class PrimalDualState(NamedTuple):
    """The weights x, the model (w in the paper) and the multiplier lambda of its stationarity."""

    x: Vector
    y: Vector
    multiplier: Vector


class Derivatives(NamedTuple):
    """Of a client's own loss f_i: gradient, Hessian times lambda, and slope = lambda . gradient, one number."""

    gradient: Vector
    product: Vector
    slope: jax.Array


class Inner(NamedTuple):
    """What the inner loop changes: the number of the step, w, lambda, and the gradient of x chosen so far."""

    k: jax.Array
    w: Vector
    multiplier: Vector
    g_x: Vector


@dataclass(frozen=True)
class PrimalDual(Algorithm):
    """Primal-dual: descent on the model and the clients' weights, ascent on the multiplier of the model's stationarity.

    The constraint "w is trained with the weights x" is sum_i x_i grad f_i(w) = 0, with multiplier lambda::

        L_x(w, lambda) = f_0(w) + lambda . sum_i x_i grad f_i(w) + Gamma sum_i x_i f_i(w)

    K times, with two independent batches of each active client i in A_k, then once for x, at k = K (or a random k)::

        w      <- w - eta_w ( grad f_0(w) + (N / |A_k|) sum_{i in A_k} x_i ( d2 f_i(w) lambda + Gamma grad f_i(w) ) )
        lambda <- P_D( lambda + eta_lambda (N / |A_k|) sum_{i in A_k} x_i grad f_i(w) )
        x      <- P( x - eta_x g_x ),  g_x,i = (N / |A_k|) lambda_k . grad f_i(w_k), 0 for i not in A_k

    ==========  ==============   =====================
    paper       name             meaning
    ==========  ==============   =====================
    eta_x       lr_upper         step of the weights x
    eta_w       lr_lower         step of the model w
    eta_lambda  lr_adjoint       step of lambda, which tends to -u*, minus the adjoint
    Gamma       augmentation     share of the clients' losses in L; in theory above (D L_2 + L_1) / mu, in experiments 1
    K           inner_steps      steps of w and lambda before one of x
    D           radius           bound on the norm of lambda; D_w / mu in the theory, infinite by default
    k           iterate          which inner step gives g_x: last, or random (uniform in 1 .. K, as in the theorems)
    ==========  ==============   =====================

    The paper's active sets are independent in all steps k: sample with Independent(p, resample=True). Without resample
    one set serves the K steps of a round. Both are unbiased, since a set is uniform given its size. The paper leaves
    the first lambda open; here it is 0. An upper loss that also depends on x directly contributes its gradient to g_x.

    Stable, for the eigenvalues h_0 of f_0's and h of the weighted Hessian, if eta_w (h_0 + Gamma h) < 2 and eta_lambda
    h^2 < h_0 + Gamma h, roughly. With few inner steps a large eta_x makes x cycle; more of them help.
    """

    citation = (
        '"Efficient Weighting and Optimization in Federated Learning: A Primal-Dual Approach" (anonymous, under '
        "review), Algorithms 1 and 2"
    )
    source = "follows the paper (Gamma grad f_i has the weight x_i, as in eq. (3))"
    assumes = "strongly convex client losses with Lipschitz gradients and Hessians"
    exact = "exact for any K"
    costs = (
        "K exchanges per round: 2Kd floats down and up, and K numbers lambda . grad f_i up; the weights are never "
        "sent. K (1 Gg, 1 H) per client; f_0 is evaluated on the server's rows"
    )

    weighting = True
    upper_at = "server"
    steps: ClassVar[Mapping[str, str]] = {**Algorithm.steps, "multiplier": "lr_adjoint"}

    lr_upper: float = parameter(0.02, "step size of the clients' weights x", above=0, tune=(1e-4, 1.0))
    lr_lower: float = parameter(0.1, "step size of the model", above=0, tune=(1e-3, 1.0))
    lr_adjoint: float = parameter(0.1, "step size of the multiplier lambda", above=0, tune=(1e-3, 2.0))
    augmentation: float = parameter(1.0, "share of the clients' losses in the Lagrangian", least=0, tune=(0.1, 10.0))
    inner_steps: int = parameter(1, "steps of the model and of lambda per step of x", least=1)
    radius: float = parameter(float("inf"), "bound on the norm of lambda", above=0)
    iterate: str = parameter("last", "which inner step gives the gradient of x", choices=("last", "random"))

    def init(self, clients: Clients, x: Vector, y: Vector) -> PrimalDualState:
        return PrimalDualState(x, y, multiplier=clients.adjoint(y))

    def round(self, clients: Clients, server: PrimalDualState) -> PrimalDualState:
        x, K = server.x, self.inner_steps
        chosen = jnp.asarray(K - 1)
        if self.iterate == "random":
            chosen = jax.random.randint(clients.next_key(), (), 0, K)

        def step(clients: Clients, inner: Inner) -> Inner:
            k, w, multiplier, g_x = inner
            f_x, f_w = clients.f.gradients(x, w, clients.next_key())
            replies = clients.weighted(x.tree).run(self.differentiate, w, multiplier)
            of_all = replies.estimate()
            # Clients that did not reply have slope 0 and keep their weight, up to the projection.
            slopes = Vector(replies.stack().slope, "x") / replies.share()
            return Inner(
                k + 1,
                clients.project_y(w - self.lr_lower * (f_w + of_all.product + self.augmentation * of_all.gradient)),
                project_ball(multiplier + self.lr_adjoint * of_all.gradient, self.radius),
                g_x.map(lambda before, now: jnp.where(k == chosen, now, before), f_x + slopes),
            )

        _, w, multiplier, g_x = clients.repeat(K, step, Inner(jnp.asarray(0), server.y, server.multiplier, 0 * x))
        return PrimalDualState(clients.project_x(x - self.lr_upper * g_x), w, multiplier)

    def differentiate(self, client: Client, key: Key, w: Vector, multiplier: Vector) -> Derivatives:
        first, second = jax.random.split(key)
        unused = Vector(jnp.zeros(client.clients), "x")  # a client's own loss does not depend on the weights
        gradient = client.own.dy(unused, w, first)
        product = client.own.dyy(unused, w, multiplier, second)
        return Derivatives(gradient, product, dot(multiplier, gradient))

    def solution(self, server: PrimalDualState, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
