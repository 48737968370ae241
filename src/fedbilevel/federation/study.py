"""A study: what a federation computes. An experiment file with two more tables, ``[federation]`` and ``[schema]``.

Without a schema, the task's own data are used, one client for each party: to try a federation out, and to compare it
with the simulator.
"""

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedbilevel.core import columns
from fedbilevel.core.task import Task
from fedbilevel.engines.plan import Plan
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.federation import schema as schemas
from fedbilevel.federation.schema import Schema
from fedbilevel.runs import configuration
from fedbilevel.runs.experiment import Built, Experiment
from fedbilevel.runs.settings import Settings, convert
from fedbilevel.storage.arrays import named_leaves
from fedbilevel.tasks import SITE_TASKS
from fedbilevel.tasks.sites import Examples, Facts


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Rules:
    """How a run deals with sites that are late or offline: the table ``[federation]``."""

    quorum: int = _option(
        0, "fewest valid replies to an exchange, or all if fewer sites are asked; 0: more than half of those asked"
    )
    deadline: float = _option(60.0, "seconds that a site has to reply to an exchange")
    setup_deadline: float = _option(300.0, "seconds that a site has to load its data and to compile")
    patience: float = _option(60.0, "seconds to wait for sites that are offline before continuing without them")
    weights: str = _option("equal", "'equal', or 'size': by the number of training rows")
    probe: tuple[int, ...] = _option((), "sizes in floats: time exchanges of these before the run, see probe.json")


@dataclass(frozen=True)
class Study:
    """An experiment for a federation."""

    experiment: Experiment
    rules: Rules
    schema: Schema | None
    text: str  # of the file, as it is sent to the sites

    @staticmethod
    def read(path: Path) -> "Study":
        """The study of a file."""
        tables, places = configuration.read(path, federated=True)
        given: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Rules)}
        for key, value in tables["federation"].items():
            place = places.get(f"federation.{key}", "")
            if key not in given:
                raise UnknownName("setting of [federation]", key, given, place)
            given[key] = convert(key, value, given[key], place)
        rules = Rules(**given)
        if rules.weights not in ("equal", "size"):
            raise FedbilevelError(f"[federation]: weights must be 'equal' or 'size', but is '{rules.weights}'.")
        if rules.quorum < 0 or min(rules.deadline, rules.setup_deadline) <= 0 or rules.patience < 0:
            raise FedbilevelError("[federation]: quorum and patience must be at least 0, and deadlines greater than 0.")
        schema = schemas.read(tables["schema"]) if tables["schema"] else None
        own = {table: tables[table] for table in configuration.TABLES}
        name = own["task"].pop("name")
        experiment = Experiment(name, places=places).changed(Settings.of_tables(own))
        return Study(experiment, rules, schema, path.read_text())

    def summarize(self, examples: Examples) -> Facts:
        """What a site sends about its rows before the first round."""
        function = SITE_TASKS[self.experiment.task].facts
        taken = inspect.signature(function).parameters
        return function(examples, **{k: v for k, v in self._options().items() if k in taken})

    def check_facts(self, rows: Any, facts: Facts) -> None:
        """Refuse a summary that cannot be right."""
        if self.schema is None:
            return
        shapes = self.summarize(schemas.blank(self.schema))
        if facts.keys() != shapes.keys() or any(np.shape(facts[k]) != np.shape(v) for k, v in shapes.items()):
            raise FedbilevelError("its sums have unexpected names or shapes.")
        if not all(np.all(np.isfinite(array)) for array in facts.values()):
            raise FedbilevelError("its sums contain NaN or infinite numbers.")
        if not isinstance(rows, int) or rows < 1:
            raise FedbilevelError(f"its number of rows is {rows!r}, which is not valid.")

    def _options(self) -> dict[str, Any]:
        parameters = inspect.signature(SITE_TASKS[self.experiment.task].task).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        settings = Settings(self.experiment.settings)
        return {"seed": self.experiment.seed, **settings.values_for("task", defaults, self.experiment.places)}

    def build(self, examples: Examples | None = None, facts: Facts | None = None) -> Built:
        """The task and the algorithm: for a site with its rows, for the server with blank ones; without a schema, for
        all clients.
        """
        if self.schema is None:
            return self.experiment.build()
        examples = schemas.blank(self.schema) if examples is None else examples
        facts = self.summarize(examples) if facts is None else facts
        return self.experiment.build(partial(SITE_TASKS[self.experiment.task].task, examples, facts))

    def quorum(self, clients: int) -> int:
        """The fewest valid replies to an exchange."""
        quorum = self.rules.quorum or clients // 2 + 1
        if quorum > clients:
            raise FedbilevelError(f"[federation]: quorum is {quorum}, but there are only {clients} sites.")
        return quorum


def from_text(text: str, folder: Path) -> Study:
    """Save the text of a study to a folder, and read it."""
    path = folder / "study.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return Study.read(path)


@cache
def code() -> str:
    """A hash of this installed copy: all its Python files."""
    hashed = hashlib.sha256()
    root = Path(str(files("fedbilevel")))
    for path in sorted(root.rglob("*.py")):
        hashed.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def facts_of_copy() -> dict[str, str]:
    """What must agree between the server and the sites for the same numbers: versions, code, precision."""
    return {
        "version": version("fedbilevel"),
        "code": code(),
        "jax": version("jax"),
        "numbers": str(jnp.result_type(float)),
    }


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Why a site's copy does not fit the server's, or "" if it does."""
    if here["version"] != there.get("version"):
        return f"it has fedbilevel {there.get('version')}, the server {here['version']}: install the same version."
    if here["code"] != there.get("code"):
        return f"its copy of fedbilevel {here['version']} differs from the server's: install the same one on both."
    if here["numbers"] != there.get("numbers"):
        return f"it computes in {there.get('numbers')}, the server in {here['numbers']}: use the same JAX_ENABLE_X64."
    if here["jax"].split(".")[:2] != there.get("jax", "").split(".")[:2]:
        return f"it has jax {there.get('jax')}, the server {here['jax']}: install the same version."
    return ""


def plan_digest(plan: Plan, built: Built) -> str:
    """A hash of the algorithm, its hyper-parameters and the shapes of everything that is sent."""
    shapes = lambda tree: {name: (leaf.shape, str(leaf.dtype)) for name, leaf in named_leaves(tree).items()}
    exchanges = [(e.name, e.method, shapes(e.broadcast), shapes(e.upload)) for e in plan.by_name.values()]
    words = repr((built.experiment.task, built.algorithm, exchanges, plan.p, plan.d))
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def fewest_rows(built: Built, examples: Examples) -> int:
    """The fewest rows of a site that any number it sends is computed from."""
    batch = built.task.batch_size
    sizes = batch.values() if isinstance(batch, Mapping) else [batch]
    return min([*parts_of(built, examples), *(size for size in sizes if size is not None)])


def parts_of(built: Built, examples: Examples) -> tuple[int, int, int]:
    """How many rows of a site are for training, validation and test."""
    train, validation = (len(columns(built.task.clients[0][part])[0][0]) for part in ("train", "val"))
    return train, validation, len(examples.labels) - train - validation


def site_task(built: Built, number: int, own: bool) -> Task:
    """The task of one site alone."""
    if own:
        return built.task
    return built.task.only(number, built.algorithm.upper_at == "clients")


def server_task(built: Built, clients: int, counts: np.ndarray, rules: Rules, own: bool) -> Task:
    """The task as the server knows it: with blank rows where the sites bring their own."""
    if not own:
        if len(built.task.clients) != clients:
            raise FedbilevelError(
                f"the task has {len(built.task.clients)} clients, but the federation has {clients} sites: "
                f"set clients = {clients} in [task]."
            )
        return built.task
    weights = counts.astype(float) if rules.weights == "size" else None
    return dataclasses.replace(built.task, clients=list(built.task.clients) * clients, weights=weights)
