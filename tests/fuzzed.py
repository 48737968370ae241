"""What is fuzzed: for each kind of input, how it is made and who reads it.

    python tests/fuzzed.py questions 50000
    python tests/fuzzed.py npz 1 --seed 7 --first 123

prints how many inputs were accepted, how many refused with a sentence, and every other outcome with its first input.
"""

import argparse
import atexit
import contextlib
import copy
import csv
import io
import json
import os
import random
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

import fedbilevel as fb
from admission import admitted, created
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.messaging.post import Post
from fedbilevel.engines.messaging.protocol import Echo, Failed, unpack
from fedbilevel.engines.messaging.server import State
from fedbilevel.engines.participation import Everyone
from fedbilevel.engines.plan import trace
from fedbilevel.engines.program import Program, without
from fedbilevel.errors import FedbilevelError, RoundLost
from fedbilevel.federation import kits as kits_of
from fedbilevel.federation import ledger, project, schema
from fedbilevel.federation.consent import Consent, Rules, digest
from fedbilevel.federation.engine import Federation, metrics_of
from fedbilevel.federation.kits import Kit
from fedbilevel.federation.rows import load
from fedbilevel.federation.study import SITE_TASKS, Study, facts_of_copy, server_task, site_weights
from fedbilevel.federation.worker import Settings, Worker
from fedbilevel.runs.prediction import load_classifier
from fedbilevel.storage.arrays import decode, encode, rebuild
from fedbilevel.storage.checkpoints import Checkpoints, Saved
from fedbilevel.storage.files import write_privately
from fedbilevel.storage.models import MODEL
from fedbilevel.tasks.classifier import Classifier
from fedbilevel.tasks.sites import together
from fuzz import Outcome, Unexpected, mutated_bytes, mutated_csv, mutated_message, mutated_toml, mutated_value, odd, run

Attempt = Callable[[random.Random], object]

SCHEMA: dict[str, Any] = {
    "label": {"column": "ill", "values": ["no", "yes"]},
    "features": {
        "age": {"least": 0, "most": 120},
        "pain": {"values": [1, 2, 3]},
        "smokes": {"values": ["n", "y"], "needed": True},
    },
    "group": {"column": "sex", "values": ["f", "m"]},
}
IMAGES: dict[str, Any] = {"label": {"column": "label", "values": ["cat", "dog"]}, "image": {"shape": [6, 5]}}


def table(count: int = 60, seed: int = 0) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    words = [["n", "y"], ["no", "yes"], ["f", "m"]]
    return [["age", "pain", "smokes", "ill", "sex"]] + [
        [
            str(rng.integers(20, 90)) if rng.random() > 0.05 else "",
            str(rng.integers(1, 4)),
            *(each[rng.integers(2)] for each in words),
        ]
        for _ in range(count)
    ]


def write(path: Path, rows: list[list[str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


class Sites:
    """Three sites in this process; every message and answer can be seen and changed on its way."""

    def __init__(self, folder: Path, task: Mapping[str, Any]) -> None:
        tables = {"task": dict(task), "run": {"rounds": 2, "every": 1}, "schema": SCHEMA}
        self.study = Study.of(tomli_w.dumps(tables))
        self.names, self.workers = ["north", "east", "south"], []
        for number, name in enumerate(self.names):
            place = folder / name
            place.mkdir()
            data = write(place / "rows.csv", table(80 + 20 * number, number))
            Settings(name, str(data), consent=Consent((digest(self.study.text),))).save(place)
            self.workers.append(Worker(place))
        self.asked: list[tuple[bytes, Worker]] = []  # of the first site: every message, and the site before it
        self.answered: list[bytes] = []
        self.change: Callable[[str, bytes], bytes] = lambda kind, answer: answer
        self.recording = True

    def ask(self, messages: Mapping[int, bytes], kind: str) -> dict[int, bytes | str]:
        answers: dict[int, bytes | str] = {}
        for m, message in messages.items():
            if m == 0 and self.recording:
                self.asked.append((message, cloned(self.workers[0])))
            answer = self.workers[m].handle(message)
            if m == 0 and self.recording:
                self.answered.append(answer)
            answers[m] = self.change(kind, answer) if m == 0 else answer
        return answers

    def set_up(self) -> tuple[Federation, State]:
        hello = {"action": "hello", "run": "r", "study": self.study.text, "copy": facts_of_copy(), "clients": 3}
        given = self.ask(dict.fromkeys(range(3), encode(hello, {})), "hello")
        answers = [decode(answer) for answer in given.values() if isinstance(answer, bytes)]
        facts = together([reply for _, reply in answers])
        built = self.study.build(facts=facts, clients=3)
        weights = site_weights(np.array([header["rows"] for header, _ in answers]), self.study.rules)
        server = server_task(built, 3, own=True)
        program = Program(server.problem, built.algorithm, server.layout, Everyone())
        plan = trace(program, server.data)
        prepare = lambda m: {"action": "prepare", "id": m, "weight": float(weights[m]), "clients": 3}
        self.ask({m: encode(prepare(m), facts) for m in range(3)}, "prepare")
        engine = Federation(program, plan, weights, self, server.data, names=self.names, run="r", quorum=2)
        engine.metric_names = metrics_of(server)
        return engine, engine.advance(engine.start(0), 1)


def cloned(worker: Worker) -> Worker:
    """A site in the same state. It shares files and arrays, which are not changed in place."""
    other = copy.copy(worker)
    other.party = copy.copy(worker.party)
    if worker.party is not None:
        for name in ("kept", "answers", "memory", "blocks", "held"):
            setattr(other.party, name, copy.copy(getattr(worker.party, name)))
    return other


TASKS: list[dict[str, Any]] = [{"name": "regularization"}, {"name": "data-cleaning", "hidden": 3}]


@cache
def played() -> list[tuple[Sites, Federation, State]]:
    """A short run of each task, up to its end."""
    made = []
    for task in TASKS:
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        sites = Sites(folder, task)
        engine, state = sites.set_up()
        engine.metrics(state)
        before = [cloned(worker) for worker in sites.workers]
        engine.finish(state)
        sites.workers[:], sites.recording = before, False  # the end of a run is the end for a worker
        made.append((sites, engine, state))
    return made


def questions(folder: Path) -> Attempt:
    """What a site is asked, at every point of a run."""
    asked = [each for sites, _, _ in played() for each in sites.asked]
    slow = [each for each in asked if decode(each[0])[0]["action"] in ("hello", "prepare")]  # it builds the task
    quick = [each for each in asked if each not in slow]

    def attempt(rng: random.Random) -> None:
        message, worker = rng.choice(slow if rng.random() < 0.005 else quick)
        (worker.folder / "refusals.json").unlink(missing_ok=True)
        with contextlib.redirect_stderr(io.StringIO()) as log:
            answer, _ = unpack(cloned(worker).handle(mutated_message(rng, message)))
        if isinstance(answer, Failed):
            if log.getvalue():
                raise Unexpected(log.getvalue().strip().splitlines()[-1] + " at " + _place(log.getvalue()))
            raise FedbilevelError(answer.error)

    return attempt


def _place(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "fedbilevel" in line and line.strip().startswith("File")]
    return lines[-1].rpartition("/")[2] if lines else "?"


def answers(folder: Path) -> Attempt:
    """What a server is answered, in every exchange and before the first one."""

    def expected(engine: Federation, answer: bytes) -> Any:
        """The shapes of the exchange that it answers."""
        for exchange in engine.plan.by_name.values():
            with contextlib.suppress(FedbilevelError):
                rebuild(shapes := without(exchange.upload, engine.program.private), decode(answer)[1])
                return shapes
        return {}

    cases = [(s, answer, expected(engine, answer)) for s, engine, _ in played() for answer in s.answered]

    class One:
        def __init__(self, answer: bytes) -> None:
            self.answer = answer

        def ask(self, messages: Any, kind: str) -> Any:
            return dict.fromkeys(messages, self.answer)

    def attempt(rng: random.Random) -> None:
        sites, honest, shapes = rng.choice(cases)
        read = Post(One(mutated_message(rng, honest))).ask({0: (Echo(), {})}, 4096)
        answer, arrays = read[0]
        if isinstance(answer, Failed):
            raise FedbilevelError(answer.error)
        if answer.action == "facts":
            sites.study.check_facts(answer.rows, arrays)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            rebuild(shapes, arrays)

    return attempt


def rounds(folder: Path) -> Attempt:
    """Whole rounds and evaluations in which one site lies: it is left out, and the others go on."""

    def attempt(rng: random.Random) -> None:
        sites, engine, state = rng.choice(played())
        honest, vaults = sites.workers, [worker.party.vault for worker in sites.workers]
        sites.workers = [cloned(worker) for worker in honest]
        for worker in sites.workers:  # nothing on disk: the next attempt begins again
            worker.party.vault = type(vaults[0])(None, vaults[0].exchanges)
        engine.failures.clear()
        engine.forget()
        sites.change = lambda kind, answer: mutated_message(rng, answer) if rng.random() < 0.3 else answer
        try:
            after = engine.advance(state, 1)
            engine.metrics(after)
            engine.finish(after)
        except RoundLost:
            return
        except FedbilevelError as error:
            raise Unexpected(f"the round ended: {error}") from error
        finally:
            sites.workers, sites.change = honest, lambda kind, answer: answer
        if not after.finite:
            raise Unexpected("the run diverged")
        if blamed := {failure.client for failure in engine.failures} - {0}:
            raise Unexpected(f"{blamed} are blamed")

    return attempt


def studies(folder: Path) -> Attempt:
    """Experiment files, rules, and files that describe a federation."""
    common = {"run": {"rounds": 3, "every": 1}, "federation": {"quorum": 2, "weights": "size"}}
    given: list[dict[str, Any]] = [
        {"task": {"name": name}, "algorithm": {"name": "fedbio"}, **common, "schema": SCHEMA} for name in SITE_TASKS
    ]
    given += [{"task": {"name": name}, **common, "schema": IMAGES} for name in ("data-cleaning", "fairness")]
    rules = {"tasks": ["regularization"], "algorithms": ["fedbio"], "columns": ["age"], "most_rounds": 3}
    parties = [{"name": "a", "role": "site"}, {"name": "b"}]
    federation = {"name": "h", "host": "localhost", "port": 8102, "experiment": "e.toml", "parties": parties}
    (folder / "e.toml").write_text("")

    def attempt(rng: random.Random) -> None:
        kind = rng.randrange(10)
        if kind == 0:
            (folder / "rules.toml").write_text(mutated_toml(rng, rules), errors="replace")
            Rules.read(folder / "rules.toml")
        elif kind == 1:
            (folder / "h.toml").write_text(mutated_toml(rng, federation), errors="replace")
            project.read(folder / "h.toml")
        else:
            text = mutated_toml(rng, rng.choice(given))
            Consent((), Rules.of(rules)).check(text, 3) if kind == 2 else Study.of(text).build()

    return attempt


def schemas(folder: Path) -> Attempt:
    """Schemas, and what they say of rows."""
    path = write(folder / "rows.csv", table())

    def attempt(rng: random.Random) -> None:
        wanted = schema.read(mutated_value(rng, rng.choice([SCHEMA, SCHEMA, IMAGES])))
        schema.blank(wanted)
        load(str(path), wanted, {}, "north")

    return attempt


def kits(folder: Path) -> Attempt:
    """Start-up kits, read and kept as ``join`` does."""
    real = Kit.read(admitted(created(folder, a="site"), "a", folder / "of a"))
    parts, key = dict(real.files), (folder / "of a" / kits_of.STARTUP / kits_of.KEY).read_bytes()
    about = json.loads(parts[kits_of.ABOUT])
    ours = {path.name for path in folder.iterdir()} | {"a.zip", "deep"}

    def attempt(rng: random.Random) -> None:
        inside, out = dict(parts), io.BytesIO()
        kind = rng.randrange(7)
        if kind == 0:
            inside[kits_of.ABOUT] = json.dumps(mutated_value(rng, about)).encode()
        elif kind == 1:
            name = rng.choice(sorted(inside))
            inside[name] = mutated_bytes(rng, inside[name])
        elif kind == 2:
            name = rng.choice(sorted(inside))
            inside[rng.choice(["../x", "/abs", "a\\..\\b", "startup", "kit.json/x", "", "a" * 300])] = inside.pop(name)
        elif kind == 3:
            inside[rng.choice(sorted(inside))] = b"\0" * (50 << 20)  # a bomb: 50 kB
        elif kind == 4:
            name, other = rng.sample(sorted(inside), 2)
            inside[name] = inside[other]
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in inside.items():
                entry = zipfile.ZipInfo(name)
                entry.external_attr = rng.choice([0o600, 0o600, 0o600, 0o120777]) << 16  # the last is a link
                file.writestr(entry, content, zipfile.ZIP_DEFLATED)
        data = mutated_bytes(rng, out.getvalue()) if kind > 4 else out.getvalue()
        (folder / "a.zip").write_bytes(data)
        place = folder / "deep" / "site"
        write_privately(place / kits_of.STARTUP / kits_of.KEY, key)
        try:
            Kit.read(folder / "a.zip").keep(place)
        finally:
            kept = {path.name for path in (place / kits_of.STARTUP).iterdir()} - {*parts, kits_of.KEY}
            escaped = {path.name for path in folder.iterdir()} - ours
            escaped |= {path.name for path in (folder / "deep").glob("*")} - {"site"}
            if escaped or kept:
                raise Unexpected(f"it wrote {escaped | kept}")
            shutil.rmtree(folder / "deep", ignore_errors=True)

    return attempt


def tables(folder: Path) -> Attempt:
    """.csv files."""
    read, rows = schema.read(SCHEMA), table()

    def attempt(rng: random.Random) -> None:
        (folder / "a.csv").write_bytes(mutated_csv(rng, rows))
        load(str(folder / "a.csv"), read, {}, "north")

    return attempt


def _columns() -> dict[str, np.ndarray]:
    rows = table()
    return {name: np.array([row[n] for row in rows[1:]]) for n, name in enumerate(rows[0])}


def npz(folder: Path) -> Attempt:
    """.npz files: damaged, of odd types and shapes, and bombs."""
    read, columns = schema.read(SCHEMA), _columns()
    pictures = {"images": np.zeros((20, 6, 5), np.uint8), "label": np.array(["cat", "dog"] * 10)}
    kinds = ["O", "M8[s]", "c16", "S5", "V8", "f2", "i1", "u8", "?", [("a", "i4"), ("b", "f8")]]

    def attempt(rng: random.Random) -> None:
        wanted, arrays = (read, dict(columns)) if rng.randrange(4) else (schema.read(IMAGES), dict(pictures))
        name, out = rng.choice(sorted(arrays)), io.BytesIO()
        kind = rng.randrange(5)
        if kind == 0:
            arrays[name] = np.zeros(rng.choice([(60,), (60, 1), (), (0,), (61,), (60, 2, 2)]), rng.choice(kinds))
        elif kind == 1:
            arrays[name] = np.array([odd(rng) for _ in range(60)], object)
        (np.savez if rng.randrange(2) else np.savez_compressed)(out, **arrays)  # pyright: ignore
        data = out.getvalue()
        if kind > 1:
            data = mutated_bytes(rng, data)
        if kind == 4:  # the header of an array, whose archive is whole
            head = io.BytesIO()
            np.save(head, columns["pain"])
            inner = mutated_bytes(rng, head.getvalue()[:128]) + head.getvalue()[128:]
            out = io.BytesIO()
            np.savez(out, **{k: v for k, v in columns.items() if k != "pain"})  # pyright: ignore
            with zipfile.ZipFile(out, "a") as file:
                file.writestr("pain.npy", inner)
            wanted, data = read, out.getvalue()
        (folder / "a.npz").write_bytes(data)
        load(str(folder / "a.npz"), wanted, {}, "north")

    return attempt


def parquet(folder: Path) -> Attempt:
    """.parquet files."""
    import pyarrow
    import pyarrow.parquet

    read, columns = schema.read(SCHEMA), _columns()
    made = []
    for compression in ("snappy", "none", "zstd"):
        for way in (columns, {**columns, "pain": columns["pain"].astype(int)}):
            out = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.table(way), out, compression=compression)
            made.append(out.getvalue())

    def attempt(rng: random.Random) -> None:
        (folder / "a.parquet").write_bytes(mutated_bytes(rng, rng.choice(made)))
        load(str(folder / "a.parquet"), read, {}, "north")

    return attempt


def images(folder: Path) -> Attempt:
    """Folders of images, and their labels.csv."""
    from PIL import Image

    wanted, rng0 = schema.read(IMAGES), np.random.default_rng(0)
    pixels = rng0.integers(0, 256, (6, 5, 3), dtype=np.uint8)
    made: list[tuple[str, bytes]] = []
    for name, mode in [("PNG", "L"), ("PNG", "RGB"), ("PNG", "P"), ("JPEG", "L"), ("BMP", "RGB"), ("GIF", "P"),
                       ("TIFF", "RGB"), ("WEBP", "RGB"), ("PPM", "RGB"), ("ICO", "RGB"), ("TIFF", "F")]:  # fmt: skip
        out = io.BytesIO()
        Image.fromarray(pixels).convert("L" if mode == "F" else mode).convert(mode).save(out, name)
        made.append((name.lower(), out.getvalue()))
    place = folder / "pets"
    listed = [["file", "label"], *([f"{n}.png", ("cat", "dog")[n % 2]] for n in range(4))]

    def attempt(rng: random.Random) -> None:
        shutil.rmtree(place, ignore_errors=True)
        (place / "cat").mkdir(parents=True)
        (place / "dog").mkdir()
        if rng.randrange(4) == 0:
            for n in range(4):
                (place / f"{n}.png").write_bytes(made[0][1])
            (place / "labels.csv").write_bytes(mutated_csv(rng, listed))
        else:
            name, data = rng.choice(made)
            (place / "dog" / f"b.{name}").write_bytes(mutated_bytes(rng, data))
            (place / "cat" / "a.png").write_bytes(made[0][1])
        load(str(place), wanted, {}, "north")

    return attempt


def own_tables(folder: Path) -> Attempt:
    """People's own tables: .csv and .parquet files, data frames, and features that may not fit."""
    import pandas

    rows = table()
    frame = pandas.DataFrame(rows[1:], columns=pandas.Index(rows[0]))
    frame.to_parquet(folder / "good.parquet")
    whole = (folder / "good.parquet").read_bytes()
    text = frame.to_csv(index=False)

    def attempt(rng: random.Random) -> None:
        source: Any = folder / "a.csv"
        kind = rng.randrange(6)
        if kind == 0:
            source.write_bytes(mutated_csv(rng, rows))
        elif kind == 1:
            source.write_bytes(mutated_bytes(rng, text.encode(rng.choice(["utf-8", "utf-16", "latin-1", "utf-8-sig"]))))
        elif kind == 2:
            source.write_bytes(rng.randbytes(rng.choice([0, 1, 100, 5000])))
        elif kind == 3:
            source = folder / "a.parquet"
            source.write_bytes(mutated_bytes(rng, whole) if rng.randrange(2) else whole[: rng.randrange(len(whole))])
        elif kind == 4:
            name = rng.choice(rows[0])
            source = frame.assign(**{name: [odd(rng) if rng.randrange(3) else cell for cell in frame[name]]})
        else:
            source.write_text(text)
        label, client = rng.choices(rows[0], k=2) if rng.randrange(8) == 0 else (rows[0][-1], None)
        more: dict[str, Any] = {"numeric": [rng.choice(rows[0])]} if rng.randrange(4) == 0 else {}
        if kind == 5:
            odd_array = np.array([[odd(rng) for _ in range(2)] for _ in range(len(rows) - 1)], object)
            more = {"features": rng.choice([odd_array, odd(rng), np.full((len(rows) - 1, 2), np.nan)])}
        read = fb.data.table(source, label=label, client=client, **more)
        assert read.inputs.shape == (len(read), read.encoding.width)
        assert np.isfinite(read.inputs).all()
        assert len(read.ids) == len(read)

    return attempt


def models(folder: Path) -> Attempt:
    """Stored models: damaged, or with other contents that have the right checksum."""
    frame = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    read = fb.data.table(frame, label=np.arange(30) % 3)
    layers = [{"w": np.ones((3, 4)), "b": np.zeros(4)}, {"w": np.ones((4, 3)), "b": np.zeros(3)}]
    about, arrays = Classifier(read.encoding, read.classes, [layers]).packed()
    whole = encode({"format": 1, **about}, arrays)

    def attempt(rng: random.Random) -> None:
        (folder / MODEL).write_bytes(mutated_message(rng, whole))
        for _, found in load_classifier(folder).predict(frame):
            assert found.shape == (30, 3)

    return attempt


def checkpoints(folder: Path) -> Attempt:
    """Checkpoints of a server; the clients' own files are there."""
    from helpers import sample_weights

    engine = Local(sample_weights(3), fb.FedBiO(lr_upper=0.1, lr_lower=0.1, lr_adjoint=0.1), folder=folder / "clients")
    state = engine.advance(engine.start(0), 2)
    saved = encode(
        {"run": "r", "round": 2, "history": [{"round": 1}], "seconds": 1.0},
        engine.arrays(state),
    )
    path = folder / "saved" / "round-0000000002.safetensors"
    path.parent.mkdir()

    def attempt(rng: random.Random) -> None:
        path.write_bytes(mutated_message(rng, saved))
        found = Checkpoints(path.parent).newest("r", engine.restore)
        assert isinstance(found, Saved)
        json.dumps(found.history)
        float(found.seconds)

    return attempt


def ledgers(folder: Path) -> Attempt:
    """Ledgers: what was changed is noticed, and the next line can be written."""
    log = ledger.Ledger(folder / "served.jsonl", "north")
    for number in range(12):
        log.note({"round": number})
    content = log.path.read_bytes()
    last = (folder / "served.jsonl.last").read_bytes()

    def attempt(rng: random.Random) -> None:
        changed, noted = mutated_bytes(rng, content), last
        if rng.randrange(4) == 0:
            changed, noted = content, mutated_bytes(rng, last)
        log.path.write_bytes(changed)
        (folder / "served.jsonl.last").write_bytes(noted)
        try:
            ledger.verify(log.path, "north")
            if changed != content and not content.startswith(changed[: len(content)]):
                raise Unexpected("a change was not noticed")
        finally:
            log.note({"round": -1})

    return attempt


KINDS: dict[str, Callable[[Path], Attempt]] = {
    each.__name__: each
    for each in (
        questions,
        answers,
        rounds,
        studies,
        schemas,
        kits,
        tables,
        npz,
        parquet,
        images,
        own_tables,
        models,
        checkpoints,
        ledgers,
    )
}


def fuzzed(kind: str, count: int, folder: Path, seed: int = 0, first: int = 0) -> Outcome:
    """What comes of many inputs of a kind."""
    return run(KINDS[kind](folder), count, seed, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=[*KINDS, "all"])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    given = parser.parse_args()
    for kind in KINDS if given.kind == "all" else [given.kind]:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{kind}: {fuzzed(kind, given.count, Path(folder), given.seed, given.first)}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_ENABLE_X64", "1")
    main()
    sys.exit()
