"""Functions that algorithms share: hypergradients, Neumann series, local descent, averages, momenta, compression.

Imports core; algorithms and every folder below may import it.
"""
