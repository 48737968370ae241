"""The data sets: what each one holds, and how its files become arrays."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.data import formats
from fedbilevel.data.sources import Source, cache_folder, find, folders, present
from fedbilevel.errors import FedbilevelError, Names


class Samples(NamedTuple):
    """Samples in order.

    Args:
        inputs: images as uint8, (n, height, width) or (n, height, width, 3); tables as float32, (n, features).
        labels: int32, (n,).
        groups: by name, what else is known of every sample, as int32 numbers of `DataSet.groups[name]`.
    """

    inputs: np.ndarray
    labels: np.ndarray
    groups: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set in memory.

    The arrays are read-only and there is one of each: a client is an array of indices into them (see
    `fedbilevel.data.partition`). The 60,000 training images of MNIST stay one array of 47 MB for any number of clients.

    Args:
        name: of the data set.
        train: the training samples, or all samples of a set without a split.
        test: the test samples, if the set has a split.
        classes: the name of every label.
        validation: the validation samples, if the set has them (mini-ImageNet).
        features: the names of the columns of a table.
        groups: for every group column, the names of its numbers.
        peak: the value of a white pixel: `inputs / peak` is between 0 and 1.
    """

    name: str
    train: Samples
    test: Samples | None
    classes: tuple[str, ...]
    validation: Samples | None = None
    features: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    peak: int | None = None

    def __repr__(self) -> str:
        sizes = {"train": self.train, "validation": self.validation, "test": self.test}
        counts = ", ".join(f"{len(s.labels)} {part}" for part, s in sizes.items() if s is not None)
        return f"DataSet({self.name}: {counts}, {len(self.classes)} classes, inputs {self.train.inputs.shape[1:]})"


def _aligned(array: np.ndarray) -> np.ndarray:
    """The array where a device on the CPU can use it as it is: at a multiple of 64 bytes."""
    if array.flags.c_contiguous and array.ctypes.data % 64 == 0:
        return array
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _samples(inputs: np.ndarray, labels: Any, groups: Mapping[str, Any] | None = None) -> Samples:
    """Samples of the promised types that nobody can change by accident."""
    inputs = _aligned(inputs if inputs.dtype == np.uint8 else np.asarray(inputs, np.float32))
    columns = {name: np.array(column, np.int32) for name, column in (groups or {}).items()}
    labels = np.array(labels, np.int32)
    for array in (inputs, labels, *columns.values()):
        array.flags.writeable = False
    return Samples(inputs, labels, columns)


# MNIST and Fashion-MNIST -----------------------------------------------------------------------------------------

_DIGITS = tuple(map(str, range(10)))
_CLOTHES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
# The author's own address of MNIST no longer serves the files; these two are the usual copies.
_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)


def _idx(folder: str, bases: tuple[str, ...], files: Sequence[tuple[str, int, str, str]]) -> tuple[Source, ...]:
    return tuple(
        Source(folder, name, tuple(base + name for base in bases), size, sha256, md5)
        for name, size, sha256, md5 in files
    )


MNIST_FILES = _idx(
    "mnist",
    _MNIST,
    [
        (
            "train-images-idx3-ubyte.gz",
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        ),
        (
            "train-labels-idx1-ubyte.gz",
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "d53e105ee54ea40749a09fcbcd1e9432",
        ),
        (
            "t10k-images-idx3-ubyte.gz",
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "9fb629c4189551a2d022fa330f9573f3",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ],
)
"""The files of MNIST."""

FASHION_MNIST_FILES = _idx(
    "fashion-mnist",
    _FASHION,
    [
        (
            "train-images-idx3-ubyte.gz",
            26421880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        ),
        (
            "train-labels-idx1-ubyte.gz",
            29515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "25c81989df183df01b3e8a0aad5dffbe",
        ),
        (
            "t10k-images-idx3-ubyte.gz",
            4422102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "bef4ecab320f06d8554ea6380940ec79",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            5148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ],
)
"""The files of Fashion-MNIST."""


def _read_idx_set(name: str, files: tuple[Source, ...], classes: tuple[str, ...]) -> DataSet:
    images, labels, test_images, test_labels = (formats.read_idx(find(file)) for file in files)
    return DataSet(name, _samples(images, labels), _samples(test_images, test_labels), classes, peak=255)


def mnist() -> DataSet:
    """MNIST: 60,000 + 10,000 handwritten digits of 28 x 28 pixels, ink bright (LeCun, Cortes, Burges)."""
    return _read_idx_set("mnist", MNIST_FILES, _DIGITS)


def fashion_mnist() -> DataSet:
    """Fashion-MNIST: 60,000 + 10,000 pictures of clothes of 28 x 28 pixels (Xiao, Rasul, Vollgraf 2017; MIT)."""
    return _read_idx_set("fashion-mnist", FASHION_MNIST_FILES, _CLOTHES)


# CIFAR-10 --------------------------------------------------------------------------------------------------------

_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR = "cifar-10-batches-bin"
CIFAR_BATCHES = tuple(
    Source(_CIFAR, name, (), 30730000, sha256)
    for name, sha256 in {
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    }.items()
)
"""The batches of CIFAR-10, the last one for the test. They are published only together, in `CIFAR_ARCHIVE`."""

CIFAR_ARCHIVE = Source(
    _CIFAR,
    "cifar-10-binary.tar.gz",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    170052171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "c32a1d4ab5d03f1284b67883e8d87530",
)
"""All of CIFAR-10, which is read as it is, not unpacked."""


def cifar_10(part: bool = False) -> DataSet:
    """CIFAR-10: 50,000 + 10,000 colour pictures of 32 x 32 pixels (Krizhevsky 2009), colours last.

    Args:
        part: be content with those of the five training batches (10,000 pictures each) that are in the folders, and
            download nothing.
    """
    names = [batch.name for batch in CIFAR_BATCHES]
    paths = {batch.name: path for batch in CIFAR_BATCHES if (path := present(batch))}
    missing = [name for name in names if name not in paths]
    if not missing or (part and names[-1] in paths and len(paths) > 1):
        raw = {name: path.read_bytes() for name, path in paths.items()}
    else:
        try:
            archive = present(CIFAR_ARCHIVE) if part else find(CIFAR_ARCHIVE)
        except FedbilevelError as error:
            hint = f" Or pass part=True to use the {len(paths) - 1} of 5 training batches that are there."
            raise FedbilevelError(
                f"cifar-10: {', '.join(missing)} are not there, and {error}"
                + (hint if names[-1] in paths and len(paths) > 1 else "")
            ) from None
        if archive is None:
            raise FedbilevelError(
                f"cifar-10: a part is test_batch.bin and at least one of data_batch_1.bin to data_batch_5.bin; put "
                f"them into {cache_folder() / _CIFAR}, or leave out part=True to download all."
            )
        paths = dict.fromkeys(names, archive)
        raw = formats.read_tar(archive, names)
    batches = {name: formats.decode_cifar(raw.pop(name), paths[name]) for name in names if name in raw}
    images, labels = batches.pop(names[-1])
    train_images, train_labels = (np.concatenate(arrays) for arrays in zip(*batches.values(), strict=True))
    return DataSet("cifar-10", _samples(train_images, train_labels), _samples(images, labels), _OBJECTS, peak=255)


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
"""The two archives of Omniglot, which may have been packed again: then their contents are verified."""


def omniglot(size: int = 28) -> DataSet:
    """Omniglot: 1623 characters of 50 alphabets, each drawn by 20 people (Lake, Salakhutdinov, Tenenbaum 2015; MIT).

    `train` is the background set (30 alphabets, 964 characters), `test` the evaluation set (20 and 659). A label is a
    character and is unique over both; the group "alphabet" numbers the alphabets likewise. Ink is 0 and paper 255, as
    stored; few-shot papers use `1 - inputs / 255`. Few-shot papers also mix both sets and draw their own split of
    the characters: concatenate them then.

    Args:
        size: height and width. Few-shot papers shrink the 105 x 105 pixels to 28 x 28; 105 keeps them as they are
            (all drawings then take 358 MB, not 25 MB).
    """
    if not 1 <= size <= 105:
        raise FedbilevelError(f"omniglot: size is from 1 to 105 pixels, not {size}.")
    alphabets: dict[str, int] = {}
    characters: dict[str, int] = {}

    def read(source: Source) -> Samples:
        path = find(source)
        images, of = _drawings(path, path.stat().st_mtime_ns, size)
        labels = [characters.setdefault(f"{alphabet}/{name}", len(characters)) for alphabet, name in of]
        groups = [alphabets.setdefault(alphabet, len(alphabets)) for alphabet, _ in of]
        return _samples(images.copy(), labels, {"alphabet": groups})

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
        return _samples(images, labels, {name: np.tile(column, 4) for name, column in samples.groups.items()})

    train = turn(data.train)
    assert train is not None
    names = tuple(name + suffix for suffix in ("", " 90°", " 180°", " 270°") for name in data.classes)
    return replace(data, train=train, validation=turn(data.validation), test=turn(data.test), classes=names)


# mini-ImageNet ---------------------------------------------------------------------------------------------------


def mini_imagenet(size: int = 84, folder: str | Path | None = None) -> DataSet:
    """mini-ImageNet with the split of Ravi and Larochelle (2017): 64, 16 and 20 classes of 600 colour pictures.

    The pictures belong to ImageNet and cannot be downloaded freely. Put `train.csv`, `val.csv` and `test.csv`
    (`filename,label`) into the folder `mini-imagenet` of your data folder, and the pictures next to them: in a folder
    for each class (`n01532829/n0153282900000005.jpg`), directly or below `images`, or all in `images`. No pickles.
    A label is unique over the three parts. At 84 x 84 all pictures take 1.3 GB.

    Args:
        size: height and width after shrinking.
        folder: where the csv files are, if not in `mini-imagenet` of the data folders.
    """
    if size < 1:
        raise FedbilevelError(f"mini-imagenet: size is at least 1 pixel, not {size}.")
    places = [Path(folder)] if folder else [place / "mini-imagenet" for place in folders()]
    root = next((place for place in places if (place / "train.csv").is_file()), None)
    if root is None:
        raise FedbilevelError(
            f"mini-imagenet has no public address: put train.csv, val.csv and test.csv of Ravi and Larochelle and a "
            f"folder of pictures for each class into {places[-1]} (the pictures have no known checksum)."
        )
    classes: dict[str, int] = {}
    train, validation, test = (_read_split(root, f"{part}.csv", size, classes) for part in ("train", "val", "test"))
    return DataSet("mini-imagenet", train, test, tuple(classes), validation=validation, peak=255)


def _read_split(root: Path, name: str, size: int, classes: dict[str, int]) -> Samples:
    """The pictures that a csv file lists; `classes` gets the new classes and holds those of the other parts."""
    path = root / name
    if not path.is_file():
        raise FedbilevelError(
            f"mini-imagenet: {path} is missing; put all three of train.csv, val.csv and test.csv there."
        )
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
            raise FedbilevelError(f"mini-imagenet: row {i + 1} of {path} is not a plain file name and a label.")
        if label in before:
            raise FedbilevelError(f"mini-imagenet: {path} has the class {label}, which another part has already.")
        tries = root / label / picture, root / "images" / label / picture, root / "images" / picture
        found = next((place for place in tries if place.is_file()), None)
        if found is None:
            raise FedbilevelError(f"mini-imagenet: {tries[0]} is missing, which {path} lists in row {i + 1}.")
        images[i] = formats.read_picture(found, size)
        labels.append(classes.setdefault(label, len(classes)))
    return _samples(images, labels)


# Tables ----------------------------------------------------------------------------------------------------------

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_HEART_COLUMNS = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal",
)  # fmt: skip
HEART_FILES = {
    hospital: Source(
        "fed-heart-disease",
        f"processed.{hospital}.data",
        (f"{_UCI}heart-disease/processed.{hospital}.data",),
        size,
        sha256,
    )
    for hospital, size, sha256 in (
        ("cleveland", 18461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
        ("hungarian", 10263, "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
        ("switzerland", 4109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
        ("va", 6737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
    )
}
"""The files of the four hospitals."""


def heart_disease(impossible_is_missing: bool = True) -> DataSet:
    """UCI heart disease: 303, 294, 123 and 200 patients of four hospitals (Janosi and others 1988; CC BY 4.0).

    13 features; the label says whether any disease was found (`num > 0`). The group "hospital" is the natural client;
    "sex" is kept as a group, too. There is no split. What is missing (`?`) is NaN: `np.isnan` is the mask, and
    `Scaling` fills it in, because how to fill it in must be learned from training rows only.

    Args:
        impossible_is_missing: a cholesterol or a blood pressure of 0 is not a measurement. All 123 patients of
            Switzerland and 49 of VA have cholesterol 0. True makes these NaN; False leaves them as stored.
    """
    tables = [
        np.array(
            [[float(cell) if cell != "?" else np.nan for cell in row] for row in formats.read_rows(find(source), 14)]
        )
        for source in HEART_FILES.values()
    ]
    hospitals = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    table = np.concatenate(tables)
    if impossible_is_missing:
        for column in ("trestbps", "chol"):
            values = table[:, _HEART_COLUMNS.index(column)]
            values[values == 0] = np.nan
    train = _samples(table[:, :13], table[:, 13] > 0, {"hospital": hospitals, "sex": table[:, 1]})
    groups = {"hospital": tuple(HEART_FILES), "sex": ("female", "male")}
    return DataSet("heart-disease", train, None, ("healthy", "disease"), features=_HEART_COLUMNS, groups=groups)


_ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country",
)  # fmt: skip
_ADULT_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_ADULT_GROUPS = ("sex", "race")
ADULT_FILES = (
    Source(
        "adult",
        "adult.data",
        (f"{_UCI}adult/adult.data",),
        3974305,
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    ),
    Source(
        "adult",
        "adult.test",
        (f"{_UCI}adult/adult.test",),
        2003153,
        "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    ),
)
"""The two files of Adult."""


def adult() -> DataSet:
    """UCI Adult (census income): 32,561 + 16,281 people (Becker and Kohavi 1996; CC BY 4.0); is income above 50K?

    Numbers stay as they are (`Scaling` standardises them); a column of words becomes one column of 0 and 1 for each
    word, in alphabetical order of the training rows, named "workclass=Private"; a missing word (`?`) is a word of its
    own. Sex and race are not among the features: they are the groups "sex" and "race". (The feature
    "relationship" still tells the sex of husbands and wives.)
    """
    rows, test_rows = (formats.read_rows(find(source), 15) for source in ADULT_FILES)
    words = {
        column: tuple(sorted({row[i] for row in rows}))
        for i, column in enumerate(_ADULT_COLUMNS)
        if column not in _ADULT_NUMBERS
    }
    features = [*_ADULT_NUMBERS]
    features += [f"{column}={word}" for column in words if column not in _ADULT_GROUPS for word in words[column]]

    def read(rows: list[list[str]]) -> Samples:
        columns = {column: np.array([row[i] for row in rows]) for i, column in enumerate(_ADULT_COLUMNS)}
        inputs = [columns[column].astype(np.float32) for column in _ADULT_NUMBERS]
        inputs += [
            (columns[column] == word).astype(np.float32)
            for column in words
            if column not in _ADULT_GROUPS
            for word in words[column]
        ]
        # Lines of the test file end with a dot.
        labels = [row[14].rstrip(".") == ">50K" for row in rows]
        groups = {column: np.searchsorted(words[column], columns[column]) for column in _ADULT_GROUPS}
        return _samples(np.stack(inputs, 1), labels, groups)

    names = {column: words[column] for column in _ADULT_GROUPS}
    return DataSet("adult", read(rows), read(test_rows), ("<=50K", ">50K"), features=tuple(features), groups=names)


def digits() -> DataSet:
    """The 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn; white is 16. There is no split."""
    from sklearn.datasets import load_digits  # here because it takes a while to import

    raw: Any = load_digits()
    return DataSet("digits", _samples(raw.images.astype(np.uint8), raw.target), None, _DIGITS, peak=16)


def breast_cancer() -> DataSet:
    """The 569 tumours (30 features) of Wisconsin that come with scikit-learn. There is no split."""
    from sklearn.datasets import load_breast_cancer

    raw: Any = load_breast_cancer()
    features = tuple(map(str, raw.feature_names))
    return DataSet(
        "breast-cancer", _samples(raw.data, raw.target), None, tuple(raw.target_names.tolist()), None, features
    )


class Scaling(NamedTuple):
    """How to fill in and standardise the columns of a table, learned from training rows.

    A missing value (NaN) becomes the median of its column; then every column gets mean 0 and deviation 1. A column
    with a single value becomes 0, and so does one that is missing in all rows that were seen.

    >>> table = np.array([[1.0, np.nan], [3.0, 5.0]])
    >>> scaling = Scaling.fit(table)
    >>> scaling(table).tolist()
    [[-1.0, 0.0], [1.0, 0.0]]
    """

    median: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, rows: np.ndarray) -> "Scaling":
        """Learn from training rows; those of one client, or of all."""
        rows = np.array(rows, float)
        if rows.ndim != 2 or not len(rows):
            raise FedbilevelError("a scaling is learned from the rows of a table, and at least one.")
        known = ~np.isnan(rows)
        medians = [np.median(rows[here, i]) if here.any() else 0.0 for i, here in enumerate(known.T)]
        median = np.array(medians)
        filled = np.where(known, rows, median)
        deviation = filled.std(0)
        return cls(median, filled.mean(0), np.where(deviation > 0, deviation, np.inf))

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The rows, filled in and standardised, as float32."""
        rows = np.where(np.isnan(rows), self.median, rows)
        return ((rows - self.mean) / self.deviation).astype(np.float32)


SETS: Names[Callable[..., DataSet]] = Names(
    "data set",
    {
        "mnist": mnist,
        "fashion-mnist": fashion_mnist,
        "cifar-10": cifar_10,
        "omniglot": omniglot,
        "mini-imagenet": mini_imagenet,
        "heart-disease": heart_disease,
        "adult": adult,
        "digits": digits,
        "breast-cancer": breast_cancer,
    },
)
"""The data sets by name."""


def load(name: str, **options: Any) -> DataSet:
    """A data set by name; options are the arguments of its function.

    >>> load("digits")
    DataSet(digits: 1797 train, 10 classes, inputs (8, 8))
    """
    return SETS[name](**options)
