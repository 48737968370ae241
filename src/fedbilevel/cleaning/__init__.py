"""Finding wrong labels in people's own tables and pictures: one run, what each client then says about its own rows, and
what people see of it.

Imports report and everything above it; federation and cli import it.
"""

from fedbilevel.cleaning.findings import Exchanged, FinalModel, Findings, Noise, Score
from fedbilevel.cleaning.search import clean_arrays

__all__ = ["Exchanged", "FinalModel", "Findings", "Noise", "Score", "clean_arrays"]
