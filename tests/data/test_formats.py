"""File formats: what is broken or strange is named, nothing is unpacked."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedbilevel as fb
from fedbilevel.data import formats


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
    with pytest.raises(fb.FedbilevelError, match="points outside the archive"):
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


def test_rows_of_a_wrong_length_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.data"
    path.write_text("|a comment\n1, 2\n\n3\n")
    with pytest.raises(fb.FedbilevelError, match=r"rows\.data cannot be read \(row 2 has 1 columns, not 2\)"):
        formats.read_rows(path, 2)
