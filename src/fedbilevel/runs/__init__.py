"""Whole runs: solve, experiments by name and their folders, sweeps, comparisons, tuning.

Imports everything above; report, reproduction, federation and cli import it.
"""
