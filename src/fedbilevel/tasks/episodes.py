"""Episodes, the small tasks of few-shot learning: N classes with K images each to learn from, and more to recognise."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.data import load
from fedbilevel.errors import FedbilevelError

TRAINING, VALIDATION = 33, 5  # of the 50 alphabets of Omniglot; the other 12 are for the test


class Pool(NamedTuple):
    """Where tasks come from: the images, and the classes of every group (an alphabet; else the class itself)."""

    images: np.ndarray
    drawings: Mapping[int, np.ndarray]  # the images of every class
    groups: Sequence[np.ndarray]  # the classes of every group
    names: Sequence[str]  # of the groups
    parts: Mapping[str, np.ndarray]  # the groups for train, validation and test


class Episodes(NamedTuple):
    """Tasks: where their images are, class by class, and how often those of each class are turned by 90 degrees."""

    support: np.ndarray
    query: np.ndarray
    turn: np.ndarray
    group: np.ndarray


def load_pool(data: str, size: int, rng: np.random.Generator) -> Pool:
    """Omniglot divides its alphabets at random, mini-ImageNet comes with a division of its classes."""
    loaded = load(data, size=size)
    splits = [part for part in (loaded.train, loaded.validation, loaded.test) if part is not None]
    images = np.concatenate([part.inputs for part in splits])
    labels = np.concatenate([part.labels for part in splits])
    drawings = {int(label): np.flatnonzero(labels == label) for label in np.unique(labels)}
    if data == "omniglot":
        alphabet = np.concatenate([part.groups["alphabet"] for part in splits])
        names = loaded.groups["alphabet"]
        groups = [np.unique(labels[alphabet == number]) for number in range(len(names))]
        train, validation, test = np.split(rng.permutation(len(names)), [TRAINING, TRAINING + VALIDATION])
        images = (255 - images)[..., None]  # ink is bright
    else:
        names, groups = loaded.classes, [np.array([label]) for label in drawings]
        train, validation, test = (np.unique(part.labels) for part in splits)
        train = rng.permutation(train)
    return Pool(images, drawings, groups, names, {"train": train, "validation": validation, "test": test})


def draw_episodes(
    pool: Pool, number: int, groups: np.ndarray, sizes: tuple[int, int, int], rotations: bool, apart: bool, rng: Any
) -> Episodes:
    """Draw tasks from some groups: from all of them together, or each from one."""
    ways, shots, queries = sizes
    sources = [np.array([g]) for g in groups] if apart else [groups]
    sources = [
        [(g, label) for g in source for label in pool.groups[g] if len(pool.drawings[label]) >= shots + queries]
        for source in sources
    ]
    sources = [source for source in sources if len(source) >= ways]
    if not sources:
        where = "a single alphabet" if apart else "the alphabets or classes of a client, or of those held out,"
        raise FedbilevelError(
            f"few-shot: {where} must have {ways} classes with {shots} + {queries} images each: lower ways, shots or "
            "queries."
        )
    drawn = []
    for _ in range(number):
        source = sources[rng.integers(len(sources))]
        chosen = [source[n] for n in rng.choice(len(source), ways, replace=False)]
        picked = [rng.choice(pool.drawings[label], shots + queries, replace=False) for _, label in chosen]
        images = np.stack(picked).astype(np.int32)
        turn = rng.integers(4 if rotations else 1, size=ways)
        drawn.append((images[:, :shots].ravel(), images[:, shots:].ravel(), turn, [g for g, _ in chosen]))
    return Episodes(*(np.array(part, np.int32) for part in zip(*drawn, strict=True)))


def turned(images: Any, turn: Any) -> jax.Array:
    """Images (tasks, classes * each, height, width, channels), those of every class turned as told."""
    turn = jnp.repeat(turn, images.shape[1] // turn.shape[1], axis=1)[..., None, None, None]
    choices = [jnp.rot90(images, times, axes=(2, 3)) for times in range(4)]
    return jnp.select([turn == times for times in range(4)], choices)


def nearest_in_pixels(support: Any, query: Any) -> np.ndarray:
    """For every query of a task the number of the support image that is nearest in pixels."""
    flat = lambda images: np.asarray(images, np.float32).reshape(*images.shape[:2], -1)
    tasks = zip(flat(support), flat(query), strict=True)
    return np.array([np.square(q[:, None] - s[None]).sum(2).argmin(1) for s, q in tasks])
