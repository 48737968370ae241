"""Sites that say what cannot be, and files that are much larger than they look: nobody else is harmed."""

import io
import json
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import fedbilevel as fb
from fedbilevel.data import table_files
from fedbilevel.data.table_files import read_table
from fedbilevel.engines.messaging.post import Post
from fedbilevel.engines.messaging.protocol import Done, Echo, Failed, pack
from fedbilevel.federation import schema
from fedbilevel.federation.engine import Federation
from fedbilevel.federation.rows import load
from fedbilevel.federation.study import Study, site_weights, sums
from fedbilevel.storage.arrays import decode, encode
from fedbilevel.tasks.sites import together
from fuzzed import IMAGES, SCHEMA, Sites, cloned, table, write

Facts = dict[str, np.ndarray]


def study(**more: Any) -> Study:
    return Study.of(tomli_w.dumps({"task": {"name": "regularization"}, "schema": SCHEMA, **more}))


def honest(wanted: Study, folder: Path, count: int = 200) -> tuple[int, Facts]:
    assert wanted.schema is not None
    examples = load(str(write(folder / "a.csv", table(count))), wanted.schema, {}, "north")
    built = wanted.build(examples)
    return int(built.task.layout.longest[0]), dict(wanted.summarize(examples))


def put(name: str, place: int, value: float) -> Callable[[Facts], Facts]:
    def change(facts: Facts) -> Facts:
        array = facts[name].copy()
        array[place] = value
        return {**facts, name: array}

    return change


LIES: list[Callable[[Facts], Facts]] = [
    put("sum count", 0, -1),
    put("sum count", 0, 10**9),
    put("sum values", 0, 1e30),
    put("sum values", 0, -1.0),  # ages are at least 0
    put("sum values", 1, 10**6),  # of 0 and 1
    put("sum squares", 0, 1e30),
    put("sum squares", 0, -1.0),
    put("sum squares", 0, 1.0),  # less than the sum allows
    put("sum values", 0, np.nan),
    put("sum squares", 0, np.inf),
    lambda facts: {**facts, "sum values": facts["sum values"][:-1]},
    lambda facts: {**facts, "sum values": facts["sum values"].astype(np.float32)},
    lambda facts: {**facts, "sum values": np.stack([facts["sum values"]] * 2)},
    lambda facts: {**facts, "more": np.zeros(3)},
    lambda facts: {name: array for name, array in facts.items() if name != "sum count"},
]


@pytest.mark.parametrize("lie", LIES)
def test_sums_that_cannot_be_are_refused(tmp_path: Path, lie: Callable[[Facts], Facts]) -> None:
    rows, facts = honest(wanted := study(), tmp_path)
    wanted.check_facts(rows, facts)
    with pytest.raises(fb.FedbilevelError, match=r"impossible for|unexpected names, types or shapes|NaN or infinite"):
        wanted.check_facts(rows, lie(facts))


@pytest.mark.parametrize("rows", [0, -5, 10**7, 10**18, 10**400, 1.5, True, None, "100"])
def test_numbers_of_rows_that_cannot_be_are_refused(tmp_path: Path, rows: Any) -> None:
    _, facts = honest(wanted := study(), tmp_path)
    with pytest.raises(fb.FedbilevelError, match="whole number from 1 to 1000000"):
        wanted.check_facts(rows, facts)
    with pytest.raises(fb.FedbilevelError, match="whole number from 1 to 50"):
        study(federation={"largest_site": 50}).check_facts(51, facts)


@pytest.mark.parametrize(
    "task", ["data-cleaning", "loss-tuning", "fairness", "client-weighting", "hyper-representation", "label-errors"]
)
def test_every_task_knows_what_can_be(tmp_path: Path, task: str) -> None:
    rows, facts = honest(wanted := study(task={"name": task}), tmp_path)
    wanted.check_facts(rows, facts)
    for name, array in facts.items():
        for value in (-1, 10**15):
            with pytest.raises(fb.FedbilevelError, match="impossible for"):
                wanted.check_facts(rows, {**facts, name: np.full_like(array, value)})


def test_images_have_all_their_pixels(tmp_path: Path) -> None:
    wanted = study(task={"name": "fairness"}, schema={**IMAGES, "group": {"column": "g", "values": [0, 1]}})
    blank = schema.blank(wanted.schema)  # pyright: ignore[reportArgumentType]
    facts = dict(wanted.summarize(blank))
    rows = int(facts["sum count"]) // 30
    wanted.check_facts(rows, facts)
    for count in (0, rows * 30 - 1, rows * 30 + 1, 10**17):
        with pytest.raises(fb.FedbilevelError, match="'sum count' is impossible"):
            wanted.check_facts(rows, {**facts, "sum count": np.array(count)})


def test_no_site_outweighs_the_others_by_what_it_says(tmp_path: Path) -> None:
    """In weights by size, and in the sums from which everybody standardises; of two sites, too."""
    wanted = study(federation={"weights": "size"})
    assert site_weights(np.array([100, 10**6]), wanted.rules) == pytest.approx([1 / 11, 10 / 11])
    capped = study(federation={"weights": "size", "most_rows": 100})
    assert site_weights(np.array([100, 10**6]), capped.rules) == pytest.approx([0.5, 0.5])
    rows, facts = honest(wanted, tmp_path)
    factor = 10**6 // rows
    lying = {name: np.asarray(array * factor).astype(array.dtype) for name, array in facts.items()}
    lying["sum values"] = lying["sum count"] * 1.0
    lying["sum squares"] = lying["sum count"] * 1.0  # everybody is one year old
    wanted.check_facts(rows * factor, lying)  # it could be
    everybody = sums([facts, lying], np.array([rows, rows * factor]), wanted.rules)
    mean = everybody["sum values"][0] / everybody["sum count"][0]
    own = facts["sum values"][0] / facts["sum count"][0]
    assert mean == pytest.approx((own + 10) / 11, rel=0.02)
    assert everybody["sum count"].dtype == facts["sum count"].dtype
    same = sums([facts, facts], np.array([rows, rows]), wanted.rules)
    for name, array in together([facts, facts]).items():
        np.testing.assert_array_equal(same[name], array)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sites, Federation, Any]:
    sites = Sites(tmp_path_factory.mktemp("sites"), {"name": "regularization"})
    sites.recording = False
    return (sites, *sites.set_up())


UPLOADS: dict[str, Callable[[bytes], bytes]] = {
    "larger than the plan": lambda answer: pack(Done(), {"0": np.zeros(100_000)}),
    "not finite": lambda answer: encode({**decode(answer)[0], "finite": False}, decode(answer)[1]),
    "NaN": lambda answer: encode(decode(answer)[0], {k: a * np.nan for k, a in decode(answer)[1].items()}),
    "another type": lambda answer: encode(decode(answer)[0], {k: a.astype("f2") for k, a in decode(answer)[1].items()}),
    "another shape": lambda answer: encode(decode(answer)[0], {k: a[None] for k, a in decode(answer)[1].items()}),
    "nothing": lambda answer: pack(Done(), {}),
    "nonsense": lambda answer: b"nonsense",
    "another answer": lambda answer: encode({"action": "facts", "rows": 3}, {}),
    "a question": lambda answer: pack(Echo(), {}),
    "deeply nested": lambda answer: nested(),
    "a long error": lambda answer: pack(Failed("\x1b[2J" + "x" * 100_000), {}),
}


def nested() -> bytes:
    text = json.dumps({"action": "done"})[:-1] + ', "finite": ' + "[" * 100_000
    head = json.dumps({"__metadata__": {"header": f"{zlib.crc32(text.encode()):08x} {text}"}}).encode()
    return struct.pack("<Q", len(head)) + head


@pytest.mark.parametrize("upload", UPLOADS)
def test_a_wrong_upload_is_the_failure_of_that_site_alone(
    federation: tuple[Sites, Federation, Any], upload: str
) -> None:
    sites, engine, state = federation
    engine.failures.clear()
    sites.change = lambda kind, answer: UPLOADS[upload](answer) if kind.startswith("run") else answer
    after = engine.advance(state, 1)
    assert after.finite
    assert {failure.client for failure in engine.failures} == {0}
    assert all(len(f.reason) <= 600 and f.reason.isprintable() for f in engine.failures)
    sites.change = lambda kind, answer: UPLOADS[upload](answer) if kind == "evaluate" else answer
    found = engine.metrics(after)
    assert {"auc_east", "auc_south"} <= found.keys()
    assert {"round", "seconds", "0", "rows"}.isdisjoint(found)
    sites.change = lambda kind, answer: UPLOADS[upload](answer) if kind in ("commit", "finish") else answer
    before = [cloned(worker) for worker in sites.workers]
    assert set(engine.finish(engine.advance(after, 1))) <= {"north"}
    sites.change = lambda kind, answer: answer
    sites.workers[:] = before  # the end of a run is the end for a worker
    engine.advance(after, 1)


def test_a_mean_is_not_overwritten_by_a_site_of_its_name(federation: tuple[Sites, Federation, Any]) -> None:
    sites, engine, state = federation
    engine.metric_names = frozenset(["auc", "auc_north"])
    sites.change = lambda kind, answer: (
        encode(decode(answer)[0], {"auc": np.array(0.25), "auc_north": np.array(0.5)}) if kind == "evaluate" else answer
    )
    try:
        assert engine.metrics(state)["auc_north"] == 0.5
    finally:
        engine.metric_names, sites.change = frozenset(["auc", "test_loss"]), lambda kind, answer: answer


def test_headers_and_texts_of_messages_have_bounds() -> None:
    long = encode({"action": "failed", "error": "x" * (5 << 20)}, {})
    answer = Post(type("One", (), {"ask": lambda self, messages, kind: dict.fromkeys(messages, long)})()).ask(
        {0: (Echo(), {})}, most=1 << 30
    )[0][0]
    assert isinstance(answer, Failed)
    assert "its header has" in answer.error
    strange = encode({"action": "done", "\x1b" * 1000: 1, **{f"f{n}": 1 for n in range(1000)}}, {})
    answer = Post(type("One", (), {"ask": lambda self, messages, kind: dict.fromkeys(messages, strange)})()).ask(
        {0: (Echo(), {})}
    )[0][0]
    assert isinstance(answer, Failed)
    assert len(answer.error) < 300


def _memory(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def bomb(shape: tuple[int, ...], kind: str, size: int) -> bytes:
    """An archive with one array that claims a shape, and holds zeros."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": kind, "fortran_order": False, "shape": shape})
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file, file.open("a.npy", "w", force_zip64=True) as member:
        member.write(head.getvalue())
        for _ in range(size >> 20):
            member.write(bytes(1 << 20))
    return out.getvalue()


@pytest.mark.parametrize(
    ("shape", "size"), [((10**12,), 1 << 20), ((2**62, 2**62), 1 << 20), ((-5,), 1 << 20), ((200 << 17,), 200 << 20)]
)
def test_archives_that_claim_or_hold_too_much_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], size: int
) -> None:
    monkeypatch.setattr(table_files, "LARGEST", 100 << 20)
    (tmp_path / "a.npz").write_bytes(bomb(shape, "<f8", size))

    def read() -> None:
        with pytest.raises(fb.FedbilevelError, match=r"bytes long|GB in memory|cannot be read"):
            read_table(str(tmp_path / "a.npz")).read(["a"])

    assert _memory(read) < 50 << 20


def test_a_table_that_claims_very_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of one value takes no room in the file."""
    monkeypatch.setattr(table_files, "LARGEST", 100 << 20)
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    chunk = pyarrow.table({"a": pyarrow.array(np.zeros(10**6)).dictionary_encode()})
    with parquet.ParquetWriter(tmp_path / "a.parquet", chunk.schema) as file:
        for _ in range(20):
            file.write_table(chunk, row_group_size=10**6)

    def read() -> None:
        with pytest.raises(fb.FedbilevelError, match="GB in memory"):
            read_table(str(tmp_path / "a.parquet")).read(["a"])

    assert _memory(read) < 50 << 20


def test_an_image_that_claims_ten_billion_pixels_is_refused(tmp_path: Path) -> None:
    from PIL import Image

    wanted = schema.read({"label": {"column": "label", "values": ["cat", "dog"]}, "image": {"shape": [4, 4]}})
    for kind in ("cat", "dog"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "pets" / kind / "a.png")
    data = bytearray((tmp_path / "pets" / "cat" / "a.png").read_bytes())
    data[16:24] = struct.pack(">II", 10**5, 10**5)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (tmp_path / "pets" / "cat" / "a.png").write_bytes(data)

    def read() -> None:
        with pytest.raises(fb.FedbilevelError, match=r"has \(100000, 100000\) pixels|Image size \(10000000000"):
            load(str(tmp_path / "pets"), wanted, {}, "north")

    assert _memory(read) < 50 << 20


@pytest.mark.parametrize(
    "asked",
    [
        {"label": {"column": "a", "values": list(range(5000))}, "image": {"shape": [10_000, 10_000]}},
        {
            "label": {"column": "a", "values": list(range(5000))},
            "group": {"column": "g", "values": list(range(5000))},
            "features": {"b": {}},
        },
    ],
)
def test_a_schema_whose_blank_rows_would_fill_the_memory_is_refused(asked: dict[str, Any]) -> None:
    def read() -> None:
        with pytest.raises(fb.FedbilevelError, match="too large"):
            schema.blank(schema.read(asked))

    assert _memory(read) < 50 << 20
