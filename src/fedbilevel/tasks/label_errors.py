"""Finding label errors as one bilevel problem: x is how the labels of each client go wrong, y are models of the right
label, each of which leaves out a fold of the rows.

Trusted rows have right labels, the labels of all others are suspicious. y holds J candidates for each of K folds (all
trained at once), the mixture of the candidates, and a final model of all rows. A row belongs to one fold, and what is
said about it comes from models that were not trained on it.

- Lower level: a candidate is trained by the likelihood of the labels: -log p_c of a trusted row, and -log sum_c p_c
  T[c, k] of a suspicious one with given label k (forward correction; Patrini and others, CVPR 2017). Other kinds of
  candidates trust all labels, use trusted rows only, or leave out rows that are probably wrong.
- Upper level: the same likelihood of every row, by the mixture of the models that have not seen it. Its gradient in x
  is the step of expectation maximization for the noise, out of fold.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Lookup, Problem
from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError
from fedbilevel.models import Model, mlp
from fedbilevel.tasks import noise_model

Array = jax.Array
HEAD_START = 4.0  # of the candidate of trusted rows in the mixture, as the logarithm of its weight
WEIGHT = 3.0  # the prior deviation of the logarithms of the weights
SPEED = 2.0  # the logarithms of the weights move this many times faster than their numbers
FEWEST = 10  # a client with fewer rows than this has a weaker prior of its noise, so that its steps are stable
Kind = Literal["aware", "given", "trusted", "cleaned"]


class Candidate(NamedTuple):
    """A way to train a model: by the noise model ("aware"), as if all labels were right ("given"), on trusted rows
    only ("trusted"), or on what is probably right ("cleaned"); with weight decay ``l2`` / 2 |w|^2.
    """

    kind: Kind
    l2: float


class Design(NamedTuple):
    """What everybody must know to build the same problem.

    Args:
        features: numbers in a row.
        classes: number of labels.
        linear: candidates that are logistic regressions.
        networks: candidates with a hidden layer.
        hidden: its width, also of the final model.
        final: weight decay of the final model, which is trained on what is probably right.
        folds: K.
    """

    features: int
    classes: int
    linear: tuple[Candidate, ...]
    networks: tuple[Candidate, ...]
    hidden: int = 64
    final: float = 1e-3
    folds: int = 5

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All candidates, in the order of the mixture."""
        return (*self.linear, *self.networks)

    @property
    def model(self) -> Model:
        """The final model."""
        return mlp(self.features, self.hidden, self.classes)

    @property
    def cost(self) -> float:
        """How many times as many numbers y has as the final model."""
        count = lambda tree: sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))
        y = jax.eval_shape(lambda: start(self, jax.random.key(0))[1])
        return count(y) / count(y["final"])


class Said(NamedTuple):
    """What models that were not trained on a row say about it.

    Args:
        right: the probability of every class, from the inputs alone.
        posterior: the same once the given label is known, too.
    """

    right: np.ndarray
    posterior: np.ndarray


def start(design: Design, key: Array) -> tuple[Any, Any]:
    """The first x and y."""
    features, classes, folds, hidden = design.features, design.classes, design.folds, design.hidden
    own, shared = noise_model.start(classes, by_class=any(each.kind == "trusted" for each in design.linear))
    of_linear, of_networks = ((len(some), folds) for some in (design.linear, design.networks))
    # The noise is first learned from what trusted rows alone say: they cannot explain wrong labels by the inputs.
    first_weights = [HEAD_START / SPEED * (each.kind == "trusted") for each in design.candidates]
    first = he(
        key,
        (features, hidden),
        (hidden, classes),
        (features, *of_networks, hidden),
        (*of_networks, hidden, classes),
        inputs=2 * (features, hidden),
    )
    biases = [jnp.zeros(shape) for shape in (hidden, classes, (*of_networks, hidden), (*of_networks, classes))]
    layers = [{"w": w, "b": b} for w, b in zip(first, biases, strict=True)]
    y = {
        "linear": {"w": jnp.zeros((features, *of_linear, classes)), "b": jnp.zeros((*of_linear, classes))},
        "mixture": {
            "weight": jnp.array(first_weights),
            "scale": jnp.zeros(len(design.candidates)),
            "sharp": jnp.asarray(0.0),
        },
        "noise": shared,
        "final": layers[:2],
    }
    if design.networks:
        y["networks"] = layers[2:]
    return own, y


def he(key: Array, *shapes: tuple[int, ...], inputs: Sequence[int]) -> list[Array]:
    """Normal first weights of layers with so many inputs. All are drawn at once: a draw takes a second to compile."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    drawn = jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1].tolist())
    return [(2 / n) ** 0.5 * each.reshape(s) for each, s, n in zip(drawn, shapes, inputs, strict=True)]


def candidate_logits(design: Design, y: Any, inputs: Array) -> Array:
    """What every model says: (rows, candidates, folds, classes)."""
    inputs = inputs.reshape(len(inputs), -1)
    linear = jnp.einsum("nf,fjkc->njkc", inputs, y["linear"]["w"]) + y["linear"]["b"]
    if not design.networks:
        return linear
    below, above = y["networks"]
    hidden = jax.nn.relu(jnp.einsum("nf,fjkh->njkh", inputs, below["w"]) + below["b"])
    return jnp.concatenate([linear, jnp.einsum("njkh,jkhc->njkc", hidden, above["w"]) + above["b"]], 1)


def of_fold(values: Array, fold: Array) -> Array:
    """Of every row what the models of its own fold say, which were not trained on it: (rows, candidates, classes)."""
    return jnp.take_along_axis(values, fold[:, None, None, None], 2)[:, :, 0]


def calibrated(mixture: Any, logits: Array) -> Array:
    """The log of the probabilities of every candidate, after its own temperature: (rows, candidates, classes)."""
    return jax.nn.log_softmax(logits * jnp.exp(mixture["scale"])[:, None])


def mixed(mixture: Any, logits: Array) -> Array:
    """The log of the probabilities of the mixture: the weighted geometric mean of the calibrated candidates, sharpened
    (a logarithmic opinion pool): (rows, classes).
    """
    weights = jax.nn.softmax(SPEED * mixture["weight"])
    together = jnp.tensordot(calibrated(mixture, logits), weights, ((1,), (0,)))
    return jax.nn.log_softmax(jnp.exp(mixture["sharp"]) * together)


def mixture_penalty(mixture: Any) -> Array:
    """Minus the log of a prior: equal weights, and probabilities that are right as they are."""
    weights = jnp.sum((SPEED * mixture["weight"]) ** 2) / (2 * WEIGHT**2)
    return weights + jnp.sum(mixture["scale"] ** 2) / 2 + mixture["sharp"] ** 2


def log_likelihood(log_right: Array, batch: Any, matrix: Array) -> Array:
    """The log of the probability of the labels: of trusted rows as right labels, of others as given ones."""
    labels, trusted = batch["label"], batch["trusted"]
    middle = (1,) * (log_right.ndim - 2)
    index = labels.reshape(-1, *middle, 1)
    of_right = jnp.take_along_axis(log_right, jnp.broadcast_to(index, (*log_right.shape[:-1], 1)), -1)[..., 0]
    return jnp.where(trusted.reshape(-1, *middle) > 0, of_right, noise_model.log_given(log_right, labels, matrix))


@cache  # tasks of equal shape share their compiled code
def problem(design: Design) -> Problem:
    """The losses of both levels."""

    def upper(x: Any, y: Any, batch: Any) -> Array:
        log_right = mixed(y["mixture"], of_fold(candidate_logits(design, y, batch["input"]), batch["fold"]))
        matrix = noise_model.transition(x, y["noise"], design.classes)
        return (
            -(batch["weight"] * log_likelihood(log_right, batch, matrix)).mean()
            + noise_model.own_penalty(x) * batch["own"].mean()
        )

    def lower(x: Any, y: Any, batch: Any) -> Array:
        logits = candidate_logits(design, y, batch["input"])
        seen = stopped(of_fold(logits, batch["fold"]))
        log_right = mixed(stopped_but(y["mixture"], "weight", "sharp"), seen)
        fixed = noise_model.transition(x, stopped(y["noise"]), design.classes)
        matrix = noise_model.transition(x, y["noise"], design.classes)
        each = log_likelihood(calibrated(y["mixture"], seen), batch, fixed).sum(1)
        mixture = -(batch["weight"] * (log_likelihood(log_right, batch, matrix) + each)).mean()
        penalty = noise_model.shared_penalty(y["noise"]) + mixture_penalty(y["mixture"])
        mixture += penalty * batch["all"].mean()
        matrix = fixed
        likely = probably_right(design, y, logits, batch, matrix)

        logp = jax.nn.log_softmax(logits)
        aware = log_likelihood(logp, batch, matrix)
        plain = jnp.take_along_axis(logp, batch["label"][:, None, None, None], 3)[..., 0]
        weights = {"given": 1.0, "trusted": (batch["trusted"] / batch["share"])[:, None], "cleaned": likely}
        rows = [
            aware[:, j] if each.kind == "aware" else weights[each.kind] * plain[:, j]
            for j, each in enumerate(design.candidates)
        ]
        trained_on = batch["weight"][:, None] * (batch["fold"][:, None] != jnp.arange(design.folds))
        loss = -(jnp.stack(rows, 1) * trained_on[:, None]).mean(0).sum() * design.folds / (design.folds - 1)

        said = noise_model.posterior(jnp.exp(stopped(log_right)), batch["label"], stopped(matrix))
        kept = jnp.where(batch["trusted"] > 0, 1.0, at(said, batch["label"]) >= 0.5)
        final = at(jax.nn.log_softmax(design.model.apply(y["final"], batch["input"])), batch["label"])
        return loss + mixture - (batch["weight"] * kept * final).mean() + decay(design, y)

    return Problem(upper, lower, lambda key: start(design, key), private_x=True)


def stopped(tree: Any) -> Any:
    """The same values, through which no gradient passes."""
    return jax.lax.stop_gradient(tree)


def at(table: Array, labels: Array) -> Array:
    """The entry of every row at its label."""
    return jnp.take_along_axis(table, labels[:, None], 1)[:, 0]


def probably_right(design: Design, y: Any, logits: Array, batch: Any, matrix: Array) -> Array:
    """For every row and fold, whether the models that leave out this fold find the label right: (rows, folds).

    The row may have trained them, but no row of the fold has: what is said of the fold stays out of fold.
    """
    chosen = [j for j, each in enumerate(design.candidates) if each.kind != "cleaned"]
    mixture = {name: v[jnp.array(chosen)] if v.ndim else v for name, v in y["mixture"].items()}
    logits, mixture, matrix = stopped((logits[:, jnp.array(chosen)], mixture, matrix))

    def of_one(logits: Array) -> Array:
        said = noise_model.posterior(jnp.exp(mixed(mixture, logits)), batch["label"], matrix)
        return jnp.where(batch["trusted"] > 0, 1.0, at(said, batch["label"]) >= 0.5)

    return jax.vmap(of_one, 2, 1)(logits)


def stopped_but(tree: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same values, of which only those of these names pass a gradient."""
    return {name: value if name in names else stopped(value) for name, value in tree.items()}


def decay(design: Design, y: Any) -> Array:
    """The weight decay of all models."""

    def of(values: Array, some: Sequence[Candidate], axis: int) -> Array:
        squares = jnp.sum(values**2, tuple(a for a in range(values.ndim) if a != axis))
        return jnp.dot(squares, jnp.array([each.l2 / 2 for each in some]))

    total = of(y["linear"]["w"], design.linear, 1)
    if design.networks:
        below, above = y["networks"]
        total += of(below["w"], design.networks, 1) + of(above["w"], design.networks, 0)
    return total + sum(design.final / 2 * jnp.sum(layer["w"] ** 2) for layer in y["final"])


def label_errors(
    design: Design,
    inputs: np.ndarray,
    clients: Sequence[Mapping[str, np.ndarray]],
    rows: int,
    trusted: int,
    batch_size: int | None = None,
) -> Task:
    """The task of clients whose rows are in one table.

    Args:
        design: the problem.
        inputs: the table.
        clients: for every client its "rows" (numbers of rows of the table), "label", "trusted" and "fold" of each.
        rows: of all clients together, here and elsewhere.
        trusted: how many of these are trusted.
        batch_size: rows per batch, None for all.
    """
    if rows < 1:
        raise FedbilevelError("there are no rows.")

    longest = max(len(client["rows"]) for client in clients)

    def columns(client: Mapping[str, np.ndarray]) -> dict[str, Any]:
        size = len(client["rows"])
        # Where all rows are used at once, clients have equally many, some of which do not count.
        length = longest if batch_size is None else size
        real = np.arange(length) < size
        index = np.minimum(np.arange(length), size - 1)
        constant = lambda value: np.full(length, value, np.float32)
        return {
            "input": Lookup(inputs, client["rows"][index]),
            "label": client["label"][index].astype(np.int32),
            "trusted": client["trusted"][index].astype(np.float32),
            "fold": client["fold"][index].astype(np.int32),
            "weight": (real * (length / size)).astype(np.float32),
            "own": constant(1 / max(size, FEWEST)),
            "all": constant(1 / rows),
            "share": constant(max(trusted, 1) / rows),
        }

    data = [columns(client) for client in clients]
    return Task(
        problem(design),
        [{"train": each, "val": each} for each in data],
        weights=[len(client["rows"]) for client in clients],
        batch_size=batch_size,
        name="label-errors",
    )


def say(
    design: Design,
    x: Any,
    y: Any,
    inputs: np.ndarray,
    labels: np.ndarray,
    fold: np.ndarray,
    candidate: int | None = None,
) -> Said:
    """What a client knows of its own rows after a run, with its own x; nothing of this is sent. By the mixture, or by
    one candidate alone.
    """
    return Said(*in_chunks(lambda *rows: _say(design, candidate, x, y, *rows), inputs, labels, fold))


def losses(design: Design, y: Any, inputs: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """For every candidate, the sum over a client's rows of -log of the probability of the given label, out of fold."""
    return summed(partial(_losses, design, y), inputs, labels, fold)


def says(design: Design, y: Any, kind: Kind, inputs: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """The probabilities of the first candidate of a kind, by models that were not trained on the rows."""
    j = [each.kind for each in design.candidates].index(kind)
    return in_chunks(lambda *rows: (_says(design, y, *rows)[:, j],), inputs, fold)[0]


def profile(
    design: Design, x: Any, y: Any, inputs: np.ndarray, labels: np.ndarray, fold: np.ndarray, trusted: np.ndarray
) -> np.ndarray:
    """The log-likelihood of a client's labels if there were more or less noise (:data:`SHIFTS` of its logit) and the
    models were more or less sure (:data:`SHARPER`): (shifts, sharper). The sum over clients says whether noise can be
    told from models that are not sure.
    """
    return summed(partial(_profile, design, x, y), inputs, labels, fold, trusted)


SHIFTS = np.linspace(-4, 4, 33)
SHARPER = np.linspace(-1.5, 1.5, 13)


def chunks(*rows: np.ndarray, size: int = 2048) -> Iterator[tuple[int, list[Array]]]:
    """Some rows at a time, and how many: the last ones are filled up to a power of two, so that programs are compiled
    for few lengths.
    """
    for first in range(0, len(rows[0]), size):
        length = min(size, len(rows[0]) - first)
        index = first + np.minimum(np.arange(max(64, 1 << (length - 1).bit_length())), length - 1)
        yield length, [jnp.asarray(a[index]) for a in rows]


def in_chunks(function: Callable[..., Any], *rows: np.ndarray) -> list[np.ndarray]:
    """A function of rows that returns several arrays with an entry for each."""
    parts = [[np.asarray(part)[:length] for part in function(*some)] for length, some in chunks(*rows)]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def summed(function: Callable[..., Any], *rows: np.ndarray) -> np.ndarray:
    """The sum of a function of rows that sums over them, and is given first how often each counts."""
    return np.sum(
        [np.asarray(function(1.0 * (jnp.arange(len(s[0])) < n), *s), float) for n, s in chunks(*rows)], axis=0
    )


@partial(jax.jit, static_argnums=(0, 1))
def _say(
    design: Design, candidate: int | None, x: Any, y: Any, inputs: Array, labels: Array, fold: Array
) -> tuple[Array, Array]:
    logits = of_fold(candidate_logits(design, y, inputs), fold)
    log_right = mixed(y["mixture"], logits) if candidate is None else jax.nn.log_softmax(logits[:, candidate])
    matrix = noise_model.transition(x, y["noise"], design.classes)
    return jnp.exp(log_right), noise_model.posterior(jnp.exp(log_right), labels, matrix)


@partial(jax.jit, static_argnums=0)
def _losses(design: Design, y: Any, counts: Array, inputs: Array, labels: Array, fold: Array) -> Array:
    said = jax.nn.log_softmax(of_fold(candidate_logits(design, y, inputs), fold))
    return -counts @ jnp.take_along_axis(said, labels[:, None, None], 2)[..., 0]


@partial(jax.jit, static_argnums=0)
def _says(design: Design, y: Any, inputs: Array, fold: Array) -> Array:
    return jnp.exp(calibrated(y["mixture"], of_fold(candidate_logits(design, y, inputs), fold)))


@partial(jax.jit, static_argnums=0)
def _profile(
    design: Design, x: Any, y: Any, counts: Array, inputs: Array, labels: Array, fold: Array, trusted: Array
) -> Array:
    log_right = mixed(y["mixture"], of_fold(candidate_logits(design, y, inputs), fold))
    batch = {"label": labels, "trusted": trusted}

    def of_one(shift: Array, sharper: Array) -> Array:
        matrix = noise_model.transition({"level": x["level"] + shift}, y["noise"], design.classes)
        return log_likelihood(jax.nn.log_softmax(jnp.exp(sharper) * log_right), batch, matrix) @ counts

    shifts, sharper = jnp.asarray(SHIFTS, log_right.dtype), jnp.asarray(SHARPER, log_right.dtype)
    return jax.lax.map(lambda shift: jax.lax.map(partial(of_one, shift), sharper), shifts)
