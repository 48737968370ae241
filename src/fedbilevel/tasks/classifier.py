"""A trained model that predicts the classes of new rows: it knows how rows become inputs, and what its outputs mean."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbilevel.data.encoding import Encoding
from fedbilevel.data.new_rows import new_rows
from fedbilevel.errors import FedbilevelError

Layers = Sequence[Mapping[str, Any]]
"""Dense layers with ReLU in between: ``{"w": (inputs, outputs), "b": (outputs,)}`` each."""


@dataclass(frozen=True, eq=False)
class Classifier:
    """Networks on encoded rows, whose probabilities are averaged.

    >>> layers = [{"w": np.array([[0.0, 1.0]]), "b": np.zeros(2)}]
    >>> Classifier(Encoding(), ("no", "yes"), [layers]).probabilities(np.array([[0.0]], np.float32)).tolist()
    [[0.5, 0.5]]

    Args:
        encoding: how rows become inputs.
        classes: the names of the labels.
        members: the networks. The last layer has an output for each class, or, with two classes, one for the second.
        shares: of each network in the mean, summing to 1; empty: the same for all.
        label: what the column of labels was called.
    """

    encoding: Encoding
    classes: tuple[str, ...]
    members: Sequence[Layers] = field(repr=False)
    shares: tuple[float, ...] = ()
    label: str = "label"

    def probabilities(self, inputs: np.ndarray) -> np.ndarray:
        """The probability of each class for encoded rows."""
        shares = self.shares or (1 / len(self.members),) * len(self.members)
        mean = np.zeros((len(inputs), len(self.classes)))
        for share, layers in zip(shares, self.members, strict=True):
            values = np.asarray(inputs, np.float32)
            for n, layer in enumerate(layers):
                values = np.maximum(values, 0) if n else values
                values = values @ np.asarray(layer["w"], np.float32) + np.asarray(layer["b"], np.float32)
            logits = values.astype(float)
            logits = np.concatenate([np.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits
            odds = np.exp(logits - logits.max(1, keepdims=True))
            mean += share * odds / odds.sum(1, keepdims=True)
        return mean

    def predict(self, source: Any, id: str | None = None) -> Iterator[tuple[list[str], np.ndarray]]:
        """What new rows are called, and the probability of each class for them, some rows at a time.

        Args:
            source: a file, a data frame, an array or a folder, with the columns or pictures that it was trained on.
            id: the column with the names of the rows.
        """
        rows, first = new_rows(self.encoding, source, id), 0
        for block in rows.blocks:
            last = first + len(block)
            yield list(rows.ids[first:last]), self.probabilities(block)
            first = last

    def packed(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """As plain values and arrays by name; see :meth:`restore`."""
        arrays = {
            f"{m}.{n}.{name}": np.asarray(layer[name], np.float32)
            for m, layers in enumerate(self.members)
            for n, layer in enumerate(layers)
            for name in ("w", "b")
        }
        about = {"encoding": self.encoding.plain(), "classes": list(self.classes), "label": self.label}
        return {**about, "shares": list(self.shares), "layers": [len(layers) for layers in self.members]}, arrays

    @classmethod
    def restore(cls, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> "Classifier":
        """The classifier of what :meth:`packed` gave; refuses what does not fit together."""
        try:
            encoding, classes = Encoding.restore(about["encoding"]), tuple(map(str, about["classes"]))
            members = [
                [{name: arrays[f"{m}.{n}.{name}"] for name in ("w", "b")} for n in range(layers)]
                for m, layers in enumerate(about["layers"])
            ]
            shares = tuple(map(float, about["shares"]))
            for layers in members:
                widths = [encoding.width, *(layer["w"].shape[1] for layer in layers)]
                if [layer["w"].shape[0] for layer in layers] != widths[:-1] or widths[-1] not in (1, len(classes)):
                    raise ValueError
                for layer, width in zip(layers, widths[1:], strict=True):
                    if layer["b"].shape != (width,) or not all(np.isfinite(array).all() for array in layer.values()):
                        raise ValueError
            if not members or len(shares) not in (0, len(members)) or len(classes) < 2:
                raise ValueError
            return cls(encoding, classes, members, shares, str(about["label"]))
        except (KeyError, TypeError, ValueError, IndexError):
            raise FedbilevelError(
                "the stored model cannot be read: it is damaged, or another version wrote it."
            ) from None


def standardising(layers: Layers, mean: Any, deviation: Any) -> list[dict[str, np.ndarray]]:
    """Layers that standardise their inputs first: with this mean and deviation; where it is 0, the input is 0.

    >>> layers = standardising([{"w": np.array([[2.0]]), "b": np.zeros(1)}], np.array([1.0]), np.array([4.0]))
    >>> layers[0]["w"].item(), layers[0]["b"].item()
    (0.5, -0.5)
    """
    first, *rest = [{name: np.asarray(array, float) for name, array in layer.items()} for layer in layers]
    scale = np.broadcast_to(1 / np.where(np.asarray(deviation) > 0, deviation, np.inf), len(first["w"]))
    shift = np.broadcast_to(mean, len(first["w"])) * scale
    return [{"w": first["w"] * scale[:, None], "b": first["b"] - shift @ first["w"]}, *rest]
