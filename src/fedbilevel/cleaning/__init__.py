"""Finding label errors in people's own rows: one run, and what each client then says about its own rows.

Imports runs and everything above it; whatever shows or writes findings (cli, federation) imports it.
"""

from fedbilevel.cleaning.findings import Exchanged, FinalModel, Findings, Noise, Score
from fedbilevel.cleaning.search import clean_arrays

__all__ = ["Exchanged", "FinalModel", "Findings", "Noise", "Score", "clean_arrays"]
