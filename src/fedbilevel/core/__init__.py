"""The vocabulary: Problem, Objective, Client, Replies, Clients, Algorithm, Task.

Imports only ``errors``; every other folder may import it.

A federated bilevel algorithm is a server program made of *exchanges*. One exchange is one message down to some
clients, one pure function run on each of them, one message up, one reduction::

    z = add(z, clients.run(self.descend, z).mean())

An algorithm is written once, in these words, and every engine executes it unchanged: as one compiled program over
thousands of simulated clients, or as messages between separate parties.

Conventions: clients m = 1..M with weights w_m (summing to 1), f = sum w_m f_m the upper and g = sum w_m g_m the lower
objective, h(x) = f(x, y*(x)) with y*(x) = argmin_y g(x, y), u* = [d2yy g]^-1 grad_y f, and grad h = grad_x f - d2xy g
u*.
"""

from fedbilevel.core.algorithm import Algorithm, call
from fedbilevel.core.client import Client
from fedbilevel.core.objective import Objective, Tally
from fedbilevel.core.parameters import parameter
from fedbilevel.core.problem import Problem, as_float
from fedbilevel.core.rows import Lookup, Rows, columns, select, take
from fedbilevel.core.server import Clients, Each, Replies, mean_type
from fedbilevel.core.types import Carry, Key, Loss, Step, Tree

__all__ = [
    "Algorithm",
    "Carry",
    "Client",
    "Clients",
    "Each",
    "Key",
    "Lookup",
    "Loss",
    "Objective",
    "Problem",
    "Replies",
    "Rows",
    "Step",
    "Tally",
    "Tree",
    "as_float",
    "call",
    "columns",
    "mean_type",
    "parameter",
    "select",
    "take",
]
