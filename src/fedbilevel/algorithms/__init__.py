"""Algorithms by name. One paper is one file is one frozen dataclass."""

from fedbilevel.algorithms.aggitd import AggITD
from fedbilevel.algorithms.commfedbio import CommFedBiO
from fedbilevel.algorithms.f2sa import F2SA
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbio_local import DistBiO, FedBiOLocal
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fedbioacc_local import DistBiOAcc, FedBiOAccLocal
from fedbilevel.algorithms.fedmsa import FedMSA
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.lfednest import LFedNest
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.mefbo import MeFBO
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO
from fedbilevel.core import Algorithm
from fedbilevel.errors import Names

ALGORITHMS: Names[type[Algorithm]] = Names(
    "algorithm",
    {
        "aggitd": AggITD,
        "commfedbio": CommFedBiO,
        "distbio": DistBiO,
        "distbioacc": DistBiOAcc,
        "f2sa": F2SA,
        "fedavg": FedAvg,
        "fedbio": FedBiO,
        "fedbio-local": FedBiOLocal,
        "fedbioacc": FedBiOAcc,
        "fedbioacc-local": FedBiOAccLocal,
        "fedmsa": FedMSA,
        "fednest": FedNest,
        "lfednest": LFedNest,
        "local-bsgvrm": LocalBSGVRM,
        "mefbo": MeFBO,
        "shrofbo": ShroFBO,
        "simfbo": SimFBO,
    },
)

__all__ = [
    "ALGORITHMS",
    "F2SA",
    "AggITD",
    "CommFedBiO",
    "DistBiO",
    "DistBiOAcc",
    "FedAvg",
    "FedBiO",
    "FedBiOAcc",
    "FedBiOAccLocal",
    "FedBiOLocal",
    "FedMSA",
    "FedNest",
    "LFedNest",
    "LocalBSGVRM",
    "MeFBO",
    "ShroFBO",
    "SimFBO",
]
