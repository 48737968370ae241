"""Operations of PyTorch that torchax translates into slow or wrong JAX: here, the project's own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from fedbilevel.models.convolutions import convolve, max_pool
from fedbilevel.pytorch.compatibility import torchax

aten: Any = torch.ops.aten
jtorch: Any = torchax.ops.jtorch


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
    """Every channel with filters of its own, the sum of shifted images."""
    tall, wide, _, outputs = filters.shape
    times = outputs // images.shape[3]
    images = jnp.repeat(images, times, axis=3) if times > 1 else images
    shifted = _shifted(images, (tall, wide), stride, (1, 1))
    return sum((part * filters[i // wide, i % wide, 0] for i, part in enumerate(shifted)), start=jnp.zeros(()))


def _shifted(images: jax.Array, size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[jax.Array]:
    """For every place in a window, the pixels that are there, of images (rows, height, width, channels)."""
    (tall, wide), (down, across), (low, side) = size, stride, dilation
    rows = (images.shape[1] - low * (tall - 1) - 1) // down + 1
    columns = (images.shape[2] - side * (wide - 1) - 1) // across + 1
    last = lambda start, count, step: start + step * (count - 1) + 1
    return [
        images[:, i : last(i, rows, down) : down, j : last(j, columns, across) : across]
        for i in range(0, low * tall, low)
        for j in range(0, side * wide, side)
    ]


def max_pooling(
    images: jax.Array,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The maximum of every window, with the derivative of the first of several, as in PyTorch."""
    if ceil_mode or return_indices or not jnp.issubdtype(images.dtype, jnp.floating):
        return jtorch._functional_max_pool2d(
            images, kernel_size, stride or kernel_size, padding, dilation, ceil_mode, return_indices
        )
    two = lambda value: (value, value) if isinstance(value, int) else tuple(value) * (3 - len(tuple(value)))
    size, padding, dilation = two(kernel_size), two(padding), two(dilation)
    steps = two(stride or size)
    single = images.ndim == 3
    images = (images[None] if single else images).transpose(0, 2, 3, 1)
    if size == steps and size[0] == size[1] and padding == (0, 0) and dilation == (1, 1):
        found = max_pool(images, size[0])
    else:
        least = jnp.full((), -jnp.inf, images.dtype)
        images = jax.lax.pad(images, least, [(0, 0, 0), *((p, p, 0) for p in padding), (0, 0, 0)])
        found, *others = _shifted(images, size, steps, dilation)
        for other in others:
            found = jnp.where((other > found) | (other != other), other, found)
    found = found.transpose(0, 3, 1, 2)
    return found[0] if single else found


OPERATIONS = {
    aten.convolution.default: convolution,
    aten.convolution: convolution,
    torch.nn.functional.max_pool2d: max_pooling,
}
