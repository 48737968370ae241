"""Which rows a batch has: drawn with replacement, in reshuffled epochs, or in blocks; always named by a key.

Batches that walk through the rows need to know how many came before. A *walking key* knows: next to what every random
key has, it carries the name of a series of batches, which is the same in all rounds, and how many batches of the series
came before. ``split`` and ``fold_in`` name other series, and a loop moves on in the same one (:func:`advance`). So the
same key still gives the same rows, in every engine and after a restart, and nobody stores a position.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import define_prng_impl

from fedbilevel.core.types import Key

Sampling = Literal["replacement", "epochs", "blocks"]
SAMPLINGS: tuple[Sampling, ...] = ("replacement", "epochs", "blocks")


def _ordinary(words: jax.Array) -> Key:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _join(random: Key, series: Key, before: jax.Array) -> jax.Array:
    before = jnp.broadcast_to(before, (*random.shape, 1))
    return jnp.concatenate([jax.random.key_data(random), jax.random.key_data(series), before], -1)


def _both(words: jax.Array, of: Callable[[Key], Key]) -> jax.Array:
    """The same done to both keys in a walking key."""
    return _join(of(_ordinary(words[:2])), of(_ordinary(words[2:4])), words[4:])


_WORDS = 5  # two of an ordinary key for random numbers, two that name the series, and the number of batches before
_WALKING = define_prng_impl(
    key_shape=(_WORDS,),
    seed=lambda seed: _join(key := jax.random.key(seed, impl="threefry2x32"), key, jnp.uint32(0)),
    split=lambda k, shape: _both(k, lambda part: jax.random.split(part, shape)),
    random_bits=lambda k, width, shape: jax.random.bits(_ordinary(k[:2]), shape, jnp.dtype(f"uint{width}")),
    fold_in=lambda k, data: _both(k, lambda part: jax.random.fold_in(part, data)),
    name="fedbilevel_walking",
    tag="walk",
)


def walking(key: Key, series: Key, before: int | jax.Array) -> Key:
    """The key with the name of a series, and the number of batches before."""
    random, name = (_ordinary(jax.random.bits(k, (2,), jnp.uint32)) for k in (key, series))
    return jax.random.wrap_key_data(_join(random, name, jnp.asarray(before, jnp.uint32)), impl=_WALKING)


def is_walking(key: Key) -> bool:
    """Whether this is a walking key."""
    return jax.random.key_data(key).shape[-1] == _WORDS


def wrapped(words: jax.Array) -> Key:
    """The key, walking or not, of what ``jax.random.key_data`` gave."""
    return jax.random.wrap_key_data(words, impl=_WALKING if words.shape[-1:] == (_WORDS,) else None)


def advance(key: Key, number: int | jax.Array, times: int | jax.Array) -> Key:
    """The key of an iteration of a loop: the batches of a loop whose length is known are one series."""
    folded = jax.random.fold_in(key, number)
    if not is_walking(key) or not isinstance(times, int):
        return folded
    before = jax.random.key_data(key)[4] * jnp.uint32(times) + jnp.asarray(number, jnp.uint32)
    words = jnp.concatenate([jax.random.key_data(folded)[:2], jax.random.key_data(key)[2:4], before[None]])
    return jax.random.wrap_key_data(words, impl=_WALKING)


def draw(key: Key, size: int, rows: int | jax.Array, sampling: Sampling) -> jax.Array:
    """The row numbers of a batch of this size, of so many rows.

    "replacement": each row is drawn uniformly. "epochs": all rows in random order, then all again in another order; a
    batch may be the end of one epoch and the start of the next. "blocks": batches are neighbouring rows, and come in a
    random order that stays the same in all epochs; if the size does not divide the number of rows, blocks overlap, and
    all rows occur equally often.
    """
    if sampling == "replacement":
        return jax.random.randint(key, (size,), 0, rows)
    words, n = jax.random.key_data(key), jnp.asarray(rows, jnp.uint32)
    series, before, within = words[2:4], words[4], jnp.arange(size, dtype=jnp.uint32)
    if sampling == "epochs":
        place = before * jnp.uint32(size) + within
        index = shuffled(place % n, n, series, place // n)
    else:
        blocks = n // jnp.gcd(n, jnp.uint32(size))
        block = shuffled(before % blocks, blocks, series, jnp.uint32(0))
        index = (block * (jnp.uint32(size) % n) + within) % n
    return index.astype(jnp.int32)


def shuffled(place: jax.Array, n: jax.Array, series: jax.Array, epoch: jax.Array) -> jax.Array:
    """Where each of these places of 0 .. n-1 goes in a random permutation, which is never written down.

    A Feistel network on a rectangle with at least n fields is a permutation of its fields; following it until it is
    back below n makes one of 0 .. n-1 (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Writing a
    permutation down would mean to sort all rows for every batch, and to know their number when a program is compiled.
    """
    width = jnp.maximum(jnp.ceil(jnp.sqrt(n.astype(jnp.float32))).astype(jnp.uint32), 1)
    height = (n + width - 1) // width

    def mixed(value: jax.Array) -> jax.Array:  # the finalizer of MurmurHash3
        value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
        value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
        return value ^ (value >> 16)

    seed = mixed(series[0] ^ mixed(series[1] ^ mixed(epoch)))

    def twist(number: jax.Array, field: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        column, row = field
        key = seed + number.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
        column = (column + mixed(row ^ key) % width) % width
        return column, (row + mixed(column ^ ~key) % height) % height

    def once(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        place, outside = state
        column, row = lax.fori_loop(0, 4, twist, (place % width, place // width))
        place = jnp.where(outside, row * width + column, place)
        return place, place >= n

    return lax.while_loop(lambda state: jnp.any(state[1]), once, (place, place < n))[0]
