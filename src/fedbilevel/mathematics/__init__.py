"""Functions that several algorithms share: hypergradients, Neumann series, local descent, averages, compression.

Imports core; algorithms and every folder below may import it.
"""
