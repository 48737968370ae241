"""``algorithms``, ``tasks``, ``plan``: what there is, and what it costs."""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from fedbilevel.cli.options import (
    ClientCount,
    DataNames,
    Sample,
    Set,
    console,
    experiment_of,
    first_line,
    settings_of,
)
from fedbilevel.engines.accounting import ORACLES
from fedbilevel.engines.participation import participation
from fedbilevel.engines.plan import Exchange, Plan, plan, shared_accounting
from fedbilevel.report import catalogue
from fedbilevel.runs import plugins


def algorithms(
    name: Annotated[
        str | None,
        typer.Argument(help="Explain this algorithm and its hyper-parameters; also ./my_method.py:MyMethod."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the text of docs/algorithms.md.")] = False,
) -> None:
    """List the algorithms, or explain one."""
    if markdown:
        print(catalogue.markdown(), end="")
        return
    if name is None:
        described = lambda kind: (catalogue.summary(kind), ", ".join(f.name for f in fields(kind)))
        console.print(_listed("algorithm", ("what it does", "hyper-parameters"), described))
        return
    kind = plugins.algorithm(name)
    console.print(inspect.getdoc(kind), highlight=False, markup=False, soft_wrap=True)
    for fact, text in catalogue.facts(kind).items():
        console.print(f"\n{fact}: {text}", highlight=False, markup=False)
    table = Table("hyper-parameter", "default", "meaning")
    for f in fields(kind):
        table.add_row(f.name, str(f.default), f.metadata["help"])
    console.print(table)


def tasks(name: Annotated[str | None, typer.Argument(help="Explain this task and its options.")] = None) -> None:
    """List the tasks, or explain one."""
    if name is not None:
        make = plugins.maker(name)
        console.print(inspect.getdoc(inspect.getmodule(make)), highlight=False, markup=False)
        console.print("\n" + (inspect.getdoc(make) or ""), highlight=False, markup=False)
        return
    options = lambda make: ", ".join(_parameters(make))
    console.print(_listed("task", ("what it is", "options (defaults)"), lambda make: (first_line(make), options(make))))


def _parameters(make: Callable[..., Any]) -> list[str]:
    """The options of a task with their defaults."""
    known = inspect.signature(make).parameters.values()
    return [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in known]


def _listed(kind: plugins.Kind, headings: Sequence[str], described: Callable[[Any], tuple[str, ...]]) -> Table:
    """Everything by name, and, if other packages are installed, where it comes from; with why some cannot be used."""
    everything = list(plugins.listed(kind))
    others = any(origin for _, origin, _ in everything)
    table = Table(kind, *headings, *(["from"] if others else []))
    for name, origin, thing in everything:
        cells = (f"[red]{escape(thing)}[/red]", "") if isinstance(thing, str) else map(escape, described(thing))
        table.add_row(name, *cells, *([origin] if others else []))
    return table


def show_plan(
    algorithm: Annotated[str, typer.Argument(help="Name of an algorithm, or ./my_method.py:MyMethod.")],
    task: Annotated[
        str, typer.Option(help="Name of a task, an experiment file, or ./my_task.py:make_task.")
    ] = "data-cleaning",
    data: DataNames = None,
    clients: ClientCount = None,
    sample: Sample = None,
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a round costs each client: exchanges, floats, oracle calls, samples. Nothing is run."""
    more = {} if sample is None else {"sample": sample}
    experiment = experiment_of(task, {"algorithm": algorithm, **more, **settings_of(set_, clients, data)})
    experiment, made, chosen, _ = experiment.build()
    cohort = participation(experiment.participation(), len(made.clients))
    cost = plan(made, chosen, cohort)
    if as_json:
        print(
            json.dumps(
                {
                    "exchanges": cost.exchanges,
                    "down": cost.down,
                    "up": cost.up,
                    "p": cost.p,
                    "d": cost.d,
                    **cost.oracles,
                    "samples": cost.samples,
                }
            )
        )
        return
    shared = shared_accounting(made, chosen, cohort) if made.problem.private_x else None
    _show_plan(cost, shared, f"{type(chosen).__name__} on {task}, per participating client and round")


def _show_plan(cost: Plan, shared: tuple[int, int] | None, title: str) -> None:
    table = Table("exchange", *(("floats down", "floats up")), *ORACLES, "samples", title=title, title_justify="left")
    for e in cost.round:
        for at in (at for at in np.ndindex(e.down.shape) if None in e.loops or e.times()[at]):
            counts = [*(str(e.oracles[oracle]) for oracle in ORACLES), f"{e.samples:,.0f}"]
            table.add_row(e.method + _often(e, at), f"{e.down[at]:,}", f"{e.up:,}", *counts)
    table.add_section()
    table.add_row(
        f"{cost.exchanges} exchange(s)",
        f"{cost.down:,}",
        f"{cost.up:,}",
        *(str(cost.oracles[oracle]) for oracle in ORACLES),
        f"{cost.samples:,}",
    )
    console.print(table)
    console.print(
        f"p = {cost.p:,} (upper variable{', one block' if shared else ''}), d = {cost.d:,} (lower variable)",
        highlight=False,
    )
    if shared is not None:
        console.print(
            f"x is private and never sent. If all blocks were sent: {shared[0]:,} floats down, {shared[1]:,} up.",
            highlight=False,
        )
    console.print(
        "Gf, Gg: gradients of the upper and lower loss; J: cross products; H: Hessian products; samples: the rows in "
        "their batches, a row once for each call.",
        highlight=False,
    )


def _often(exchange: Exchange, at: tuple[int, ...]) -> str:
    """How often an exchange is made in these iterations of the loops around it: the first ones, or later ones."""
    if None in exchange.loops:
        return " x (N - 1)" if at[-1] else " (first of N)"
    times = int(exchange.times()[at])
    return "" if times == 1 else f" x {times}"
