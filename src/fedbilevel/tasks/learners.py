"""Networks for the rows of sites: standardised by the facts of all sites, whether the rows are tables or images."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.core import Lookup
from fedbilevel.models import Model, mlp
from fedbilevel.tasks import images
from fedbilevel.tasks.sites import Divided, Examples, Facts, moments, standardised


def learner(
    examples: Examples, facts: Facts, hidden: Sequence[int], dropout: float = 0.0, outputs: int = 0
) -> tuple[np.ndarray, Model]:
    """The inputs of all rows, and a network for them.

    Args:
        examples: the rows of the site, without what is about too few of them.
        facts: with those of :func:`~fedbilevel.tasks.sites.column_facts`.
        hidden: widths of the hidden layers.
        dropout: of hidden units.
        outputs: of the network; 0 is one for every label.
    """
    size = int(np.prod(examples.inputs.shape[1:]))
    network = mlp(size, *hidden, outputs or examples.classes, initial="pytorch", dropout=dropout)
    mean, deviation = moments(facts)
    if examples.images:  # these stay bytes until they are used
        return examples.inputs, images.standardised(network, float(mean), float(deviation) or 1.0)
    return standardised(examples.inputs, mean, deviation), network


def labelled(inputs: np.ndarray, rows: Divided) -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]:
    """The rows of a site as a client, and its inputs and labels for the test."""
    labels = rows.examples.labels.astype(np.int32)
    take = lambda part: {"image": Lookup(inputs, part.astype(np.int32)), "label": labels[part]}
    return {"train": take(rows.train), "val": take(rows.validation)}, (inputs[rows.test], labels[rows.test])
