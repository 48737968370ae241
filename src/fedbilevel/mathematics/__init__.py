"""Functions that several algorithms share: hypergradients, Neumann series, local descent, averages, compression.

Imports core; algorithms import it.
"""
