"""Blocks of a private x as the server knows them: names, and linear combinations of names."""

from collections.abc import Mapping

from fedbilevel.core.vectors import Scalar


class Blocks:
    """A private vector as the server knows it: a linear combination of named blocks that every client holds for
    itself.
    """

    def __init__(self, terms: Mapping[str, float]) -> None:
        self.terms = dict(terms)

    def __add__(self, other: "Blocks") -> "Blocks":
        return Blocks(
            {name: self.terms.get(name, 0.0) + other.terms.get(name, 0.0) for name in {**self.terms, **other.terms}}
        )

    def __mul__(self, scale: Scalar) -> "Blocks":
        return Blocks({name: factor * float(scale) for name, factor in self.terms.items()})

    __rmul__ = __mul__

    def __neg__(self) -> "Blocks":
        return self * -1.0

    def __sub__(self, other: "Blocks") -> "Blocks":
        return self + -other

    def __truediv__(self, scale: Scalar) -> "Blocks":
        return self * (1 / scale)


def is_block(value: object) -> bool:
    """Whether the server knows this vector by name only."""
    return isinstance(value, Blocks)
