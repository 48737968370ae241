"""What a site is shown: its data checked before it joins, what it will send, and what it has sent."""

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbilevel.engines.messaging.party import Party
from fedbilevel.engines.plan import Exchange
from fedbilevel.engines.program import without
from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import rows, study
from fedbilevel.federation.consent import digest
from fedbilevel.federation.join import about
from fedbilevel.federation.ledger import DONE, EXCHANGES, LEDGER, owner, verify
from fedbilevel.federation.ledger import lines as read
from fedbilevel.federation.project import load
from fedbilevel.federation.worker import Settings
from fedbilevel.storage.arrays import named_leaves


def preview(folder: Path, settings: Settings, text: str, console: Console) -> study.Study:
    """Show a study in words, check the data against it, and show what will be sent. Returns the study."""
    kit = about(folder)
    given = study.Study.of(text, "the study")
    experiment = given.build().experiment
    console.print(
        f"[bold]{kit['party']}[/bold] in the federation [bold]{kit['federation']}[/bold]. The study "
        f"[bold]{digest(text)[:12]}[/bold]: {_about(given, experiment)}",
        highlight=False,
        soft_wrap=True,
    )
    if given.schema is None:
        if settings.data != "builtin":
            raise FedbilevelError("this experiment uses the task's own data: join with --data builtin.")
        console.print("The experiment uses the task's own data; no file of this site is read.")
        return given
    if settings.data == "builtin":
        raise FedbilevelError("this experiment needs data of this site: join with --data FILE.")
    examples = rows.load(
        settings.data, given.schema, settings.columns, settings.source(folder), settings.limits.min_rows
    )
    facts = given.summarize(examples)
    built = given.build(examples)
    train, validation, test = study.parts_of(built, examples)
    console.print(
        f"Checked: {settings.data} has {len(examples.labels)} rows that fit the experiment: {train} for training, "
        f"{validation} for validation, {test} for testing.",
        highlight=False,
        soft_wrap=True,
    )
    party = Party(built.task, built.algorithm, 0, 1.0, 2)
    shared = Table("when", "what is sent", "numbers", "bytes")
    for name, array in facts.items():
        shared.add_row("once", f"{name} over the training rows", str(array.size), str(np.asarray(array).nbytes))
    for each in party.plan.round:
        times = "several" if None in each.loops else int(each.times().sum())
        often = "every round" if times == 1 else f"every round, {times} times"
        sent = ", ".join(_named(each, party)) or "(nothing)"
        shared.add_row(often, f"{each.method}: {sent}", str(each.up), str(each.bytes_up))
    shared.add_row("at evaluations", "metrics on the test rows", "a few", "")
    console.print(shared)
    console.print(
        "Never sent: rows, labels, file names"
        + (", and this site's part of x, which belongs to its rows." if built.task.problem.private_x else ".")
        + " The site sends means of gradients, or models; docs/federation.md explains what they can reveal.",
        highlight=False,
        soft_wrap=True,
    )
    return given


def _about(given: study.Study, experiment: Any) -> str:
    """A study in words."""
    words = (
        f"the task {experiment.task} with {experiment.algorithm}, {experiment.rounds} rounds, seed {experiment.seed}"
    )
    if experiment.settings:
        words += ", and " + ", ".join(f"{name} = {value}" for name, value in sorted(experiment.settings.items()))
    if given.schema is None:
        return f"{words}."
    return f"{words}. It reads the columns {', '.join(given.schema.columns)}; all others are ignored."


def _named(exchange: Exchange, party: Party) -> list[str]:
    leaves = named_leaves(without(exchange.upload, party.program.private))
    return [f"{shown(name)}{list(leaf.shape)}" for name, leaf in leaves.items()]


def shown(name: str) -> str:
    """The name of an array of a message for users, without the internal names of a vector's parts."""
    return name.replace(".tree", "")


def ledger(folder: Path, console: Console, last: int = 0) -> None:
    """Print tables of what a site has sent, or what a coordinator has done."""
    if (folder / DONE).exists():
        _done(folder, console, last or 30)
        return
    path = folder / LEDGER
    if not path.exists():
        raise FedbilevelError(f"{folder} has sent nothing yet, or is not the folder of a site or a coordinator.")
    lines = list(read(path))
    runs: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0, 0, {}, ""]))
    for line in lines:
        entry = runs[line["run"]][f"{line['action']} {line['method']}".strip()]
        entry[0] += 1
        entry[1] += line["bytes_in"]
        entry[2] += line["bytes_out"]
        entry[3] += bool(line["error"])
        entry[4] = line["left"] or entry[4]
        entry[5] = line["error"] or entry[5]
    for run, totals in runs.items():
        table = Table("asked for", "times", "failed", "bytes in", "bytes out", title=run, title_justify="left")
        table.add_column("what left", overflow="fold")
        for what, (times, came, left, failed, arrays, error) in totals.items():
            shapes = ", ".join(f"{shown(name)}{arrays[name]['shape']}" for name in sorted(arrays))
            more = "; ".join(text for text in (shapes, error and f"last failure: {error}") if text)
            table.add_row(what, str(times), str(failed), f"{came:,}", f"{left:,}", escape(more))
        console.print(table)
    if last:
        each = Table("time", "request", "bytes out", "what was sent (norm)")
        for line in lines[-last:]:
            arrays = ", ".join(f"{shown(name)} {a['norm']:.3g}" for name, a in sorted(line["left"].items()))
            when = np.datetime64(int(line["time"]), "s")
            each.add_row(
                str(when),
                f"{line['action']} {line['method']}".strip(),
                f"{line['bytes_out']:,}",
                escape(line["error"] or arrays),
            )
        console.print(each)


def _done(folder: Path, console: Console, last: int) -> None:
    """What a coordinator has done, the last of it."""
    table = Table("time", "by", "what was done")
    for line in deque(read(folder / DONE), last):
        facts = {k: v for k, v in line.items() if k not in ("n", "before", "time", "caller", "action", "ledger")}
        words = ", ".join(f"{name} {value}" for name, value in facts.items())
        table.add_row(
            str(np.datetime64(int(line["time"]), "s")), escape(line["caller"]), escape(f"{line['action']}: {words}")
        )
    console.print(table)


def check_ledgers(folder: Path, console: Console) -> None:
    """Check every ledger in the folder of a site, of a coordinator or of a run; refuses one that was changed."""
    ours = {folder / LEDGER: folder, folder / EXCHANGES: folder.parent.parent, folder / DONE: folder}
    ours |= dict.fromkeys(sorted(folder.glob(f"runs/*/{EXCHANGES}")), folder)
    found = {
        path: place for path, place in ours.items() if path.with_name(f"{path.name}.last").exists() or path.exists()
    }
    if not found:
        raise FedbilevelError(f"{folder} has no ledger: it is not the folder of a site, a coordinator or a run.")
    broken = 0
    for path, place in found.items():
        try:
            said = str(verify(path, _owner(path, place)))
        except FedbilevelError as error:
            said, broken = f"NOT intact. {error}", broken + 1
        console.print(f"{path}: {said}", highlight=False, soft_wrap=True, markup=False)
    if broken:
        raise FedbilevelError(f"{broken} of {len(found)} ledgers are not intact.")


def _owner(path: Path, place: Path) -> str:
    """Whose ledger it should be, in the folder of a site or a coordinator; "" if the folder does not say."""
    if path.name == EXCHANGES:
        return owner(place, path.parent.name)
    try:
        return owner(place, about(place)["party"] if path.name == LEDGER else load(place).name)
    except (OSError, ValueError, KeyError, FedbilevelError):
        return ""
