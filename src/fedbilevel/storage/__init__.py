"""Everything that touches a disk: arrays by name, run folders, checkpoints.

Imports core; engines and everything above them may import it, tasks, data and models do not.
"""
