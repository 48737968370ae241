"""Images with many classes of few samples, for few-shot learning: Omniglot and mini-ImageNet."""

import csv
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedbilevel.data import formats
from fedbilevel.data.samples import DataSet, Samples, read_only
from fedbilevel.data.sources import Source, find, folders
from fedbilevel.errors import FedbilevelError

# Omniglot --------------------------------------------------------------------------------------------------------

_OMNIGLOT = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/"
OMNIGLOT_FILES = tuple(
    Source(
        "omniglot",
        name,
        (_OMNIGLOT + name,),
        md5=md5,
        contents=formats.omniglot_contents,
        holds=formats.OmniglotContents(*holds),
    )
    for name, md5, holds in (
        (
            "images_background.zip",
            "68d2efa1b9178cc56df9314c21c6e718",
            (30, 964, 19280, "71a1ca99688b462d3818e7fd1d96e592b0bc508754ea500c444035296bf74117"),
        ),
        (
            "images_evaluation.zip",
            "6b91aef0f799c5bb55b94e3f2daec811",
            (20, 659, 13180, "748bfbe557520aab543e31b7cb103f75cc655361f4e6b7fe1ccede747c9710f7"),
        ),
    )
)
"""The two archives of Omniglot. If they were repacked, their contents are verified."""


def omniglot(size: int = 28) -> DataSet:
    """Omniglot: 1623 characters of 50 alphabets, each drawn by 20 people (Lake, Salakhutdinov, Tenenbaum 2015; MIT).

    `train` is the background set (30 alphabets, 964 characters), `test` the evaluation set (20 and 659). A label is a
    character and is unique over both; the group "alphabet" numbers the alphabets likewise. Ink is 0 and paper 255, as
    stored; few-shot papers use `1 - inputs / 255`. They also mix both sets and draw their own split of the characters:
    to do so, concatenate the two.

    Args:
        size: height and width. Few-shot papers shrink the 105 x 105 pixels to 28 x 28; 105 keeps them as they are
            (all drawings then take 358 MB, not 25 MB).
    """
    if not 1 <= size <= 105:
        raise FedbilevelError(f"omniglot: size must be from 1 to 105 pixels, not {size}.")
    alphabets: dict[str, int] = {}
    characters: dict[str, int] = {}

    def read(source: Source) -> Samples:
        path = find(source)
        images, of = _drawings(path, path.stat().st_mtime_ns, size)
        labels = [characters.setdefault(f"{alphabet}/{name}", len(characters)) for alphabet, name in of]
        groups = [alphabets.setdefault(alphabet, len(alphabets)) for alphabet, _ in of]
        return read_only(images.copy(), labels, {"alphabet": groups})

    train, test = map(read, OMNIGLOT_FILES)
    return DataSet("omniglot", train, test, tuple(characters), groups={"alphabet": tuple(alphabets)}, peak=255)


@lru_cache(maxsize=2)  # it takes seconds, and every run of a comparison asks for the same
def _drawings(path: Path, modified: int, size: int) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """The images of an archive, and the alphabet and character of each."""
    drawings = list(formats.omniglot_drawings(path))
    images = np.empty((len(drawings), size, size), np.uint8)
    for i, drawing in enumerate(drawings):
        images[i] = formats.decode_drawing(drawing, path, size)
    return images, [(drawing.alphabet, drawing.character) for drawing in drawings]


def rotated(data: DataSet) -> DataSet:
    """All images in four rotations, each a class of its own, as few-shot papers enlarge Omniglot to 6492 classes.

    Label k turned t times is label k + t * len(data.classes). The result takes four times the memory; to save it,
    turn the images of an episode when it is drawn.
    """
    number = len(data.classes)

    def turn(samples: Samples | None) -> Samples | None:
        if samples is None:
            return None
        if samples.inputs.ndim < 3 or samples.inputs.shape[1] != samples.inputs.shape[2]:
            raise FedbilevelError(f"{data.name}: only square images can be rotated.")
        images = np.concatenate([np.rot90(samples.inputs, t, axes=(1, 2)) for t in range(4)])
        labels = np.concatenate([samples.labels + t * number for t in range(4)])
        return read_only(images, labels, {name: np.tile(column, 4) for name, column in samples.groups.items()})

    train = turn(data.train)
    assert train is not None
    names = tuple(name + suffix for suffix in ("", " 90°", " 180°", " 270°") for name in data.classes)
    return replace(data, train=train, validation=turn(data.validation), test=turn(data.test), classes=names)


# mini-ImageNet ---------------------------------------------------------------------------------------------------


def mini_imagenet(size: int = 84, folder: str | Path | None = None) -> DataSet:
    """mini-ImageNet with the split of Ravi and Larochelle (2017): 64, 16 and 20 classes of 600 colour images.

    The images belong to ImageNet and cannot be downloaded freely. Put `train.csv`, `val.csv` and `test.csv`
    (`filename,label`) into the folder `mini-imagenet` of your data folder, and the images next to them: in a folder
    for each class (`n01532829/n0153282900000005.jpg`), directly or below `images`, or all in `images`. Pickles are not
    read. A label is unique over the three parts. At 84 x 84 all images take 1.3 GB.

    Args:
        size: height and width after shrinking.
        folder: where the csv files are, if not in `mini-imagenet` of the data folders.
    """
    if size < 1:
        raise FedbilevelError(f"mini-imagenet: size must be at least 1 pixel, not {size}.")
    places = [Path(folder)] if folder else [place / "mini-imagenet" for place in folders()]
    root = next((place for place in places if (place / "train.csv").is_file()), None)
    if root is None:
        raise FedbilevelError(
            f"mini-imagenet has no public address: put train.csv, val.csv and test.csv of Ravi and Larochelle and a "
            f"folder of images for each class into {places[-1]} (the images have no known checksum)."
        )
    classes: dict[str, int] = {}
    train, validation, test = (_read_split(root, f"{part}.csv", size, classes) for part in ("train", "val", "test"))
    return DataSet("mini-imagenet", train, test, tuple(classes), validation=validation, peak=255)


def _read_split(root: Path, name: str, size: int, classes: dict[str, int]) -> Samples:
    """The images that a csv file lists. Adds its classes to `classes`, which has those of the other parts."""
    path = root / name
    if not path.is_file():
        raise FedbilevelError(f"mini-imagenet: {path} is missing: put train.csv, val.csv and test.csv there.")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, skipinitialspace=True))
    if not rows or not {"filename", "label"} <= rows[0].keys():
        raise FedbilevelError(f"mini-imagenet: {path} needs the columns filename and label, and at least one row.")
    before = set(classes)
    images, labels = np.empty((len(rows), size, size, 3), np.uint8), []
    for i, row in enumerate(rows):
        picture, label = row["filename"] or "", row["label"] or ""
        # Names come from a file: they must not lead out of the folder.
        if any(not word or word.startswith(".") or set(word) & set("/\\:") for word in (picture, label)):
            raise FedbilevelError(f"mini-imagenet: row {i + 1} of {path} must have a plain file name and a label.")
        if label in before:
            raise FedbilevelError(f"mini-imagenet: {path} has the class {label}, which is also in another part.")
        tries = root / label / picture, root / "images" / label / picture, root / "images" / picture
        found = next((place for place in tries if place.is_file()), None)
        if found is None:
            raise FedbilevelError(f"mini-imagenet: {tries[0]} is missing, but row {i + 1} of {path} lists it.")
        images[i] = formats.read_picture(found, size)
        labels.append(classes.setdefault(label, len(classes)))
    return read_only(images, labels)
