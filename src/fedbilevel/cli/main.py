"""The command line. It only reads arguments and shows results."""

import contextlib
import inspect
import json
import os
import sys
import warnings
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedbilevel import reproduction
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.engines.participation import participation
from fedbilevel.engines.plan import Plan, plan, shared_accounting
from fedbilevel.errors import FedbilevelError, FedbilevelWarning, Stopped
from fedbilevel.federation.cli import app as federation
from fedbilevel.report import catalogue, figures, page
from fedbilevel.report import terminal as report
from fedbilevel.report import watch as watching
from fedbilevel.report.progress import Display
from fedbilevel.runs import comparison as comparisons
from fedbilevel.runs import configuration, execute, interrupts, tuning
from fedbilevel.runs.experiment import RUN_SETTINGS, Experiment
from fedbilevel.runs.search_space import Range
from fedbilevel.storage.files import new_folder, plain_json
from fedbilevel.tasks import TASKS

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Federated bilevel optimization."
)
app.add_typer(federation, name="federation")
console = Console()

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any field of the algorithm or option of the task; may be repeated."
    ),
]
Sample = Annotated[
    str | None,
    typer.Option(
        help="Clients per round (10), probability (0.5) or list (0,3,5); '10 resample' draws anew for every exchange, "
        "'10 replacement' with replacement. Default: everyone."
    ),
]


def _settings(pairs: list[str] | None, clients: int | None = None, data: str | None = None) -> dict[str, str]:
    settings = {name: str(value) for name, value in (("clients", clients), ("data", data)) if value is not None}
    return settings | _by_key(pairs, "--set needs KEY=VALUE, for instance --set lr_upper=0.5")


def _by_key(pairs: list[str] | None, needs: str) -> dict[str, str]:
    """What KEY=VALUE says, for all of them."""
    found: dict[str, str] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise FedbilevelError(f"{needs}, not '{pair}'.")
        found[key.strip()] = value.strip()
    return found


def _experiment(what: str, settings: dict[str, str]) -> Experiment:
    """The experiment of a file, or of a task by its name."""
    given = Experiment.read(what) if what.endswith(".toml") else Experiment(what)
    return given.changed(settings)


AlgorithmName = Annotated[
    str | None, typer.Option(help="Name of an algorithm, see 'fedbilevel algorithms'; default: the task's.")
]
DataName = Annotated[str | None, typer.Option(help="Name of a data set, see 'fedbilevel tasks TASK'.")]
ClientCount = Annotated[int | None, typer.Option(help="Number of clients.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line, and no progress.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; default: a new one in runs/.")]


@contextlib.contextmanager
def _ending_well(go_on: str = "") -> Iterator[None]:
    """Ctrl-C and SIGTERM end with a sentence that says how to go on (Typer would end without a word)."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        saved = interrupt.saved if isinstance(interrupt, Stopped) else ""
        print(f"fedbilevel: interrupted. {saved or go_on}".strip(), file=sys.stderr)
        # At once: shutting down in the middle of a compilation can crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(143 if isinstance(interrupt, interrupts.Terminated) else 130)


@app.command()
def run(
    task: Annotated[str, typer.Argument(help="Name of a task, see 'fedbilevel tasks', or an experiment file my.toml.")],
    algorithm: AlgorithmName = None,
    data: DataName = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds; default: the task's.")] = None,
    clients: ClientCount = None,
    sample: Sample = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random; default: 0.")] = None,
    set_: Set = None,
    track: Annotated[
        list[str] | None, typer.Option(help="Also tell 'tensorboard' or 'mlflow'; may be repeated.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run an algorithm on a task and write a folder with everything that came out."""
    fields = {"algorithm": algorithm, "rounds": rounds, "sample": sample, "seed": seed}
    settings = {name: str(value) for name, value in fields.items() if value is not None}
    settings |= {"trackers": ",".join(track)} if track else {}
    experiment = _experiment(task, {**settings, **_settings(set_, clients, data)})
    with _ending_well():
        _run_and_show(lambda progress: execute.run(experiment, out, progress), as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or of a comparison that did not come to its end.")],
    rounds: Annotated[int | None, typer.Option(help="Go on to more rounds than it was begun with.")] = None,
    as_json: Json = False,
) -> None:
    """Go on with an interrupted run or comparison, to the result that it would have had without a break."""
    with _ending_well(f"Go on with: fedbilevel resume {folder}"):
        if (folder / comparisons.COMPARISON).exists():
            if rounds is not None:
                raise FedbilevelError("a comparison cannot be given more rounds: begin another one.")
            _compare_and_show(comparisons.read(folder), folder, 0, as_json)
        else:
            _run_and_show(lambda progress: execute.resume(folder, rounds, progress), as_json)


def _run_and_show(run: Callable[[Any], execute.Finished], as_json: bool) -> None:
    if as_json:
        finished = run(None)
        report.pictures(finished)
        print(json.dumps(plain_json(finished.summary)))
        return
    with Display(console) as progress:
        finished = run(progress)
    report.pictures(finished)
    console.print(report.table(finished))
    if finished.details is not None:
        console.print(report.details(finished))
    files = ", ".join(sorted(path.name for path in finished.folder.glob("[!.]*")))
    console.print(f"Results in [bold]{finished.folder}[/bold]: {files}", soft_wrap=True, highlight=False)


@app.command()
def init(
    task: Annotated[str, typer.Argument(help="Name of a task, see 'fedbilevel tasks'.")],
    algorithm: AlgorithmName = None,
    data: DataName = None,
    out: Annotated[Path | None, typer.Option(help="The file; default: TASK.toml.")] = None,
) -> None:
    """Write an experiment file with every setting and what it means, to be changed and run."""
    path = out or Path(f"{task}.toml")
    if path.exists():
        raise FedbilevelError(f"{path} exists: choose another file with --out, so that nothing is overwritten.")
    built = Experiment(task, algorithm, settings=_settings(None, None, data)).build()
    meanings = {
        "task": {"name": _first_line(TASKS[task]), **configuration.explained(TASKS[task])},
        "algorithm": {
            "name": _first_line(type(built.algorithm)),
            **{f.name: f.metadata["help"] for f in fields(built.algorithm)},
        },
        "run": RUN_SETTINGS,
    }
    try:
        path.write_text(configuration.commented(built.config(), meanings, ["run.every"]))
    except OSError as error:
        raise FedbilevelError(f"cannot write to {path}: {error.strerror}.") from error
    console.print(f"Wrote {path}. Run it with: fedbilevel run {path}", soft_wrap=True, highlight=False)


@app.command()
def compare(
    task: Annotated[str, typer.Argument(help="Name of a task, see 'fedbilevel tasks'.")],
    algorithms: Annotated[str | None, typer.Option(help="Names with commas; default: all that fit the task.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, for instance 0..4 or 0,3,7.")] = None,
    sample: Sample = None,
    set_: Set = None,
    jobs: Annotated[int, typer.Option(help="Processes; default: as many as there are cores.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results; one that holds this comparison is continued. Default: in runs/."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run several algorithms on a task: a table, and curves against rounds and against floats sent."""
    with _ending_well():
        comparison = comparisons.plan(task, algorithms, rounds, seeds, sample, _settings(set_))
        _compare_and_show(comparison, out, jobs, as_json)


def _compare_and_show(comparison: comparisons.Comparison, out: Path | None, jobs: int, as_json: bool) -> None:
    if as_json:
        compared = comparisons.run(comparison, out, jobs=jobs)
    else:
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bars:
            bar = bars.add_task("", total=None)
            show = lambda done, members: bars.update(bar, total=members, completed=done)
            compared = comparisons.run(comparison, out, show, jobs)
    picture = report.comparison_curves(compared)
    if as_json:
        print(json.dumps(report.comparison_json(compared)))
        return
    console.print(report.comparison(compared))
    for member in compared.members:
        if not member.done:
            console.print(f"{member.algorithm} (seed {member.seed}): {member.failure}")
    console.print(
        f"Floats and oracle calls are means per client. Results in [bold]{compared.folder}[/bold]: "
        f"{comparisons.COMPARISON}, {picture.name}, and a folder for each run",
        soft_wrap=True,
        highlight=False,
    )


@app.command("report")
def write_report(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Run folders, or folders of run folders.")],
    out: Annotated[Path | None, typer.Option(help="The file; default: report.html in the first folder.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    draw: Annotated[
        bool, typer.Option("--figures", help="Also draw figures for a paper, into figures/ beside the report.")
    ] = False,
) -> None:
    """Make one HTML page about runs and comparisons, finished or still running: curves, tables, pictures, settings."""
    written = page.write(paths, out or paths[0] / "report.html")
    console.print(f"Report in [bold]{escape(str(written))}[/bold]", soft_wrap=True, highlight=False)
    if draw:
        made = figures.write(paths, written.parent / "figures")
        console.print(f"{len(made)} figures in {escape(str(made[0].parent))}", soft_wrap=True, highlight=False)
    if open_:
        webbrowser.open(written.resolve().as_uri())


@app.command()
def watch(
    path: Annotated[Path, typer.Argument(help="A run folder, or a folder of run folders.")],
    port: Annotated[int, typer.Option(help="Port on this machine; default: any that is free.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Serve the report to this machine's browser, and keep it up to date while runs go on."""
    watching.serve(path, port, open_)


@app.command()
def tune(
    task: Annotated[str, typer.Argument(help="Name of a task, see 'fedbilevel tasks'.")],
    algorithm: AlgorithmName = None,
    trials: Annotated[int, typer.Option(help="How many settings to try, with those that the folder has.")] = 30,
    data: DataName = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds of a trial; default: the task's.")] = None,
    clients: ClientCount = None,
    sample: Sample = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    set_: Set = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,...", help="Also try these values of a hyper-parameter; may be repeated."),
    ] = None,
    keep_apart: Annotated[
        float, typer.Option(help="Share of the validation rows to compare settings by, and to train nothing on.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results, or of a search to go on with; default: a new one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Search for the hyper-parameters with the least validation loss. Test data are not looked at."""
    given = Experiment(task, algorithm, rounds, seed, sample)
    asked = tuning.Tuning(given.changed(_settings(set_, clients, data)), trials, _varied(vary), kept_apart=keep_apart)
    with _ending_well():
        if as_json:
            print(json.dumps(plain_json(tuning.tune(asked, out).summary)))
            return
        columns = (BarColumn(), TextColumn("trial {task.completed}/{task.total}"), TextColumn("{task.fields[seen]}"))
        with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
            bar = bars.add_task("", seen="compiling ...", total=None)

            def progress(done: int, trials: int, best: float | None) -> None:
                seen = "compiling ..." if best is None else f"best validation loss {best:.4g}"
                bars.update(bar, total=trials, completed=done, seen=seen)

            tuned = tuning.tune(asked, out, progress)
    _show_tuned(tuned)


def _varied(pairs: list[str] | None) -> dict[str, str]:
    needs = "--vary needs KEY=VALUES, for instance --vary local_steps=1,5"
    varied = _by_key(pairs, needs)
    for key, values in varied.items():
        if not values:
            raise FedbilevelError(f"{needs}, not '{key}='.")
    return varied


def _show_tuned(tuned: tuning.Tuned) -> None:
    best, suggested = tuned.best, tuned.suggested
    title = f"{tuned.experiment.task}, {tuned.experiment.algorithm}, {len(tuned.trials)} trials"
    table = Table(title=title, title_justify="left")
    for heading in ("", "suggested", "best", "searched", "importance"):
        table.add_column(heading, justify="right" if heading else "left")
    shown = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
    for name, values in tuned.space.items():
        ranged = isinstance(values, Range)
        searched = f"{values.low:.3g} .. {values.high:.3g}" if ranged else ", ".join(map(str, values.values))
        importance = f"{tuned.importance[name]:.0%}" if name in tuned.importance else "-"
        table.add_row(name, shown(suggested.settings[name]), shown(best.settings[name]), searched, importance)
    table.add_section()
    table.add_row("validation loss", shown(suggested.value), shown(best.value), style="bold")
    console.print(table)
    states = ", ".join(f"{tuned.summary[state]} {state}" for state in ("complete", "pruned", "diverged"))
    files = ", ".join(sorted(path.name for path in tuned.folder.iterdir()))
    console.print(f"Trials: {states}. Results in [bold]{tuned.folder}[/bold]: {files}", soft_wrap=True, highlight=False)
    console.print(f"Run the best: fedbilevel run {tuned.folder / 'best.toml'}", soft_wrap=True, highlight=False)


@app.command()
def reproduce(
    id: Annotated[str | None, typer.Argument(help="Which one, see --list.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments of the papers.")] = False,
    seeds: Annotated[int | None, typer.Option(help="How many seeds; default: as in its file.", min=1)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run: few rounds, one seed, small data.")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Search for parameters first, as its file says (needs Optuna).")
    ] = False,
    judge: Annotated[
        bool, typer.Option("--judge", help="Run nothing: judge the curves beside the page, and write it again.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes; default: as many as there are cores.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; one that holds some is continued. Default: in runs/.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="For page, picture and curves; default: reproduction/, or that of the runs with --quick."),
    ] = None,
) -> None:
    """Run an experiment of a paper again: its numbers beside ours, and whether its claims hold."""
    if list_ or id is None:
        table = Table("experiment", "what it is", "in the paper", "seeds")
        for name in reproduction.names():
            made = reproduction.read(name)
            table.add_row(name, made.title, made.where, str(made.seeds))
        console.print(table)
        return
    chosen = [name for name, given in {"--judge": judge, "--quick": quick, "--search": search}.items() if given]
    if len(chosen) > 1 or (seeds and (judge or quick)):
        raise FedbilevelError(f"{' and '.join([*chosen, *(['--seeds'] if seeds else [])])} do not go together.")
    made = reproduction.read(id)
    if quick:
        made = made.shortened()
    elif seeds is not None:
        made = replace(made, seeds=seeds)
        reproduction.check(made)
    words = [f"fedbilevel reproduce {id}", *([f"--seeds {seeds}"] if seeds else [])]
    if judge:
        pages = to or Path("reproduction")
        done = reproduction.read_curves(made, pages / f"{id}.csv")
        _show_reproduced(done)
        written = reproduction.write(done, pages, words[0], keep=False)
        console.print(f"Written: {written}", soft_wrap=True, highlight=False)
        return
    words += chosen
    folder = out if out is not None and out.is_dir() else new_folder(f"reproduce-{id}", out)
    with _ending_well("The same command with the same --out goes on."):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bars:
            bar = bars.add_task("searching" if search else "runs", total=None)
            show = lambda done, members: bars.update(bar, total=members, completed=done)
            if search:
                made = reproduction.search(made, folder / "search", show, jobs)
                bars.update(bar, description="runs")
            done = reproduction.run(made, folder, show, jobs)
    _show_reproduced(done)
    pages = to or (folder if quick else Path("reproduction"))
    written = reproduction.write(done, pages, " ".join(words))
    console.print(f"Written: {written}; the runs are in {folder}", soft_wrap=True, highlight=False)


def _show_reproduced(done: reproduction.Reproduced) -> None:
    made = done.reproduction
    headings, *rows = reproduction.table(done)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    if sum(widths) + 3 * len(widths) < console.width:
        table = Table(title=f"{made.id}: {made.title}", title_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="left" if number < 2 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:  # too narrow for a table that can be read
        console.print(f"{made.id}: {made.title}", highlight=False)
        for row in rows:
            said = "; ".join(f"{heading} {cell}" for heading, cell in zip(headings[2:], row[2:], strict=True))
            console.print(f"  {', '.join(cell for cell in row[:2] if cell)}: {said}", highlight=False, markup=False)
    for kind, claims in reproduction.judged(done).items():
        console.print(f"Claims, parameters: {reproduction.PARAMETERS[kind]}", highlight=False)
        for each in claims:
            console.print(
                f"  {each.word}: {each.claim.words} ({each.numbers})",
                highlight=False,
                markup=False,
            )
    console.print(f"[bold]Verdict: {reproduction.verdict(done)}[/bold]", highlight=False)


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Show this one with its hyper-parameters.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the text of docs/algorithms.md.")] = False,
) -> None:
    """List the algorithms, or explain one."""
    if markdown:
        print(catalogue.markdown(), end="")
        return
    if name is None:
        table = Table("algorithm", "what it does", "hyper-parameters")
        for name, kind in ALGORITHMS.items():
            table.add_row(name, _first_line(kind), ", ".join(f.name for f in fields(kind)))
        console.print(table)
        return
    kind = ALGORITHMS[name]
    console.print(inspect.getdoc(kind), highlight=False, markup=False)
    table = Table("hyper-parameter", "default", "meaning")
    for f in fields(kind):
        table.add_row(f.name, str(f.default), f.metadata["help"])
    console.print(table)


@app.command()
def tasks(name: Annotated[str | None, typer.Argument(help="Show this one with its options.")] = None) -> None:
    """List the tasks, or explain one."""
    if name is not None:
        console.print(inspect.getdoc(inspect.getmodule(TASKS[name])), highlight=False, markup=False)
        console.print("\n" + (inspect.getdoc(TASKS[name]) or ""), highlight=False, markup=False)
        return
    table = Table("task", "what it is", "options (defaults)")
    for name, make in TASKS.items():
        table.add_row(
            name,
            _first_line(make),
            ", ".join(f"{k}={p.default}" for k, p in inspect.signature(make).parameters.items()),
        )
    console.print(table)


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").splitlines()[0]


@app.command("plan")
def show_plan(
    algorithm: Annotated[str, typer.Argument(help="Name of an algorithm.")],
    task: Annotated[str, typer.Option(help="Name of a task.")] = "data-cleaning",
    clients: ClientCount = None,
    sample: Sample = None,
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a round costs each client, found by tracing: exchanges, floats, oracle calls. Nothing is run."""
    experiment = Experiment(task, algorithm, sample=sample).changed(_settings(set_, clients))
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
                }
            )
        )
        return
    shared = shared_accounting(made, chosen, cohort) if made.problem.private_x else None
    _show_plan(cost, shared, f"{type(chosen).__name__} on {task}, per participating client and round")


def _show_plan(cost: Plan, shared: tuple[int, int] | None, title: str) -> None:
    oracles = ("Gf", "Gg", "J", "H")
    table = Table("exchange", *(("floats down", "floats up")), *oracles, title=title, title_justify="left")
    for e in cost.round:
        often = "" if e.times == 1 else f" x {e.times}" if e.times is not None else " x N" + " - 1" * e.later
        name = e.method + often
        table.add_row(name, f"{e.down:,}", f"{e.up:,}", *(str(e.oracles[o]) for o in oracles))
    table.add_section()
    table.add_row(
        f"{cost.exchanges} exchange(s)", f"{cost.down:,}", f"{cost.up:,}", *(str(cost.oracles[o]) for o in oracles)
    )
    console.print(table)
    console.print(
        f"p = {cost.p:,} (upper variable{', one block' if shared else ''}), d = {cost.d:,} (lower variable)",
        highlight=False,
    )
    if shared is not None:
        console.print(
            f"x is private, none of it is sent; if all blocks were: {shared[0]:,} floats down, {shared[1]:,} up.",
            highlight=False,
        )
    console.print(
        "Gf, Gg: gradients of the upper and lower loss; J: cross products; H: Hessian products.", highlight=False
    )


def main() -> None:
    """Run the command line; what the user can mend is one sentence and exit code 2."""
    interrupts.listen()
    usual = warnings.showwarning

    def show(message: Any, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, FedbilevelWarning):
            print(f"fedbilevel: {message}", file=sys.stderr)
        else:
            usual(message, category, *rest)

    warnings.showwarning = show
    try:
        code = app(standalone_mode=False)
    except FedbilevelError as error:
        saved = error.saved if isinstance(error, Stopped) else ""
        print(f"fedbilevel: {error} {saved}".strip(), file=sys.stderr)
        code = 2
    except Exception as error:
        if not hasattr(error, "format_message"):  # what typer says of wrong arguments has one
            raise
        print(f"fedbilevel: {error.format_message()} Try 'fedbilevel --help'.", file=sys.stderr)  # pyright: ignore
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
