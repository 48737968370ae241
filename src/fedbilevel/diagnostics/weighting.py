"""Client weighting: the measures of the primal-dual paper."""

from fedbilevel.core import Tree
from fedbilevel.core.task import Task
from fedbilevel.diagnostics.quantities import objective, stationarity
from fedbilevel.errors import FedbilevelError

WEIGHTING = "problems with weighting=True, whose x is the clients' weights"


def weighting_stationarity(task: Task, x: Tree, y: Tree = None, step: float = 0.001) -> float:
    """|x - Proj(x - step grad)| on the simplex of client weights, at the exact model of these weights.

    The measure of the primal-dual paper (section 5.1). It is at most step |grad|: compare methods by it, not problems.
    """
    _check_weighting(task)
    return step * stationarity(task, x, y, step)


def weighting_value(task: Task, x: Tree, y: Tree = None) -> float:
    """f_0(w*(x)): the server's loss at the exact model of these client weights."""
    _check_weighting(task)
    return objective(task, x, y)


def _check_weighting(task: Task) -> None:
    if not task.problem.weighting:
        raise FedbilevelError(f"this diagnostic is for {WEIGHTING}.")
