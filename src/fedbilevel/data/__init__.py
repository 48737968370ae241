"""Real data: load a data set, divide it among clients, add label errors, and see which client has what.

    data = fb.data.load("mnist")
    parts = fb.data.shards(data.train.labels, clients=100, seed=0)
    print(fb.data.describe(parts, data.train.labels))

A partition is a list of index arrays; nothing is copied for a client. `fedbilevel.data.sources` explains where files
come from.

People's own tables and pictures are read by `fb.data.table`.

This folder has the data sets, their file formats, partitions and label noise. It imports only `errors` and `cache`;
tasks and everything below them import it.
"""

from fedbilevel.data.encoding import Encoding
from fedbilevel.data.few_shot import mini_imagenet, omniglot, rotated
from fedbilevel.data.noise import corrupt, long_tail
from fedbilevel.data.own_tables import OwnTable
from fedbilevel.data.partition import by_class, counts, describe, dirichlet, heat_map, iid, natural, shards, split
from fedbilevel.data.pictures import cifar_10, digits, fashion_mnist, mnist
from fedbilevel.data.reading import table
from fedbilevel.data.samples import DataSet, Samples
from fedbilevel.data.sets import SETS, load
from fedbilevel.data.sources import Source, cache_folder, find
from fedbilevel.data.tables import Scaling, adult, breast_cancer, heart_disease

__all__ = [
    "SETS",
    "DataSet",
    "Encoding",
    "OwnTable",
    "Samples",
    "Scaling",
    "Source",
    "adult",
    "breast_cancer",
    "by_class",
    "cache_folder",
    "cifar_10",
    "corrupt",
    "counts",
    "describe",
    "digits",
    "dirichlet",
    "fashion_mnist",
    "find",
    "heart_disease",
    "heat_map",
    "iid",
    "load",
    "long_tail",
    "mini_imagenet",
    "mnist",
    "natural",
    "omniglot",
    "rotated",
    "shards",
    "split",
    "table",
]
