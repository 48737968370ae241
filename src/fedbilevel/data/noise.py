"""Make data harder on purpose: wrong labels and long tails."""

from typing import Literal

import numpy as np

from fedbilevel.errors import FedbilevelError

Seed = int | np.random.Generator


def corrupt(
    labels: np.ndarray, share: float, classes: int, seed: Seed, reading: Literal["wrong", "uniform"] = "wrong"
) -> tuple[np.ndarray, np.ndarray]:
    """Give a share of the labels a random class; returns the new labels and which ones really differ from the old.

    Papers write "uniform" and mean one of two things. The choice matters: with share 0.95 and ten classes, a label is
    right with probability 0.145 under "uniform", still the most frequent one of its class, so that plain
    training learns; under "wrong" it is right with probability 0.05, less often than any other.

    Args:
        labels: the right labels, 0 to classes - 1.
        share: share of the labels to draw again; exactly `round(share * len(labels))` of them.
        classes: number of classes.
        seed: a number, or a generator to draw from.
        reading: "wrong" draws out of the other classes, so that every label drawn again is wrong; "uniform" draws out
            of all classes, so that one in `classes` of them is right by chance.

    >>> labels, wrong = corrupt(np.zeros(10, np.int32), 0.5, 10, seed=0)
    >>> int(wrong.sum()), bool(((labels != 0) == wrong).all())
    (5, True)
    """
    labels = np.asarray(labels)
    if not 0 <= share <= 1:
        raise FedbilevelError(f"the share of corrupted labels must be from 0 to 1, not {share}.")
    if reading not in ("wrong", "uniform"):
        raise FedbilevelError(f"reading must be 'wrong' or 'uniform', not '{reading}'.")
    if classes < (2 if reading == "wrong" else 1):
        raise FedbilevelError(f"corrupting labels needs at least 2 classes, not {classes}.")
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise FedbilevelError(f"labels must be from 0 to {classes - 1}, but these go up to {labels.max()}.")
    rng = np.random.default_rng(seed)
    chosen = np.zeros(len(labels), bool)
    chosen[rng.choice(len(labels), round(share * len(labels)), replace=False)] = True
    if reading == "wrong":
        drawn = (labels + rng.integers(1, classes, len(labels))) % classes
    else:
        drawn = rng.integers(0, classes, len(labels))
    given = np.where(chosen, drawn, labels).astype(labels.dtype)
    return given, given != labels


def long_tail(labels: np.ndarray, ratio: float, seed: Seed, classes: int | None = None) -> np.ndarray:
    """Choose samples so that classes get rarer: class i of C keeps the share ratio^(i / (C - 1)) of its samples.

    Class 0 keeps all, the last class keeps `ratio`: for ten classes n * ratio^(i / 9). Numbers are rounded, and at
    least one sample stays. Returns sorted indices, drawn at random within a class.

    Args:
        labels: of all samples.
        ratio: share of samples that the last class keeps; above 0, at most 1.
        seed: a number, or a generator to draw from.
        classes: number of classes. Default: the largest label plus 1.

    >>> kept = long_tail(np.repeat([0, 1, 2], 100), 0.01, seed=0)
    >>> np.bincount(np.repeat([0, 1, 2], 100)[kept]).tolist()
    [100, 10, 1]
    """
    labels = np.asarray(labels)
    if not 0 < ratio <= 1:
        raise FedbilevelError(f"the ratio of a long tail must be above 0 and at most 1, not {ratio}.")
    number = classes if classes is not None else int(labels.max(initial=-1)) + 1
    rng = np.random.default_rng(seed)
    kept = [np.empty(0, np.intp)]
    for i in range(number):
        members = np.flatnonzero(labels == i)
        stay = max(1, round(len(members) * ratio ** (i / max(number - 1, 1)))) if len(members) else 0
        kept.append(rng.permutation(members)[:stay])
    return np.sort(np.concatenate(kept))
