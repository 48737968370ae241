"""Data: files found, fetched and verified; sets read; partitions, noise, tables and pictures."""

import ast
import dataclasses
import hashlib
import io
import os
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

import fedbilevel as fb
from fedbilevel.data import formats, sets, sources
from helpers import REAL, real

GOOD = bytes(range(256)) * 4000  # about 1 MB: more than one chunk
QUICK = {"timeout": 0.5, "waits": (0.0, 0.0)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and no other folder."""
    monkeypatch.delenv("FEDBILEVEL_DATA", raising=False)
    monkeypatch.delenv("FEDBILEVEL_MIRROR", raising=False)
    monkeypatch.setenv("FEDBILEVEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Server(ThreadingHTTPServer):
    """Serves what the path asks for, well or badly; `asked` lists the paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.release = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The kinds of answers; the first folder of the path chooses."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        kind = self.path.split("/")[1]
        if kind == "missing" or (kind == "twice" and len(self.server.asked) <= 2):
            self.send_error(404 if kind == "missing" else 503)
            return
        body = {"wrong": GOOD[::-1], "long": GOOD + b"more"}.get(kind, GOOD)
        if kind == "files":
            body = (Path(REAL.split(os.pathsep)[0]) / self.path.removeprefix("/files/")).read_bytes()
        self.send_response(200)
        if kind != "quiet":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind in ("truncated", "quiet", "stalled"):
            self.wfile.write(body[: len(body) // 2])
            if kind == "stalled":
                self.wfile.flush()
                self.server.release.wait(10)
        elif kind == "slow":
            for start in range(0, len(body), 300_000):
                self.wfile.write(body[start : start + 300_000])
                self.wfile.flush()
                self.server.release.wait(0.2)
        else:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.release.set()
        running.shutdown()
        thread.join()


def source(server: Server, *kinds: str) -> fb.data.Source:
    addresses = tuple(f"{server.address}/{kind}/things.bin" for kind in kinds)
    return fb.data.Source("things", "things.bin", addresses, len(GOOD), hashlib.sha256(GOOD).hexdigest())


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


# Finding and fetching --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["good", "slow", "twice"])
def test_download_arrives_and_is_kept(kind: str, server: Server, cache: Path) -> None:
    path = fb.data.find(source(server, kind), **QUICK)
    assert path == cache / "things" / "things.bin"
    assert path.read_bytes() == GOOD
    assert files(cache) == ["things.bin"]
    asked = len(server.asked)
    assert asked == (3 if kind == "twice" else 1)
    assert fb.data.find(source(server, kind), **QUICK) == path
    assert len(server.asked) == asked  # from the cache


@pytest.mark.parametrize(
    ("kind", "tries", "reason"),
    [
        ("truncated", 3, "broke after 512000 of 1024000"),
        ("quiet", 3, "truncated"),
        ("stalled", 3, "no answer within 0.5 seconds"),
        ("wrong", 1, "not the expected file"),
        ("long", 1, "longer than 1024000"),
        ("missing", 1, "404"),
    ],
)
def test_bad_download_leaves_nothing(kind: str, tries: int, reason: str, server: Server, cache: Path) -> None:
    with pytest.raises(fb.FedbilevelError, match=reason) as caught:
        fb.data.find(source(server, kind), **QUICK)
    assert len(server.asked) == tries
    assert files(cache) == []
    message = str(caught.value)
    for part in ("things.bin", str(cache / "things"), hashlib.sha256(GOOD).hexdigest(), "FEDBILEVEL_DATA"):
        assert part in message


def test_next_address_and_mirror(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fb.data.find(source(server, "missing", "wrong", "good"), **QUICK)
    assert [asked.split("/")[1] for asked in server.asked] == ["missing", "wrong", "good"]
    path.unlink()
    monkeypatch.setenv("FEDBILEVEL_MIRROR", server.address + "/good/")
    fb.data.find(source(server, "missing"), **QUICK)
    assert server.asked[-1] == "/good/things/things.bin"


def test_offline_is_one_sentence(cache: Path) -> None:
    with Server() as closed:
        there = source(closed, "good")
    with pytest.raises(fb.FedbilevelError, match="refused") as caught:
        fb.data.find(there, **QUICK)
    assert str(cache / "things") in str(caught.value)
    assert "sha256" in str(caught.value)


def test_folders_come_before_the_cache(
    server: Server, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = source(server, "good")
    cached = fb.data.find(wanted, **QUICK)
    second = tmp_path / "second" / "things"
    second.mkdir(parents=True)
    (tmp_path / "first").mkdir()
    (second / "things.bin").write_bytes(GOOD)
    monkeypatch.setenv("FEDBILEVEL_DATA", os.pathsep.join([str(tmp_path / "first"), str(tmp_path / "second")]))
    assert fb.data.find(wanted) == second / "things.bin" != cached
    (second / "things.bin").write_bytes(GOOD[:-1])
    with pytest.raises(fb.FedbilevelError, match=r"second/things/things\.bin is truncated \(1023999 bytes"):
        fb.data.find(wanted)
    (second / "things.bin").write_bytes(GOOD[:-1] + b"x")
    with pytest.raises(fb.FedbilevelError, match=r"second/things/things\.bin is not the expected file"):
        fb.data.find(wanted)
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(fb.FedbilevelError, match="nowhere, which is not a folder"):
        fb.data.find(wanted)


def test_cache_that_cannot_be_written(server: Server, cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(fb.FedbilevelError, match="cannot be written"):
        fb.data.find(source(server, "good"), **QUICK)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_for_terminals(
    terminal: bool, server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))  # rich looks at this
    monkeypatch.setattr(sources.sys.stdout, "isatty", lambda: terminal)
    fb.data.find(source(server, "good"), **QUICK)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("things.bin" in shown.err) == terminal


def test_data_imports_neither_engines_nor_tasks() -> None:
    for path in Path(sets.__file__).parent.glob("*.py"):
        modules = [node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        ours = [name for name in modules if name and name.startswith("fedbilevel")]
        assert all(name.startswith(("fedbilevel.data", "fedbilevel.errors")) for name in ours)


def test_cache_folder_of_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDBILEVEL_CACHE", raising=False)
    monkeypatch.setattr(sources.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fb.data.cache_folder() == tmp_path / "fedbilevel"
    monkeypatch.setattr(sources.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert fb.data.cache_folder() == tmp_path / "local" / "fedbilevel"
    monkeypatch.setattr(sources.sys, "platform", "darwin")
    assert fb.data.cache_folder().parts[-3:] == ("Library", "Caches", "fedbilevel")


# Formats ---------------------------------------------------------------------------------------------------------


def zipped(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def png(size: int = 105) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.eye(size, dtype=bool)).save(file, "PNG")
    return file.getvalue()


def test_repacked_archives_are_known_by_their_contents(cache: Path, tmp_path: Path) -> None:
    entries = {f"images/Greek/character0{c}/000{c}_0{d}.png": png() for c in (1, 2) for d in (1, 2)}
    first = zipped(tmp_path / "first.zip", entries)
    holds = formats.omniglot_contents(first)
    assert holds[:3] == (1, 2, 4)
    place = cache / "omniglot" / "some.zip"
    place.parent.mkdir(parents=True)
    zipped(place, dict(reversed(entries.items())) | {"images/README": b"passed over"})
    wanted = fb.data.Source(
        "omniglot", "some.zip", md5="0" * 32, contents=formats.omniglot_contents, holds=holds
    )  # fmt: skip
    assert fb.data.find(wanted) == place
    zipped(place, dict(list(entries.items())[1:]))
    with pytest.raises(fb.FedbilevelError, match=r"some\.zip is not the expected archive .*3 drawings"):
        fb.data.find(wanted)
    place.write_bytes(first.read_bytes()[:-100])
    with pytest.raises(fb.FedbilevelError, match=r"some\.zip cannot be read"):
        fb.data.find(wanted)


@pytest.mark.parametrize("name", ["../evil.png", "/evil.png", "images/../../x/character01/1_1.png"])
def test_entries_that_lead_out_of_an_archive_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(fb.FedbilevelError, match="points out of the archive"):
        formats.omniglot_contents(zipped(tmp_path / "evil.zip", {name: png()}))


def test_drawings_must_be_drawings(tmp_path: Path) -> None:
    for content, reason in ((png(50), "not 105 x 105"), (b"no picture", "cannot be read")):
        drawing = formats.Drawing("Greek", "character01", "0001_01.png", content)
        with pytest.raises(fb.FedbilevelError, match=reason):
            formats.decode_drawing(drawing, tmp_path / "some.zip", 28)
    whole = formats.decode_drawing(formats.Drawing("Greek", "character01", "0001_01.png", png()), tmp_path, 105)
    np.testing.assert_array_equal(whole, np.eye(105) * 255)


@pytest.mark.parametrize("content", [b"", b"\x1f\x8bnothing", b"plain"])
def test_broken_idx_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "some-idx.gz"
    path.write_bytes(content)
    with pytest.raises(fb.FedbilevelError, match=r"some-idx\.gz cannot be read"):
        formats.read_idx(path)


def test_cifar_records() -> None:
    record = bytes([3]) + bytes([10] * 1024 + [20] * 1024 + [30] * 1024)
    images, labels = formats.decode_cifar(record * 2, Path("batch"))
    assert images.shape == (2, 32, 32, 3)
    assert images[1, 5, 7].tolist() == [10, 20, 30]
    assert labels.tolist() == [3, 3]
    for raw in (record[:-1], b"\x0a" + record[1:], b""):
        with pytest.raises(fb.FedbilevelError, match="batch cannot be read"):
            formats.decode_cifar(raw, Path("batch"))


def test_cifar_10_from_its_archive(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole set is read out of the published archive; here with batches of one picture."""
    place = cache / "cifar-10-batches-bin" / "cifar-10-binary.tar.gz"
    place.parent.mkdir(parents=True)
    with tarfile.open(place, "w:gz") as archive:
        for label, batch in enumerate(sets.CIFAR_BATCHES):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{batch.name}")
            member.size = formats.CIFAR_RECORD
            archive.addfile(member, io.BytesIO(bytes([label]) + bytes(3072)))
    content = place.read_bytes()
    small = dataclasses.replace(
        sets.CIFAR_ARCHIVE, size=len(content), sha256=hashlib.sha256(content).hexdigest(), md5=None
    )
    monkeypatch.setattr(sets, "CIFAR_ARCHIVE", small)
    data = fb.data.load("cifar-10")
    assert data.test is not None
    assert data.train.labels.tolist() == [0, 1, 2, 3, 4]
    assert data.test.labels.tolist() == [5]
    assert files(cache) == ["cifar-10-binary.tar.gz"]  # nothing is unpacked
    with pytest.raises(fb.FedbilevelError, match="other is not in it"):
        formats.read_tar(place, ["other"])
    place.write_bytes(content[:-50])
    with pytest.raises(fb.FedbilevelError, match=r"cifar-10-binary\.tar\.gz cannot be read"):
        formats.read_tar(place, ["data_batch_1.bin", "test_batch.bin"])


def test_rows_of_a_wrong_length_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.data"
    path.write_text("|a comment\n1, 2\n\n3\n")
    with pytest.raises(fb.FedbilevelError, match=r"rows\.data cannot be read \(row 2 has 1 columns, not 2\)"):
        formats.read_rows(path, 2)


# Sets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), [("digits", (1797, 8, 8)), ("breast-cancer", (569, 30))])
def test_sets_of_scikit_learn(name: str, shape: tuple[int, ...]) -> None:
    data = fb.data.load(name)
    assert data.train.inputs.shape == shape
    assert data.train.inputs.dtype == (np.uint8 if name == "digits" else np.float32)
    assert data.train.labels.dtype == np.int32
    assert data.test is None
    assert set(data.train.labels) == set(range(len(data.classes)))
    with pytest.raises(ValueError, match="read-only"):
        data.train.inputs[0] = 0


def test_unknown_set_suggests_one() -> None:
    with pytest.raises(fb.FedbilevelError, match="did you mean 'mnist'"):
        fb.data.load("mnits")


@pytest.mark.parametrize("layout", ["{label}", "images/{label}", "images"])
def test_mini_imagenet(layout: str, cache: Path) -> None:
    root = cache / "mini-imagenet"
    root.mkdir(parents=True)
    with pytest.raises(fb.FedbilevelError, match="no public address"):
        fb.data.load("mini-imagenet")
    colours = {"n01": (250, 0, 0), "n02": (0, 250, 0), "n03": (0, 0, 250), "n04": (90, 90, 90)}
    for part, labels in {"train": ["n01", "n02"], "val": ["n03"], "test": ["n04"]}.items():
        rows = ["filename,label"]
        for label in labels:
            folder = root / layout.format(label=label)
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(3):
                Image.new("RGB", (120, 100), colours[label]).save(folder / f"{label}0000{i}.png")
                rows.append(f"{label}0000{i}.png,{label}")
        (root / f"{part}.csv").write_text("\n".join(rows))
    data = fb.data.load("mini-imagenet")
    assert data.validation is not None
    assert data.test is not None
    assert data.train.inputs.shape == (6, 84, 84, 3)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.validation.labels.tolist() == [2, 2, 2]
    assert data.test.labels.tolist() == [3, 3, 3]
    assert data.classes == tuple(colours)
    assert data.train.inputs[3, 40, 40].tolist() == [0, 250, 0]
    broken = root / layout.format(label="n04") / "n0400001.png"
    for content, reason in ((b"no picture", "cannot be read"), (None, "is missing")):
        broken.write_bytes(content) if content else broken.unlink()
        with pytest.raises(fb.FedbilevelError, match=rf"n0400001\.png {reason}"):
            fb.data.load("mini-imagenet")
    for row, reason in (("../n04.png,n04", "not a plain file name"), ("n0100000.png,n01", "another part")):
        (root / "test.csv").write_text(f"filename,label\n{row}\n")
        with pytest.raises(fb.FedbilevelError, match=reason):
            fb.data.load("mini-imagenet")


def test_scaling_learns_from_training_rows_only() -> None:
    rows = np.array([[1.0, np.nan, 5.0, np.nan], [3.0, 2.0, 5.0, np.nan], [np.nan, 4.0, 5.0, np.nan]])
    scaling = fb.data.Scaling.fit(rows)
    scaled = scaling(rows)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(scaled.std(0), [1, 1, 0, 0], atol=1e-6)
    assert scaling(np.array([[2.0, 3.0, 7.0, 9.0]])).tolist() == [[0, 0, 0, 0]]


def test_rotations_are_new_classes() -> None:
    data = fb.data.digits()
    turned = fb.data.rotated(data)
    assert len(turned.train.labels) == 4 * 1797
    assert len(turned.classes) == 40
    np.testing.assert_array_equal(turned.train.inputs[1797], np.rot90(data.train.inputs[0]))
    assert turned.train.labels[1797] == data.train.labels[0] + 10


@real
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist(name: str) -> None:
    data = fb.data.load(name)
    assert data.test is not None
    assert data.train.inputs.shape == (60000, 28, 28)
    assert data.test.inputs.shape == (10000, 28, 28)
    assert data.train.inputs.dtype == np.uint8
    assert data.train.inputs.nbytes == 47_040_000
    counts = np.bincount(data.train.labels).tolist()
    if name == "mnist":
        assert data.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
        assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert np.bincount(data.test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
        parts = fb.data.shards(data.train.labels, 100, seed=0)
        assert {len(part) for part in parts} == {600}
        assert max((row > 0).sum() for row in fb.data.counts(parts, data.train.labels)) <= 4
    else:
        assert counts == [6000] * 10
        assert data.classes[data.train.labels[0]] == "ankle boot"


@real
def test_cifar_10_in_part(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDBILEVEL_DATA", REAL)
    data = fb.data.load("cifar-10", part=True)
    assert data.test is not None
    assert len(data.train.labels) % 10_000 == 0
    assert data.test.inputs.shape == (10_000, 32, 32, 3)
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    assert data.train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    if len(data.train.labels) < 50_000:
        with Server() as closed:
            monkeypatch.setenv("FEDBILEVEL_MIRROR", closed.address)
        monkeypatch.setattr(sets, "find", lambda file: sources.find(file, **QUICK))
        with pytest.raises(fb.FedbilevelError, match=r"data_batch_2\.bin, .* are not there, .*part=True"):
            fb.data.load("cifar-10")
    monkeypatch.delenv("FEDBILEVEL_DATA")
    with pytest.raises(fb.FedbilevelError, match="at least one of data_batch_1"):
        fb.data.load("cifar-10", part=True)


@real
def test_omniglot() -> None:
    data = fb.data.load("omniglot")
    assert data.test is not None
    assert data.train.inputs.shape == (964 * 20, 28, 28)
    assert data.test.inputs.shape == (659 * 20, 28, 28)
    assert len(data.classes) == 1623
    assert (np.bincount(np.concatenate([data.train.labels, data.test.labels])) == 20).all()
    assert len(data.groups["alphabet"]) == 50
    assert set(data.train.groups["alphabet"]) == set(range(30))
    assert set(data.test.groups["alphabet"]) == set(range(30, 50))
    assert data.classes[0] == "Alphabet_of_the_Magi/character01"
    parts = fb.data.natural(data.train.groups["alphabet"], clients=11, seed=0)
    owners = [set(data.train.groups["alphabet"][part]) for part in parts]
    assert sorted(alphabet for own in owners for alphabet in own) == list(range(30))
    assert np.median(data.train.inputs) == 255  # paper is white


@real
def test_heart_disease() -> None:
    data = fb.data.load("heart-disease")
    parts = fb.data.natural(data.train.groups["hospital"])
    assert [len(part) for part in parts] == [303, 294, 123, 200]
    assert [int(data.train.labels[part].sum()) for part in parts] == [139, 106, 115, 149]
    assert data.train.inputs.shape == (920, len(data.features))
    assert data.train.inputs.dtype == np.float32
    chol = data.features.index("chol")
    assert np.isnan(data.train.inputs[parts[2], chol]).all()
    assert (fb.data.heart_disease(impossible_is_missing=False).train.inputs[parts[2], chol] == 0).all()
    assert np.isfinite(fb.data.Scaling.fit(data.train.inputs[parts[1]])(data.train.inputs)).all()


@real
def test_adult() -> None:
    data = fb.data.load("adult")
    assert data.test is not None
    assert (len(data.train.labels), len(data.test.labels)) == (32561, 16281)
    assert (int(data.train.labels.sum()), int(data.test.labels.sum())) == (7841, 3846)
    assert data.train.inputs.shape[1] == data.test.inputs.shape[1] == len(data.features)
    assert not any(feature.startswith(("sex", "race")) for feature in data.features)
    assert data.groups["sex"] == ("Female", "Male")
    assert np.bincount(data.train.groups["sex"]).tolist() == [10771, 21790]
    words = [i for i, feature in enumerate(data.features) if feature.startswith("workclass=")]
    assert (data.train.inputs[:, words].sum(1) == 1).all()
    assert data.train.inputs[:, data.features.index("workclass=?")].sum() == 1836


@real
def test_sets_come_from_a_mirror(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBILEVEL_MIRROR", server.address + "/files")
    assert len(fb.data.load("heart-disease").train.labels) == 920
    assert len(files(cache)) == len(server.asked) == 4


# Partitions ------------------------------------------------------------------------------------------------------

PARTITIONS: dict[str, Callable[..., list[np.ndarray]]] = {
    "iid": fb.data.iid,
    "shards": fb.data.shards,
    "three shards": lambda labels, clients, seed: fb.data.shards(labels, clients, seed, per_client=3),
    "dirichlet": lambda labels, clients, seed: fb.data.dirichlet(labels, clients, seed, alpha=1.0),
    "by class": lambda labels, clients, seed: fb.data.by_class(labels, clients + 3, seed),
    "natural": lambda labels, clients, seed: fb.data.natural(labels),
    "dealt": lambda labels, clients, seed: fb.data.natural(labels, min(clients, 4), seed),
}


@pytest.mark.parametrize("name", sorted(PARTITIONS))
@given(samples=st.integers(40, 200), clients=st.integers(1, 7), seed=st.integers(0, 1000))
def test_every_sample_goes_to_one_client(name: str, samples: int, clients: int, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.arange(samples) % 4)
    parts = PARTITIONS[name](labels, clients, seed)
    assert all(len(part) for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    again = PARTITIONS[name](labels, clients, np.random.default_rng(seed))
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    if samples // len(parts) >= 4 and min(map(len, parts)) >= 4:
        train, validation = fb.data.split(parts, (0.75, 0.25), seed)
        joined = [np.sort(np.concatenate(pair)) for pair in zip(train, validation, strict=True)]
        assert all((a == b).all() for a, b in zip(parts, joined, strict=True))


def test_shapes_of_partitions() -> None:
    labels = np.repeat(np.arange(10), 100)
    assert {len(part) for part in fb.data.iid(labels, 30, 0)} == {33, 34}
    own = fb.data.counts(fb.data.shards(labels, 10, 0), labels)
    assert (own.sum(1) == 100).all()
    assert ((own > 0).sum(1) <= 2).all()
    single = fb.data.counts(fb.data.by_class(labels, 20, 0), labels)
    assert (single == 50 * np.tile(np.eye(10), (2, 1))).all()
    even = fb.data.counts(fb.data.dirichlet(labels, 5, 0, alpha=1e6), labels)
    assert (abs(even - 20) <= 1).all()
    skewed = fb.data.counts(fb.data.dirichlet(labels, 5, 0, alpha=0.05, smallest=20), labels)
    assert skewed.sum(1).min() >= 20
    assert (skewed.max(0) > 90).mean() > 0.5  # most classes belong to one client


@pytest.mark.parametrize(
    "call",
    [
        lambda labels: fb.data.iid(labels, 0, 0),
        lambda labels: fb.data.iid(labels, 41, 0),
        lambda labels: fb.data.shards(labels, 21, 0),
        lambda labels: fb.data.shards(labels, 2, 0, per_client=0),
        lambda labels: fb.data.dirichlet(labels, 4, 0, alpha=0.0),
        lambda labels: fb.data.dirichlet(labels, 4, 0, alpha=0.01, smallest=11),
        lambda labels: fb.data.dirichlet(labels, 9, 0, alpha=0.01, draws=2),
        lambda labels: fb.data.by_class(labels, 3, 0),
        lambda labels: fb.data.by_class(labels[:5], 5 + 4, 0),
        lambda labels: fb.data.natural(labels, 5),
        lambda labels: fb.data.split([labels[:1]], (0.5, 0.5), 0),
        lambda labels: fb.data.split([labels], (0.5, 0.6), 0),
        lambda labels: fb.data.corrupt(labels, 1.5, 4, 0),
        lambda labels: fb.data.corrupt(labels, 0.5, 3, 0),
        lambda labels: fb.data.corrupt(labels, 0.5, 4, 0, reading="odd"),
        lambda labels: fb.data.long_tail(labels, 0.0, 0),
        lambda labels: fb.data.counts([labels], labels, 2),
    ],
)
def test_what_cannot_be_is_a_sentence(call: Callable[[np.ndarray], object]) -> None:
    with pytest.raises(fb.FedbilevelError, match=r"\.$"):
        call(np.arange(40) % 4)


# Noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.95, 1.0])
def test_corruption_in_both_readings(share: float) -> None:
    labels = (np.arange(20_000) % 10).astype(np.int32)
    drawn = round(share * len(labels))
    given, wrong = fb.data.corrupt(labels, share, 10, seed=3)
    assert wrong.sum() == drawn
    given_any, wrong_any = fb.data.corrupt(labels, share, 10, seed=3, reading="uniform")
    # Every draw is right by chance one time in ten: a binomial number, here within four deviations.
    assert abs(wrong_any.sum() - 0.9 * drawn) <= 4 * np.sqrt(drawn * 0.09)
    for new, differs in ((given, wrong), (given_any, wrong_any)):
        assert new.dtype == labels.dtype
        assert ((new != labels) == differs).all()
        assert new.min() >= 0
        assert new.max() <= 9
    if share == 0.95:
        # Of the true zeros: the right label is the rarest under "wrong", the most frequent under "uniform".
        assert np.bincount(given[labels == 0]).argmin() == 0
        assert np.bincount(given_any[labels == 0]).argmax() == 0


def test_corruption_draws_as_the_first_release_did() -> None:
    labels, rng = np.arange(100) % 10, np.random.default_rng(7)
    wrong = np.zeros(100, bool)
    wrong[rng.choice(100, 40, replace=False)] = True
    expected = np.where(wrong, (labels + rng.integers(1, 10, 100)) % 10, labels)
    np.testing.assert_array_equal(fb.data.corrupt(labels, 0.4, 10, seed=7)[0], expected)


def test_long_tail() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 1000))
    kept = fb.data.long_tail(labels, 0.01, seed=0)
    assert (np.diff(kept) > 0).all()
    assert np.bincount(labels[kept]).tolist() == [round(1000 * 0.01 ** (i / 9)) for i in range(10)]
    assert np.bincount(labels[kept])[[0, 9]].tolist() == [1000, 10]


# Tables and pictures ---------------------------------------------------------------------------------------------


def printed(table: object) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_describe_and_heat_map(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(10), 100)
    parts = fb.data.shards(labels, 25, seed=0)
    text = printed(fb.data.describe(parts, labels))
    assert text.split("\n")[1].split()[-1] == "9"  # the last class has its column
    assert "25 clients, 1000 samples: 40 to 40 each, median 40" in text
    assert "+5" in text
    large = np.repeat(np.arange(10), 9000)
    text = printed(fb.data.describe(fb.data.iid(large, 2, 0), large, [f"name {k}" for k in range(10)]))
    assert "…" not in text
    assert "45000" in text
    assert text.split("\n")[-2].count("4") >= 10  # no column is dropped: every class has about 4500
    assert len(text.split("\n")[-2].split()) == 13
    many = np.arange(200) % 50
    text = printed(fb.data.describe(fb.data.iid(many, 2, 0), many, [f"kind {k}" for k in range(50)]))
    assert "most frequent" in text
    assert "kind " in text
    path = fb.data.heat_map(parts, labels, tmp_path / "who.png", [f"class {k}" for k in range(10)])
    with Image.open(path) as picture:
        assert min(picture.size) > 200
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10
