"""A trained model in a folder: plain values and arrays, in a format that is safe to load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.errors import FedbilevelError
from fedbilevel.storage.arrays import decode, encode
from fedbilevel.storage.files import write_atomically

MODEL = "model.safetensors"
FORMAT = 1
"""Of the models that this version writes."""


def save_model(folder: Path | str, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """Save a model in a folder: what it is about, and its arrays by name."""
    path = Path(folder) / MODEL
    write_atomically(path, encode({"format": FORMAT, **about}, arrays))
    return path


def load_model(folder: Path | str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What :func:`save_model` saved."""
    path = Path(folder) / MODEL
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FedbilevelError(
            f"{folder} has no trained model: give the folder of a run on your own table, which has a {MODEL}."
        ) from None
    except OSError as error:
        raise FedbilevelError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        about, arrays = decode(content)
    except FedbilevelError as error:
        raise FedbilevelError(f"{path} cannot be read: {error}") from None
    if about.get("format") != FORMAT:
        raise FedbilevelError(
            f"{path} has format {about.get('format')}, but this version reads {FORMAT}: upgrade fedbilevel."
        )
    return about, arrays
