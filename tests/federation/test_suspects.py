"""Finding label errors between sites: each has its own list, and the coordinator learns next to nothing of it."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w
from rich.console import Console
from test_sites import REFUSED, Sites, named, why, write

import fedbilevel as fb
from admission import admitted, created
from fedbilevel.cleaning.sites import Options, facts_of_site, folds_of_site, judge, task, trusted_rows
from fedbilevel.engines.messaging.protocol import unpack
from fedbilevel.federation import join, schema, suspects
from fedbilevel.federation.cli.following import suspects_of
from fedbilevel.federation.consent import Consent, Limits, digest
from fedbilevel.federation.kits import Kit
from fedbilevel.federation.ledger import LEDGER
from fedbilevel.federation.preview import preview
from fedbilevel.federation.rows import load, names
from fedbilevel.federation.study import Study, site_task
from fedbilevel.federation.worker import Settings, Worker
from fedbilevel.storage.arrays import decode, encode, named_leaves
from fedbilevel.tasks.sites import Examples, Judged

ROUNDS = 25
SITES = ("north", "east", "south")
SCHEMA: dict[str, Any] = {
    "label": {"column": "ill", "values": ["no", "yes"]},
    "features": {"age": {"least": 0, "most": 120}, "pressure": {}},
    "trusted": {"column": "checked", "values": ["no", "yes"]},
}
TASK: dict[str, Any] = {"name": "label-errors", "hidden": 2, "folds": 2}


def rows(seed: int, count: int = 120, wrong: float = 0.3, trusted: float = 0.25) -> list[dict[str, Any]]:
    """People who are ill if they are old; some labels are wrong, none of the trusted ones."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        age, checked = int(rng.integers(20, 90)), rng.random() < trusted
        ill = (age > 55) != (rng.random() < wrong and not checked)
        pressure = "" if rng.random() < 0.1 else f"{rng.normal(120, 10):.1f}"
        patient = f"patient {seed}-{number}"
        made.append({"age": age, "pressure": pressure, "ill": ("no", "yes")[ill],
                     "checked": "yes" if checked else rng.choice(["no", ""]), "patient": patient})  # fmt: skip
    return made


def study(**more: Any) -> Study:
    tables: dict[str, Any] = {"task": TASK, "run": {"rounds": ROUNDS, "every": 10}, "federation": {"weights": "size"}}
    return Study.of(tomli_w.dumps({**tables, "schema": SCHEMA, **more}))


class Cleaning(Sites):
    """Three sites with labels of which some are wrong; keeps all answers of the first one."""

    def __init__(self, folder: Path, wanted: Study, limits: Limits | None = None, id: str = "") -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, wanted, limits)
        self.answers: list[bytes] = []
        for number, worker in enumerate(self.workers):
            write(worker.folder / "rows.csv", rows(number))
            (worker.folder / "secret").write_text("secret")
            Settings(self.names[number], str(worker.folder / "rows.csv"), {}, id, worker.settings.consent).save(
                worker.folder
            )
        self.workers = [Worker(worker.folder) for worker in self.workers]

    def ask(self, messages: Any, kind: str) -> dict[int, bytes | str]:
        found = super().ask(messages, kind)
        self.answers += [answer for m, answer in found.items() if m == 0 and isinstance(answer, bytes)]
        return found

    def found(self, site: str) -> list[dict[str, str]]:
        with (self.workers[self.names.index(site)].folder / "runs" / "r" / suspects.SUSPECTS).open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cleaning, Study, Any, Any, Any]]:
    """A whole run, in which sites tell their numbers; in double precision, as Adam amplifies rounding."""
    with jax.enable_x64(True):
        wanted = study()
        sites = Cleaning(tmp_path_factory.mktemp("sites"), wanted, Limits(min_rows=5, share_counts=True), "patient")
        engine, facts = sites.set_up(wanted)
        state = engine.advance(engine.start(0), ROUNDS)
        assert engine.finish(state, 1000) == {}
        yield sites, wanted, engine, state, facts


def test_lists_are_those_of_the_simulator(played: tuple[Cleaning, Study, Any, Any, Any]) -> None:
    """With the rows of all sites in one place, where nothing is sent."""
    sites, wanted, engine, state, facts = played
    known = {**facts, "clients": np.asarray(3)}
    built = [wanted.build(worker.examples, facts, 3) for worker in sites.workers]
    own = [site_task(each, 0, own=True) for each in built]
    plain = [{part: {k: a[:] for k, a in columns.items()} for part, columns in one.clients[0].items()} for one in own]
    everybody = fb.Task(own[0].problem, plain, batch_size=None, weights="size")
    expected = fb.solve(everybody, built[0].algorithm, rounds=ROUNDS, seed=0, metrics=False)
    _, y = engine.solution(state)
    for found, wished in zip(jax.tree.leaves(y), jax.tree.leaves(expected.y), strict=True):
        np.testing.assert_allclose(found, wished, rtol=1e-9, atol=1e-10)
    for m, worker in enumerate(sites.workers):
        block = jax.tree.map(lambda a, m=m: a[m], expected.x)
        judged = judge(worker.examples, known, block, expected.y, folds=2, hidden=2)
        listed = {row["row"]: row for row in sites.found(worker.settings.name)}
        ids = [row["patient"] for row in rows(m)]
        assert list(listed) != ids  # the worst first
        wrong = np.array([float(listed[name]["probability_wrong"]) for name in ids])
        np.testing.assert_allclose(wrong, judged.wrong, rtol=1e-5, atol=1e-6)  # six digits are written
        says = [listed[name]["predicted_label"] for name in ids]
        assert says == [("no", "yes")[code] for code in judged.predicted]


def test_every_site_gets_its_own_list_by_the_names_of_its_rows(played: tuple[Cleaning, Study, Any, Any, Any]) -> None:
    sites = played[0]
    for number, site in enumerate(sites.names):
        given = {row["patient"]: row for row in rows(number)}
        found = sites.found(site)
        assert tuple(found[0]) == suspects.COLUMNS
        assert {row["row"] for row in found} == set(given)
        assert {row["client"] for row in found} == {site}
        trusted = [row["trusted"] == "True" for row in found]
        assert trusted == sorted(trusted)  # these come last, and are no suspects
        for row in found:
            assert row["given_label"] == given[row["row"]]["ill"]
            assert (row["trusted"] == "True") == (given[row["row"]]["checked"] == "yes")
            assert (row["is_label_issue"] == "True") == (float(row["probability_wrong"]) > 0.5)
        qualities = [float(row["label_quality"]) for row, sure in zip(found, trusted, strict=True) if not sure]
        assert qualities == sorted(qualities)
        wrong = [(int(given[row["row"]]["age"]) > 55) != (row["given_label"] == "yes") for row in found]
        first, last = wrong[: len(qualities) // 4], wrong[len(qualities) // 2 : len(qualities)]
        assert np.mean(first) > np.mean(last) + 0.4  # it finds them


def test_no_upload_depends_on_the_names_of_rows(played: tuple[Cleaning, Study, Any, Any, Any], tmp_path: Path) -> None:
    """Another run, in which rows have other names: what leaves is the same to the last byte."""
    first, wanted, *_ = played
    other = Cleaning(tmp_path / "other", wanted, Limits(min_rows=5, share_counts=True))
    for number, worker in enumerate(other.workers):
        write(worker.folder / "rows.csv", [{**row, "patient": "Jane Doe"} for row in rows(number)])
    engine, _ = other.set_up(wanted)
    engine.finish(engine.advance(engine.start(0), ROUNDS), 1000)
    assert len(other.answers) > ROUNDS
    assert other.answers == first.answers[: len(other.answers)]
    assert [row["row"] for row in other.found("north")] != [row["row"] for row in first.found("north")]
    assert {row["row"] for row in other.found("north")} == {str(line) for line in range(2, 122)}
    left = b"".join(first.answers)
    assert b"patient" not in left
    assert b"0-17" not in left


def test_x_never_leaves(played: tuple[Cleaning, Study, Any, Any, Any]) -> None:
    """Another noise model of a site changes what it sends only through the gradient of y; x itself is in no answer."""
    sites, _, engine, state, _ = played
    assert jax.tree.leaves(engine.solution(state)[0]) == []
    _, kept = decode((sites.workers[0].folder / "runs" / "r" / "solution.safetensors").read_bytes())
    own = {name: array for name, array in kept.items() if name.startswith("x")}
    assert own
    assert all(array != 0 for array in own.values())
    shapes = {name for name, _ in named_leaves({"y": engine.solution(state)[1]}).items()}
    for answer in sites.answers:
        for name, array in unpack(answer)[1].items():
            assert not any(array.ndim == 0 and array == value for value in own.values()), name
    lines = [json.loads(line) for line in (sites.workers[0].folder / LEDGER).read_text().splitlines()]
    descend = next(line for line in lines if line["method"] == "descend")
    assert len(descend["left"]) == len(shapes)  # one array for each of y, none for x
    header, arrays = decode(sites.workers[0].handle(encode({"action": "reveal", "round": ROUNDS, "blocks": {}}, {})))
    assert "error" in header
    assert not arrays


def test_numbers_of_suspects_are_told_where_the_site_allows_it(played: tuple[Cleaning, Study, Any, Any, Any]) -> None:
    sites, wanted, engine, _, _ = played
    assert wanted.schema is not None
    assert set(engine.finished) == set(SITES)
    told = {site: suspects.received(arrays, wanted.schema, 120) for site, arrays in engine.finished.items()}
    assert any(told.values())
    for site, numbers in told.items():
        found = sites.found(site)
        for label in ("no", "yes"):
            own = [row["is_label_issue"] for row in found if row["given_label"] == label and row["trusted"] == "False"]
            may = min(own.count("True"), own.count("False")) >= 5
            assert numbers.get(label) == (own.count("True") if may else None)
        last = json.loads((sites.workers[0].folder / LEDGER).read_text().splitlines()[-1])
        assert last["action"] in ("finish", "reveal")
    text = io.StringIO()
    Console(file=text, width=100).print(suspects_of(told, SITES))
    for numbers in told.values():
        assert all(str(count) in text.getvalue() for count in numbers.values())


def test_numbers_of_suspects_are_a_secret_unless_the_site_tells(tmp_path: Path) -> None:
    wanted = study(run={"rounds": 1, "every": 1})
    sites = Cleaning(tmp_path, wanted, Limits(min_rows=1))
    engine, _ = sites.set_up(wanted)
    engine.finish(engine.advance(engine.start(0), 1), 1000)
    assert list(engine.finished.items()) == [(site, {}) for site in SITES]
    assert not (tmp_path / "north" / suspects.TOLD).exists()
    assert len(sites.found("north")) == 120


def test_few_suspects_cannot_be_found_by_subtraction() -> None:
    """Whoever knows how many rows each class has."""
    rng = np.random.default_rng(0)
    hidden = 0
    for _ in range(300):
        count, classes, least = int(rng.integers(1, 80)), int(rng.integers(2, 5)), int(rng.integers(1, 15))
        labels, issue = rng.integers(0, classes, count), rng.random(count) < rng.random()
        trusted, none = rng.random(count) < 0.2, np.zeros(count)
        told = suspects.counts(Judged(trusted, issue & ~trusted, none, none, none), labels, classes, least)
        for label in range(classes):
            own = issue[(labels == label) & ~trusted]
            if f"{suspects.NAME}{label}" in told:
                assert told[f"{suspects.NAME}{label}"] == own.sum() >= least
                assert (~own).sum() >= least
            else:
                hidden += 1
                assert min(own.sum(), (~own).sum()) < least
    assert hidden > 100


def test_a_coordinator_cannot_ask_for_one_number_after_the_other(
    played: tuple[Cleaning, Study, Any, Any, Any], tmp_path: Path
) -> None:
    """With crafted results, each answer would count the rows on one side of a plane of its choice."""
    first, wanted, engine, state, facts = played
    public = {k: np.asarray(v) for k, v in named(engine, state).items()}
    crafted = {k: np.asarray(-20 * a, a.dtype) if "linear" in k else a for k, a in public.items()}
    worker = first.workers[0]
    kept = (worker.folder / "runs" / "r" / suspects.SUSPECTS).read_bytes()
    examples = worker.examples
    other = wanted.judge(examples, facts, *worker.party.solution(ROUNDS, crafted))
    assert suspects.counts(other, examples.labels, 2, 5) != suspects.counts(
        wanted.judge(examples, facts, *worker.party.solution(ROUNDS, public)), examples.labels, 2, 5
    )
    answers = [decode(worker.handle(encode({"action": "finish", "round": ROUNDS}, sent))) for sent in (public, crafted)]
    assert [header for header, _ in answers] == [{"action": "done", "finite": True}] * 2
    assert {k: int(v) for k, v in answers[0][1].items()} == {k: int(v) for k, v in answers[1][1].items()}
    assert (worker.folder / "runs" / "r" / suspects.SUSPECTS).read_bytes() == kept
    # Nor in another run of the same study, nor after the site was restarted.
    again = Worker(worker.folder)
    assert suspects.once(again.folder, digest(wanted.text), "another", {f"{suspects.NAME}0": np.asarray(33)}) == {}
    assert suspects.once(again.folder, digest(wanted.text), "r", {f"{suspects.NAME}0": np.asarray(33)}) == {
        name: int(count) for name, count in answers[0][1].items()
    }
    (tmp_path / suspects.TOLD).write_text("[]")  # damaged
    assert suspects.once(tmp_path, digest(wanted.text), "r", {f"{suspects.NAME}0": np.asarray(33)}) == {}
    nan = {k: np.full_like(a, np.nan) if "linear" in k else a for k, a in public.items()}
    header, arrays = decode(worker.handle(encode({"action": "finish", "round": ROUNDS}, nan)))
    assert "NaN" in header["error"]
    assert not arrays


@pytest.mark.parametrize(
    "sent",
    [
        {"suspects 2": np.array(3)},
        {"suspects 0": np.array(-3)},
        {"suspects 0": np.array(101)},
        {"suspects 0": np.array(60), "suspects 1": np.array(60)},
        {"suspects 0": np.array(3.0)},
        {"suspects 0": np.array([3])},
        {"suspects 0": np.array(3), "round": np.array(3)},
    ],
)
def test_numbers_that_cannot_be_are_left_out(sent: dict[str, np.ndarray]) -> None:
    assert suspects.received(sent, schema.read(SCHEMA), 100) == {}
    assert suspects.received({"suspects 1": np.array(3)}, schema.read(SCHEMA), 100) == {"yes": 3}


def example(count: int, trusted: int, least: int, labels: int = 2, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    sure = np.zeros(count, bool)
    sure[rng.permutation(count)[:trusted]] = True
    return Examples(rng.normal(size=(count, 3)), rng.integers(0, labels, count), None, labels, f"n {seed}", None, least,
                    (), sure)  # fmt: skip


@pytest.mark.parametrize("folds", [2, 5, 20])
def test_no_fold_is_about_few_rows(folds: int) -> None:
    """Of trusted rows, and of the others: sums over each are found by subtraction."""
    rng = np.random.default_rng(folds)
    for seed in range(100):
        count, least = int(rng.integers(10, 200)), int(rng.integers(1, 11))
        rows = example(count, int(rng.integers(0, count + 1)), least, int(rng.integers(1, 4)), seed)
        fold, trusted = folds_of_site(rows, folds, 0), trusted_rows(rows, 0)
        sizes = [np.bincount(fold[trusted == kind]) for kind in (False, True)]
        assert all(size == 0 or size >= least for size in np.concatenate(sizes))
        assert fold.max() < folds
        facts = facts_of_site(rows)
        assert facts["sum trusted"] == 0 or least <= facts["sum trusted"] <= count
        assert facts["sum trusted"] == count or count - facts["sum trusted"] >= least
        for kind in np.unique(trusted):  # every fold that has some has its share of every label
            for label in np.unique(rows.labels):
                own = np.bincount(fold[(rows.labels == label) & (trusted == kind)], minlength=folds)
                assert np.ptp(own[np.unique(fold[trusted == kind])]) <= 1


def test_gradients_of_a_crafted_model_are_not_about_few_rows(tmp_path: Path) -> None:
    """The attack: all models are alike and sure of one class, then of the other. The gradients of their biases then
    count the rows that each was trained on, and the differences those of a single fold.
    """
    wanted = study(task={"name": "label-errors", "folds": 20, "hidden": 2})
    assert wanted.schema is not None
    table = str(write(tmp_path / "rows.csv", rows(0, 300)))
    counted = {}
    for least in (1, 10):
        examples = load(table, wanted.schema, {}, "north secret", least)
        facts = wanted.summarize(examples)
        made = wanted.build(examples, facts).task
        x, y = (v.tree for v in made.problem.start(jax.random.key(0)))
        batch = {name: jnp.asarray(a[:]) for name, a in made.clients[0]["train"].items()}
        slope = lambda b, x=x, y=y, batch=batch, made=made: jax.grad(
            lambda b: made.problem.lower(x, {**y, "linear": {**y["linear"], "b": b}}, batch)
        )(b)
        zero, first = y["linear"]["b"], jnp.array([1.0, 0.0])
        sure = [np.asarray(slope(zero + sign * 30 * first), float)[..., 0] for sign in (1, -1)]
        kinds = [each.kind for each in Options(False, 20, 2, 0).design(examples, facts).linear]
        for kind, rows_of in (("given", len(examples.labels)), ("trusted", int(facts["sum trusted"]))):
            trained = (sure[0] - sure[1])[kinds.index(kind)] * rows_of * 19 / 20  # rows, for each model
            counted[least, kind] = np.rint(trained.sum() / 19 - trained).astype(int)
        assert counted[least, "given"].sum() == 300
        assert counted[least, "trusted"].sum() == sum(row["checked"] == "yes" for row in rows(0, 300))
    assert 0 < min(counted[1, "trusted"]) < 10  # what a site that does not mind would tell
    for kind in ("given", "trusted"):
        assert all(size == 0 or size >= 10 for size in counted[10, kind])


def test_a_site_uses_as_many_folds_as_it_has_rows_for(tmp_path: Path) -> None:
    few = example(25, 0, 10)
    assert len(np.unique(folds_of_site(few, 5, 0))) == 2
    assert not np.array_equal(folds_of_site(few, 5, 0), folds_of_site(few._replace(site="n other"), 5, 0))
    np.testing.assert_array_equal(folds_of_site(few, 5, 0), folds_of_site(few, 5, 0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"folds": 1}, "folds must be from 2 to 20"),
        ({"folds": 1000}, "folds must be from 2 to 20"),
        ({"hidden": 10**9}, "hidden from 1 to 1024"),
        ({"hidden": 0}, "hidden from 1 to 1024"),
    ],
)
def test_designs_that_would_exhaust_a_site_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    sites = Cleaning(tmp_path, wanted := study(task={"name": "label-errors", **change}))
    header, arrays = decode(sites.workers[0].handle(encode(sites.hello, {})))
    assert header["error"] == REFUSED
    assert not arrays
    assert said in why(tmp_path / "north")
    with pytest.raises(fb.FedbilevelError, match=said):
        wanted.build()


def test_what_would_be_too_large_to_send_is_not_computed(tmp_path: Path) -> None:
    wanted = study(task={"name": "label-errors", "folds": 20, "hidden": 1024, "thorough": True})
    sites = Cleaning(tmp_path, wanted, Limits(largest_upload=0.5))
    _, facts = decode(sites.workers[0].handle(encode(sites.hello, {})))
    prepare = {"action": "prepare", "id": 0, "weight": 0.3, "clients": 3}
    header, _ = decode(sites.workers[0].handle(encode(prepare, facts)))
    assert "MB at once, but it sends at most 0.5 MB" in header["error"]
    assert sites.workers[0].party is None
    header, _ = decode(sites.workers[0].handle(encode({"action": "evaluate", "round": 0}, {})))
    assert "cannot answer" in header["error"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (rows(0, 9), "only sends numbers computed from at least 10 rows"),
        (
            [{**row, "checked": "perhaps"} for row in rows(0)],
            "'checked': expected one of 'no', 'yes', but found 'perhaps'",
        ),
    ],
)
def test_rows_that_do_not_do_are_refused(tmp_path: Path, table: list[dict[str, Any]], said: str) -> None:
    sites = Cleaning(tmp_path, study())
    write(tmp_path / "north" / "rows.csv", table)
    header, _ = decode(sites.workers[0].handle(encode(sites.hello, {})))
    assert header["error"] == REFUSED
    assert said in why(tmp_path / "north")


def test_odd_sites_take_part(tmp_path: Path) -> None:
    """One with trusted rows only, one with a single class and no column of trusted rows, one with few rows."""
    wanted = study(run={"rounds": 2, "every": 1})
    sites = Cleaning(tmp_path, wanted)
    odd = [[{**row, "checked": "yes"} for row in rows(0)],
           [{k: "yes" if k == "ill" else v for k, v in row.items() if k != "checked"} for row in rows(1)],
           rows(2, 12)]  # fmt: skip
    for site, table in zip(sites.names, odd, strict=True):
        write(tmp_path / site / "rows.csv", table)
    engine, facts = sites.set_up(wanted)
    assert facts["sum trusted"] == 120
    state = engine.advance(engine.start(0), 2)
    measured = engine.metrics(state)
    assert np.isfinite(measured["loss_east"])
    assert np.isnan(measured["trusted_accuracy_south"])
    assert engine.finish(state) == {}
    assert "all 120 labels are trusted" in suspects.summary(tmp_path / "north" / "runs" / "r")
    assert "of 120 labels" in suspects.summary(tmp_path / "east" / "runs" / "r")
    assert len(sites.found("south")) == 12
    assert {row["trusted"] for row in sites.found("east")} == {"False"}


def test_without_trusted_rows_anywhere_a_site_is_told_so() -> None:
    """Before any training, nothing tells how many labels are wrong: all are ranked, and none is called wrong."""
    rows = example(60, 0, 10)
    facts = facts_of_site(rows)
    x, y = (v.tree for v in task(rows, facts, hidden=2).problem.start(jax.random.key(0)))
    found = judge(rows, facts, x, y, hidden=2)
    assert "No site has trusted rows" in found.remark
    assert "cannot be told from these rows" in found.remark
    assert not found.issue.any()
    assert suspects.sentence(found).startswith("0 of 60 labels are probably wrong. No site has")
    # With trusted rows of others, labels are called wrong; those that this site has checked are not, even if few.
    some = example(60, 4, 10)
    known = {**facts, "sum trusted": np.asarray(40)}
    x, y = (v.tree for v in task(some, known, hidden=2).problem.start(jax.random.key(0)))
    found = judge(some, known, {"level": x["level"] + 20.0}, y, hidden=2)
    assert found.issue.sum() == 56
    assert not found.issue[found.trusted].any()
    assert found.remark == ""


def test_the_column_of_trusted_rows_is_the_sites_own(tmp_path: Path) -> None:
    known = schema.read(SCHEMA)
    table = [{"geprüft" if k == "checked" else k: v for k, v in row.items()} for row in rows(0)]
    path = str(write(tmp_path / "a.csv", table))
    found = load(path, known, {"checked": "geprüft"}, "north").trusted
    np.testing.assert_array_equal(found, [row["checked"] == "yes" for row in rows(0)])
    assert load(path, known, {}, "north").trusted is None
    with pytest.raises(fb.FedbilevelError, match="has no column 'chekced'"):
        load(path, known, {"checked": "chekced"}, "north")
    assert names(path, known, "patient")[:2] == ["patient 0-0", "patient 0-1"]
    assert names(path, known)[:2] == ["2", "3"]  # as in messages about rows
    with pytest.raises(fb.FedbilevelError, match="has no column 'id'"):
        names(path, known, "id")


def test_images_have_the_names_of_their_files(tmp_path: Path) -> None:
    from PIL import Image

    known = schema.read(
        {"label": {"column": "label", "values": ["cat", "dog"]}, "image": {"shape": [3, 3]},
         "trusted": SCHEMA["trusted"]}
    )  # fmt: skip
    for number in range(4):
        place = tmp_path / "pets" / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((3, 3), number, np.uint8)).save(place / f"{number}.png")
    assert names(str(tmp_path / "pets"), known) == ["cat/0.png", "cat/2.png", "dog/1.png", "dog/3.png"]
    assert load(str(tmp_path / "pets"), known, {}, "north").trusted is None
    pets = ("cat", "dog", "cat", "dog")
    listed = [{"file": f"{pet}/{n}.png", "label": pet, "checked": ("no", "yes")[n // 2]} for n, pet in enumerate(pets)]
    write(tmp_path / "pets" / "labels.csv", listed)
    assert names(str(tmp_path / "pets"), known) == [row["file"] for row in listed]
    np.testing.assert_array_equal(load(str(tmp_path / "pets"), known, {}, "n").trusted, [False, False, True, True])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": {**SCHEMA, "trusted": {"column": "checked", "values": [0, 1, 2]}}}, "trusted has two values"),
        ({"schema": {**SCHEMA, "trusted": {"column": "age", "values": [0, 1]}}}, "is both the trusted and a feature"),
        ({"schema": {**SCHEMA, "trusted": {"column": "ill", "values": [0, 1]}}}, "is both"),
        ({"schema": {**SCHEMA, "trusted": "checked"}}, "trusted must be a table"),
        ({"task": {"name": "regularization"}}, "regularization does not use trusted: leave it out"),
        ({"schema": {}}, "label-errors is a task for rows of sites"),
    ],
)
def test_studies_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    tables: dict[str, Any] = {"task": TASK, "schema": SCHEMA, **change}
    if not tables["schema"]:
        del tables["schema"]
    with pytest.raises(fb.FedbilevelError, match=said):
        Study.of(tomli_w.dumps(tables)).build()


def test_a_site_sees_before_it_agrees_what_it_gets_and_what_leaves(tmp_path: Path) -> None:
    kit = tmp_path / "site"
    Kit.read(admitted(created(tmp_path / "home", north="site"), "north", kit)).keep(kit)
    data = str(write(tmp_path / "rows.csv", rows(0)))
    bare = str(write(tmp_path / "bare.csv", [{k: v for k, v in r.items() if k != "checked"} for r in rows(0)]))

    def shown(settings: Settings) -> str:
        said = io.StringIO()
        preview(kit, settings, study().text, Console(file=said, width=300))
        return said.getvalue()

    text = shown(Settings("north", data, {}, "patient"))
    for words in (
        "checked (whether the label is trusted, if you have it)",
        "that are trusted",
        "the first one is called patient 0-0",
        "how many of them are trusted (sum trusted",
        "nothing: you do not share the numbers of suspects",
        "this site's part of x",
    ):
        assert words in text, words
    text = shown(Settings("north", bare, consent=Consent(limits=Limits(share_counts=True))))
    assert "There is no column checked, so no label counts as trusted" in text
    assert "how many labels of each class are suspicious, if 10 or more are, and as many are not" in text
    with pytest.raises(fb.FedbilevelError, match="has no column 'name'"):
        shown(Settings("north", data, {}, "name"))
    some = [{**row, "checked": "yes" if n < 4 else "no"} for n, row in enumerate(rows(0))]
    text = shown(Settings("north", str(write(tmp_path / "few.csv", some))))
    assert "Only 4 labels are trusted" in text


def test_the_people_of_a_site_hear_of_its_suspects(
    played: tuple[Cleaning, Study, Any, Any, Any], tmp_path: Path
) -> None:
    folder, said = played[0].workers[1].folder, []
    joined = join.Joined(folder, Settings("east", "rows.csv"), said.append)
    joined._news(folder / LEDGER, 0)
    assert len(said) == 1
    assert said[0].startswith("run r: ")
    assert "labels are probably wrong. See " in said[0]
    assert said[0].endswith("runs/r/suspects.csv")
