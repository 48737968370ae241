"""What a site is shown before it joins: a study in words, whether its data fit, and what would be sent."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fedbilevel.engines.messaging.party import Party
from fedbilevel.engines.plan import Exchange
from fedbilevel.engines.program import without
from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import rows, study
from fedbilevel.federation.consent import digest
from fedbilevel.federation.engine import metrics_of
from fedbilevel.federation.join import about
from fedbilevel.federation.ledgers import plain, shown
from fedbilevel.federation.suspects import SUSPECTS
from fedbilevel.federation.worker import Settings
from fedbilevel.runs.experiment import Built
from fedbilevel.storage.arrays import named_leaves
from fedbilevel.tasks.sites import Examples, Facts

FACTS = {
    "sum rows": "how many rows there are",
    "sum trusted": "how many of them are trusted",
    "sum count": "of every column, how many values are known",
    "sum values": "of every column, the sum of its values",
    "sum squares": "of every column, the sum of the squares of its values",
    "max samples": "how many training rows there are",
    "sum validation": "how many validation rows each class has",
    "mean positives": "which share of the validation rows is positive in each group",
    "number of judges": "whether this site is one of those that judge",
}
"""What sites send before the first round, in words. A test holds it complete."""


def preview(folder: Path, settings: Settings, text: str, console: Console) -> study.Study:
    """Show a study in words, check the data against it, and show what will be sent. Returns the study."""
    kit = about(folder)
    given = study.Study.of(text, "the study", settings.consent.packages)
    experiment = given.build().experiment
    say = lambda words: console.print(words, highlight=False, soft_wrap=True)
    say(
        f"[bold]{plain(kit['party'])}[/bold] in the federation [bold]{plain(kit['federation'])}[/bold]. The study "
        f"[bold]{digest(text)[:12]}[/bold]: {plain(_about(given, experiment))}"
    )
    for package in given.packages:
        hashed = settings.consent.packages[package]
        say(f"It runs code of the package {package} as it is installed here ({hashed[:12]}), which you listed.")
    if given.schema is None:
        if settings.data != "builtin":
            raise FedbilevelError("this experiment uses the task's own data: join with --data builtin.")
        say("The experiment uses the task's own data; no file of this site is read.")
        return given
    if settings.data == "builtin":
        raise FedbilevelError("this experiment needs data of this site: join with --data FILE.")
    say(plain(_columns(given, settings)))
    examples = rows.load(
        settings.data, given.schema, settings.columns, settings.source(folder), settings.limits.min_rows
    )
    built = given.build(examples)
    parts = study.parts_of(built, examples)
    counted = ", ".join(f"{count} {what}" for what, count in parts.items())
    say(plain(f"Checked: {settings.data} has {len(examples.labels)} rows that fit the experiment: {counted}."))
    if given.finds_suspects:
        say(plain(_found(given, settings, examples)))
    console.print(_sent(given, built, given.summarize(examples), settings))
    say(
        "Never sent: rows, labels, file names"
        + (", and this site's part of x, which belongs to its rows." if built.task.problem.private_x else ".")
        + " x is what the study tunes, y the model; other letters are vectors of the algorithm with the size of one of "
        "them. The site sends means of gradients, or models; docs/federation.md explains what they can reveal."
    )
    return given


def _found(given: study.Study, settings: Settings, examples: Examples) -> str:
    """What a study that finds wrong labels leaves at the site."""
    assert given.schema is not None
    names, column = rows.names(settings.data, given.schema, settings.id), given.schema.trusted
    first = names[0] or "nothing"
    words = f"At the end, runs/NAME/{SUSPECTS} lists all labels, the worst first, by the names of your rows (the first "
    words += f"one is called {first}). The list stays at this site."
    least = settings.limits.min_rows
    if column and examples.trusted is None:
        words += f" There is no column {settings.columns.get(column, column)}, so no label counts as trusted."
    elif examples.trusted is not None and 0 < examples.trusted.sum() < least:
        words += f" Only {examples.trusted.sum()} labels are trusted, and this site sends no number about fewer than "
        words += f"{least} rows, so these train like all others."
    return words


def _about(given: study.Study, experiment: Any) -> str:
    """A study in words."""
    some = experiment.sample not in (None, "everyone")
    who = f", in each a sample of the sites ({experiment.sample})" if some else ", all sites in each"
    words = f"the task {experiment.task} with {experiment.algorithm}, {experiment.rounds} rounds{who}, "
    words += f"evaluated every {experiment.every} rounds, seed {experiment.seed}"
    if experiment.settings:
        words += ", and " + ", ".join(f"{name} = {value}" for name, value in sorted(experiment.settings.items()))
    weights = "by its number of training rows" if given.rules.weights == "size" else "equally"
    return f"{words}. Every site counts {weights}."


def _columns(given: study.Study, settings: Settings) -> str:
    """What is read of the site's data."""
    assert given.schema is not None
    own = lambda name: f"{name} (here {settings.columns[name]})" if name in settings.columns else name
    words = {"trusted": "whether the label is trusted, if you have it"}
    read = [own(name) for name in given.schema.features] or [f"images of {given.schema.shape} pixels"]
    read += [f"{own(name)} ({words.get(role, f'the {role}')})" for role, name in given.schema.roles.items()]
    return f"It reads the columns {', '.join(read)}; all others are ignored."


def _sent(given: study.Study, built: Built, facts: Facts, settings: Settings) -> Table:
    """What leaves the site, when, and how much."""
    party = Party(built.task, built.algorithm, 0, 1.0, 2)
    table = Table("when", "what is sent", "numbers", "bytes")
    table.add_row("once", "how many training rows there are", "1", "")
    for name, array in facts.items():
        size = np.asarray(array)
        table.add_row("once", f"{FACTS.get(name, name)} ({name}, training rows)", str(size.size), str(size.nbytes))
    total, rounds = 0, built.experiment.rounds or 1
    for when, exchanges in (("in the first round", party.plan.start), ("in every round", party.plan.round)):
        for each in exchanges:
            times = None if None in each.loops else int(each.times().sum())
            total += each.bytes_up * (times or 1) * (rounds if when == "in every round" else 1)
            often = when if times == 1 else f"{when}, {times or 'several'} times"
            words = ", ".join(_named(each, party)) or "(nothing)"
            table.add_row(often, f"{each.method}: {words}", f"{each.up:,}", f"{each.bytes_up:,}")
    names = ", ".join(sorted(metrics_of(study.server_task(built, 1, own=True))))
    of = "its rows" if given.finds_suspects else "the test rows"
    table.add_row(f"every {built.experiment.every} rounds", f"on {of}: {names}", "", "")
    if given.finds_suspects and given.schema is not None:
        least, share = settings.limits.min_rows, settings.limits.share_counts
        words = f"how many labels of each class are suspicious, if {least} or more are, and as many are not"
        most = str(len(given.schema.classes)) if share else "0"
        table.add_row("at the end", words if share else "nothing: you do not share the numbers of suspects", most, "")
    table.add_row(f"in {rounds} rounds", "all of this together, at most", "", f"about {total:,}")
    return table


def _named(exchange: Exchange, party: Party) -> list[str]:
    leaves = named_leaves(without(exchange.upload, party.program.private))
    return [f"{shown(name)}{list(leaf.shape)}" for name, leaf in leaves.items()]
