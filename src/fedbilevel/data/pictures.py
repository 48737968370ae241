"""Images with ten classes: MNIST, Fashion-MNIST, CIFAR-10 and the small digits of scikit-learn."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.data import formats
from fedbilevel.data.samples import DataSet, read_only
from fedbilevel.data.sources import Source, cache_folder, find, present
from fedbilevel.errors import FedbilevelError

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
    return DataSet(name, read_only(images, labels), read_only(test_images, test_labels), classes, peak=255)


def mnist() -> DataSet:
    """MNIST: 60,000 + 10,000 handwritten digits of 28 x 28 pixels, bright ink (LeCun, Cortes, Burges)."""
    return _read_idx_set("mnist", MNIST_FILES, _DIGITS)


def fashion_mnist() -> DataSet:
    """Fashion-MNIST: 60,000 + 10,000 images of clothes of 28 x 28 pixels (Xiao, Rasul, Vollgraf 2017; MIT)."""
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
"""The batches of CIFAR-10, the last one for testing. They are published only together, in `CIFAR_ARCHIVE`."""

CIFAR_ARCHIVE = Source(
    _CIFAR,
    "cifar-10-binary.tar.gz",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    170052171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "c32a1d4ab5d03f1284b67883e8d87530",
)
"""All of CIFAR-10, read without unpacking."""


def cifar_10(part: bool = False) -> DataSet:
    """CIFAR-10: 50,000 + 10,000 colour images of 32 x 32 pixels (Krizhevsky 2009), colours last.

    Args:
        part: use only those of the five training batches (10,000 images each) that are in the folders, and download
            nothing.
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
            hint = f" Or pass part=True to use only the {len(paths) - 1} of 5 training batches that you have."
            raise FedbilevelError(
                f"cifar-10: {', '.join(missing)} are missing, and {error}"
                + (hint if names[-1] in paths and len(paths) > 1 else "")
            ) from None
        if archive is None:
            raise FedbilevelError(
                f"cifar-10: part=True needs test_batch.bin and at least one of data_batch_1.bin to data_batch_5.bin: "
                f"put them into {cache_folder() / _CIFAR}, or leave out part=True to download all."
            )
        paths = dict.fromkeys(names, archive)
        raw = formats.read_tar(archive, names)
    batches = {name: formats.decode_cifar(raw.pop(name), paths[name]) for name in names if name in raw}
    images, labels = batches.pop(names[-1])
    train_images, train_labels = (np.concatenate(arrays) for arrays in zip(*batches.values(), strict=True))
    return DataSet("cifar-10", read_only(train_images, train_labels), read_only(images, labels), _OBJECTS, peak=255)


# Digits ----------------------------------------------------------------------------------------------------------


def digits() -> DataSet:
    """Digits: 1797 handwritten digits of 8 x 8 pixels, from scikit-learn; white is 16. There is no split."""
    from sklearn.datasets import load_digits  # here because it takes a while to import

    raw: Any = load_digits()
    return DataSet("digits", read_only(raw.images.astype(np.uint8), raw.target), None, _DIGITS, peak=16)
