"""The page about wrong labels, ``report.html``: one file without scripts, which opens without any network."""

import base64
import io
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, FileSystemLoader
from markupsafe import Markup

from fedbilevel.cleaning.found import Found
from fedbilevel.cleaning.shares import Share, confusion, shares
from fedbilevel.cleaning.words import cell, percent, probable
from fedbilevel.errors import FedbilevelError
from fedbilevel.report import page
from fedbilevel.storage.files import write_atomically

MOST_ROWS, MOST_PICTURES, MOST_GROUPS, MOST_COLUMNS = 60, 48, 100, 12
FEWEST = 12
MATRIX = 12  # classes that fit into a matrix
THUMBNAIL = 160  # pixels


HERE = Path(__file__).parent
TEMPLATES = page.TEMPLATES.overlay(loader=ChoiceLoader([FileSystemLoader(HERE), FileSystemLoader(page.HERE)]))
TEMPLATES.filters = {
    **page.TEMPLATES.filters,
    "percent": percent,
    "probable": probable,
    "cell": cell,
    "thousands": lambda n: f"{n:,}",
}


def write(found: Found, path: Path) -> Path:
    """Write the page about what was found."""
    try:
        write_atomically(path, render(found).encode("utf-8", "replace"))
    except OSError as error:
        raise FedbilevelError(f"cannot write {path}: {error.strerror}.") from error
    return path


def render(found: Found) -> str:
    """The page as text."""
    suspects = found.suspects
    per_client = found.per_client
    per_class = shares(suspects, "given_label", found.classes)
    clients, classes = _largest(per_client), _largest(per_class)
    counted = confusion(suspects, found.classes)
    pairs = counted.pairs(20)
    gallery = found.pictures is not None
    return TEMPLATES.get_template(
        "page.html"
    ).render(
        title=found.title,
        facts=_facts(found),
        warnings=found.warnings,
        notes=found.data.notes,
        clients=clients,
        clients_left=len(per_client) - len(clients),
        classes=classes,
        classes_left=len(per_class) - len(classes),
        scale=_scale([*clients, *classes]),
        matrix=_matrix(found.classes, counted.counts) if pairs and len(found.classes) <= MATRIX else None,
        pairs_of_classes=pairs,
        class_count=len(found.classes),
        gallery=gallery,
        looked_at=bool(found.data.parts[0].cells),  # other columns may be texts, which people read
        columns=[] if gallery else list(found.columns)[:MOST_COLUMNS],
        worst=_worst(found, MOST_PICTURES if gallery else MOST_ROWS),
        gain=_gain(found),
        exchanged=found.exchanged,
        settings=found.settings,
        style=Markup("".join((folder / "page.css").read_text(encoding="utf-8") for folder in (page.HERE, HERE))),
    )


def _facts(found: Found) -> list[str]:
    """What was looked at, in few words."""
    trusted = int(found.trusted.sum())
    return [
        f"{len(found.suspects):,} rows",
        f"{len(found.clients):,} client{'s' if len(found.clients) != 1 else ''}",
        f"{len(found.classes):,} classes",
        f"{trusted:,} trusted rows" if trusted else "no trusted rows",
    ]


def _largest(groups: Sequence[Share]) -> list[Share]:
    """All groups in their order, or, if there are too many for a page, those with the largest shares."""
    if len(groups) <= MOST_GROUPS:
        return list(groups)
    return sorted(groups, key=lambda each: -each.share)[:MOST_GROUPS]


def _scale(groups: Sequence[Share]) -> float:
    """Where the bars end: a round share above all that is shown, except for the ends of very long intervals."""
    most = max([each.share for each in groups if each.rows > each.trusted], default=1.0)
    return next(end for end in (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0) if end >= min(1.0, 1.3 * most))


def _matrix(classes: Sequence[Hashable], counts: np.ndarray) -> dict[str, Any]:
    """The counts, and how strongly each is coloured; what lies on the diagonal is not."""
    most = max(1, int((counts - np.diag(np.diag(counts))).max()))
    rows = [
        (name, [(int(n), None if i == j else 55 * int(n) / most) for j, n in enumerate(line)])
        for i, (name, line) in enumerate(zip(classes, counts, strict=True))
    ]
    return {"names": classes, "rows": rows}


def _worst(found: Found, most: int) -> list[dict[str, Any]]:
    """The rows that are most suspicious; trusted ones are not. Of rows that are no label issue, only a few."""
    issues, trusted = (found.suspects[name].to_numpy(bool) for name in ("is_label_issue", "trusted"))
    shown = issues | (np.cumsum(~trusted) <= FEWEST)
    open_ = np.flatnonzero(shown & ~trusted)[:most]
    positions = found.order[open_]
    cells = None if found.pictures is not None else found.values(positions, list(found.columns)[:MOST_COLUMNS])
    return [
        {
            "row": Path(str(row.row)).name if found.pictures is not None else row.row,
            "client": row.client,
            "given": row.given_label,
            "likely": row.predicted_label,
            "wrong": float(row.probability_wrong),  # pyright: ignore[reportArgumentType]
            "quality": float(row.label_quality),  # pyright: ignore[reportArgumentType]
            "cells": [] if cells is None else cells[n],
            "picture": None if found.pictures is None else _thumbnail(found.pictures(int(positions[n]))),
        }
        for n, row in enumerate(found.suspects.iloc[open_].itertuples(index=False))
    ]


def _thumbnail(picture: Any) -> str | None:
    """A small picture for the page; None if there is none."""
    from PIL import Image

    if picture is None:
        return None
    try:
        image = picture if isinstance(picture, Image.Image) else Image.open(picture)
        image = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    if max(image.size) < THUMBNAIL:
        times = THUMBNAIL // max(image.size)
        image = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    kept = io.BytesIO()
    image.save(kept, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(kept.getvalue()).decode()}"


def _gain(found: Found) -> dict[str, Any] | None:
    """Accuracy and loss on trusted rows that the model was not trained on."""
    if found.gain is None:
        return None
    models = (("all labels as they were given", found.gain.given), ("the cleaned labels", found.gain.cleaned))
    rows = [(name, (percent(score.accuracy), f"{score.loss:.3f}")) for name, score in models]
    return {"headings": ["accuracy", "loss"], "rows": rows, "count": found.gain.rows}
