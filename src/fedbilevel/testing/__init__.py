"""Tests for algorithms, ours and yours: what every algorithm must keep, and problems whose solutions are known.

Imports runs, engines and tasks; only tests, and the skeletons that ``fedbilevel new`` writes, import it.
"""

from fedbilevel.testing.contract import (
    Broken,
    Limit,
    check_algorithm,
    check_bounds,
    check_engines,
    check_limit,
    check_plan,
    check_resume,
    check_state,
    check_step_compiles_nothing,
)
from fedbilevel.testing.problems import identical, largest_difference, noisy, problem_of

__all__ = [
    "Broken",
    "Limit",
    "check_algorithm",
    "check_bounds",
    "check_engines",
    "check_limit",
    "check_plan",
    "check_resume",
    "check_state",
    "check_step_compiles_nothing",
    "identical",
    "largest_difference",
    "noisy",
    "problem_of",
]
