"""Federated few-shot learning: learn filters from which a new character is recognised after one drawing of it.

Every client has tasks: N characters with K drawings each to learn from (support) and more to be recognised (query). x
is a convolutional network that everybody shares, y holds a linear classifier ("head") on its features for each task;
heads never leave their client::

    min_x  1/M sum_m mean_n mean_i loss(x, y_mn; query_mni)
    y_mn = argmin_y  mean_i loss(x, y; support_mni) + l2/2 |y|^2        for every task n of client m

Hyper-representation learning, the problem with a local lower level of Li, Huang, Huang: "Communication-Efficient
Federated Bilevel Optimization with Global and Local Lower Level Problems", NeurIPS 2023, section 5.2 and appendix B.2.

A row is a task, and row n of "train" (support) and of "val" (query) are about the same task, so that one key names the
same tasks in both losses. The upper loss is a mean over the tasks of a batch, the lower loss is their *sum*. A head
enters the term of its own task only, so that the terms may be scaled without changing the solution (g times c divides
[d2yy g]^-1 by c and multiplies d2xy g by it); with the sum, lr_lower and lr_adjoint mean the same for any number of
tasks.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core import Lookup, Problem, Tree
from fedbilevel.core.presentation import Details, Outcomes, Presentation, Suggestion
from fedbilevel.core.task import Task
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.models import Model, conv4, cross_entropy, squared_norm
from fedbilevel.tasks.episodes import Episodes, draw_episodes, load_pool, nearest_in_pixels, turned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = {"omniglot": 28, "mini-imagenet": 84}
CLIENTS = {"omniglot": 11, "mini-imagenet": 4}
ASKED = 5  # drawings per class that the metrics ask for: who is in a task matters more than how often it is asked
# For features of a length of about 1, where the Hessian of a head is of order 1 (see `embed`). With five steps and
# products instead of ten, plain steps on seed 1 learned less (0.74 against 0.85 after 200).
LOWER = {"lr_lower": 1.0, "lr_adjoint": 1.0, "lower_steps": 10, "neumann_steps": 10, "shared_batch": True}
# The paper's rate and forgetting: delta = 2, u = 10000, c = 100. The rate is 0.093 at first.
MOMENTUM = {"rate": "cube_root(2, 10000)", "c_upper": 100.0, "c_lower": 100.0}
ROOM = 5  # times the tasks of a step: heads that start again have room for a first batch so much larger


class Losses(NamedTuple):
    """The problem, and what a head that is trained on the support says of the queries."""

    problem: Problem
    learn: Callable[[Tree, Any, Any], tuple[jax.Array, jax.Array]]


@cache  # tasks of equal shape share their compiled code
def _losses(model: Model, ways: int, features: int, heads: int, restart: bool, l2: float, adapt_steps: int) -> Losses:
    def embed(x: Any, images: jax.Array) -> jax.Array:
        """Features of a length of about 1, so that the Hessian of a head is, too, whatever the size of the network."""
        return model.apply(x, images) / features**0.5

    def cost(head: Any, seen: jax.Array) -> jax.Array:
        """Of one task, from the features of its images, which come class by class."""
        labels = jnp.repeat(jnp.arange(ways), len(seen) // ways)
        return cross_entropy(seen @ head["w"] + head["b"], labels).mean()

    def costs(x: Any, y: Any, batch: Any) -> tuple[jax.Array, Any]:
        """Of every task of a batch, and their heads."""
        tasks = len(batch["turn"])
        if restart and tasks > heads:
            raise FedbilevelError(
                f"few-shot: a batch has {tasks} tasks, but there are {heads} heads: lower first_batch."
            )
        own = jax.tree.map(lambda a: a[jnp.arange(tasks) if restart else batch["head"]], y)
        # Task by task, so that batch normalization, if any, is that of the task.
        seen = jax.vmap(embed, (None, 0))(x, turned(batch["image"], batch["turn"]))
        return jax.vmap(cost)(own, seen), own

    def upper(x: Any, y: Any, batch: Any) -> jax.Array:
        return costs(x, y, batch)[0].mean()

    def lower(x: Any, y: Any, batch: Any) -> jax.Array:
        each, own = costs(x, y, batch)
        return each.sum() + l2 / 2 * squared_norm(own)

    def init(key: jax.Array) -> tuple[Any, Any]:
        return model.init(key), {"w": jnp.zeros((heads, features, ways)), "b": jnp.zeros((heads, ways))}

    def learned(x: Any, support: jax.Array, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen, asked = embed(x, support), embed(x, query)
        slope = jax.grad(lambda head: cost(head, seen) + l2 / 2 * squared_norm(head))
        # The Hessian of the cross-entropy is at most half the mean of |(features, 1)|^2: this step never overshoots.
        step = 1 / (0.5 * (1 + jnp.square(seen).sum(1).mean()) + l2)
        first = {"w": jnp.zeros((features, ways), seen.dtype), "b": jnp.zeros(ways, seen.dtype)}
        descend = lambda _, head: jax.tree.map(lambda a, d: a - step * d, head, slope(head))
        head = jax.lax.fori_loop(0, adapt_steps, descend, first)
        return (asked @ head["w"] + head["b"]).argmax(1), cost(head, asked)

    def learn(x: Any, support: Any, query: Any) -> tuple[jax.Array, jax.Array]:
        return jax.lax.map(lambda task: learned(x, *task), (support, query), batch_size=4)

    # A head is about one task: all batches of a step must be the same tasks, and no others where heads start again.
    needs = (("shared_batch", True), ("restart", restart))
    return Losses(Problem(upper, lower, init, lower_level="local", needs=needs), jax.jit(learn))


def _draw(figure: "Figure", filters: np.ndarray, support: np.ndarray, query: np.ndarray, said: np.ndarray) -> None:
    """The first filters, and a task: what its classes look like, and what the head says of other images."""
    figure.set_size_inches(9.5, 5)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.3])
    filters = filters / np.abs(filters).max((0, 1, 2))  # each with its own contrast
    across = int(np.ceil(filters.shape[3] ** 0.5))
    sheet = np.full((4 * across, 4 * across, 3), np.nan)
    for n, one in enumerate(np.moveaxis(filters, 3, 0)):
        top, start = 4 * (n // across), 4 * (n % across)
        sheet[top : top + 3, start : start + 3] = (one + 1) / 2  # one channel is grey, three are colours
    left.imshow(np.ma.masked_invalid(sheet)[:-1, :-1])
    left.set_title(f"the {filters.shape[3]} filters of the first layer", fontsize=10)
    high, wide = query.shape[2:4]
    right.set(xlim=(0, len(query)), ylim=(query.shape[1] + 1.2, 0))
    for column in range(len(query)):
        for row, image in enumerate([support[column, 0], *query[column]]):
            ok = row == 0 or said[column, row - 1] == column
            top = row + (0.2 if row else 0)
            right.imshow(
                np.broadcast_to(image, (high, wide, 3)), extent=(column + 0.06, column + 0.94, top + 0.94, top + 0.06)
            )
            color = "grey" if row == 0 else "tab:green" if ok else "tab:red"
            corners = [column + 0.05, column + 0.95, column + 0.95, column + 0.05, column + 0.05]
            right.plot(corners, [top + 0.05, top + 0.05, top + 0.95, top + 0.95, top + 0.05], color=color, linewidth=2)
            if not ok:
                where = (column + 0.12, top + 0.88)
                right.text(*where, f"{said[column, row - 1] + 1}", color="tab:red", fontweight="bold")
    right.set(xlim=(0, len(query)), ylim=(query.shape[1] + 1.2, 0))
    right.set_title("a task of the test: to learn from (first row) and to recognise", fontsize=10)
    right.set_xlabel("green: right; red: wrong, with the number of the class that was named")
    right.set_xticks(np.arange(len(query)) + 0.5, [f"class {n + 1}" for n in range(len(query))], fontsize=8)
    right.set_yticks([])
    left.set_axis_off()


def few_shot(
    data: str = "omniglot",
    ways: int = 5,
    shots: int = 1,
    queries: int = 15,
    clients: int = 0,
    tasks: int = 200,
    tasks_per_step: int = 1,
    head: str = "restart",
    one_alphabet: bool = False,
    rotations: bool = True,
    filters: int = 32,
    norm: str = "batch",
    l2: float = 0.01,
    size: int = 0,
    held_out: int = 40,
    adapt_steps: int = 50,
    seed: int = 0,
) -> Task:
    """Learn filters for few-shot classification.

    Args:
        data: "omniglot" or "mini-imagenet" (whose pictures you must supply).
        ways: classes of a task.
        shots: images of each class to learn from.
        queries: images of each class to be recognised.
        clients: number of clients, who share the training alphabets (or classes); 0 is 11 for Omniglot, so that each
            has three of the 33 alphabets, and 4 for mini-ImageNet.
        tasks: tasks of every client, drawn once.
        tasks_per_step: tasks of a batch.
        head: "restart" - a head starts at 0 for each batch of tasks; "persistent" - every task keeps its head.
        one_alphabet: draw the characters of a task from one alphabet, not from all alphabets of the client.
        rotations: turn the images of each class of a task by 0, 90, 180 or 270 degrees (Omniglot only).
        filters: of each of the four convolutions.
        norm: "batch" - batch normalization within a task; "none".
        l2: weight decay of the heads.
        size: height and width of the images; 0 is 28 for Omniglot and 84 for mini-ImageNet.
        held_out: tasks of held-out alphabets for the metrics; the table of the test has three times as many.
        adapt_steps: gradient steps that train the head of a held-out task.
        seed: of the division of the alphabets and of the tasks.
    """
    if data not in SIZES:
        raise UnknownName("data set for few-shot", data, SIZES)
    if head not in ("restart", "persistent"):
        raise UnknownName("head for few-shot", head, ["restart", "persistent"])
    counts = {"ways": ways, "shots": shots, "queries": queries, "tasks": tasks, "tasks_per_step": tasks_per_step}
    for name, count in {**counts, "filters": filters, "held_out": held_out, "adapt_steps": adapt_steps}.items():
        if count < 1:
            raise FedbilevelError(f"few-shot: {name} must be at least 1, not {count}.")
    if min(clients, size, seed) < 0 or not 0 <= l2 < np.inf:
        raise FedbilevelError("few-shot: clients, size, l2 and seed must not be negative.")
    rng = np.random.default_rng(seed)
    pool = load_pool(data, size or SIZES[data], rng)
    number = clients or CLIENTS[data]
    if number > len(pool.parts["train"]):
        raise FedbilevelError(
            f"few-shot: {number} clients cannot share {len(pool.parts['train'])} alphabets or classes."
        )
    rotated, apart = rotations and data == "omniglot", one_alphabet and data == "omniglot"
    shares = np.array_split(pool.parts["train"], number)
    made = [draw_episodes(pool, tasks, share, (ways, shots, queries), rotated, apart, rng) for share in shares]

    def client(own: Episodes) -> dict[str, Any]:
        both = {"turn": own.turn, "head": np.arange(tasks, dtype=np.int32)}
        rows = {"train": own.support, "val": own.query}
        return {split: {"image": Lookup(pool.images, index), **both} for split, index in rows.items()}

    def examination(part: str, number: int) -> tuple[Episodes, jax.Array, jax.Array]:
        own = draw_episodes(pool, number, pool.parts[part], (ways, shots, min(queries, ASKED)), rotated, apart, rng)
        return own, turned(pool.images[own.support], own.turn), turned(pool.images[own.query], own.turn)

    model = conv4(pool.images.shape[1:], None, filters, norm)
    first = jnp.asarray(pool.images[:1])
    features = jax.eval_shape(lambda key: model.apply(model.init(key), first), jax.random.key(0)).shape[1]
    restart = head == "restart"
    heads = ROOM * tasks_per_step if restart else tasks
    problem, learn = _losses(model, ways, features, heads, restart, l2, adapt_steps)
    validation, test = examination("validation", held_out), examination("test", 3 * held_out)
    truth = np.repeat(np.arange(ways), min(queries, ASKED))

    def metrics(x: Any, y: Any) -> dict[str, float]:
        said, losses = learn(x, *validation[1:])
        return {"accuracy": float(np.mean(np.asarray(said) == truth)), "loss": float(jnp.mean(losses))}

    def choice(x: Any, y: Any) -> float:
        """The loss on the validation alphabets, which nobody trains on."""
        return float(jnp.mean(learn(x, *validation[1:])[1]))

    def details(results: Outcomes) -> Details:
        trained, untrained = results["run"].x, model.init(jax.random.key(seed))
        rows: list[list[Any]] = []
        for part, (own, support, query) in {"validation": validation, "test": test}.items():
            says = [
                nearest_in_pixels(support, query) // shots,
                *(learn(x, support, query)[0] for x in (untrained, trained)),
            ]
            right = [np.asarray(said) == truth for said in says]
            group = own.group[:, truth]
            share = lambda where, right=right: [float(each[where].mean()) for each in right]
            rows += [[pool.names[g], part, len(pool.groups[g]), *share(group == g)] for g in np.unique(group)]
            rows.append(
                [f"all of {part}", part, sum(len(pool.groups[g]) for g in np.unique(group)), *share(group >= 0)]
            )
        headings = ["alphabet" if data == "omniglot" else "class", "part", "classes", "pixels", "untrained", "learned"]
        return Details(f"Accuracy on held-out {'alphabets' if data == 'omniglot' else 'classes'}", headings, rows)

    def picture(results: Outcomes, figure: "Figure") -> None:
        x = results["run"].x
        said = np.asarray(learn(x, *test[1:])[0])[0].reshape(ways, -1)  # of the first task
        support, query = (np.asarray(part[0]).reshape(ways, -1, *part.shape[2:])[:10] for part in test[1:])
        _draw(figure, np.asarray(x["conv"][0]["w"]), support, query, said)

    steps = {**LOWER, "local_steps": 5, "restart": restart}
    # A momentum moves the heads that persist by lr_lower times the rate; heads that start again have none.
    followed = {**steps, **MOMENTUM, "lr_lower": 1.0 if restart else 10.0, "lr_upper": 3.0}
    return Task(
        problem,
        [client(own) for own in made],
        batch_size=tasks_per_step,
        metrics=metrics,
        choice=choice,
        name="few-shot",
        options={
            "data": data,
            **counts,
            "clients": clients,
            "head": head,
            "one_alphabet": one_alphabet,
            "rotations": rotations,
            "filters": filters,
            "norm": norm,
            "l2": l2,
            "size": size,
            "held_out": held_out,
            "adapt_steps": adapt_steps,
            "seed": seed,
        },
        shown=Presentation(
            headline={"accuracy": "accuracy on new alphabets", "loss": "loss"},
            details=details,
            picture=picture,
        ),
        suggested=Suggestion(
            algorithm="fedbio-local",
            rounds=30,
            sample="4",
            hyper={
                "fedbio-local": {**steps, "lr_upper": 0.3},
                "distbio": {**steps, "lr_upper": 0.3},
                "fedbioacc-local": followed,
                "distbioacc": followed,
            },
        ),
    )
