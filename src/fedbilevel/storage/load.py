"""Find run folders, and load the records of many as one table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fedbilevel.errors import FedbilevelError
from fedbilevel.storage.run_folder import INFO, Run, RunFolder


def runs(path: Path | str) -> list[Run]:
    """All run folders at or below a path, those below in the order of their names."""
    path = Path(path)
    if not path.is_dir():
        raise FedbilevelError(f"{path} is not a folder: give a run folder, or a folder of run folders.")
    every = [run for file in sorted(path.rglob(INFO)) if (run := RunFolder(file.parent).read()) is not None]
    if not every:
        raise FedbilevelError(f"there are no runs in {path}: give a folder that 'fedbilevel run' has written.")
    return every


def load(path: "Path | str | Sequence[Path | str]", kind: Literal["pandas", "polars"] = "pandas") -> Any:
    """Load the records of one or many run folders as a table: a row for every evaluation.

    Args:
        path: a run folder, a folder of run folders (a comparison, ``runs/``), or several of them.
        kind: "pandas" or "polars", which must be installed.

    Returns:
        A data frame: ``folder``, ``task``, ``algorithm``, ``seed``, ``run`` (the algorithm itself or a reference),
        ``round``, ``exchanges``, ``megabytes_down``, ``megabytes_up``, ``megabytes``, ``floats``, the oracle counts
        ``Gf``, ``Gg``, ``J``, ``H``, their ``samples``, ``seconds``, and the metrics of the task.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    rows = []
    for run in (run for each in paths for run in runs(each)):
        about = {name: run.info.get(name) for name in ("task", "algorithm", "seed")}
        rows += [{"folder": str(run.folder), **about, **row} for row in run.rows]
    if kind not in ("pandas", "polars"):
        raise FedbilevelError(f"kind must be 'pandas' or 'polars', not '{kind}'.")
    try:
        if kind == "polars":
            import polars  # pyright: ignore[reportMissingImports]

            return polars.DataFrame(rows, infer_schema_length=None)
        import pandas  # pyright: ignore[reportMissingImports]

        return pandas.DataFrame(rows)
    except ImportError:
        raise FedbilevelError(f"{kind} is not installed: pip install {kind}.") from None
