"""Functions that several algorithms share: hypergradients, Neumann series, local descent, averages, compression.

Imports core; every folder below may import it, above all algorithms.
"""
