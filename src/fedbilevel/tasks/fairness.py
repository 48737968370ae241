"""Fair federated learning: weight groups of people so that the model recognises women and men equally well.

Who earns above 50K? Clients have people of both sexes, with and without a high income: four groups. x weights the
groups, y is the model trained with these weights on everybody's training rows; x is chosen so that y does well on
everybody's validation rows and has nearly the same true-positive rate for women and for men (equal opportunity)::

    min_x  sum_m w_m mean_n loss(y_x; val_mn) + penalty gap(y_x)^2
    y_x = argmin_y  sum_m w_m mean_n weight_(group of mn)(x) loss(y; train_mn) + l2/2 |y|^2

w_m is client m's share of all training rows, weight(x) = 4 softmax(x): the four weights add up to 4, and x = 0 trains
without weights. The gap is that of smooth true-positive rates, in which a person counts with the probability that the
model gives instead of 0 or 1::

    gap(y) = sum_m w_m mean_n r_mn(y),   r_mn = probability_mn (1[rich man] / p_men - 1[rich woman] / p_women)

where p_men and p_women are the shares of rich men and women in the validation rows, sum_m w_m (share of client m),
which the clients count once. So the gap is a mean over rows and clients. Its square is not: a mean of the clients'
squares would be larger (Jensen's inequality), and a client with hardly any rich woman has no gap of its own at all.
So x has one more number t, and the upper loss of a client is::

    f_m = mean_n loss + penalty (2 t mean_n r_mn - t^2)

a mean over rows, whose mean over clients is the validation loss + penalty (2 t gap - t^2). This is at most the
objective above, with equality at t = gap. Everything else is minimised and t maximises: the loss turns the sign of the
derivative in t, and scales it to ``track (t - gap)``, so that descending algorithms make t follow the gap, and the
derivative in y is that of loss + 2 penalty t gap. Where all derivatives are 0, t is the gap of all clients and x is
stationary for the objective above, exactly. For the price of one number per message no client needs to know another's
gap.

The first FedBiO preprint (Li, Huang, Huang) names fair federated learning as its application (section 5, Conclusion)
without a formulation: this one is ours. Equal opportunity is from Hardt, Price, Srebro: "Equality of Opportunity in
Supervised Learning", NeurIPS 2016.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import FedAvg
from fedbilevel.core import Problem
from fedbilevel.core.presentation import Details, Outcomes, Presentation, Reference, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.data import adult, dirichlet, iid, split
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.models import Model, mlp, outputs, squared_norm
from fedbilevel.tasks.learners import learner
from fedbilevel.tasks.sites import Bounds, Columns, Divided, Examples, Facts, column_bounds, column_facts, divided, told

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS = ("poor women", "rich women", "poor men", "rich men")
"""Group 2 sex + label: sex 0 is female, label 1 an income above 50K."""
STEPS = {"lr_lower": 0.8, "lr_adjoint": 0.8}
HYPER = {
    "simfbo": {
        **STEPS,
        "lr_upper": 0.05,
        "local_lr_upper": 1.0,
        "local_lr_lower": 1.0,
        "local_lr_adjoint": 1.0,
        "local_steps": 1,
    },
    "fedbioacc": {"lr_upper": 0.03, "lr_lower": 0.5, "lr_adjoint": 0.3, "local_steps": 5},
    "*": {**STEPS, "lr_upper": 0.03, "local_steps": 1},
}
TRACK = 2.0
"""The derivative of the upper loss in t is this times (t - gap): with a step of 0.03 on x, t moves by 6 %."""


@cache  # tasks of equal shape share their compiled code, whatever their seed
def _problem(model: Model, l2: float, penalty: float) -> Problem:
    def losses(y: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = model.apply(y, batch["features"])[:, 0]
        return jax.nn.softplus(logits) - batch["group"] % 2 * logits, logits

    def upper(x: Any, y: Any, batch: Any) -> jax.Array:
        loss, logits = losses(y, batch)
        gap = batch["share"] * jax.nn.sigmoid(logits)
        t = _reversed(x["gap"], TRACK / (2 * penalty) if penalty else 0.0)
        return jnp.mean(loss + penalty * (2 * t * gap - t**2))

    def lower(x: Any, y: Any, batch: Any) -> jax.Array:
        weights = 4 * jax.nn.softmax(x["groups"])
        return jnp.mean(weights[batch["group"]] * losses(y, batch)[0]) + l2 / 2 * squared_norm(y)

    def init(key: jax.Array) -> tuple[Any, Any]:
        y = model.init(key)
        # A logistic regression is convex and starts at 0.
        return {"groups": jnp.zeros(4), "gap": jnp.zeros(())}, y if len(y) > 1 else jax.tree.map(jnp.zeros_like, y)

    return Problem(upper, lower, init)


def _reversed(t: jax.Array, scale: float) -> jax.Array:
    """t, whose derivative is -scale."""
    return jax.lax.stop_gradient(t + scale * t) - scale * t


def fairness(
    data: str = "adult",
    clients: int = 10,
    penalty: float = 3.0,
    alpha: float = 1.0,
    validation: float = 0.2,
    hidden: int = 0,
    l2: float = 1e-3,
    batch_size: int = 256,
    seed: int = 0,
) -> Task:
    """Weight the four groups of sex and income for equal true-positive rates.

    Args:
        data: "adult", the census data; sex is not among the features.
        clients: number of clients.
        penalty: weight of the squared gap in smooth true-positive rates; 0 minimises the validation loss alone.
        alpha: for each of the four groups, its shares over the clients are drawn from Dirichlet(alpha); 0 divides
            everybody at random, into equal parts.
        validation: share of every client's rows for validation; the test rows are the set's own.
        hidden: width of the hidden layer of the model; 0 is logistic regression.
        l2: weight decay.
        batch_size: rows per batch, of training and of validation; 0 is all.
        seed: of the partition and of the split.
    """
    if data != "adult":
        raise UnknownName("data set for fairness", data, ["adult"])
    if clients < 1 or min(hidden, batch_size, seed) < 0:
        raise FedbilevelError("fairness: clients must be at least 1, hidden, batch_size and seed not negative.")
    if not (0 <= penalty < np.inf and 0 <= alpha < np.inf and 0 <= l2 < np.inf):
        raise FedbilevelError("fairness: penalty, alpha and l2 are finite numbers that are not negative.")
    if not 0 < validation < 1:
        raise FedbilevelError(f"fairness: validation is a share between 0 and 1, not {validation}.")
    loaded = adult()
    assert loaded.test is not None
    groups, test_groups = (2 * part.groups["sex"] + part.labels for part in (loaded.train, loaded.test))
    rng = np.random.default_rng(seed)
    parts = dirichlet(groups, clients, rng, alpha, smallest=100) if alpha else iid(groups, clients, rng)
    train, val = split(parts, (1 - validation, validation), rng)

    # Numbers are standardised with the mean and the deviation of all training rows, which sums over clients give;
    # columns of 0 and 1 stay as they are.
    numbers = np.array(["=" not in name for name in loaded.features])
    seen = loaded.train.inputs[np.concatenate(train)]
    mean, deviation = np.where(numbers, seen.mean(0), 0), np.where(numbers, seen.std(0), 1)
    features, test_features = (
        ((part.inputs - mean) / deviation).astype(np.float32) for part in (loaded.train, loaded.test)
    )
    weights = np.array([len(part) for part in train]) / sum(map(len, train))
    rich = {group: sum(w * np.mean(groups[v] == group) for w, v in zip(weights, val, strict=True)) for group in (1, 3)}
    if min(rich.values()) == 0:
        raise FedbilevelError("fairness: the validation rows have no rich women or no rich men: take more of them.")
    share = ((groups == 3) / rich[3] - (groups == 1) / rich[1]).astype(np.float32)
    take = lambda part: {"features": features[part], "group": groups[part]}

    model = mlp(features.shape[1], *([hidden] if hidden else []), 1)
    on_device = jnp.asarray(test_features)

    def metrics(x: Any, y: Any) -> dict[str, float]:
        yes = outputs(model.apply, y, on_device)[:, 0] > 0
        women, men = (float(yes[test_groups == group].mean()) for group in (1, 3))
        accuracy = float(np.mean(yes == test_groups % 2))
        return {"accuracy": accuracy, "gap": men - women, "tpr_women": women, "tpr_men": men, "t": float(x["gap"])}

    def group_weights(x: Any) -> np.ndarray:
        return np.asarray(4 * jax.nn.softmax(jnp.asarray(x["groups"])))

    def details(results: Outcomes) -> Details:
        count = lambda rows: np.bincount(groups[np.concatenate(rows)], minlength=4)
        columns = count(train), count(val), np.bincount(test_groups, minlength=4), group_weights(results["run"].x)
        table = [[name, *(cell.item() for cell in row)] for name, *row in zip(GROUPS, *columns, strict=True)]
        return Details("Weights of the groups", ["", "train", "val", "test", "weight"], table)

    def picture(results: Outcomes, figure: "Figure") -> None:
        figure.set_size_inches(10.5, 4.2)
        left, right = figure.subplots(1, 2)
        run, reference = results["run"], results["unweighted"].metrics
        # The model of the first tenth of the rounds is not yet trained.
        history = [row for row in run.history if row["round"] >= run.metrics["round"] / 10]
        gap, accuracy = ([row[name] for row in history] for name in ("gap", "accuracy"))
        left.plot(gap, accuracy, color="C1", alpha=0.4, linewidth=1)
        dots = left.scatter(gap, accuracy, c=[row["round"] for row in history], s=14, cmap="viridis", zorder=2)
        figure.colorbar(dots, ax=left, label="round")
        left.plot(gap[-1], accuracy[-1], "o", color="C1", markersize=9, label="weighted groups, last round")
        left.plot(reference["gap"], reference["accuracy"], "s", color="C0", markersize=9, label="unweighted")
        left.axvline(0, color="grey", linewidth=0.8)
        left.set_xlabel("gap: true-positive rate of men - of women")
        left.set_ylabel("test accuracy")
        left.legend(fontsize=8)
        learned = group_weights(run.x)
        right.bar(range(4), learned, color="C1", width=0.6)
        for n, weight in enumerate(learned):
            right.annotate(f"{weight:.2f}", (n, weight), ha="center", va="bottom")
        right.axhline(1, color="C0", linestyle="--", label="unweighted")
        right.set_xticks(range(4), GROUPS)
        right.set_ylim(0, 1.2 * max(1.0, learned.max()))
        right.set_ylabel("learned weight of a group")
        right.legend(loc="upper left", fontsize=8)

    return Task(
        _problem(model, l2, penalty),
        [{"train": take(t), "val": {**take(v), "share": share[v]}} for t, v in zip(train, val, strict=True)],
        weights=weights,
        batch_size=batch_size or None,
        metrics=metrics,
        name="fairness",
        options={
            "data": data,
            "clients": clients,
            "penalty": penalty,
            "alpha": alpha,
            "validation": validation,
            "hidden": hidden,
            "l2": l2,
            "batch_size": batch_size,
            "seed": seed,
        },
        shown=Presentation(
            headline={"accuracy": "accuracy", "gap": "TPR gap", "tpr_women": "women", "tpr_men": "men"},
            compare_by=["accuracy", "gap"],
            references=[
                Reference(
                    "unweighted",
                    "unweighted",
                    FedAvg(lr_lower=STEPS["lr_lower"], local_steps=1),
                    {"groups": np.zeros(4), "gap": 0.0},
                )
            ],
            details=details,
            picture=picture,
        ),
        suggested=Suggestion(
            algorithm="fedbio",
            rounds=1000,
            hyper=HYPER,
        ),
    )


def _positives(rows: Divided) -> tuple[np.ndarray, np.ndarray]:
    """For every row, 2 group + label; and the shares of the first and the second group with label 1 among the
    validation rows, 0 where they are too few to tell.
    """
    examples = rows.examples
    if examples.groups is None or examples.classes != 2 or examples.groups.max(initial=0) > 1:
        raise FedbilevelError(
            'fairness needs a label with two values, and group = { column = "sex", values = ["f", "m"] } in the schema.'
        )
    groups = 2 * examples.groups + examples.labels
    counts = np.bincount(groups[rows.validation], minlength=4)
    return groups, (np.where(told(counts, examples.least), counts, 0) / len(rows.validation))[[1, 3]]


def fairness_facts(examples: Examples, train: float = 0.6, validation: float = 0.2, seed: int = 0) -> Facts:
    """Sums over the columns, and the shares of both groups with label 1 among the validation rows."""
    rows = divided(examples, train, validation, seed)
    return {**column_facts(rows), "mean positives": _positives(rows)[1]}


def fairness_bounds(facts: Facts, rows: int, columns: Columns) -> Bounds:
    """Two shares of the same rows."""
    return {**column_bounds(facts, rows, columns), "mean positives": (0, 1 - facts["mean positives"][::-1])}


def fairness_of_site(
    examples: Examples,
    facts: Facts,
    train: float = 0.6,
    validation: float = 0.2,
    penalty: float = 3.0,
    hidden: int = 0,
    l2: float = 1e-3,
    batch_size: int = 0,
    seed: int = 0,
) -> Task:
    """Weight groups and labels for equal true-positive rates, on the rows of sites.

    The gap is the true-positive rate of the schema's second group minus that of the first.

    Args:
        examples: the rows of the site, with groups.
        facts: what everybody knows of all sites.
        train: share of every site's rows, of every label and group, for training, if the schema has no part.
        validation: share for validation; the rest is for the test.
        penalty: weight of the squared gap in smooth true-positive rates; 0 minimises the validation loss alone.
        hidden: width of the hidden layer of the model; 0 is logistic regression.
        l2: weight decay.
        batch_size: rows per batch, of training and of validation; 0 is all.
        seed: of the split.
    """
    if min(hidden, batch_size) < 0 or not (0 <= penalty < np.inf and 0 <= l2 < np.inf):
        raise FedbilevelError("fairness: hidden, batch_size, penalty and l2 must be finite and not negative.")
    rows = divided(examples, train, validation, seed)
    groups, mine = _positives(rows)
    everywhere = facts["mean positives"]
    if everywhere.min() <= 0:
        raise FedbilevelError(
            "fairness: no site has enough validation rows of both groups with the label's second value."
        )
    # Where a site has too few people of a group to tell of them, they are no part of the gap.
    first, second = np.where(mine > 0, 1 / everywhere, 0)
    share = ((groups == 3) * second - (groups == 1) * first).astype(np.float32)
    features, model = learner(rows.examples, facts, [hidden] if hidden else [], outputs=1)
    take = lambda part: {"features": features[part], "group": groups[part]}
    tested, test_groups = jnp.asarray(features[rows.test]), groups[rows.test]

    def metrics(x: Any, y: Any) -> dict[str, float]:
        yes = outputs(model.apply, y, tested)[:, 0] > 0
        of_group = [yes[test_groups == group] for group in (1, 3)]
        rates = [float(each.mean()) if len(each) >= max(1, examples.least) else float("nan") for each in of_group]
        accuracy = float(np.mean(yes == test_groups % 2))
        return {"accuracy": accuracy, "gap": rates[1] - rates[0], "tpr_first": rates[0], "tpr_second": rates[1]}

    return Task(
        _problem(model, l2, penalty),
        [{"train": take(rows.train), "val": {**take(rows.validation), "share": share[rows.validation]}}],
        batch_size=batch_size or None,
        metrics=metrics,
        name="fairness",
        shown=Presentation(
            headline={"accuracy": "accuracy", "gap": "TPR gap", "tpr_first": "first", "tpr_second": "second"}
        ),
        suggested=Suggestion("fedbio", 1000, hyper=HYPER),
    )
