"""The folder of a search: what was asked for, so that an interrupted search can continue, and what was found."""

import dataclasses
import json
import re
import shutil
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from fedbilevel.cleaning import cleaned, page
from fedbilevel.cleaning.clean import Progress, search
from fedbilevel.cleaning.found import Found
from fedbilevel.data.own_tables import OwnTable
from fedbilevel.data.reading import table
from fedbilevel.data.table_files import is_function
from fedbilevel.errors import FedbilevelError
from fedbilevel.runs.solve import check_seed
from fedbilevel.storage.csv_files import CsvWriter
from fedbilevel.storage.files import alone, new_folder, write_atomically
from fedbilevel.storage.run_folder import CHECKPOINTS, CONFIG

SUSPECTS, CLIENTS, SUMMARY, REPORT = "suspects.csv", "clients.csv", "summary.json", "report.html"
SECTION = "clean"
ESTIMATED = ("label_quality", "probability_wrong", "noise", "low", "high")


@dataclass(frozen=True)
class Search:
    """What was asked for; the fields are the options of ``fedbilevel clean``."""

    sources: tuple[str, ...]  # at least one
    label: str | None = None
    client: str | None = None
    client_from: str | None = None
    trusted: str | None = None
    id: str | None = None
    features: str | None = None
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    relabel: bool = False
    thorough: bool = False
    seed: int = 0

    @classmethod
    def of(cls, folder: Path) -> "Search":
        """What was asked for in a folder."""
        path = folder / CONFIG
        try:
            asked = tomllib.loads(path.read_text(encoding="utf-8"))[SECTION]
            known = {f.name for f in fields(cls)}
            lists = ("sources", "drop", "categorical", "numeric")
            values: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in asked.items() if k in known}
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FedbilevelError(f"{path} cannot be read ({error}).") from None

    def read(self) -> OwnTable:
        """Read the rows."""
        check_seed(self.seed)
        source = self.sources[0] if len(self.sources) == 1 else list(self.sources)
        options = {k: v for k, v in asdict(self).items() if k not in ("sources", "relabel", "thorough", "seed")}
        return table(source, **options)

    def absolute(self) -> "Search":
        """The same from any working folder."""
        sources = tuple(path if is_function(path) else str(Path(path).resolve()) for path in self.sources)
        features = None if self.features is None else str(Path(self.features).resolve())
        return dataclasses.replace(self, sources=sources, features=features)

    @property
    def settings(self) -> dict[str, Any]:
        """What the page shows of it: files without their folders, so that it is the same from any working folder."""
        known = {k: v for k, v in asdict(self).items() if v is not None and v != ()}
        known["sources"] = tuple(Path(path).name or path for path in self.sources)
        return known if self.features is None else {**known, "features": Path(self.features).name}

    def text(self) -> str:
        """As TOML."""
        asked = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v not in (None, ())}
        return tomli_w.dumps({SECTION: asked})


def is_search(folder: Path) -> bool:
    """Whether a folder is that of a search."""
    try:
        return SECTION in tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def place(asked: Search, out: Path | None) -> Path:
    """The folder for a search: a new one, or that of the same search, which continues."""
    if out is not None and is_search(out):
        if Search.of(out) != asked.absolute():
            raise FedbilevelError(f"{out} has another search: choose another folder with --out.")
        if (out / SUMMARY).exists():
            raise FedbilevelError(f"{out} has the results of this search: choose another folder with --out.")
        return out
    stem = re.sub(r"[^\w-]+", "-", Path(asked.sources[0]).stem)[:40].strip("-")
    return new_folder(f"{SECTION}-{stem or 'table'}-seed{asked.seed}", out)


def run(asked: Search, data: OwnTable, folder: Path, progress: Progress | None = None) -> Found:
    """Search, and write everything that was found into a folder."""
    with alone(folder):
        write_atomically(folder / CONFIG, asked.absolute().text().encode())
        found = search(data, asked.settings, progress, folder / CHECKPOINTS)
        save(found, folder)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return found


def save(found: Found, folder: Path) -> list[Path]:
    """Write what was found: tables, the cleaned data, the model, the page; ``summary.json`` comes last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_frame(folder / SUSPECTS, found.suspects)
        _write_frame(folder / CLIENTS, found.noise)
        files = [folder / SUSPECTS, *cleaned.write(found, folder), folder / CLIENTS, found.model.save(folder)]
    except OSError as error:
        raise FedbilevelError(f"cannot write to {folder}: {error.strerror}.") from error
    files.append(page.write(found, folder / REPORT))
    write_atomically(folder / SUMMARY, json.dumps(summary(found), indent=1).encode())
    return [*files, folder / SUMMARY]


def _write_frame(path: Path, frame: Any) -> None:
    """A data frame as a CSV file, without its index. What was estimated has six digits; names are written in full."""
    columns = [
        [f"{cell:.6g}" for cell in column] if name in ESTIMATED else column.tolist() for name, column in frame.items()
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = CsvWriter(file)
        table.rows([list(frame.columns)])
        table.rows(zip(*columns, strict=True))


def summary(found: Found) -> dict[str, Any]:
    """What was found, in a few numbers, for programs."""
    scores = {
        name: score._asdict()
        for name, score in (("given", found.findings.given), ("cleaned", found.findings.cleaned))
        if score
    }
    clients = [
        {k: v if isinstance(v, str | int | float | bool) else str(v) for k, v in row.items()}
        for row in found.noise.astype(object).to_dict("records")
    ]
    return {
        "rows": len(found.data),
        "label_issues": int(found.findings.issue.sum()),
        "trusted": int(found.trusted.sum()),
        "identified": bool(found.findings.identified),
        "clients": clients,
        "on_trusted_rows": scores,
        "megabytes": found.findings.exchanged.megabytes,
        "rounds": found.findings.exchanged.rounds,
        "seed": found.settings.get("seed", 0),
        "warnings": found.warnings,
    }
