"""Operations of PyTorch that torchax translates into slow or wrong JAX: here, the project's own."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import torch

from fedbilevel.models.convolutions import convolve

aten: Any = torch.ops.aten


def convolution(
    images: jax.Array,
    filters: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """Every convolution of one or two axes as matrix products of patches; those of three axes are XLA's."""
    axes = filters.ndim - 2
    single = images.ndim == axes + 1  # no axis of rows
    images = images[None] if single else images
    each = lambda value: tuple(value) * axes if len(value) == 1 else tuple(value)
    stride, padding, dilation = each(stride), each(padding), each(dilation)
    sizes = [d * (k - 1) + 1 for k, d in zip(filters.shape[2:], dilation, strict=True)]
    if transposed:
        # The transposed convolution is one with stride 1 of what lies ``stride`` apart, with the filters turned round.
        outputs = filters.shape[1]
        filters = filters.reshape(groups, -1, outputs, *filters.shape[2:]).swapaxes(1, 2)
        filters = jnp.flip(filters.reshape(groups * outputs, -1, *filters.shape[3:]), range(2, 2 + axes))
        extra = each(output_padding) if output_padding else (0,) * axes
        edges = [(k - 1 - p, k - 1 - p + e) for k, p, e in zip(sizes, padding, extra, strict=True)]
        between = [s - 1 for s in stride]
        stride = (1,) * axes
    else:
        edges, between = [(p, p) for p in padding], [0] * axes
    zero = jnp.zeros((), images.dtype)
    if any(between) or any(side for edge in edges for side in edge):
        inner = [(low, high, gap) for (low, high), gap in zip(edges, between, strict=True)]
        images = jax.lax.pad(images, zero, [(0, 0, 0), (0, 0, 0), *inner])
    if axes == 3:
        found = jax.lax.conv_general_dilated(
            images, filters, stride, "VALID", rhs_dilation=dilation, feature_group_count=groups
        )
    else:
        return _of_patches(images, filters, bias, stride, dilation, groups)[0 if single else slice(None)]
    if bias is not None:
        found = found + bias.reshape(-1, *(1,) * axes)
    return found[0] if single else found


def _of_patches(
    images: jax.Array,
    filters: jax.Array,
    bias: jax.Array | None,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> jax.Array:
    """Of images (rows, channels, height, width), or without the height."""
    if images.ndim == 3:
        found = _of_patches(images[:, :, None], filters[:, :, None], bias, (1, *stride), (1, *dilation), groups)
        return found[:, :, 0]
    if any(d > 1 for d in dilation):
        filters = jax.lax.pad(
            filters, jnp.zeros((), filters.dtype), [(0, 0, 0), (0, 0, 0), *((0, 0, d - 1) for d in dilation)]
        )
    images, filters = images.transpose(0, 2, 3, 1), filters.transpose(2, 3, 1, 0)
    if filters.shape[2] == 1 and groups == images.shape[3]:
        found = _depthwise(images, filters, stride)
    elif groups == 1:
        found = _strided(images, filters, stride)
    else:
        pairs = zip(jnp.split(images, groups, 3), jnp.split(filters, groups, 3), strict=True)
        found = jnp.concatenate([_strided(part, own, stride) for part, own in pairs], 3)
    return (found if bias is None else found + bias).transpose(0, 3, 1, 2)


def _strided(images: jax.Array, filters: jax.Array, stride: tuple[int, ...]) -> jax.Array:
    down, across = stride
    if filters.shape[:2] == (1, 1):
        return images[:, ::down, ::across] @ filters[0, 0]
    if down == across:
        return convolve(images, filters, down)
    return convolve(images, filters)[:, ::down, ::across]


def _depthwise(images: jax.Array, filters: jax.Array, stride: tuple[int, ...]) -> jax.Array:
    """Every channel with filters of its own: the sum of shifted images."""
    (tall, wide, _, outputs), (down, across) = filters.shape, stride
    times = outputs // images.shape[3]
    images = jnp.repeat(images, times, axis=3) if times > 1 else images
    height, width = images.shape[1] - tall + 1, images.shape[2] - wide + 1
    parts = [
        images[:, i : i + height : down, j : j + width : across] * filters[i, j, 0]
        for i in range(tall)
        for j in range(wide)
    ]
    return reduce(jnp.add, parts)


OPERATIONS = {
    aten.convolution.default: convolution,
    aten.convolution: convolution,
}
