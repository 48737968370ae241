"""A study: what a federation computes. An experiment file with two more tables, ``[federation]`` and ``[schema]``.

Without a schema, the task's own data are used, one client for each party: to try a federation out, and to compare it
with the simulator.
"""

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedbilevel.cleaning import sites as cleaning
from fedbilevel.core.task import Task
from fedbilevel.engines.plan import Plan
from fedbilevel.errors import FedbilevelError, Names, UnknownName
from fedbilevel.federation import schema as schemas
from fedbilevel.federation.schema import Schema
from fedbilevel.runs import configuration, plugins
from fedbilevel.runs.experiment import Built, Experiment
from fedbilevel.runs.own_data import is_own
from fedbilevel.runs.settings import Settings, convert
from fedbilevel.storage.arrays import named_leaves
from fedbilevel.tasks import SITE_TASKS as OF_TASKS
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.sites import MOST_ROWS, Examples, Facts, Judged, SiteTask, together

NO_PACKAGES: Mapping[str, str] = MappingProxyType({})
SITE_TASKS: Names[SiteTask] = Names(OF_TASKS.kind, {**OF_TASKS, "label-errors": cleaning.SITE_TASK})
"""The tasks of a federation whose sites bring their own rows."""


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
    most_rows: int = _option(
        0, "training rows of one site that count at most, in sums and in weights by size; 0: ten times the median site"
    )
    largest_site: int = _option(
        1_000_000, "training rows that a site may have at most: one that says it has more is refused"
    )
    probe: tuple[int, ...] = _option((), "sizes in floats: time exchanges of these before the run, see probe.json")


@dataclass(frozen=True)
class Study:
    """An experiment for a federation."""

    experiment: Experiment
    rules: Rules
    schema: Schema | None
    text: str  # of the file, as it is sent to the sites
    packages: tuple[str, ...] = ()  # of other people, whose code it runs

    @staticmethod
    def read(path: Path) -> "Study":
        """The study of a file."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise FedbilevelError(f"the experiment file {path} cannot be read: {reason}.") from None
        return Study.of(text, str(path), None)

    @staticmethod
    def of(text: str, source: str = "the study", packages: Mapping[str, str] | None = NO_PACKAGES) -> "Study":
        """The study of a text. Nothing of other people's is imported here.

        Args:
            text: as it is sent.
            source: what messages call it.
            packages: the plug-in packages that may be used, with their hashes; None, for whoever wrote the study: all
                that are installed.
        """
        tables, places = configuration.parse(text, source, federated=True)
        given: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Rules)}
        for key, value in tables["federation"].items():
            place = places.get(f"federation.{key}", "")
            if key not in given:
                raise UnknownName("setting of [federation]", key, given, place)
            given[key] = convert(key, value, given[key], place)
        rules = Rules(**given)
        if rules.weights not in ("equal", "size"):
            raise FedbilevelError(f"[federation]: weights must be 'equal' or 'size', not '{rules.weights}'.")
        if min(rules.quorum, rules.patience, rules.most_rows) < 0 or min(rules.deadline, rules.setup_deadline) <= 0:
            raise FedbilevelError(
                "[federation]: quorum, patience and most_rows must be at least 0, and deadlines greater than 0."
            )
        if not 1 <= rules.largest_site <= MOST_ROWS:
            raise FedbilevelError(f"[federation]: largest_site must be a number from 1 to {MOST_ROWS}.")
        schema = schemas.read(tables["schema"]) if tables["schema"] or "schema" in places else None
        own = {table: tables[table] for table in configuration.TABLES}
        name = own["task"].pop("name")
        experiment = Experiment(name, places=places).changed(Settings.of_tables(own))
        if name in TASKS and is_own(experiment.settings, TASKS[name]):  # it would be read, or called, at every site
            raise FedbilevelError(
                f"{source}: [task] cannot say which table to read: every site does, with join --data."
            )
        words: dict[plugins.Kind, str | None] = {"task": experiment.task, "algorithm": experiment.algorithm}
        used = {plugins.check_listed(kind, word, packages) for kind, word in words.items() if word is not None}
        return Study(experiment, rules, schema, text, tuple(sorted(used - {""})))

    def summarize(self, examples: Examples) -> Facts:
        """What a site sends about its rows before the first round."""
        return self._with_options(SITE_TASKS[self.experiment.task].facts, examples)

    @property
    def finds_suspects(self) -> bool:
        """Whether every site gets a list of labels that are probably wrong."""
        return self.schema is not None and SITE_TASKS[self.experiment.task].judge is not None

    def judge(self, examples: Examples, facts: Facts, x: Any, y: Any) -> Judged:
        """What a site finds out about its labels with the solution, in a study that finds wrong ones."""
        judge = SITE_TASKS[self.experiment.task].judge
        assert judge is not None
        return self._with_options(judge, examples, facts, x, y)

    def _with_options(self, function: Callable[..., Any], *given: Any) -> Any:
        """A function of the task, with those options that it has."""
        taken = inspect.signature(function).parameters
        return function(*given, **{k: v for k, v in self._options().items() if k in taken})

    def check_facts(self, rows: Any, facts: Facts) -> None:
        """Refuse what a site says of its rows if it cannot be right."""
        fewest, most = (1, self.rules.largest_site) if self.schema is not None else (0, 0)
        if type(rows) is not int or not fewest <= rows <= most:
            raise FedbilevelError(f"its number of rows must be a whole number from {fewest} to {most}.")
        self._check_shapes(facts)
        if self.schema is None:
            return
        bounds = SITE_TASKS[self.experiment.task].bounds(facts, rows, self.schema.bounds)
        for name, (least, largest) in bounds.items():
            slack = 1e-9 * np.maximum(1.0, np.maximum(np.abs(least), np.abs(largest)))  # for rounding
            if np.any(facts[name] < least - slack) or np.any(facts[name] > largest + slack):
                raise FedbilevelError(f"its '{name}' is impossible for {rows} rows that fit the schema.")

    def _check_shapes(self, facts: Facts) -> None:
        """Refuse facts of any other form than ours."""
        ours = {} if self.schema is None else self.summarize(schemas.blank(self.schema))
        form = lambda array: (np.shape(array), np.asarray(array).dtype)
        if facts.keys() != ours.keys() or any(form(facts[name]) != form(array) for name, array in ours.items()):
            raise FedbilevelError("its sums have unexpected names, types or shapes.")
        if not all(np.all(np.isfinite(array)) for array in facts.values()):
            raise FedbilevelError("its sums contain NaN or infinite numbers.")

    def _options(self) -> dict[str, Any]:
        parameters = inspect.signature(SITE_TASKS[self.experiment.task].task).parameters.values()
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        settings = Settings(self.experiment.settings)
        return {"seed": self.experiment.seed, **settings.values_for("task", defaults, self.experiment.places)}

    def build(self, examples: Examples | None = None, facts: Facts | None = None, clients: int = 2) -> Built:
        """The task and the algorithm: for a site with its rows, for the server with blank ones; without a schema, for
        all clients.

        Args:
            examples: the rows of a site; None at the server.
            facts: of all sites; None before they are known: the other sites are then as good as blank.
            clients: the number of sites.
        """
        if self.schema is None:
            name = self.experiment.task
            if name in SITE_TASKS and name not in TASKS:
                raise FedbilevelError(f"{name} is a task for rows of sites: say in [schema] what they look like.")
            return self.experiment.build()
        blank = schemas.blank(self.schema)
        if self.schema.trusted and not self.finds_suspects:
            raise FedbilevelError(f"[schema]: {self.experiment.task} does not use trusted: leave it out.")
        if facts is None:
            facts = together([self.summarize(blank), *([] if examples is None else [self.summarize(examples)])])
        self._check_shapes(facts)
        known = {**facts, "clients": np.asarray(clients)}
        make = partial(SITE_TASKS[self.experiment.task].task, blank if examples is None else examples, known)
        built = self.experiment.build(make)
        if built.algorithm.upper_at == "server":
            raise FedbilevelError(
                f"{built.experiment.algorithm} evaluates the upper loss at the server, which has no rows in a "
                "federation of sites with their own: use another algorithm."
            )
        if built.task.problem.weighting and self.rules.weights != "equal":
            raise FedbilevelError(
                f"[federation]: weights must be 'equal' for {built.task.name}, which finds the weights of the sites."
            )
        return built

    def quorum(self, clients: int) -> int:
        """The fewest valid replies to an exchange."""
        quorum = self.rules.quorum or clients // 2 + 1
        if quorum > clients:
            raise FedbilevelError(f"[federation]: quorum is {quorum}, but there are only {clients} sites.")
        return quorum


def facts_of_packages(packages: Iterable[str]) -> dict[str, str]:
    """What must agree of plug-in packages: a hash of all their files."""
    return {f"package {name}": plugins.hash_of(plugins.folder_of(name)) for name in packages}


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


def packages_differ(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Why plug-in packages do not fit the server's, or "" if they do."""
    for name, hashed in here.items():
        if there.get(name) != hashed:
            return f"its copy of the {name} differs from the server's: install the same one on both."
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
    return min([*parts_of(built, examples).values(), *(size for size in sizes if size is not None)])


def parts_of(built: Built, examples: Examples) -> Mapping[str, int]:
    """How many rows of a site are for what."""
    return SITE_TASKS[built.experiment.task].parts(built.task, examples)


def site_task(built: Built, number: int, own: bool) -> Task:
    """The task of one site alone."""
    if own:
        return built.task
    return built.task.only(number, built.algorithm.upper_at == "clients")


def server_task(built: Built, clients: int, own: bool) -> Task:
    """The task as the server knows it: with blank rows where the sites bring their own."""
    if not own:
        if len(built.task.clients) != clients:
            raise FedbilevelError(
                f"the task has {len(built.task.clients)} clients, but the federation has {clients} sites: "
                f"set clients = {clients} in [task]."
            )
        return built.task
    return dataclasses.replace(built.task, clients=list(built.task.clients) * clients, weights=None)


def site_weights(counts: np.ndarray, rules: Rules) -> np.ndarray:
    """The weights of sites with these numbers of training rows, summing to 1."""
    if rules.weights != "size":
        return np.full(len(counts), 1 / len(counts))
    rows = counted_rows(counts, rules)
    return rows / rows.sum()


def counted_rows(counts: np.ndarray, rules: Rules) -> np.ndarray:
    """For how many training rows a site that says it has so many counts: no more than the coordinator allows. One that
    is not there yet has 0 rows, and counts as the median site.
    """
    known = np.sort(counts[counts > 0])
    median = float(known[(len(known) - 1) // 2]) if len(known) else 1.0  # of two, the smaller: the other may lie
    rows = np.where(counts > 0, counts.astype(float), median)
    return np.minimum(rows, rules.most_rows or 10 * median)


def sums(facts: Sequence[Facts], counts: np.ndarray, rules: Rules) -> Facts:
    """The facts of all sites, in which no site counts for more training rows than the coordinator allows."""
    shares = counted_rows(counts, rules) / np.maximum(counts, 1)
    return together(facts, site_weights(counts, rules), shares)
