"""Rows of clients from PyTorch's data sets and loaders."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fedbilevel.errors import FedbilevelError


def rows(source: Any, *names: str) -> dict[str, np.ndarray]:
    """All rows of a ``Dataset`` or ``DataLoader`` as the arrays of a client, read once.

    ``fb.torch.rows(data, "image", "label")`` gives ``{"image": ..., "label": ...}``. What is random in the source, such
    as augmentation, is drawn once. A loader gives what one pass over it gives.

    Args:
        source: a data set, or a loader of one.
        names: of the parts of a sample, where samples are tuples; samples that are dictionaries have names.
    """
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        source = DataLoader(source, batch_size=256)
    elif not isinstance(source, DataLoader):
        raise FedbilevelError(f"fb.torch.rows needs a Dataset or a DataLoader, but got {type(source).__name__}.")
    parts = [_named(batch, names) for batch in source]
    if not parts:
        raise FedbilevelError("fb.torch.rows: there are no rows in this data set.")
    try:
        return {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}
    except ValueError as error:
        raise FedbilevelError(f"fb.torch.rows: samples must have one shape: {error}.") from None


def _named(batch: Any, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    if isinstance(batch, Mapping):
        return dict(batch)
    batch = batch if isinstance(batch, list | tuple) else [batch]
    if len(names) != len(batch):
        said = f"{len(batch)} parts, but {len(names)} names" if names else f"{len(batch)} parts"
        raise FedbilevelError(f'fb.torch.rows: samples have {said}: give names, as in rows(data, "image", "label").')
    return dict(zip(names, batch, strict=True))
