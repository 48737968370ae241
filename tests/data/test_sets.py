"""The data sets: what each one holds."""

import ast
import dataclasses
import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedbilevel as fb
from fedbilevel.data import formats, pictures, sources
from helpers import REAL, real
from serving import QUICK, Server, files


def test_data_imports_neither_engines_nor_tasks() -> None:
    for path in Path(formats.__file__).parent.glob("*.py"):
        modules = [node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        ours = [name for name in modules if name and name.startswith("fedbilevel")]
        assert all(name.startswith(("fedbilevel.cache", "fedbilevel.data", "fedbilevel.errors")) for name in ours)


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
    for row, reason in (("../n04.png,n04", "must have a plain file name"), ("n0100000.png,n01", "another part")):
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


def test_cifar_10_from_its_archive(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole set is read out of the published archive; here with batches of one picture."""
    place = cache / "cifar-10-batches-bin" / "cifar-10-binary.tar.gz"
    place.parent.mkdir(parents=True)
    with tarfile.open(place, "w:gz") as archive:
        for label, batch in enumerate(pictures.CIFAR_BATCHES):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{batch.name}")
            member.size = formats.CIFAR_RECORD
            archive.addfile(member, io.BytesIO(bytes([label]) + bytes(3072)))
    content = place.read_bytes()
    small = dataclasses.replace(
        pictures.CIFAR_ARCHIVE, size=len(content), sha256=hashlib.sha256(content).hexdigest(), md5=None
    )
    monkeypatch.setattr(pictures, "CIFAR_ARCHIVE", small)
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
        monkeypatch.setattr(pictures, "find", lambda file: sources.find(file, **QUICK))
        with pytest.raises(fb.FedbilevelError, match=r"data_batch_2\.bin, .* are missing, .*part=True"):
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
