"""Algorithms by name. One paper is one file is one frozen dataclass."""

from fedbilevel.algorithms.aggitd import AggITD
from fedbilevel.algorithms.f2sa import F2SA
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fedmsa import FedMSA
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.lfednest import LFedNest
from fedbilevel.algorithms.mefbo import MeFBO
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO
from fedbilevel.core import Algorithm
from fedbilevel.errors import Names

ALGORITHMS: Names[type[Algorithm]] = Names(
    "algorithm",
    {
        "aggitd": AggITD,
        "f2sa": F2SA,
        "fedavg": FedAvg,
        "fedbio": FedBiO,
        "fedbioacc": FedBiOAcc,
        "fedmsa": FedMSA,
        "fednest": FedNest,
        "lfednest": LFedNest,
        "mefbo": MeFBO,
        "shrofbo": ShroFBO,
        "simfbo": SimFBO,
    },
)

__all__ = [
    "ALGORITHMS",
    "F2SA",
    "AggITD",
    "FedAvg",
    "FedBiO",
    "FedBiOAcc",
    "FedMSA",
    "FedNest",
    "LFedNest",
    "MeFBO",
    "ShroFBO",
    "SimFBO",
]
