"""Agnostic federated learning."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector


class AFLState(NamedTuple):
    """The weights (lambda in the paper), the model, its mean over the rounds so far, and their number."""

    x: Vector
    y: Vector
    mean: Vector
    rounds: jax.Array


class Evaluation(NamedTuple):
    """A client's own loss and its gradient."""

    gradient: Vector
    loss: jax.Array


@dataclass(frozen=True)
class AFL(Algorithm):
    """AFL: a model that is good for the worst mixture of clients, by descent on the model and ascent on the weights.

    min_w max_lambda sum_i lambda_i L_i(w), lambda in the probability simplex; both steps are taken at the old point::

        w      <- w - gamma_w sum_i lambda_i grad L_i(w)
        lambda <- P( lambda + gamma_lambda L(w) )

    The solution is the last lambda and the mean of w over all rounds; the theory is about this mean.

    ============  ==============   =====================
    paper         name             meaning
    ============  ==============   =====================
    gamma_lambda  lr_upper         step of the weights lambda
    gamma_w       lr_lower         step of the model w
    ============  ==============   =====================

    If w_t converges, its mean lags behind by O(1 / T). The validation rows are not used: the weights *maximise* the
    training loss, where other methods for client weights minimise a validation loss. With partial participation, sums
    have the factor N / |A|, and clients that did not reply count with a loss of 0; both estimates are unbiased.
    """

    citation = 'Mohri, Sivek, Suresh: "Agnostic Federated Learning", ICML 2019'
    source = "reconstruction without the paper's text"
    assumes = "convex losses; the rate is then O(1 / sqrt(T))"
    exact = "exact"
    costs = (
        "One exchange per round: d floats down and up, and one loss up; the weights are never sent. 1 Gg per client: "
        "loss and gradient come from one batch"
    )

    weighting = True
    upper_at = "either"

    lr_upper: float = parameter(0.01, "step size of the clients' weights", above=0, tune=(1e-4, 1.0))
    lr_lower: float = parameter(0.1, "step size of the model", above=0, tune=(1e-3, 2.0))

    def init(self, clients: Clients, x: Vector, y: Vector) -> AFLState:
        return AFLState(x, y, mean=y, rounds=jnp.asarray(0))

    def round(self, clients: Clients, server: AFLState) -> AFLState:
        x, y, mean, rounds = server
        replies = clients.weighted(x.tree).run(self.evaluate, y)
        y = clients.project_y(y - self.lr_lower * replies.estimate().gradient)
        losses = Vector(replies.stack().loss, "x") / replies.share()
        rounds = rounds + 1
        return AFLState(clients.project_x(x + self.lr_upper * losses), y, mean + (y - mean) / rounds, rounds)

    def evaluate(self, client: Client, key: Key, y: Vector) -> Evaluation:
        unused = Vector(jnp.zeros(client.clients), "x")  # a client's own loss does not depend on the weights
        return Evaluation(client.own.dy(unused, y, key), client.own.value(unused, y, key))

    def solution(self, server: AFLState, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.mean
