"""What a site agrees to, and what nobody finds out: before it has agreed nothing, afterwards nothing about few rows."""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from rich.console import Console

import fedbilevel as fb
from admission import admitted, created
from fedbilevel.federation import ledger, project, schema
from fedbilevel.federation.consent import MOST_REFUSALS, REFUSALS, Consent, Rules, check_run_name, digest
from fedbilevel.federation.kits import Kit
from fedbilevel.federation.preview import FACTS, preview
from fedbilevel.federation.rows import load
from fedbilevel.federation.study import SITE_TASKS, Study, facts_of_copy
from fedbilevel.federation.worker import Settings, Worker
from fedbilevel.storage.arrays import decode, encode
from fedbilevel.storage.files import json_lines
from fedbilevel.storage.run_folder import RunFolder
from fedbilevel.tasks.sites import divided
from fuzzed import SCHEMA, table, write
from helpers import here

REGULARIZATION: dict[str, Any] = {"task": {"name": "regularization"}, "run": {"rounds": 3, "every": 1}}
REFUSED = encode({"action": "failed", "error": "it does not take part in this study.", "reason": "failed"}, {})


def text(features: dict[str, Any] | None = None, **more: Any) -> str:
    asked = {**SCHEMA, "features": {**SCHEMA["features"], **(features or {})}}
    return tomli_w.dumps({**REGULARIZATION, **more, "schema": asked})


def site(folder: Path, consent: Consent) -> Worker:
    place = folder / "north"
    place.mkdir(exist_ok=True)
    Settings("north", str(write(place / "rows.csv", table(200))), consent=consent).save(place)
    return Worker(place)


def installed(folder: Path) -> Path:
    """The folder of a site with its kit."""
    Kit.read(admitted(created(folder / "home", north="site"), "north", folder / "site")).keep(folder / "site")
    return folder / "site"


def hello(worker: Worker, study: str, run: str = "r") -> bytes:
    asked = {"action": "hello", "run": run, "study": study, "copy": facts_of_copy(), "clients": 3}
    return worker.handle(encode(asked, {}))


def agreed(answer: bytes) -> bool:
    return decode(answer)[0]["action"] == "facts"


def by_halves(worker: Worker) -> tuple[int, int, int]:
    """The attack: what is the largest age? Returns between what it was found to lie, and how many studies ran."""
    least, most, allowed = 20, 120, 0
    for _ in range(32):
        middle = (least + most) // 2
        fits = agreed(hello(Worker(worker.folder), text({"age": {"least": 0, "most": middle}})))
        allowed += fits
        least, most = (least, middle) if fits else (middle, most)
    return least, most, allowed


def test_the_largest_value_of_a_column_is_not_found(tmp_path: Path) -> None:
    worker = site(tmp_path, Consent((digest(text()),)))
    assert by_halves(worker)[2] == 0
    # Rules hold for the columns and bounds that people were shown.
    shown = Study.of(text()).schema
    rules = Consent((), Rules(("regularization",)), schemas=(digest(repr(shown)),))
    (worker.folder / REFUSALS).unlink()
    assert by_halves(site(tmp_path, rules))[2] == 0
    (worker.folder / REFUSALS).unlink()
    assert agreed(hello(site(tmp_path, rules), text(task={"name": "regularization", "start": 0.1})))


def test_whether_a_value_is_present_is_not_found(tmp_path: Path) -> None:
    shown = Study.of(text()).schema
    for consent in (
        Consent((digest(text()),)),
        Consent((), Rules(("regularization",)), schemas=(digest(repr(shown)),)),
    ):
        worker = site(tmp_path, consent)
        asked = [text({"pain": {"values": [1, 2, 3]}}), text({"pain": {"values": [1, 2]}})]
        answers = [hello(Worker(worker.folder), each + "# another") for each in asked]
        if consent.rules is None:
            assert answers == [REFUSED, REFUSED]
        else:
            assert agreed(answers[0])  # what was shown, and the rows fit
            assert answers[1] == REFUSED


def test_refusals_are_alike_to_the_last_byte_and_their_reason_stays(tmp_path: Path) -> None:
    worker = site(tmp_path, Consent((digest(text({"age": {"least": 30, "most": 31}})),)))
    asked = ["", "[", text(), text({"age": {"least": 30, "most": 31}}), "x" * 100_000]
    assert [hello(worker, each) for each in asked] == [REFUSED] * len(asked)
    assert hello(worker, text(), run="../up") == REFUSED
    reasons = [line["error"] for line in json_lines(worker.folder / ledger.LEDGER)]
    assert len(set(reasons)) == 6
    assert "is not between 30 and 31" in reasons[3]


def test_a_thousand_refused_studies_leave_nothing_behind(tmp_path: Path) -> None:
    worker = site(tmp_path, Consent())
    for number in range(1000):
        assert hello(worker, f"# {number} {'x' * 60_000}") == REFUSED
    files = {path.name: path.stat().st_size for path in worker.folder.rglob("*") if path.is_file()}
    assert sum(size for name, size in files.items() if name != "rows.csv") < 200_000
    assert not (worker.folder / "runs").exists()
    assert worker.study is None
    assert ledger.verify(worker.folder / ledger.LEDGER).lines <= ledger.MOST_REFUSED + 30  # then one a minute


def test_studies_that_rules_allow_are_limited_in_number(tmp_path: Path) -> None:
    """Every other share of the rows gives other sums over them."""
    shown = Study.of(text()).schema
    worker = site(tmp_path, Consent((), Rules(("regularization",)), schemas=(digest(repr(shown)),)))
    asked = [text(task={"name": "regularization", "seed": seed}) for seed in range(MOST_REFUSALS + 1)]
    (worker.folder / REFUSALS).write_text(json.dumps([[__import__("time").time(), str(n)] for n in range(28)]))
    assert [agreed(hello(Worker(worker.folder), each)) for each in asked[:3]] == [True, True, False]
    assert agreed(hello(Worker(worker.folder), asked[0]))  # the run goes on in a new job


def test_the_study_is_shown_in_words(tmp_path: Path) -> None:
    kit = installed(tmp_path)
    data = write(tmp_path / "rows.csv", table(200))
    said = io.StringIO()
    settings = Settings("north", str(data), {"age": "age"})
    preview(kit, settings, text(), Console(file=said, width=200))
    for words in (
        "the task regularization with fedbio, 3 rounds, all sites in each",
        "reads the columns age (here age), pain, smokes, ill (the label), sex (the group)",
        "how many training rows there are",
        "of every column, the sum of its values",
        "in every round",
        "descend: x[5], y.bias[]",
        "on the test rows: auc, test_loss",
        "in 3 rounds",
    ):
        assert words in said.getvalue(), words


def test_what_a_coordinator_wrote_does_not_command_the_terminal(tmp_path: Path) -> None:
    kit = installed(tmp_path)
    odd = "[bold]\x1b[2Jage"
    rows = table(200)
    rows[0][0] = odd
    said = io.StringIO()
    asked = tomli_w.dumps(
        {**REGULARIZATION, "schema": {**SCHEMA, "features": {odd: {}, "pain": {"values": [1, 2, 3]}}}}
    )
    preview(kit, Settings("north", str(write(tmp_path / "a.csv", rows))), asked, Console(file=said, width=200))
    assert "\x1b" not in said.getvalue()
    assert "[bold]\\x1b[2Jage" in said.getvalue()
    with pytest.raises(fb.FedbilevelError) as error:
        Study.of(f'[task]\nname = "regularization"\n"{odd}" = 1\n'.replace("\x1b", "\\u001b")).build()
    assert "\x1b" not in str(error.value)


def test_all_that_is_sent_has_words() -> None:
    blank = schema.blank(schema.read(SCHEMA))
    for name, task in SITE_TASKS.items():
        assert set(task.facts(blank)) <= set(FACTS), name


def numbers(rows: list[list[str]], least: int, folder: Path) -> tuple[dict[str, np.ndarray], list[str], np.ndarray]:
    """The facts of rows, the names of their columns, and the inputs that train."""
    features = {"age": {}, "pain": {"values": [1, 2, 3]}, "smokes": {"values": ["n", "y"]}}
    wanted = schema.read({**SCHEMA, "features": features})
    examples = load(str(write(folder / "a.csv", rows)), wanted, {}, "north secret", least)
    parts = divided(examples, 0.5, 0.25, 0)
    return dict(SITE_TASKS["regularization"].facts(examples)), wanted.names, examples.inputs[parts.train]


@pytest.mark.parametrize("absent", [1, 3, 8])
def test_how_few_values_are_missing_does_not_leave(tmp_path: Path, absent: int) -> None:
    """Of a number, of one of several values, and of one of two."""
    rows = table(400)
    for row in rows[1:]:
        row[0] = row[0] or "50"
    for column in (0, 1, 2):
        for row in random.Random(column).sample(rows[1:], absent):
            row[column] = ""
    facts, names, _ = numbers(rows, 10, tmp_path)
    counts = dict(zip(names, facts["sum count"], strict=True))
    sums = dict(zip(names, facts["sum values"], strict=True))
    assert counts["age"] == counts["smokes"] == counts["pain: 1"] == max(counts.values())
    assert sum(sums[f"pain: {n}"] for n in (1, 2, 3)) == max(counts.values())
    assert sums["age"] == int(sums["age"])  # nothing is scaled: fractions would tell
    told, _, inputs = numbers(rows, 1, tmp_path)  # a site that allows it tells
    assert told["sum count"][0] == (~np.isnan(inputs[:, 0])).sum() <= max(told["sum count"])


def test_rare_values_are_not_found_by_subtraction(tmp_path: Path) -> None:
    rows = table(400)
    for number, row in enumerate(rows[1:]):
        row[0], row[1], row[2] = "50", "1" if number < 6 else "2" if number < 150 else "3", "y" if number < 5 else "n"
    facts, names, _ = numbers(rows, 10, tmp_path)
    told = {name: total for name, total in zip(names, facts["sum values"], strict=True) if total}
    assert "smokes" not in told
    assert set(told) <= {"age", "pain: 3"}, told  # with both others, what is left would be the rare one
    few = [count for count in facts["sum count"] if count]
    assert set(few) == {max(few)}


def test_an_auc_is_not_about_few_people(tmp_path: Path) -> None:
    rows = table(400)
    for number, row in enumerate(rows[1:]):
        row[3] = "yes" if number < 30 else "no"  # a quarter of them are tested on
    worker = site(tmp_path, Consent((digest(text()),)))
    write(worker.folder / "rows.csv", rows)
    assert agreed(hello(worker, text()))
    built = worker.study.build(worker.examples)
    x, y = built.task.problem.start(__import__("jax").random.key(0))
    found = built.task.measured(x.tree, y.tree)
    assert np.isnan(found["auc"])
    assert np.isfinite(found["test_loss"])


@pytest.mark.parametrize(
    "name", ["../up", "/tmp/abs", "a/b", "", "..", ".hidden", "a\0b", "a" * 102, "c:\\x", "a\n", "\u202e"]
)
def test_names_of_runs_are_no_paths_anywhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(fb.FedbilevelError, match="not a valid name for a run"):
        check_run_name(name)
    worker = site(tmp_path, Consent((digest(text()),)))
    assert hello(worker, text(), name) == REFUSED
    assert not (worker.folder / "runs").exists()
    home = tmp_path / "hospitals"
    (home / "runs").mkdir(parents=True)
    project.save(project.Project("hospitals", "localhost", 8102, {"a": "site"}, ""), home)
    RunFolder(tmp_path / "up").enter("running")
    code, said = here("federation", "stop", "--federation", str(home), "--run", name, cwd=tmp_path)
    assert code == 2
    assert "not a valid name" in said
    assert RunFolder(tmp_path / "up").info()["status"] == "running"
