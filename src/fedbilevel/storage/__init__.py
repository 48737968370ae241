"""Everything that touches a disk: arrays by name, run folders, checkpoints.

Imports core only. Engines, runs and everything built on runs import it; tasks, data and models do not.
"""
