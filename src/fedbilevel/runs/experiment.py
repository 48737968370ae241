"""An experiment: a task, an algorithm and all their options by name. ``runs/execute.py`` runs it."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbilevel.core import Algorithm
from fedbilevel.core.task import Task
from fedbilevel.diagnostics import DIAGNOSTICS
from fedbilevel.engines.participation import Independent, Participation, Uniform, participation
from fedbilevel.engines.program import check_fits
from fedbilevel.engines.simulation import BATCHINGS
from fedbilevel.errors import FedbilevelError, UnknownName
from fedbilevel.runs import configuration, plugins
from fedbilevel.runs.callbacks import TRACKERS
from fedbilevel.runs.given import Fixed, Given
from fedbilevel.runs.own_data import is_own, own_maker
from fedbilevel.runs.settings import Setting, Settings, Unset, convert, convert_run, options_of, plain
from fedbilevel.runs.solve import ENGINES, check_rounds, check_seed, interval
from fedbilevel.runs.until import parse as parse_until
from fedbilevel.storage.checkpoints import check_checkpoints

if TYPE_CHECKING:
    from fedbilevel.runs.execute import Finished, Progress


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Experiment:
    """Everything that determines a run; None means what the task suggests.

    Args:
        task: its name in ``fb.TASKS``, that of an installed plug-in, or ``package.module:maker`` or ``file.py:maker``.
        algorithm: its name in ``fb.ALGORITHMS``, that of a plug-in, or ``package.module:Name`` or ``file.py:Name``.
        settings: options of the task and hyper-parameters of the algorithm, as "lr_upper", or "task.NAME" and
            "algorithm.NAME"; values or text.
        places: where each was written ("my.toml, line 7"), for messages.
        given: what was given from Python instead of by words.

    The other fields are the table ``[run]`` of an experiment file.

    >>> Experiment("quadratic", "fedbio").changed({"lr_upper": "0.2", "rounds": "50"}).rounds
    50
    """

    task: str
    algorithm: str | None = None
    rounds: int | None = _field(None, "number of rounds")
    seed: int = _field(0, "seed for everything random: data, starting points, batches, cohorts")
    sample: str | None = _field(
        None, "which clients take part in a round: 'everyone', a number, a probability such as 0.5, or a list '0,3,5'"
    )
    settings: Mapping[str, Any] = field(default_factory=dict)
    every: int | None = _field(None, "rounds between evaluations; left out: about fifty evaluations")
    until: str = _field("", "end at the first evaluation at which a column is at most this: 'hypergradient=1e-3'")
    diagnostics: Sequence[str] = _field((), "exact quantities at every evaluation, such as 'hypergradient'")
    engine: str = _field("simulation", "'simulation' (compiled) or 'local' (serialized messages, no checkpoints)")
    batching: str = _field("auto", "how the simulator visits clients: 'scan' one by one, 'vmap' all at once, 'auto'")
    references: bool = _field(True, "whether to run the task's references as well")
    checkpoint_seconds: float = _field(30.0, "shortest time between two checkpoints")
    checkpoints: int = _field(2, "number of checkpoints to keep")
    trackers: Sequence[str] = _field((), "where to log every evaluation: 'tensorboard', 'mlflow'")
    title: str = _field("", "what tables and pictures call the run; left out: the name of the algorithm")
    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    given: Given = field(default_factory=Given, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("task", "algorithm"):
            if (word := getattr(self, name)) is not None:
                object.__setattr__(self, name, plugins.absolute(word))

    @staticmethod
    def read(path: Path | str) -> "Experiment":
        """Read an experiment from a TOML file. Python files that it names are looked for beside it, then here."""
        tables, places = configuration.read(Path(path))
        base = Path(path).parent
        if isinstance(name := tables["algorithm"].get("name"), str):
            tables["algorithm"]["name"] = plugins.absolute(name, base)
        task = plugins.absolute(tables["task"].pop("name"), base)
        return Experiment(task, places=places).changed(Settings.of_tables(tables))

    def changed(self, settings: Mapping[str, Any]) -> "Experiment":
        """The same experiment with other settings: fields of ``[run]`` ("rounds" or "run.rounds"), "algorithm", options
        and hyper-parameters; later settings override earlier ones.
        """
        fields: dict[str, Any] = {}
        others = Settings(self.settings)
        for key, value in settings.items():
            table, name = Setting.parse(key)
            if key in ("algorithm", "algorithm.name"):
                fields["algorithm"] = convert(key, value, "", self._at(key))
            elif table == "run" or (not table and name in RUN_SETTINGS):
                if name not in RUN_SETTINGS:
                    raise UnknownName("setting of [run]", name, RUN_SETTINGS, self._at(key))
                fields[name] = convert_run(key, value, self._at(key))
            else:
                others.put(key, value)
        return dataclasses.replace(self, **fields, settings=others)

    def _at(self, key: str) -> str:
        return self.places.get(key, "")

    def build(self, make: Callable[..., Task] | None = None) -> "Built":
        """Make the task and the algorithm; refuses unknown names and wrong types. The task is made by the function of
        its name, or by the one given.
        """
        check_seed(self.seed)
        if self.rounds is not None and self.rounds < 1:
            raise FedbilevelError(f"{self._at('run.rounds')}rounds must be at least 1, not {self.rounds}.")
        parse_until(self.until)
        for name in self.diagnostics:
            DIAGNOSTICS.check(name)
        for name in self.trackers:
            TRACKERS.check(name, self._at("run.trackers"))
        if not re.fullmatch(r"[\w.+ -]*", self.title) or self.title.startswith("."):
            raise FedbilevelError(
                f"{self._at('run.title')}title must be letters, digits, '_', '.', '+', '-' and spaces."
            )
        make = self.maker() if make is None else make
        options = options_of(make)
        if self.algorithm is not None:
            self._check_settings(self.algorithm, options)
        settings = Settings(self.settings)
        for_task: dict[str, Any] = {"seed": self.seed} if "seed" in options else {}
        for_task |= settings.values_for("task", options, self.places)
        if missing := [n for n, d in options.items() if isinstance(d, Unset) and d.needed and n not in for_task]:
            raise FedbilevelError(f"{plugins.short(self.task)} needs '{missing[0]}': --set {missing[0]}=VALUE.")
        task = plugins.make(make, for_task, plugins.short(self.task))
        name = self.algorithm or task.suggested.algorithm
        algorithm = self._algorithm(name, options, task)
        rounds, sample = self.rounds or task.suggested.rounds, self.sample or task.suggested.sample
        every = interval(rounds, self.every)
        whole = dataclasses.replace(self, algorithm=name, rounds=rounds, sample=sample, every=every)
        return Built(whole, task, algorithm, {**options, **for_task})

    def maker(self) -> Callable[..., Task]:
        """What makes the task: what was given, the function of its word, or, where the settings are about an own table,
        another.
        """
        if self.given.make is not None:
            return self.given.make
        make = plugins.maker(self.task, self._at("task.name"))
        return own_maker(self.task) if is_own(self.settings, make) else make

    def kind(self, name: str | None = None) -> type[Algorithm]:
        """The class of the algorithm."""
        given, name = self.given.algorithm, name or self.algorithm
        if given is None:
            assert name is not None
            return plugins.algorithm(name, self._at("algorithm.name"))
        return given if isinstance(given, type) else type(given)

    def _algorithm(self, name: str, options: Mapping[str, Any], task: Task) -> Algorithm:
        """The algorithm with all its hyper-parameters."""
        kind, hyper = self._check_settings(name, options)
        chosen = Settings(self.settings).values_for("algorithm", hyper, self.places)
        if isinstance(self.given.algorithm, Algorithm):
            return dataclasses.replace(self.given.algorithm, **chosen)
        return kind(**{**task.suggested.for_algorithm(name, hyper), **chosen})

    def _check_settings(self, algorithm: str, options: Mapping[str, Any]) -> tuple[type[Algorithm], dict[str, Any]]:
        """The algorithm and its hyper-parameters; refuses settings that are unknown or ambiguous."""
        kind = self.kind(algorithm)
        hyper = {f.name: f.default for f in dataclasses.fields(kind)}
        owners = {"task": (plugins.short(self.task), options), "algorithm": (plugins.short(algorithm), hyper)}
        Settings(self.settings).check(owners, RUN_SETTINGS, self.places)
        return kind, hyper

    @property
    def name(self) -> str:
        """What the run itself is called in its folder."""
        return self.title or plugins.short(str(self.algorithm))

    def participation(self) -> int | Participation | list[int] | None:
        """Read ``sample``: "10" clients, a probability "0.5", or a list "0,3,5"; "10 resample" or "0.5 resample" for a
        new cohort in every exchange, "10 replacement" for draws with replacement, "everyone".
        """
        if self.sample is None or self.sample == "everyone":
            return None
        number, *words = self.sample.split()
        how = dict.fromkeys(words, True)
        try:
            if "," in number and not how:
                return [int(part) for part in number.split(",") if part]
            return Independent(float(number), **how) if "." in number else Uniform(int(number), **how)
        except (ValueError, TypeError):
            raise FedbilevelError(
                f"{self._at('run.sample')}sample '{self.sample}' is neither a number of clients, nor a probability "
                "such as 0.5 (each may be followed by 'resample', a number also by 'replacement'), nor a list such as "
                "0,3,5."
            ) from None

    def run(self, out: Path | str | None = None, progress: "Progress | None" = None) -> "Finished":
        """Run the experiment and write its folder.

        Args:
            out: the folder, which must be empty. Default: a new one in ``runs/``.
            progress: called when a run starts, and with every row.
        """
        from fedbilevel.runs.execute import run  # which knows experiments

        return run(self, None if out is None else Path(out), progress)


RUN_SETTINGS: Mapping[str, str] = {
    f.name: f.metadata["help"] for f in dataclasses.fields(Experiment) if "help" in f.metadata
}
"""The fields of the table [run], with what they mean."""


class Built(NamedTuple):
    """A complete experiment, with its task and its algorithm."""

    experiment: Experiment
    task: Task
    algorithm: Algorithm
    options: Mapping[str, Any]  # what the task was made with

    def config(self) -> dict[str, dict[str, Any]]:
        """All of it as tables: what ``config.toml`` holds, and what an experiment file may hold."""
        # A task knows best what became of its options, such as a default that depends on the data set.
        known = self.task.options if isinstance(self.experiment.given.make, Fixed) else self.options
        options = {name: self.task.options.get(name, value) for name, value in known.items()}
        options = {name: value for name, value in options.items() if not isinstance(value, Unset | None)}
        if options.get("seed") == self.experiment.seed:
            del options["seed"]  # it follows the seed of the run
        hyper = {f.name: getattr(self.algorithm, f.name) for f in dataclasses.fields(self.algorithm)}
        run = {
            name: getattr(self.experiment, name) for name in RUN_SETTINGS if name != "title" or self.experiment.title
        }
        tables = {
            "task": {"name": self.experiment.task, **options},
            "algorithm": {"name": self.experiment.algorithm, **hyper},
            "run": run,
        }
        return {table: {k: plain(v) for k, v in keys.items()} for table, keys in tables.items()}

    def check(self) -> None:
        """Refuse settings that do not fit together, before anything is written."""
        experiment = self.experiment
        check_rounds(experiment.rounds, experiment.every)
        for name, value, choices in (
            ("engine", experiment.engine, ENGINES),
            ("batching", experiment.batching, BATCHINGS),
        ):
            if value not in choices:
                raise UnknownName(name, value, choices, experiment.places.get(f"run.{name}", ""))
        for name in experiment.trackers:
            TRACKERS[name].check_installed()
        check_checkpoints(experiment.checkpoint_seconds, experiment.checkpoints)
        sample = participation(experiment.participation(), len(self.task.clients))
        check_fits(self.task.problem, self.algorithm, self.task.layout, sample)
