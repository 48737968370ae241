"""Algorithms by name: one paper, one file, one frozen dataclass.

Imports core and mathematics; every folder below these may import it.
"""

from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.algorithms.afl import AFL
from fedbilevel.algorithms.aggitd import AggITD
from fedbilevel.algorithms.alternating import Alternating
from fedbilevel.algorithms.commfedbio import CommFedBiO, CommFedBiOSketch
from fedbilevel.algorithms.f2sa import F2SA
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbio_local import DistBiO, FedBiOLocal
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fedbioacc_local import DistBiOAcc, FedBiOAccLocal
from fedbilevel.algorithms.fedmbo import FedMBO
from fedbilevel.algorithms.fedmsa import FedMSA
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.gd import GD
from fedbilevel.algorithms.lfednest import LFedNest
from fedbilevel.algorithms.local_bsgvrm import LocalBSGM, LocalBSGVRM
from fedbilevel.algorithms.mefbo import MeFBO, MeFBOStorm
from fedbilevel.algorithms.meha import MEHA
from fedbilevel.algorithms.mrbo import MRBO
from fedbilevel.algorithms.primal_dual import PrimalDual
from fedbilevel.algorithms.rfho import RFHO
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO
from fedbilevel.algorithms.soba import SABA, SOBA
from fedbilevel.algorithms.stocbio import StocBiO
from fedbilevel.algorithms.sustain import SUSTAIN
from fedbilevel.core import Algorithm
from fedbilevel.errors import Names

ALGORITHMS: Names[type[Algorithm]] = Names(
    "algorithm",
    {
        "adafbio": AdaFBiO,
        "afl": AFL,
        "aggitd": AggITD,
        "alternating": Alternating,
        "commfedbio": CommFedBiO,
        "commfedbio-sketch": CommFedBiOSketch,
        "distbio": DistBiO,
        "distbioacc": DistBiOAcc,
        "f2sa": F2SA,
        "fedavg": FedAvg,
        "fedbio": FedBiO,
        "fedbio-local": FedBiOLocal,
        "fedbioacc": FedBiOAcc,
        "fedbioacc-local": FedBiOAccLocal,
        "fedmbo": FedMBO,
        "fedmsa": FedMSA,
        "fednest": FedNest,
        "gd": GD,
        "lfednest": LFedNest,
        "local-bsgm": LocalBSGM,
        "local-bsgvrm": LocalBSGVRM,
        "mefbo": MeFBO,
        "mefbo-storm": MeFBOStorm,
        "meha": MEHA,
        "mrbo": MRBO,
        "primal-dual": PrimalDual,
        "rfho": RFHO,
        "saba": SABA,
        "shrofbo": ShroFBO,
        "simfbo": SimFBO,
        "soba": SOBA,
        "stocbio": StocBiO,
        "sustain": SUSTAIN,
    },
)

__all__ = [
    "AFL",
    "ALGORITHMS",
    "F2SA",
    "GD",
    "MEHA",
    "MRBO",
    "RFHO",
    "SABA",
    "SOBA",
    "SUSTAIN",
    "AdaFBiO",
    "AggITD",
    "Alternating",
    "CommFedBiO",
    "CommFedBiOSketch",
    "DistBiO",
    "DistBiOAcc",
    "FedAvg",
    "FedBiO",
    "FedBiOAcc",
    "FedBiOAccLocal",
    "FedBiOLocal",
    "FedMBO",
    "FedMSA",
    "FedNest",
    "LFedNest",
    "LocalBSGM",
    "LocalBSGVRM",
    "MeFBO",
    "MeFBOStorm",
    "PrimalDual",
    "ShroFBO",
    "SimFBO",
    "StocBiO",
]
