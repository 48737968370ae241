"""The parts of convolutional networks: convolution, pooling and batch normalization.

Images are arrays (rows, height, width, channels).
"""

from functools import partial

import jax
import jax.numpy as jnp

from fedbilevel.errors import FedbilevelError

BAND = 64  # products with zeros, for every pixel of a patch, that take as long as copying it
CACHED = 2**19  # bytes of copies that a core's cache holds, with room for the rest


def convolve(images: jax.Array, filters: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    """The cross-correlation of images (rows, height, width, channels) with filters (height, width, channels, outputs).

    This is what other libraries call a convolution, computed as one matrix product of all patches with all filters, or,
    where there are few filters, of whole lines of pixels with a banded matrix. XLA's own convolution is many times
    slower on the CPU inside a compiled loop, and becomes a grouped one where every client has its own filters.

    >>> convolve(jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4)), stride=2, padding=1).shape
    (2, 4, 4, 4)

    Args:
        images: floats.
        filters: as many channels as the images.
        stride: pixels from one patch to the next, down and to the right.
        padding: zeros added on all four sides.
    """
    tall, wide, channels, outputs = filters.shape
    if images.ndim != 4 or images.shape[3] != channels:
        raise FedbilevelError(f"convolve: images of shape {images.shape} do not fit filters of shape {filters.shape}.")
    if padding:
        images = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows, height, width, _ = images.shape
    if height < tall or width < wide:
        raise FedbilevelError(
            f"convolve: images of {height} x {width} (padded) are smaller than filters of {tall} x {wide}."
        )
    down, across = (height - tall) // stride + 1, (width - wide) // stride + 1
    last = lambda start, count: start + stride * (count - 1) + 1

    def of_patches(images: jax.Array, filters: jax.Array) -> jax.Array:
        starts = [(i, j) for i in range(tall) for j in range(wide)]
        shifted = [images[:, i : last(i, down) : stride, j : last(j, across) : stride] for i, j in starts]
        patches = jnp.concatenate(shifted, axis=3).reshape(-1, tall * wide * channels)
        return (patches @ filters.reshape(-1, outputs)).reshape(-1, down, across, outputs)

    def of_lines(images: jax.Array, filters: jax.Array) -> jax.Array:
        lines = images.reshape(-1, height, width * channels)
        lines = jnp.stack([lines[:, i : last(i, down) : stride] for i in range(tall)], axis=2)
        beside = lambda j: ((0, 0), (j, width - wide - j), (0, 0), (0, 0))
        band = jnp.stack([jnp.pad(filters, beside(stride * j)) for j in range(across)], axis=3)
        band = band.reshape(tall * width * channels, across * outputs)
        return (lines.reshape(-1, len(band)) @ band).reshape(-1, down, across, outputs)

    # The band is mostly zeros, but one product with it is cheap beside copying every pixel into tall * wide patches.
    few = outputs * width <= BAND * wide
    product, copied = (of_lines, width) if few else (of_patches, across * wide)
    group = _images_at_once(rows, down * copied * tall * channels * images.dtype.itemsize)
    if group == rows:
        return product(images, filters)
    # The copies of a group stay in the cache of a core, and are cheaper made again for the gradient than read again.
    again = jax.checkpoint(product)
    groups = images.reshape(rows // group, group, height, width, channels)
    return jax.lax.map(lambda images: again(images, filters), groups).reshape(rows, down, across, outputs)


def _images_at_once(rows: int, size: int) -> int:
    """How many images to convolve together, if the copies of one have this size: all where that is little, or where
    the device is not a CPU.
    """
    if rows * size <= 32 * CACHED or jax.default_backend() != "cpu":
        return rows
    return max((k for k in range(2, rows) if rows % k == 0 and k * size <= CACHED), default=1)


def max_pool(images: jax.Array, size: int = 2) -> jax.Array:
    """The maximum of every square of this size; what is left at the lower or right border is dropped.

    >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    return _max_pool(images, size)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_pool(images: jax.Array, size: int) -> jax.Array:
    return _squares(images, size).max((2, 4))


@_max_pool.defjvp
def _max_pool_jvp(size: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The derivative is that of the first maximum of a square, as in PyTorch. JAX's own divides by how many there are,
    which takes several times as long.
    """
    squares, moved = _squares(primals[0], size), _squares(tangents[0], size)
    largest = squares.max((2, 4))
    places = jnp.arange(size * size, dtype=jnp.int8).reshape(size, 1, size, 1)
    first = jnp.full(largest.shape, size * size - 1, jnp.int8)
    for place in reversed(range(size * size - 1)):
        first = jnp.where(squares[:, :, place // size, :, place % size] == largest, jnp.int8(place), first)
    return largest, jnp.where(first[:, :, None, :, None] == places, moved, 0).sum((2, 4))


def _squares(images: jax.Array, size: int) -> jax.Array:
    rows, height, width, channels = images.shape
    high, long = height // size, width // size
    return images[:, : high * size, : long * size].reshape(rows, high, size, long, size, channels)


def batch_norm(images: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Every channel with the mean ``shift`` and the standard deviation ``scale`` over this batch and all pixels."""
    mean = images.mean((0, 1, 2))
    variance = jnp.square(images - mean).mean((0, 1, 2))
    return (images - mean) * (scale * jax.lax.rsqrt(variance + 1e-5)) + shift


def pooled_relu(images: jax.Array, bias: jax.Array) -> jax.Array:
    """``max_pool(relu(images + bias))``. Pooling first gives the same numbers, with a quarter of the work after it."""
    return jax.nn.relu(max_pool(images) + bias)
