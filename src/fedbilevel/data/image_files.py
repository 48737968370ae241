"""Image files of one size, as arrays. Every defect is one sentence."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.data.columns import check_file, reason, unreadable
from fedbilevel.errors import FedbilevelError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
"""What is read. Readers of other formats start other programs (EPS), or are rarely used and rarely tested."""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
"""Pixels of at most 8 bits for each colour."""
MOST_PIXELS = 50_000_000
"""Of an image that is made smaller."""


def read_image_file(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The pixels of an image, uint8: grey for a shape (height, width), colours for (height, width, 3).

    An image of any other size is refused before it is decoded, however large it claims to be.
    """
    with _opened(path) as image:
        size = (image.height, image.width)
        if size == shape[:2]:
            return _pixels(image, path, shape)
    raise FedbilevelError(f"{path} has {size} pixels, but {shape[:2]} were expected.")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An image that is not decoded yet; whatever a damaged file makes the decoders do is a sentence."""
    from PIL import Image

    check_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images and odd metadata
            with Image.open(path, formats=FORMATS) as image:
                yield image
    except FedbilevelError:
        raise
    except Exception as error:
        raise FedbilevelError(f"{path} is not an image that can be read: {reason(error)}.") from None


def _pixels(image: Any, path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """An open image, brought to a shape if it has another."""
    from PIL import Image

    if image.mode not in MODES:
        raise FedbilevelError(f"{path} has pixels of the kind '{image.mode}': save it with 8 bits for each colour.")
    decoded = image.convert("RGB" if len(shape) == 3 else "L")
    if (image.height, image.width) != shape[:2]:
        decoded = decoded.resize((shape[1], shape[0]), Image.Resampling.BOX)
    return np.asarray(decoded)


def common_shape(paths: Sequence[Path], most: int = 32) -> tuple[int, ...]:
    """A shape for all of some images: theirs, if all have the same of at most ``most`` pixels; otherwise such a
    square. It has colours if one of them has.
    """
    sizes, colours = set(), False
    for path in paths:
        with _opened(path) as image:
            if image.height * image.width > MOST_PIXELS:
                raise FedbilevelError(f"{path} has more than {MOST_PIXELS:,} pixels: make it smaller.")
            sizes.add((image.height, image.width))
            colours |= image.mode not in ("1", "L", "LA")
    only = next(iter(sizes)) if len(sizes) == 1 else (most, most)
    return (*(only if max(only) <= most else (most, most)), *([3] if colours else []))


def read_resized(paths: Sequence[Path], shape: tuple[int, ...]) -> np.ndarray:
    """The pixels of some images, brought to one shape."""
    pixels = _room(len(paths), shape)
    for number, path in enumerate(paths):
        with _opened(path) as image:
            if image.height * image.width > MOST_PIXELS:
                raise FedbilevelError(f"{path} has more than {MOST_PIXELS:,} pixels: make it smaller.")
            pixels[number] = _pixels(image, path, shape)
    return pixels


def _room(images: int, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return np.empty((images, *shape), np.uint8)
    except (MemoryError, ValueError) as error:
        raise unreadable(f"{images} images", error) from None


def read_image_files(paths: Sequence[Path], shape: tuple[int, ...]) -> np.ndarray:
    """The pixels of some images, one after the other."""
    pixels = _room(len(paths), shape)
    for number, path in enumerate(paths):
        pixels[number] = read_image_file(path, shape)
    return pixels
