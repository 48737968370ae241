"""Curves that are made up, to judge claims by."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedbilevel.reproduction import Reproduced
from fedbilevel.reproduction.claims import Judge, Judged
from fedbilevel.reproduction.curves import Curve
from fedbilevel.reproduction.files import Claim, Method, Panel, Reproduction, ResultColumn

Ends = Mapping[str, Sequence[float]]  # of one seed each, by the names of methods; NaN is a run that diverged


def reproduced(*panels: Ends, claims: Sequence[Claim] = (), better: str = "higher", **rows: Any) -> Reproduced:
    """Flat curves of 40 rounds under one condition for each argument, called A, B, ...; seeds are 0, 1, ..."""
    titles = "ABCDEFG"[: len(panels)]
    labels = list(dict.fromkeys(label for ends in panels for label in ends))
    methods = [Method(label, "fedbio", **rows.get(label.replace(" ", "_"), {})) for label in labels]
    made = Reproduction(
        id="made-up",
        title="",
        paper="",
        where="",
        claim="",
        task={"name": "quadratic"},
        run={"rounds": 40},
        seeds=3,
        columns=[ResultColumn("the end", "number", better=better)],
        panels=[Panel(title) for title in titles],
        methods=methods,
        claims=claims,
    )
    curves = [
        Curve(panel, method, seed, flat(0.0 if math.isnan(end) else end), "round 7: NaN" if math.isnan(end) else "")
        for panel, ends in zip(made.panels, panels, strict=True)
        for method in methods
        for seed, end in enumerate(ends.get(method.label, ()))
    ]
    return Reproduced(made, curves)


def flat(end: float) -> list[dict[str, float]]:
    """A history that stays where it is."""
    return [{"round": float(n), "exchanges": float(n), "seconds": 0.0, "number": end} for n in (0, 20, 40)]


def judge(done: Reproduced, kind: str, *methods: str, parameters: str = "printed", **settings: Any) -> Judged:
    """A claim about these curves."""
    return Judge(done, parameters).claim(Claim("", kind, methods, **settings))
