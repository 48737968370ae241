"""``fedbilevel reproduce``: an experiment of a paper, run again, and what the paper says beside what came out.

Every experiment is a file in ``experiments/``: what the paper claims, its conditions ("panels"), its methods with the
parameters that the paper prints or that a search found, the printed numbers, and claims that can hold or fail. Runs are
kept in a folder of their own and go on after an interruption; the page about them is made from their curves and the
file alone, verdict included, so that nobody words it.

Imports runs, report and what stands above them; only cli imports it.
"""

from fedbilevel.reproduction.claims import judged, verdict
from fedbilevel.reproduction.curves import Reproduced
from fedbilevel.reproduction.curves import read as read_curves
from fedbilevel.reproduction.files import PARAMETERS, check, names, read
from fedbilevel.reproduction.page import table, write
from fedbilevel.reproduction.runs import run, search

__all__ = [
    "PARAMETERS",
    "Reproduced",
    "check",
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
