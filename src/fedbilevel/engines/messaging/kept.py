"""What a client keeps on its disk: committed rounds, and what it has answered since, so that it may be restarted at any
moment.

A committed round is on disk before it is acknowledged, and so is what an answer left behind before the answer leaves.
Every file has a checksum; one that cannot be read counts as missing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.engines.plan import Exchange
from fedbilevel.errors import FedbilevelError
from fedbilevel.storage.arrays import decode, encode, named_leaves, rebuild
from fedbilevel.storage.files import sync_folder, write_atomically


class Kept(NamedTuple):
    """What a client keeps of a committed round: its blocks of a private x, and its memory of the run."""

    round: int
    blocks: dict[str, Any]
    memory: Any


class Answered(NamedTuple):
    """One answer in an attempt at a round: what was sent, and what it left behind at the client."""

    session: str
    attempt: int
    base: int  # the round that the attempt started from
    number: int  # in this attempt
    exchange: str
    slot: str
    scope: str  # of the memory: a sub-cohort of one exchange may have a memory of its own
    memory: Any
    blocks: dict[str, Any]  # the new ones
    finite: bool
    reply: dict[str, np.ndarray]

    @property
    def whole_attempt(self) -> tuple[str, int]:
        """The attempt, in all sessions."""
        return self.session, self.attempt


class Vault:
    """The files of one client for one run. Without a folder, nothing is saved."""

    def __init__(self, folder: Path | None, exchanges: Mapping[str, Exchange]) -> None:
        self.folder, self.exchanges, self.run = folder, exchanges, ""

    def save(self, kept: list[Kept]) -> None:
        """Save the rounds to keep, and forget all others and all answers."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for each in kept:
            path = self._of_round(each.round)
            if not path.exists() or each is kept[-1]:
                header = {"run": self.run, "round": each.round, "blocks": sorted(each.blocks)}
                blocks = [each.blocks[name] for name in sorted(each.blocks)]
                self._write(path, header, {"blocks": blocks, "memory": each.memory}, durable=True)
        names = {self._of_round(each.round).name for each in kept}
        for path in [*self.folder.glob("round *"), *self.folder.glob("answer *")]:
            if path.name not in names:
                path.unlink(missing_ok=True)
        sync_folder(self.folder)

    def answer(self, answered: Answered) -> None:
        """Save what an answer left behind. The machine may lose this, but then notices it by the checksum."""
        if self.folder is not None:
            header = {**answered._asdict(), "run": self.run, "blocks": sorted(answered.blocks)}
            del header["memory"], header["reply"]
            blocks = [answered.blocks[name] for name in sorted(answered.blocks)]
            tree = {"blocks": blocks, "memory": answered.memory, "reply": dict(answered.reply)}
            self._write(self._of_answer(answered.number), header, tree, durable=False)

    def load(self, like: Kept) -> tuple[list[Kept], list[Answered]]:
        """What is saved of this run: rounds, the oldest first, and the answers of one attempt. ``like`` has the right
        shapes.
        """
        block, kept = next(iter(like.blocks.values())), []
        for path in self.folder.glob("round *") if self.folder is not None else ():
            if (found := self._read(path)) is not None:
                header, arrays = found
                shapes = {"blocks": [block] * len(header["blocks"]), "memory": like.memory}
                tree = jax.tree.map(jnp.asarray, rebuild(shapes, arrays))
                blocks = dict(zip(header["blocks"], tree["blocks"], strict=True))
                kept.append(Kept(header["round"], blocks, tree["memory"]))
        answers: list[Answered] = []
        while self.folder is not None and (found := self._read(self._of_answer(len(answers)))) is not None:
            header, arrays = found
            del header["run"]
            memory = self.exchanges[header["exchange"]].memory
            names = header.pop("blocks")
            tree = rebuild({"blocks": [block] * len(names), "memory": memory}, arrays)
            tree = jax.tree.map(jnp.asarray, tree)
            blocks = dict(zip(names, tree["blocks"], strict=True))
            reply = {name.removeprefix("reply."): a for name, a in arrays.items() if name.startswith("reply.")}
            each = Answered(**header, memory=tree["memory"], blocks=blocks, reply=reply)
            if answers and each.whole_attempt != answers[0].whole_attempt:
                break  # left over from an attempt before
            answers.append(each)
        return sorted(kept, key=lambda each: each.round), answers

    def _of_round(self, round: int) -> Path:
        assert self.folder is not None
        return self.folder / f"round {round}"

    def _of_answer(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"answer {number}"

    def _write(self, path: Path, header: dict[str, Any], tree: Any, durable: bool) -> None:
        arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}
        write_atomically(path, encode(header, arrays), durable)

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """A file of this run; None if there is none, or none that can be read."""
        try:
            header, arrays = decode(path.read_bytes())
        except (OSError, FedbilevelError):
            return None
        return (header, arrays) if header["run"] == self.run else None
