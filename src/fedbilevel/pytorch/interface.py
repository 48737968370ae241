"""``fedbilevel.torch``: bilevel problems with PyTorch models and losses, unchanged."""

from fedbilevel.pytorch.agreement import check
from fedbilevel.pytorch.arrays import tensors
from fedbilevel.pytorch.problem import problem
from fedbilevel.pytorch.rows import rows
from fedbilevel.pytorch.variables import load

__all__ = ["check", "load", "problem", "rows", "tensors"]
