"""Benchmarks: ratios measured in one interleaved run, because seconds depend on the machine and its mood."""
