"""``fedbilevel reproduce``: run an experiment of a paper again, and show its numbers next to ours.

Every experiment is a file in ``experiments/``: what the paper claims, its conditions ("panels"), its methods with the
parameters that the paper prints or that a search found, the printed numbers, and claims that can hold or fail. Runs
have a folder of their own and continue after an interruption. Their page, verdict included, is generated only from
their curves and the file.

Imports runs, report and the folders above them; only cli imports it.
"""

from fedbilevel.reproduction.curves import Reproduced
from fedbilevel.reproduction.curves import read as read_curves
from fedbilevel.reproduction.files import PARAMETERS, check, names, read
from fedbilevel.reproduction.page import table, write
from fedbilevel.reproduction.runs import run, search
from fedbilevel.reproduction.verdicts import headline, judged, verdict

__all__ = [
    "PARAMETERS",
    "Reproduced",
    "check",
    "headline",
    "judged",
    "names",
    "read",
    "read_curves",
    "run",
    "search",
    "table",
    "verdict",
    "write",
]
