"""The bilevel problem of finding label errors: its likelihoods in numpy, and that what is said is out of fold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks import noise_model
from fedbilevel.tasks.label_errors import (
    SPEED,
    Candidate,
    Design,
    candidate_logits,
    label_errors,
    mixed,
    of_fold,
    problem,
    say,
)
from fedbilevel.testing import largest_difference

CLASSES, FOLDS = 3, 3
DESIGN = Design(
    features=4,
    classes=CLASSES,
    linear=(Candidate("aware", 1e-2), Candidate("given", 1e-2), Candidate("cleaned", 1e-2), Candidate("trusted", 1e-2)),
    networks=(Candidate("aware", 1e-2),),
    hidden=6,
    folds=FOLDS,
)


def rows(size: int = 40, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of three classes whose labels are partly wrong; every fifth one is trusted."""
    rng = np.random.default_rng(seed)
    right = rng.integers(0, CLASSES, size)
    inputs = 2 * np.eye(CLASSES, 4)[right] + rng.normal(size=(size, 4))
    trusted = np.arange(size) % 5 == 0
    wrong = (rng.random(size) < 0.3) & ~trusted
    label = np.where(wrong, (right + rng.integers(1, CLASSES, size)) % CLASSES, right)
    fold = rng.permutation(size) % FOLDS
    return {"input": inputs.astype(np.float32), "label": label, "trusted": trusted, "fold": fold, "right": right}


def task_of(table: dict[str, np.ndarray], parts: list[np.ndarray]) -> fb.Task:
    """The task of clients that have these rows."""
    clients = [{"rows": part, **{name: table[name][part] for name in ("label", "trusted", "fold")}} for part in parts]
    return label_errors(DESIGN, table["input"], clients, len(table["label"]), int(table["trusted"].sum()))


PARTS = [np.arange(0, 25), np.arange(25, 39), np.array([39])]  # also a client with a single row


def somewhere(seed: int = 1) -> tuple[Any, Any]:
    """An x and a y that are not the first ones."""
    x, y = problem(DESIGN).init(jax.random.key(0))
    rng = np.random.default_rng(seed)
    moved = lambda a: jnp.asarray(np.asarray(a) + 0.3 * rng.normal(size=np.shape(a)), jnp.float32)
    return jax.tree.map(moved, x), jax.tree.map(moved, y)


def in_numpy(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """The matrix T, entry by entry, and the logits of all candidates."""
    noise = {name: noise_model.SPEED * np.asarray(a, float) for name, a in y["noise"].items()}
    e = 1 / (1 + np.exp(-(noise["level"] + float(x["level"]) + noise["rate"])))
    matrix = np.zeros((CLASSES, CLASSES))
    for c in range(CLASSES):
        others = [k for k in range(CLASSES) if k != c]
        spread = np.exp(noise["flip"][c, others])
        matrix[c, others] = e[c] * spread / spread.sum()
        matrix[c, c] = 1 - e[c]
    return matrix, e


def test_the_noise_model_in_numpy() -> None:
    x, y = somewhere()
    table, (matrix, _) = rows(), in_numpy(*somewhere())
    np.testing.assert_allclose(noise_model.transition(x, y["noise"], CLASSES), matrix, rtol=1e-5)
    right = np.random.default_rng(0).dirichlet(np.ones(CLASSES), 40)
    given = (right @ matrix)[np.arange(40), table["label"]]
    found = noise_model.log_given(jnp.log(jnp.asarray(right)), jnp.asarray(table["label"]), jnp.asarray(matrix))
    np.testing.assert_allclose(found, np.log(given), rtol=1e-4)
    bayes = right * matrix[:, table["label"]].T / given[:, None]
    np.testing.assert_allclose(noise_model.posterior(right, table["label"], jnp.asarray(matrix)), bayes, rtol=1e-4)


def test_the_upper_gradient_is_the_step_of_expectation_maximization() -> None:
    """The derivative in the level is the sum of e - P(wrong) over suspicious rows, out of fold; prior aside."""
    x, y = somewhere()
    x = {"level": jnp.asarray(0.4)}
    table = rows()
    y["noise"]["rate"] = jnp.zeros(CLASSES)
    task = task_of(table, [np.arange(40)])
    batch = jax.tree.map(np.asarray, task.clients[0]["val"], is_leaf=lambda a: isinstance(a, fb.Lookup))
    batch["input"] = table["input"]
    slope = jax.jit(jax.grad(task.problem.upper))(x, y, batch)["level"]
    matrix, e = in_numpy(x, y)
    logits = of_fold(candidate_logits(DESIGN, y, jnp.asarray(table["input"])), jnp.asarray(table["fold"]))
    right = np.exp(np.asarray(mixed(y["mixture"], logits), float))
    at = (np.arange(40), table["label"])
    wrong = 1 - right[at] * matrix[table["label"], table["label"]] / (right @ matrix)[at]
    expected = np.where(table["trusted"], 0, e[0] - wrong).sum() / 40 + 0.4 / 40
    assert float(slope) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    said = say(DESIGN, x, y, table["input"], table["label"], table["fold"])
    np.testing.assert_allclose(1 - said.posterior[at], wrong, atol=1e-4)


def test_the_mixture_is_a_sharpened_geometric_mean_of_calibrated_candidates() -> None:
    mixture = {name: np.asarray(value, float) for name, value in somewhere()[1]["mixture"].items()}
    logits = np.random.default_rng(0).normal(size=(7, len(DESIGN.candidates), CLASSES))
    grown = np.exp(logits * np.exp(mixture["scale"])[:, None])
    each = grown / grown.sum(2, keepdims=True)
    weights = np.exp(SPEED * mixture["weight"]) / np.exp(SPEED * mixture["weight"]).sum()
    together = np.prod(each ** weights[:, None], 1) ** np.exp(mixture["sharp"])
    found = mixed(jax.tree.map(jnp.asarray, mixture), jnp.asarray(logits))
    np.testing.assert_allclose(np.exp(found), together / together.sum(1, keepdims=True), rtol=1e-4)


def test_models_of_a_fold_know_nothing_of_its_labels() -> None:
    """Whatever the labels of a fold are, and whether they are trusted: the models that leave it out move alike."""
    x, y = somewhere()
    table = rows()
    gradients = []
    for shift in range(2):
        changed = {**table, "label": np.where(table["fold"] == 1, (table["label"] + shift) % CLASSES, table["label"])}
        task = task_of(changed, [np.arange(40)])
        batch = {**task.clients[0]["train"], "input": table["input"]}
        gradients.append(jax.jit(jax.grad(task.problem.lower, 1))(x, y, batch))
    before, after = gradients
    below, above = ([each["networks"][n]["w"] for each in gradients] for n in (0, 1))
    for one, other in ((before["linear"]["w"], after["linear"]["w"]), below):
        np.testing.assert_allclose(one[:, :, 1], other[:, :, 1], atol=1e-6)
        assert np.max(np.abs(one[:, :, 0] - other[:, :, 0])) > 1e-4  # the other models do learn from them
    np.testing.assert_allclose(above[0][:, 1], above[1][:, 1], atol=1e-6)


def test_the_division_into_clients_does_not_matter() -> None:
    """The mean over clients of the lower gradient is that of all rows on one machine, also where clients differ."""
    x, y = somewhere()
    table, shards = rows(), [np.flatnonzero(rows()["label"] == c) for c in range(CLASSES)]
    gradients = []
    for parts in ([np.arange(40)], shards):
        task = task_of(table, parts)
        of_clients = [
            jax.jit(jax.grad(task.problem.lower, 1))(x, y, {**c["train"], "input": c["train"]["input"][:]})
            for c in task.clients
        ]
        weights = task.normalised_weights
        gradients.append(jax.tree.map(lambda *a, w=weights: np.tensordot(w, np.stack(a), 1), *of_clients))
    assert largest_difference(*gradients) < 1e-5


ADAM = fb.Alternating(lr_upper=4.0, lr_lower=1.0, server="adam", lr_server=fb.schedules.constant(0.05))


def test_a_private_noise_level_is_never_sent_and_engines_agree() -> None:
    task = task_of(rows(), PARTS)
    y = problem(DESIGN).init(jax.random.key(0))[1]
    plan = fb.plan(task, ADAM).at(1)
    assert plan.up == plan.down == sum(leaf.size for leaf in jax.tree.leaves(y))
    one, other = (fb.solve(task, ADAM, 3, engine=engine, metrics=False) for engine in ("simulation", "local"))
    assert largest_difference((one.x, one.y), (other.x, other.y)) < 1e-4
    assert one.x["level"].shape == (3,)
    assert abs(float(one.x["level"][0] - one.x["level"][1])) > 1e-4


STEPS = {"lr_upper": 1.0, "lr_lower": 0.1, "lr_adjoint": 0.02, "local_steps": 1, "shared_batch": True, "radius": 1.0}


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(fb.FedBiO(**STEPS), id="FedBiO"),
        pytest.param(fb.FedBiOAcc(**STEPS), id="FedBiOAcc", marks=pytest.mark.slow),
    ],
)
def test_bilevel_algorithms_solve_it_too(algorithm: fb.Algorithm) -> None:
    """What is said of the labels finds the wrong ones."""
    table = rows()
    task = task_of(table, PARTS)
    result = fb.solve(task, algorithm, 300, metrics=False)
    own = [jax.tree.map(lambda a, m=m: a[m], result.x) for m in range(3)]
    said = [
        say(DESIGN, own[m], result.y, *(table[name][part] for name in ("input", "label", "fold")))
        for m, part in enumerate(PARTS)
    ]
    quality = np.concatenate([each.posterior for each in said])[np.arange(40), table["label"]]
    suspicious, wrong = ~table["trusted"], table["label"] != table["right"]
    assert quality[suspicious & ~wrong].mean() > quality[suspicious & wrong].mean() + 0.3
