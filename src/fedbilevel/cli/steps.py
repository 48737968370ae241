"""``steps``: the constants of a task, and what the theorems ask of step sizes."""

from typing import Annotated

import typer
from rich.table import Table

from fedbilevel.cli.options import ClientCount, Set, console, settings_of
from fedbilevel.diagnostics.constants import measure_constants
from fedbilevel.diagnostics.theorems import bounds, words
from fedbilevel.runs.experiment import Experiment


def steps(
    task: Annotated[str, typer.Argument(help="Name of a task.")],
    clients: ClientCount = None,
    set_: Set = None,
    local_steps: Annotated[int, typer.Option(help="Local steps of a round, I or tau in the papers.", min=1)] = 5,
    prox: Annotated[float, typer.Option(help="MeFBO's proximal parameter.", min=1e-9)] = 0.015,
    look_at: Annotated[int, typer.Option(help="How many clients to look at.", min=1)] = 6,
    seed: Annotated[int, typer.Option(help="Seed of the start.", min=0)] = 0,
) -> None:
    """Estimate the constants of a task, and show what the papers' theorems then ask of step sizes."""
    built = Experiment(task, "fedbio", seed=seed).changed(settings_of(set_, clients)).build()
    found = measure_constants(built.task, clients=look_at, seed=seed)
    for line in words(found):
        console.print(line, highlight=False, markup=False)
    batch = built.task.layout.batch_sizes[0] or built.task.layout.longest[0]
    table = Table("algorithm", "hyper-parameter", "", "its theorem's value", "from")
    for name, asked in bounds(found, local_steps, batch, len(built.task.clients), prox).items():
        for bound in asked:
            table.add_row(name, bound.name, "=" if bound.exact else "<=", f"{bound.value:.3g}", bound.why)
        if not asked:
            table.add_row(name, "-", "", "-", "g is not strongly convex in y here")
    console.print(table)
    console.print(
        "Theorems are sufficient, not necessary: practical steps are often 10 to 1000 times larger. The papers of "
        "SimFBO and FedNest were not at hand: their rows say what no such method can do without.",
        highlight=False,
        markup=False,
    )
