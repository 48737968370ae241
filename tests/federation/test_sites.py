"""A site without its network: what it reads, refuses, shares and keeps."""

import csv
import dataclasses
import io
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tomli_w
from rich.console import Console
from typer.testing import CliRunner

import fedbilevel as fb
from admission import PASSPHRASE, admitted
from fedbilevel.engines.messaging.protocol import (
    Commit,
    Echo,
    Evaluate,
    Failed,
    Finish,
    Hello,
    Join,
    Message,
    Prepare,
    Reveal,
    Run,
    pack,
    unpack,
)
from fedbilevel.engines.messaging.server import Messaging
from fedbilevel.engines.participation import Everyone
from fedbilevel.engines.plan import trace
from fedbilevel.engines.program import Program
from fedbilevel.federation import attendance, cli, coordinator, join, project, schema, setup
from fedbilevel.federation.consent import MOST_REFUSALS, Consent, Limits, Rules, check_run_name, digest
from fedbilevel.federation.engine import Federation, metrics_of
from fedbilevel.federation.ledger import LEDGER
from fedbilevel.federation.preview import preview
from fedbilevel.federation.rows import load
from fedbilevel.federation.study import (
    Study,
    difference,
    facts_of_copy,
    plan_digest,
    server_task,
    site_task,
    site_weights,
)
from fedbilevel.federation.worker import SECRET, Settings, Worker
from fedbilevel.storage.arrays import decode, encode
from fedbilevel.storage.checkpoints import Saved
from fedbilevel.storage.run_folder import RunFolder
from fedbilevel.tasks.sites import divided, together
from helpers import here, small_disk

SCHEMA: dict[str, Any] = {
    "label": {"column": "ill", "values": ["no", "yes"]},
    "features": {"age": {"least": 0, "most": 120}, "pain": {"values": [1, 2, 3]}, "smokes": {"values": ["n", "y"]}},
}


def rows(count: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "age": int(rng.integers(20, 90)) if rng.random() > 0.1 else "",
            "pain": int(rng.integers(1, 4)),
            "smokes": "ny"[rng.integers(2)],
            "ill": ("no", "yes")[rng.integers(2)],
        }
        for _ in range(count)
    ]


def write(path: Path, table: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return path


def study(folder: Path, **more: Any) -> Study:
    path = folder / "study.toml"
    tables = {"task": {"name": "regularization"}, "run": {"rounds": 3, "every": 1}, "schema": SCHEMA}
    path.write_text(tomli_w.dumps(tables | more))
    return Study.read(path)


READ = schema.read(SCHEMA)


def test_a_table_is_read_from_every_format(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = rows()
    from_csv = load(str(write(tmp_path / "a.csv", table)), READ, {}, "north")
    columns = {name: [row[name] for row in table] for name in table[0]}
    numbers = {**columns, "age": [None if v == "" else v for v in columns["age"]]}
    parquet.write_table(pyarrow.table(numbers), tmp_path / "a.parquet")
    np.savez(tmp_path / "a.npz", **{k: np.array(v, str) for k, v in columns.items()})  # pyright: ignore
    for name in ("a.parquet", "a.npz"):
        found = load(str(tmp_path / name), READ, {}, "north")
        np.testing.assert_array_equal(found.inputs, from_csv.inputs)
        np.testing.assert_array_equal(found.labels, from_csv.labels)
    assert from_csv.inputs.shape == (40, len(READ.names))
    assert READ.names == ["age", "pain: 1", "pain: 2", "pain: 3", "smokes"]
    assert np.isnan(from_csv.inputs[:, 0]).sum() == columns["age"].count("")
    np.testing.assert_array_equal(from_csv.inputs[:, 1:4].argmax(1) + 1, columns["pain"])


def test_a_function_gives_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hospital.py").write_text(
        f"def load():\n    return {{k: [r[k] for r in {rows()!r}] for k in {list(rows()[0])!r}}}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load("hospital:load", READ, {}, "north").labels) == 40
    with pytest.raises(fb.FedbilevelError, match="there is no function hospital:other"):
        load("hospital:other", READ, {}, "north")


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    table = [{"Alter" if k == "age" else k: v for k, v in row.items()} for row in rows()]
    path = str(write(tmp_path / "a.csv", table))
    assert len(load(path, READ, {"age": "Alter"}, "north").labels) == 40
    with pytest.raises(
        fb.FedbilevelError, match=r"has no column 'age': it has Alter, pain, smokes, ill.*--column age="
    ):
        load(path, READ, {}, "north")


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("age", "old", r"a\.csv, row 4, column 'age': 'old' is not a number"),
        ("age", 130, r"a\.csv, row 4, column 'age': 130 is not between 0 and 120"),
        ("pain", 7, r"row 4, column 'pain': expected one of 1, 2, 3, but found '7'"),
        ("ill", "", r"row 4, column 'ill': expected one of 'no', 'yes', but found nothing"),
        ("ill", "perhaps", r"row 4, column 'ill': expected one of 'no', 'yes', but found 'perhaps'"),
    ],
)
def test_wrong_rows_are_named_in_the_sites_own_terms(tmp_path: Path, column: str, value: Any, said: str) -> None:
    table = rows()
    table[2][column] = value
    with pytest.raises(fb.FedbilevelError, match=said):
        load(str(write(tmp_path / "a.csv", table)), READ, {}, "north")


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text("age,pain,smokes,ill\n1,2\n")
    (tmp_path / "latin.csv").write_bytes("größe\n1\n".encode("latin-1"))
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "bad.npz").write_bytes(b"PK nonsense")
    for name, said in {
        "short.csv": "row 2 has 2 values, but there are 4 columns",
        "latin.csv": "is not UTF-8 text",
        "empty.csv": "is empty",
        "bad.npz": "cannot be read",
        "missing.csv": "there is no file",
    }.items():
        with pytest.raises(fb.FedbilevelError, match=said):
            load(str(tmp_path / name), READ, {}, "north")


def test_images_are_read_from_folders_and_lists(tmp_path: Path) -> None:
    from PIL import Image

    wanted = schema.read({"label": {"column": "label", "values": ["cat", "dog"]}, "image": {"shape": [4, 5]}})
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (6, 4, 5), dtype=np.uint8)
    for number, picture in enumerate(pictures):
        folder = tmp_path / "pets" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number}.png")
    found = load(str(tmp_path / "pets"), wanted, {}, "north")
    assert found.inputs.shape == (6, 4, 5, 1)
    np.testing.assert_array_equal(found.inputs[..., 0], pictures[[0, 2, 4, 1, 3, 5]])
    np.testing.assert_array_equal(found.labels, [0, 0, 0, 1, 1, 1])
    listed = [{"file": f"{('cat', 'dog')[n % 2]}/{n}.png", "label": ("cat", "dog")[n % 2]} for n in range(6)]
    write(tmp_path / "pets" / "labels.csv", listed)
    np.testing.assert_array_equal(load(str(tmp_path / "pets"), wanted, {}, "north").inputs[..., 0], pictures)
    Image.fromarray(pictures[0].T.copy()).save(tmp_path / "pets" / "cat" / "0.png")
    with pytest.raises(fb.FedbilevelError, match=r"0\.png has \(5, 4\) pixels, but \(4, 5\) were expected"):
        load(str(tmp_path / "pets"), wanted, {}, "north")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"labels": {}}, "labels"),
        ({"label": {"column": "a"}}, "needs label"),
        ({"label": {"column": "a", "values": [0, 1]}}, "either"),
        ({"label": {"column": "a", "values": [0, 1]}, "features": {"b": {"max": 3}}}, "max"),
        ({"label": {"column": "a", "values": [0, 1]}, "image": {"shape": [3]}}, "shape"),
        ({"label": {"column": "a", "values": 2}}, "needs label"),
        ({"label": {"column": "a", "values": [0, 1]}, "features": {"b": {"values": 3}}}, "wrong type"),
        ({"label": {"column": "a", "values": [0, 1]}, "features": {"b": {"least": "x"}}}, "wrong type"),
    ],
)
def test_a_wrong_schema_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=said):
        schema.read(table)


def test_parts_are_drawn_by_the_site_and_stay(tmp_path: Path) -> None:
    examples = load(str(write(tmp_path / "a.csv", rows(200))), READ, {}, "north")
    first, again = divided(examples, 0.5, 0.25, 0)[1:], divided(examples, 0.5, 0.25, 0)[1:]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert sorted(np.concatenate(first)) == list(range(200))
    assert [len(part) for part in first] == pytest.approx([100, 50, 50], abs=2)
    other = divided(examples._replace(site="south"), 0.5, 0.25, 0)
    assert not np.array_equal(first[0], other.train)
    more = divided(examples, 0.52, 0.25, 0)  # two sums must not differ by four rows
    assert len(set(more.train) - set(first[0])) > 20


class Sites:
    """Three workers with their own files, in this process, as a transport."""

    def __init__(self, folder: Path, wanted: Study, limits: Limits | None = None) -> None:
        self.names, self.workers = ["north", "east", "south"], []
        for number, name in enumerate(self.names):
            place = folder / name
            place.mkdir()
            data = write(place / "rows.csv", rows(100 + 20 * number, number))
            Settings(name, str(data), consent=Consent((digest(wanted.text),), None, limits or Limits())).save(place)
            self.workers.append(Worker(place))
        self.hello = {"action": "hello", "run": "r", "study": wanted.text, "copy": facts_of_copy(), "clients": 3}

    def ask(self, messages: Any, kind: str) -> dict[int, bytes | str]:
        return {m: self.workers[m].handle(message) for m, message in messages.items()}

    def set_up(self, wanted: Study) -> tuple[Federation, Any]:
        answers = [decode(worker.handle(encode(self.hello, {}))) for worker in self.workers]
        assert not any("error" in header for header, _ in answers), answers
        facts = together([reply for _, reply in answers])
        built = wanted.build(facts=facts, clients=3)
        weights = site_weights(np.array([header["rows"] for header, _ in answers]), wanted.rules)
        task = server_task(built, 3, own=True)
        program = Program(task.problem, built.algorithm, task.layout, Everyone())
        plan = trace(program, task.data)
        for m, worker in enumerate(self.workers):
            prepare = {"action": "prepare", "id": m, "weight": float(weights[m]), "clients": 3}
            header, _ = decode(worker.handle(encode(prepare, facts)))
            assert header["plan"] == plan_digest(plan, built)
        engine = Federation(program, plan, weights, self, task.data, names=self.names, run="r")
        engine.metric_names = metrics_of(task)
        return engine, facts


REFUSED = "it does not take part in this study."


def why(site: Path) -> str:
    """The last entry of a site's ledger: what its own people learn."""
    return json.loads((site / LEDGER).read_text().splitlines()[-1])["error"]


@pytest.mark.parametrize("algorithm", ["fedbio", pytest.param("fedbioacc", marks=pytest.mark.slow)])
def test_sites_with_their_own_rows_give_the_simulators_numbers(tmp_path: Path, algorithm: str) -> None:
    """Standardised by sums that the sites sent; against a task of all their rows in one place."""
    wanted = study(tmp_path, algorithm={"name": algorithm}, federation={"weights": "size"})
    sites = Sites(tmp_path, wanted)
    engine, facts = sites.set_up(wanted)
    state = engine.advance(engine.start(0), 3)
    x, y = engine.solution(state)
    clients = [site_task(wanted.build(w.examples, facts), 0, own=True) for w in sites.workers]
    everybody = fb.Task(
        clients[0].problem,
        [task.clients[0] for task in clients],
        weights="size",
        batch_size=None,
    )
    built = wanted.build(sites.workers[0].examples, facts)
    expected = fb.solve(everybody, built.algorithm, rounds=3, seed=0)
    np.testing.assert_allclose(x, expected.x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y["weights"], expected.y["weights"], rtol=1e-5, atol=1e-6)
    found = engine.metrics(state)
    assert {"auc", "auc_north", "test_loss_south", "sites"} <= found.keys()
    assert found["sites"] == 3
    own = clients[1].metrics(expected.x, expected.y)  # pyright: ignore[reportOptionalCall]
    assert found["auc_east"] == pytest.approx(own["auc"], abs=1e-6)


def test_sums_standardise_as_all_rows_would(tmp_path: Path) -> None:
    wanted = study(tmp_path)
    examples = [load(str(write(tmp_path / f"{n}.csv", rows(50, n))), READ, {}, f"s{n}") for n in range(3)]
    facts = together([wanted.summarize(each) for each in examples])
    known = np.concatenate([each.inputs[divided(each, 0.5, 0.25, 0).train] for each in examples])
    features = np.concatenate([wanted.build(each, facts).task.clients[0]["train"]["features"] for each in examples])
    expected = (known - np.nanmean(known, 0)) / np.nanstd(known, 0)
    np.testing.assert_allclose(features, np.nan_to_num(expected), atol=1e-5)


def test_weights_of_rows_never_leave_their_site(tmp_path: Path) -> None:
    """Data cleaning: x is private; what is sent has the shapes of the model, and the site keeps x at the end."""
    wanted = study(
        tmp_path,
        task={"name": "data-cleaning", "hidden": 4},
        algorithm={"name": "fedbio"},
        federation={"weights": "equal"},
    )
    sites = Sites(tmp_path, wanted)
    engine, facts = sites.set_up(wanted)
    state = engine.advance(engine.start(0), 2)
    x, y = engine.solution(state)
    assert x == {}
    assert all(np.all(np.isfinite(leaf)) for leaf in __import__("jax").tree.leaves(y))
    samples = int(facts["max samples"])
    for line in (tmp_path / "east" / LEDGER).read_text().splitlines():
        for name, left in json.loads(line)["left"].items():
            assert samples not in left["shape"], name
    header, _ = decode(sites.workers[1].handle(encode({"action": "reveal", "round": 2, "blocks": {}}, {})))
    assert "not for others" in header["error"]
    public = {k: np.asarray(v) for k, v in named(engine, state).items()}
    header, _ = decode(sites.workers[1].handle(encode({"action": "finish", "round": 2}, public)))
    assert "error" not in header
    _, kept = decode((tmp_path / "east" / "runs" / "r" / "solution.safetensors").read_bytes())
    assert kept["x"].shape == (samples,)
    assert np.ptp(kept["x"]) > 0


def named(engine: Messaging, state: Any) -> dict[str, Any]:
    from fedbilevel.storage.arrays import named_leaves

    return named_leaves(engine.public(state))  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(tasks=("fairness",)), "does not take part in the task 'regularization'"),
        (Limits(min_clients=5), "needs at least 5 parties, but there are 3"),
        (Limits(min_rows=1000), "only sends numbers computed from at least 1000 rows"),
        (Limits(largest_upload=1e-5), "it sends at most"),
    ],
)
def test_the_limits_of_a_site_hold(tmp_path: Path, limits: Limits, said: str) -> None:
    sites = Sites(tmp_path, study(tmp_path), limits)
    header, arrays = decode(sites.workers[0].handle(encode(sites.hello, {})))
    assert said in why(tmp_path / "north")
    assert header["error"] == REFUSED or limits.largest_upload < 1
    assert not arrays


def test_a_site_runs_the_algorithms_it_agreed_to(tmp_path: Path) -> None:
    """And no sums leave before that is known."""
    sites = Sites(tmp_path, study(tmp_path), Limits(algorithms=("fedavg",)))
    header, facts = decode(sites.workers[0].handle(encode(sites.hello, {})))
    assert "does not run the algorithm 'fedbio'" in why(tmp_path / "north")
    assert header["error"] == REFUSED
    assert not facts


def test_messages_have_an_order(tmp_path: Path) -> None:
    """Hello, prepare, join, run: nothing else is answered, and a worker serves one run only."""
    wanted = study(tmp_path)
    sites = Sites(tmp_path, wanted)
    worker = sites.workers[0]
    later = [
        {"action": "prepare", "id": 0, "weight": 0.3, "clients": 3},
        {"action": "finish", "round": 0},
        {"action": "evaluate", "round": 0},
        {"action": "echo"},
    ]
    for message in later:
        header, arrays = decode(worker.handle(encode(message, {})))
        assert "cannot answer" in header["error"]
        assert not arrays
    first, facts = decode(worker.handle(encode(sites.hello, {})))
    again, same = decode(worker.handle(encode(sites.hello, {})))  # its answer may have been lost
    assert first == again
    assert same.keys() == facts.keys()
    header, arrays = decode(worker.handle(encode({**sites.hello, "run": "another"}, {})))
    assert header["error"] == "it takes part in another run."
    assert not arrays
    header, _ = decode(worker.handle(encode({**later[0], "clients": 1}, facts)))
    assert "not the experiment it agreed to" in header["error"]
    for message in later[1:]:
        header, arrays = decode(worker.handle(encode(message, {})))
        assert "error" in header
        assert not arrays
    prepared, _ = decode(worker.handle(encode(later[0], facts)))
    assert prepared["action"] == "prepared"
    assert decode(worker.handle(encode(later[0], facts)))[0] == prepared
    for message in ({**later[0], "id": 1}, {**sites.hello, "run": "another"}, later[3]):
        assert "error" in decode(worker.handle(encode(message, facts)))[0]


ANYTHING: tuple[Message, ...] = (
    Hello("another", "", facts_of_copy(), 3),
    Prepare(1, 1.0, 3),
    Join("another", "s", False, False),
    Run("round.0", "train", "", "run", "s", 0, -1, 0, {}, {}, {}),
    Commit("s", 0, 0, 0, {}, {}, []),
    Evaluate(0),
    Reveal(0, {}),
    Finish(0),
    Echo(),
)
"""One message of every kind, none of which fits into a run."""
IN_ORDER: dict[str, set[type[Message]]] = {
    "": {Hello},
    "hello": {Hello, Prepare, Echo},
    "prepare": {Hello, Prepare, Echo, Join},
    "join": {type(message) for message in ANYTHING},
    "finish": {Finish},
}


def test_messages_out_of_order_are_refused_and_change_nothing(tmp_path: Path) -> None:
    """At every step of a run, every kind of message is tried that has no place there, and a second run."""
    wanted = study(tmp_path, run={"rounds": 2})

    class Disorder(Sites):
        step, tried = "", 0

        def ask(self, messages: Any, kind: str) -> dict[int, bytes | str]:
            for number in messages:
                self.disturb(self.workers[number])
            answers = super().ask(messages, kind)
            self.step = kind if kind in IN_ORDER else self.step
            return answers

        def disturb(self, worker: Worker) -> None:
            for message in ANYTHING:
                answer, arrays = unpack(worker.handle(pack(message, {})))
                if isinstance(message, Commit | Evaluate | Finish | Reveal) and type(message) in IN_ORDER[self.step]:
                    continue  # in order, whatever becomes of it
                assert isinstance(answer, Failed), (self.step, message)
                assert not arrays
                late = f"it cannot answer '{message.action}' now."
                assert (answer.error == late) == (type(message) not in IN_ORDER[self.step]), answer
                self.tried += 1

    (tmp_path / "calm").mkdir()
    calm, disturbed = Sites(tmp_path / "calm", wanted), Disorder(tmp_path, wanted)
    results = []
    for sites in (calm, disturbed):
        for worker in sites.workers:  # the same rows for training
            (worker.folder / SECRET).write_text("secret")
        for worker in disturbed.workers if sites is disturbed else ():
            for step in ("", "hello"):
                disturbed.step = step
                disturbed.disturb(worker)
                if not step:
                    worker.handle(encode(sites.hello, {}))
        engine, _ = sites.set_up(wanted)
        disturbed.step = "prepare"
        state = engine.advance(engine.start(0), 2)
        assert engine.finish(state) == {}
        results.append(engine.solution(state))
    for worker in disturbed.workers:
        disturbed.disturb(worker)
    assert disturbed.tried > 100
    np.testing.assert_array_equal(*(x for x, _ in results))
    np.testing.assert_array_equal(*(y["weights"] for _, y in results))


def test_what_was_not_approved_is_refused_and_not_stored(tmp_path: Path) -> None:
    """Another bound of a column is another study: nobody finds out about rows by asking for many."""
    sites = Sites(tmp_path, study(tmp_path))
    worker = sites.workers[0]
    before = sum(path.stat().st_size for path in (tmp_path / "north").rglob("*") if path.name != LEDGER)
    for most in range(90, 120):
        bounded = {**SCHEMA, "features": {**SCHEMA["features"], "age": {"least": 0, "most": most}}}
        text = tomli_w.dumps({"task": {"name": "regularization"}, "schema": bounded}) + "# " + "x" * 60_000
        header, arrays = decode(worker.handle(encode({**sites.hello, "study": text}, {})))
        assert header == {"action": "failed", "error": REFUSED, "reason": "failed"}
        assert not arrays
        assert "was not approved: ask the coordinator" in why(tmp_path / "north")
    after = sum(path.stat().st_size for path in (tmp_path / "north").rglob("*") if path.name != LEDGER)
    assert after - before < 2000  # the times of the refusals
    assert not (tmp_path / "north" / "runs").exists()
    assert MOST_REFUSALS == 30
    header, _ = decode(worker.handle(encode(sites.hello, {})))  # even what was approved
    assert header["error"] == REFUSED
    assert "too many studies today" in why(tmp_path / "north")
    assert "too many" in why(tmp_path / "north")
    restarted = Worker(tmp_path / "north")
    assert decode(restarted.handle(encode(sites.hello, {})))[0]["error"] == REFUSED


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"tasks": ["regularization"]}, ""),
        ({"tasks": ["regularization"], "algorithms": ["fedbio"], "most_rounds": 3}, ""),
        ({"tasks": ["regularization"], "columns": ["age", "pain", "smokes", "ill"]}, ""),
        ({"tasks": ["fairness"]}, "do not allow the task 'regularization'"),
        ({"tasks": ["regularization"], "algorithms": ["fednest"]}, "do not allow the algorithm 'fedbio'"),
        ({"tasks": ["regularization"], "most_rounds": 2}, "at most 2 rounds"),
        ({"tasks": ["regularization"], "columns": ["age", "pain", "ill"]}, "do not allow the column 'smokes'"),
    ],
)
def test_rules_allow_studies_without_asking(tmp_path: Path, rules: dict[str, Any], said: str) -> None:
    sites = Sites(tmp_path, study(tmp_path))
    place = tmp_path / "rules.toml"
    place.write_text(tomli_w.dumps(rules))
    shown = (digest(repr(READ)),)
    Settings("north", str(tmp_path / "north" / "rows.csv"), consent=Consent((), Rules.read(place), schemas=shown)).save(
        tmp_path / "north"
    )
    header, _ = decode(Worker(tmp_path / "north").handle(encode(sites.hello, {})))
    assert ("error" in header) == bool(said)
    assert said in why(tmp_path / "north")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "name the tasks that are allowed"),
        ("tasks = 3", "tasks must be a list of names"),
        ("tasks = ['fairness']\nrounds = 3", "there is no rule called 'rounds'"),
        ("tasks = ['fairness']\nmost_rounds = true", "most_rounds must be a whole number"),
        ("tasks = [", "is not valid TOML"),
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(fb.FedbilevelError, match=said):
        Rules.read(tmp_path / "rules.toml")


def test_weights_by_size_are_bounded(tmp_path: Path) -> None:
    """A site that claims a billion rows counts as ten median sites at most; one that is not there yet as one."""
    wanted = study(tmp_path, federation={"weights": "size"})
    weights = site_weights(np.array([100, 200, 10**9, 0]), wanted.rules)
    assert weights == pytest.approx(np.array([100, 200, 2000, 200]) / 2500)
    capped = study(tmp_path, federation={"weights": "size", "most_rows": 150})
    assert site_weights(np.array([100, 200, 10**9]), capped.rules) == pytest.approx(np.array([100, 150, 150]) / 400)
    assert site_weights(np.array([100, 10**9]), study(tmp_path).rules) == pytest.approx([0.5, 0.5])


def test_sites_cannot_measure_what_the_task_does_not(tmp_path: Path) -> None:
    """A metric called "round" would be a column of the history."""
    wanted = study(tmp_path)
    sites = Sites(tmp_path, wanted)
    engine, _ = sites.set_up(wanted)
    state = engine.advance(engine.start(0), 1)
    honest = sites.workers[0].handle

    def lying(message: bytes) -> bytes:
        header, arrays = decode(honest(message))
        more = {"round": np.array(99.0), "seconds": np.array(-1.0), "auc_east": np.array(0.0), "auc": np.array(np.inf)}
        return encode(header, {**arrays, **more} if "auc" in arrays else arrays)

    expected = engine.metrics(state)
    sites.workers[0].handle = lying  # pyright: ignore
    found = engine.metrics(state)
    assert found.keys() == expected.keys()
    assert found["auc_east"] == expected["auc_east"]
    assert np.isfinite(found["auc"])


@pytest.mark.parametrize(
    "change",
    [
        {"train": 0.9, "validation": 0.08},  # next to nothing is left for the test
        {"train": 0.05, "validation": 0.5},
        {"train": 0.5, "validation": 0.05},
    ],
)
def test_no_part_of_the_rows_is_too_small(tmp_path: Path, change: dict[str, Any]) -> None:
    sites = Sites(tmp_path, study(tmp_path, task={"name": "regularization", **change}))
    header, arrays = decode(sites.workers[0].handle(encode(sites.hello, {})))
    assert "only sends numbers computed from at least 10 rows" in why(tmp_path / "north")
    assert header["error"] == REFUSED
    assert not arrays


def test_batches_of_few_rows_are_refused(tmp_path: Path) -> None:
    sites = Sites(tmp_path, study(tmp_path, task={"name": "data-cleaning", "batch_size": 1}))
    header, _ = decode(sites.workers[0].handle(encode(sites.hello, {})))
    assert header["error"] == REFUSED
    assert "batches are smaller" in why(tmp_path / "north")


def test_the_server_does_not_learn_what_is_wrong_with_a_row(tmp_path: Path) -> None:
    """The site's own people do."""
    asked = {**SCHEMA, "features": {"name": {"values": ["a", "b"]}}}
    sites = Sites(tmp_path, study(tmp_path, schema=asked))
    data = tmp_path / "north" / "rows.csv"
    write(data, [{"name": "Jane Doe", **row} for row in rows(60)])
    header, _ = decode(sites.workers[0].handle(encode(sites.hello, {})))
    assert header["error"] == REFUSED
    assert "row 2, column 'name': expected one of" in why(tmp_path / "north")
    assert "found 'Jane Doe'" in why(tmp_path / "north")
    for text in ("", "[task]\nname = 3\n"):
        header, _ = decode(sites.workers[1].handle(encode({**sites.hello, "study": text}, {})))
        assert str(tmp_path) not in header["error"]


@pytest.mark.parametrize("name", ["../up", "/tmp/abs", "a/b", "", "..", ".hidden"])
def test_names_of_runs_are_no_paths(tmp_path: Path, name: str) -> None:
    worker = Sites(tmp_path, study(tmp_path)).workers[0]
    hello = {"action": "hello", "run": name, "study": "", "copy": facts_of_copy(), "clients": 3}
    header, _ = decode(worker.handle(encode(hello, {})))
    assert header["error"] == REFUSED
    assert "is not a valid name for a run" in why(tmp_path / "north")
    assert not (tmp_path / "north" / "runs").exists()
    with pytest.raises(fb.FedbilevelError, match="not a valid name for a run"):
        check_run_name(name)


def test_messages_that_are_none_are_answered(tmp_path: Path) -> None:
    worker = Sites(tmp_path, study(tmp_path)).workers[0]
    for nonsense in (b"", b"nonsense", encode({"action": "run"}, {}), encode({"action": "erase"}, {}), encode({}, {})):
        assert "error" in decode(worker.handle(nonsense))[0]


def test_other_copies_are_told_apart() -> None:
    here = facts_of_copy()
    assert not difference(here, dict(here))
    for change, said in {
        "version": "install the same version",
        "code": "differs from the server's",
        "numbers": "JAX_ENABLE_X64",
        "jax": "it has jax",
    }.items():
        assert said in difference(here, {**here, change: "0.0.1"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"federation": {"quorums": 2}}, "quorums"),
        ({"federation": {"deadline": "soon"}}, "line .* deadline must be a number"),
        ({"federation": {"weights": "big"}}, "weights must be 'equal' or 'size'"),
        ({"task": {"name": "quadratics"}}, "quadratics"),
    ],
)
def test_a_wrong_study_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=said):
        study(tmp_path, **change).build()


def test_a_file_for_a_federation_is_not_for_the_simulator(tmp_path: Path) -> None:
    study(tmp_path)
    with pytest.raises(fb.FedbilevelError, match="fedbilevel federation run"):
        fb.Experiment.read(tmp_path / "study.toml")


PROJECT: dict[str, Any] = {"name": "hospitals", "host": "localhost", "port": 8102, "experiment": "study.toml"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"port": 99999}, "port must be a number from 1 to 65535"),
        ({"parties": [{"name": "a"}, {"name": "a"}]}, "two parties called a"),
        ({"parties": [{"name": "a b"}]}, "'a b' is not a valid name"),
        ({"parties": [{"name": "a", "role": "king"}]}, "king"),
        ({"parties": [{"name": "a", "role": "coordinator"}]}, "no party has data"),
        ({"experiment": "nothing.toml"}, "there is no experiment file"),
        ({"hosts": "x"}, "hosts"),
    ],
)
def test_a_wrong_federation_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    study(tmp_path)
    path = tmp_path / "hospitals.toml"
    path.write_text(tomli_w.dumps({**PROJECT, "parties": [{"name": "a"}], **change}))
    with pytest.raises(fb.FedbilevelError, match=said):
        project.read(path)


def test_infinite_numbers_are_refused(tmp_path: Path) -> None:
    table = rows()
    table[3]["age"] = "inf"
    with pytest.raises(fb.FedbilevelError, match="row 5, column 'age': 'inf' is not a number"):
        load(str(write(tmp_path / "a.csv", table)), READ, {}, "north")


class Session:
    """What FLARE's server says; notes which jobs are aborted."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def get_job_status(self, job: str) -> str:
        return "RUNNING"

    def get_client_job_status(self) -> list[dict[str, str]]:
        return []

    def abort_job(self, job: str) -> None:
        self.aborted.append(job)


def made(tmp_path: Path) -> tuple[Path, coordinator.Coordinator]:
    home = tmp_path / "hospitals"
    (home / "runs" / "r").mkdir(parents=True)
    parties = {"a": "site", "b": "site", "c": "site"}
    project.save(project.Project("hospitals", "localhost", 8102, parties, "", ()), home)
    return home, coordinator.Coordinator(home, lambda text: None)


def test_a_party_that_was_added_does_not_disturb_a_run(tmp_path: Path) -> None:
    home, serving = made(tmp_path)
    RunFolder(home / "runs" / "r").enter("running", sites=["a", "b"])
    serving.session, serving.seen = Session(), ["a", "b", "c"]
    serving.attendance.see(serving.seen)
    serving._watch("job", "r", frozenset(["a", "b"]))
    assert not serving.session.aborted
    serving.next_look = 0.0
    for _ in range(3):  # it takes a while until the job has ended
        serving._watch("job", "r", frozenset(["a"]))  # but b, which is in the run, is back
    assert serving.session.aborted == ["job"]


def test_what_ended_cannot_be_stopped_and_what_was_stopped_does_not_go_on(tmp_path: Path) -> None:
    home, serving = made(tmp_path)
    run = RunFolder(home / "runs" / "r")
    stop = ["federation", "stop", "--federation", str(home), "--run", "r"]
    run.enter("running", sites=["a", "b"])
    assert here(*stop, cwd=tmp_path)[0] == 0
    serving.session, serving.seen = Session(), ["a", "b", "c"]
    serving._watch("job", "r", frozenset(["a", "b"]))
    assert serving.session.aborted == ["job"]
    assert not run.enter("running", round=3)  # the job has not heard of it yet
    assert run.info()["status"] == "stopped"
    assert list(coordinator.wanted_runs(home)) == []
    run.finish({"rounds": 3})
    assert here(*stop, cwd=tmp_path) == (2, "fedbilevel: r cannot be stopped: it is already finished.\n")


def test_a_run_that_cannot_be_fails_alone(tmp_path: Path) -> None:
    home, serving = made(tmp_path)
    text = study(tmp_path, federation={"quorum": 5}).text
    with pytest.raises(fb.FedbilevelError, match="quorum is 5, but there are only 3 sites"):
        coordinator.want(home, tmp_path / "study.toml", "big")
    for name in ("../up", "a/b", ""):
        with pytest.raises(fb.FedbilevelError, match="not a valid name for a run"):
            coordinator.want(home, tmp_path / "study.toml", name)
    (home / "runs" / "r" / "study.toml").write_text(text)
    RunFolder(home / "runs" / "r").enter("wanted", asked=1.0)
    (home / "runs" / "r" / "facts.safetensors").touch()
    serving.session, serving.seen = SimpleNamespace(get_system_info=lambda: SimpleNamespace(client_info=[])), []
    serving._supervise()
    assert RunFolder(home / "runs" / "r").info()["status"] == "failed"


def test_a_number_of_a_process_that_is_somebody_elses_is_not_the_server(tmp_path: Path) -> None:
    home, _ = made(tmp_path)
    (home / coordinator.STATE).write_text(json.dumps({"pid": os.getpid()}))
    assert coordinator.pid(home) is None
    assert not coordinator.stop(home)


def test_a_dry_run_says_what_would_leave_and_changes_nothing(tmp_path: Path) -> None:
    study(tmp_path)
    table = {**PROJECT, "experiment": "study.toml", "parties": [{"name": "a"}, {"name": "b"}]}
    (tmp_path / "hospitals.toml").write_text(tomli_w.dumps(table))
    setup.create(project.read(tmp_path / "hospitals.toml"), tmp_path / "hospitals", PASSPHRASE)
    kit = admitted(tmp_path / "hospitals", "a", tmp_path / "a")
    data = write(tmp_path / "rows.csv", rows(80))
    folder, settings = join.unpack(kit, tmp_path / "a", str(data), {})
    said = io.StringIO()
    preview(folder, settings, join.about(folder)["experiment"], Console(file=said, width=120))
    for words in (
        "the task regularization with fedbio, 3 rounds",
        "reads the columns age, pain, smokes, ill",
        "has 80 rows",
        "of every column, the sum of its values",
        "descend: x[5], y.bias[]",
        "Never sent: rows",
    ):
        assert words in said.getvalue()
    assert not (folder / "site.json").exists()
    code, error = here("federation", "join", str(kit), "--data", "none.csv", "--dry-run", cwd=tmp_path)
    assert code == 2
    assert "there is no file none.csv" in error
    code, error = here("federation", "join", str(kit), "--data", str(data), cwd=tmp_path)  # nobody can be asked
    assert code == 2
    assert "approve the kit's with --approve" in error
    assert not (tmp_path / "a" / "site.json").exists()


class Jobs(Session):
    """FLARE as the coordinator sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[dict[str, Any]] = []
        self.connected: list[str] = []
        self.word = "RUNNING"

    def get_system_info(self) -> Any:
        return SimpleNamespace(client_info=[SimpleNamespace(name=name) for name in self.connected])

    def submit_job(self, package: str) -> str:
        self.submitted.append(json.loads((Path(package) / "meta.json").read_text()))
        return f"job {len(self.submitted)}"

    def get_job_status(self, job: str) -> str:
        return self.word

    def get_client_job_status(self) -> list[dict[str, Any]]:
        return []


def test_a_run_starts_with_its_quorum_and_does_not_block_others(tmp_path: Path) -> None:
    home, serving = made(tmp_path)
    serving.session = session = Jobs()
    shutil.rmtree(home / "runs" / "r")
    study(tmp_path, federation={"quorum": 3, "patience": 0.0})
    coordinator.want(home, tmp_path / "study.toml", "all-three")
    study(tmp_path, federation={"quorum": 2, "patience": 0.0})
    coordinator.want(home, tmp_path / "study.toml", "any-two")
    session.connected = ["a", "b"]
    serving._supervise()
    assert [job["name"] for job in session.submitted] == ["any-two"]
    assert session.submitted[0]["deploy_map"] == {"app": ["server", "a", "b"]}
    assert "waiting for c" in RunFolder(home / "runs" / "all-three").info()["waits"]
    # When the third is there, the run goes on with it.
    session.connected = ["a", "b", "c"]
    RunFolder(home / "runs" / "any-two").enter("running", sites=["a", "b", "c"])
    serving._supervise()
    assert session.aborted == ["job 1"]
    session.word = "FINISHED:ABORTED"
    serving._supervise()
    session.word = "RUNNING"
    serving._supervise()
    assert session.submitted[1]["deploy_map"] == {"app": ["server", "a", "b", "c"]}


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (coordinator, attendance):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))


def hour(
    serving: coordinator.Coordinator, clock: Clock, there: Callable[[int], list[str]], works: float = 20.0
) -> float:
    """An hour of a coordinator. A job takes 20 seconds to begin with its work. Returns for how long jobs worked."""
    session, run = serving.session, RunFolder(serving.folder / "runs" / "r")
    worked, began, jobs = 0.0, clock.now, 0
    for second in range(3600):
        clock.now += 1.0
        session.connected = there(second)
        gone = serving.job is not None and not serving.job[2] <= set(session.connected)
        session.word = "FINISHED:ABORTED" if session.aborted or gone else "RUNNING"  # FLARE ends a job for all
        session.aborted.clear()
        serving._supervise()
        if len(session.submitted) > jobs:
            jobs, began = len(session.submitted), clock.now
            run.note(there=session.submitted[-1]["deploy_map"]["app"][1:])
        if serving.job is not None and clock.now - began > works:
            if run.info()["status"] != "running":
                run.enter("running")
            worked += 1.0
    return worked


@pytest.mark.parametrize("period", [10, 40, 150])
def test_a_site_that_comes_and_goes_does_not_keep_a_run_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, period: int
) -> None:
    """It has to stay longer each time until it is counted on, and nobody waits for it."""
    home, serving = made(tmp_path)
    clock, serving.session = Clock(monkeypatch), Jobs()
    (home / "runs" / "r" / "study.toml").write_text(study(tmp_path).text)
    RunFolder(home / "runs" / "r").enter("wanted", asked=1.0)
    there = lambda second: ["a", "b", "c"] if second // period % 2 else ["a", "b"]
    worked = hour(serving, clock, there)
    jobs = len(serving.session.submitted)
    assert jobs <= 16
    assert worked > 2400
    serving.session.submitted.clear()
    hour(serving, clock, lambda second: ["a", "b", "c"])  # it stays, at last
    assert len(serving.session.submitted) == 1
    assert serving.session.submitted[0]["deploy_map"]["app"] == ["server", "a", "b", "c"]


def test_a_site_without_which_there_is_no_quorum_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, serving = made(tmp_path)
    clock, serving.session = Clock(monkeypatch), Jobs()
    (home / "runs" / "r" / "study.toml").write_text(study(tmp_path, federation={"quorum": 3}).text)
    RunFolder(home / "runs" / "r").enter("wanted", asked=1.0)
    assert hour(serving, clock, lambda second: ["a", "b", "c"] if second // 100 % 2 else ["a", "b"]) > 1000


def test_who_was_there_when_the_server_stopped_has_a_clean_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, seen = Clock(monkeypatch), attendance.Attendance()
    seen.see(["a"])
    seen.forget()
    seen.see([])
    seen.see(["a"])
    assert seen.steady("a")
    seen.see([])
    seen.see(["a"])
    assert not seen.steady("a")
    clock.now += attendance.FIRST
    assert seen.steady("a")


def test_a_site_that_could_not_set_up_is_asked_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk was full, say, or it took too long. Less and less often."""
    home, serving = made(tmp_path)
    clock, serving.session = Clock(monkeypatch), Jobs()
    (home / "runs" / "r" / "study.toml").write_text(study(tmp_path).text)
    run = RunFolder(home / "runs" / "r")
    run.enter("wanted", asked=1.0)
    run.note(unable=["c"])
    hour(serving, clock, lambda second: ["a", "b", "c"])
    assert 5 < len(serving.session.submitted) < 16
    run.note(unable=[])
    serving.session.submitted.clear()
    hour(serving, clock, lambda second: ["a", "b", "c"])
    assert len(serving.session.submitted) <= 1
    assert serving.job is not None
    assert serving.job[2] == {"a", "b", "c"}


def test_a_run_whose_sites_were_revoked_ends_with_a_sentence(tmp_path: Path) -> None:
    home, serving = made(tmp_path)
    serving.session = Jobs()
    run = RunFolder(home / "runs" / "r")
    (run.path / "study.toml").write_text(study(tmp_path).text)
    run.enter("wanted", asked=1.0, sites=["a", "b", "c"])
    given = tuple(project.Issued(name, f"{number:040x}", name, 2e9) for number, name in enumerate("abc"))
    project.save(dataclasses.replace(project.load(home), certificates=given), home)
    for name in "bc":
        setup.revoke(home, name)
    serving._supervise()
    assert run.info()["status"] == "failed"
    assert run.info()["failure"] == "the run needs 2 sites, and too few are left: b, c cannot take part any more."


def test_runs_queue_in_the_order_in_which_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if the clock is set back in between."""
    home, _ = made(tmp_path)
    shutil.rmtree(home / "runs" / "r")
    study(tmp_path)
    for name, now in (("one", 2e9), ("two", 1e9), ("three", 1.5e9)):
        monkeypatch.setattr(coordinator.time, "time", lambda now=now: now)
        coordinator.want(home, tmp_path / "study.toml", name)
    assert list(coordinator.wanted_runs(home)) == ["one", "two", "three"]
    RunFolder(home / "runs" / "one").enter("running")
    RunFolder(home / "runs" / "two").enter("waiting", waits="waiting for c.")
    monkeypatch.chdir(tmp_path)
    status = CliRunner().invoke(cli.app, ["status", "--federation", str(home)])
    assert status.exit_code == 0
    said = " ".join(capsys.readouterr().out.split() + status.output.split())
    for words in ("number 1 in the queue", "number 2 in the queue"):
        assert words in said


def test_a_coordinator_whose_disk_is_full_says_so_and_goes_on(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        home, serving = made(disk.folder)
        said: list[str] = []
        serving.say = said.append
        serving.server, serving.session = SimpleNamespace(poll=lambda: None, pid=1), Jobs()
        (home / "runs" / "r" / "study.toml").write_text(study(tmp_path).text)
        RunFolder(home / "runs" / "r").enter("wanted", asked=1.0)
        disk.fill()
        for _ in range(3):
            serving._step()
        assert said == [
            f"nothing can be saved in {home} (No space left on device): free space, or make the folder writable. "
            "Runs go on when that is done."
        ]
        disk.free()
        serving.session = Jobs()
        serving.session.connected = ["a", "b", "c"]
        serving._step()
        assert "the folder can be written again: going on." in said
        assert len(serving.session.submitted) == 1


@pytest.mark.parametrize("how", ["fill", "read_only"])
def test_a_site_whose_disk_is_full_says_so_to_its_people(tmp_path: Path, how: str) -> None:
    with small_disk(tmp_path / "disk") as disk:
        said: list[str] = []
        joined = join.Joined(disk.folder, Settings("north", "builtin"), said.append)
        assert not joined._look_at_disk("")
        getattr(disk, how)()
        before = joined._look_at_disk("")
        assert joined._look_at_disk(before) == before
        disk.free()
        assert not joined._look_at_disk(before)
        reason = "No space left on device" if how == "fill" else "Read-only file system"
        assert said == [
            f"nothing can be saved in {disk.folder} ({reason}): free space, or make the folder writable.",
            "the folder can be written again: this site goes on.",
        ]


def test_results_are_given_to_sites_that_come_back(tmp_path: Path) -> None:
    home, serving = made(tmp_path)
    serving.session = session = Jobs()
    run = RunFolder(home / "runs" / "r")
    (run.path / "study.toml").write_text(study(tmp_path).text)
    run.enter("running", sites=["a", "b", "c"], undelivered=["c"])
    run.finish({"rounds": 3})
    session.connected = ["a", "b"]
    serving._supervise()
    assert not session.submitted
    session.connected = ["a", "c"]
    for _ in range(5):  # it is not there for good: three times are enough
        serving._supervise()
        session.word = "FINISHED:COMPLETED"
        serving._supervise()
    assert [job["deploy_map"]["app"] for job in session.submitted] == [["server", "c"]] * 3
    assert run.info()["status"] == "finished"


def test_a_run_that_gets_nowhere_is_tried_less_and_less_often(tmp_path: Path) -> None:
    home, serving = made(tmp_path)
    run = RunFolder(home / "runs" / "r")
    pauses = []
    for _ in range(9):
        serving._pause("r", run.info())
        pauses.append(serving.paused_until["r"] - time.monotonic())
    assert pauses[0] <= 0
    assert pauses[-1] > 55
    run.checkpoints().save("r", {}, 5, Saved(None, [], 0.0))
    serving._pause("r", run.info())
    assert serving.paused_until["r"] <= time.monotonic()
