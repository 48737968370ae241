"""Image files of one size, as arrays. Every defect is one sentence."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbilevel.data.columns import check_file, reason, unreadable
from fedbilevel.errors import FedbilevelError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
"""What is read. Readers of other formats start other programs (EPS), or are rarely used and rarely tested."""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
"""Pixels of at most 8 bits for each colour."""


def read_image_file(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The pixels of an image, uint8: grey for a shape (height, width), colours for (height, width, 3).

    An image of any other size is refused before it is decoded, however large it claims to be.
    """
    from PIL import Image

    check_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images and odd metadata
            with Image.open(path, formats=FORMATS) as image:
                size, mode = (image.height, image.width), image.mode
                if size == shape[:2] and mode in MODES:
                    return np.asarray(image.convert("RGB" if len(shape) == 3 else "L"))
    except Exception as error:  # whatever a damaged file makes the decoders do
        raise FedbilevelError(f"{path} is not an image that can be read: {reason(error)}.") from None
    if size != shape[:2]:
        raise FedbilevelError(f"{path} has {size} pixels, but {shape[:2]} were expected.")
    raise FedbilevelError(f"{path} has pixels of the kind '{mode}': save it with 8 bits for each colour.")


def read_image_files(paths: Sequence[Path], shape: tuple[int, ...]) -> np.ndarray:
    """The pixels of some images, one after the other."""
    try:
        pixels = np.empty((len(paths), *shape), np.uint8)
    except (MemoryError, ValueError) as error:
        raise unreadable(f"{len(paths)} images", error) from None
    for number, path in enumerate(paths):
        pixels[number] = read_image_file(path, shape)
    return pixels
