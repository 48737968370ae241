"""Algorithms by name. One paper is one file is one frozen dataclass."""

from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.core import Algorithm
from fedbilevel.errors import Names

ALGORITHMS: Names[type[Algorithm]] = Names("algorithm", {"fedavg": FedAvg, "fedbio": FedBiO, "fedbioacc": FedBiOAcc})

__all__ = ["ALGORITHMS", "FedAvg", "FedBiO", "FedBiOAcc"]
