"""All commands, and what becomes of their errors."""

import sys
import warnings
from importlib.metadata import version
from typing import Annotated, Any

import typer

from fedbilevel.cli.catalogue import algorithms, show_plan, tasks
from fedbilevel.cli.clean import clean
from fedbilevel.cli.compare import compare
from fedbilevel.cli.new import new
from fedbilevel.cli.predict import predict
from fedbilevel.cli.report import watch, write_report
from fedbilevel.cli.reproduce import reproduce
from fedbilevel.cli.run import init, resume, run
from fedbilevel.cli.steps import steps
from fedbilevel.cli.tune import tune
from fedbilevel.errors import FedbilevelError, FedbilevelWarning, Stopped
from fedbilevel.federation.cli import app as federation
from fedbilevel.runs import interrupts
from fedbilevel.storage import compiled

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Federated bilevel optimization.")
COMMANDS = {
    "clean": clean, "predict": predict, "run": run, "resume": resume, "init": init, "compare": compare,
    "report": write_report, "watch": watch, "tune": tune, "reproduce": reproduce, "algorithms": algorithms,
    "tasks": tasks, "plan": show_plan, "steps": steps, "new": new,
}  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedbilevel {version('fedbilevel')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Federated bilevel optimization."""


for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(federation, name="federation")


def main() -> None:
    """Run the command line. An error that the user can fix is one sentence on stderr and exit code 2."""
    interrupts.listen()
    usual = warnings.showwarning

    def show(message: Any, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, FedbilevelWarning):
            print(f"fedbilevel: {message}", file=sys.stderr)
        else:
            usual(message, category, *rest)

    warnings.showwarning = show
    compiled.enable()
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
