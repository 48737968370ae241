"""The data sets by name."""

from collections.abc import Callable
from typing import Any

from fedbilevel.data.few_shot import mini_imagenet, omniglot
from fedbilevel.data.pictures import cifar_10, digits, fashion_mnist, mnist
from fedbilevel.data.samples import DataSet
from fedbilevel.data.tables import adult, breast_cancer, heart_disease
from fedbilevel.errors import Names

SETS: Names[Callable[..., DataSet]] = Names(
    "data set",
    {
        "mnist": mnist,
        "fashion-mnist": fashion_mnist,
        "cifar-10": cifar_10,
        "omniglot": omniglot,
        "mini-imagenet": mini_imagenet,
        "heart-disease": heart_disease,
        "adult": adult,
        "digits": digits,
        "breast-cancer": breast_cancer,
    },
)
"""The data sets by name."""


def load(name: str, **options: Any) -> DataSet:
    """Load a data set by name; options are the arguments of its function.

    >>> load("digits")
    DataSet(digits: 1797 train, 10 classes, inputs (8, 8))
    """
    return SETS[name](**options)
