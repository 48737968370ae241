"""Partitions: which client has which samples.

Every function returns a list with one sorted array of indices for each client; every sample goes to exactly one client.
A partition costs only its indices: the images stay one array, whatever the number of clients. A `seed` is a number or a
numpy Generator to draw from.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from fedbilevel.data.noise import Seed
from fedbilevel.errors import FedbilevelError

Parts = list[np.ndarray]


def _check(samples: int, clients: int, pieces: int = 1) -> None:
    if clients < 1:
        raise FedbilevelError(f"a partition needs at least one client, not {clients}.")
    if samples < clients * pieces:
        raise FedbilevelError(
            f"{samples} samples are too few for {clients} clients"
            + (f" with {pieces} shards each" if pieces > 1 else "")
            + ": use fewer clients or more samples."
        )


def iid(labels: np.ndarray, clients: int, seed: Seed) -> Parts:
    """Shuffle the samples and deal them out: parts of equal size (up to one sample) with similar classes.

    >>> [part.tolist() for part in iid(np.zeros(5), 2, seed=0)]
    [[2, 3, 4], [0, 1]]
    """
    _check(len(labels), clients)
    order = np.random.default_rng(seed).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def shards(labels: np.ndarray, clients: int, seed: Seed, per_client: int = 2) -> Parts:
    """Sort by label, cut into clients * per_client shards of equal size (up to one sample), deal them out at random.

    A client with two shards has two classes, or a few more where a shard contains a boundary (McMahan and others 2017).
    FedNest's partition of MNIST gives 100 clients two of 200 shards of 300 images.
    """
    if per_client < 1:
        raise FedbilevelError(f"per_client must be at least 1, not {per_client}.")
    _check(len(labels), clients, per_client)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    order = order[np.argsort(np.asarray(labels)[order], kind="stable")]
    pieces = np.array_split(order, clients * per_client)
    dealt = rng.permutation(len(pieces)).reshape(clients, per_client)
    return [np.sort(np.concatenate([pieces[i] for i in hand])) for hand in dealt]


def dirichlet(
    labels: np.ndarray, clients: int, seed: Seed, alpha: float, smallest: int = 1, draws: int = 1000
) -> Parts:
    """Draw the clients' shares of every class from Dirichlet(alpha, ..., alpha).

    A small alpha gives clients with few classes and very different sizes, a large alpha nearly equal clients. If a
    client gets fewer than `smallest` samples, the shares of all classes are drawn again, as usual (Yurochkin and
    others 2019); so the distribution is conditional on all clients being large enough.

    Args:
        labels: of all samples.
        clients: number of clients.
        seed: a number, or a generator to draw from.
        alpha: above 0.
        smallest: the fewest samples that a client may have.
        draws: the number of draws after which to give up with an error.
    """
    if not alpha > 0 or not np.isfinite(alpha):
        raise FedbilevelError(f"alpha of a Dirichlet partition must be above 0, not {alpha}.")
    if smallest < 1 or draws < 1:
        raise FedbilevelError("smallest and draws of a Dirichlet partition must be at least 1.")
    _check(len(labels), clients)
    rng = np.random.default_rng(seed)
    members = [rng.permutation(np.flatnonzero(labels == k)) for k in np.unique(labels)]
    sizes = np.array([len(indices) for indices in members])
    for _ in range(draws):
        shares = rng.dirichlet(np.full(clients, float(alpha)), len(members))
        # Rounding the borders, not the sizes, gives every sample away exactly once.
        borders = np.rint(np.cumsum(shares, 1) * sizes[:, None]).astype(int)[:, :-1]
        counts = np.diff(borders, axis=1, prepend=0, append=sizes[:, None])
        if counts.sum(0).min() >= smallest:
            pieces = [np.split(indices, cut) for indices, cut in zip(members, borders, strict=True)]
            return [np.sort(np.concatenate(part)) for part in zip(*pieces, strict=True)]
    raise FedbilevelError(
        f"none of {draws} Dirichlet draws with alpha {alpha:g} gave each of {clients} clients {smallest} samples: "
        "use a larger alpha, fewer clients or a smaller number."
    )


def by_class(labels: np.ndarray, clients: int, seed: Seed) -> Parts:
    """Give each client one class: client m has class m mod C; clients of the same class share its samples equally."""
    kinds = np.unique(labels)
    _check(len(labels), clients)
    if clients < len(kinds):
        raise FedbilevelError(
            f"one class per client needs at least {len(kinds)} clients, one for each class, not {clients}: "
            "use more clients or leave classes out."
        )
    rng = np.random.default_rng(seed)
    parts: Parts = [np.empty(0, np.intp)] * clients
    for k, kind in enumerate(kinds):
        owners = range(k, clients, len(kinds))
        members = rng.permutation(np.flatnonzero(labels == kind))
        if len(members) < len(owners):
            raise FedbilevelError(
                f"class {kind} has {len(members)} samples, too few for its {len(owners)} clients: use fewer clients."
            )
        for owner, part in zip(owners, np.array_split(members, len(owners)), strict=True):
            parts[owner] = np.sort(part)
    return parts


def natural(groups: np.ndarray, clients: int | None = None, seed: Seed = 0) -> Parts:
    """Make each group (a hospital, an alphabet) a client, in the order of the groups' numbers.

    With fewer clients than groups, whole groups are dealt out in random order, one after the other, as for the 50
    alphabets of Omniglot over 11 clients.

    >>> [part.tolist() for part in natural(np.array([1, 0, 1, 0]))]
    [[1, 3], [0, 2]]
    """
    groups = np.asarray(groups)
    kinds = np.unique(groups)
    members = [np.flatnonzero(groups == kind) for kind in kinds]
    if clients is None or clients == len(kinds):
        _check(len(groups), len(kinds))
        return members
    if not 1 <= clients < len(kinds):
        raise FedbilevelError(f"{len(kinds)} groups need from 1 to {len(kinds)} clients, not {clients}.")
    order = np.random.default_rng(seed).permutation(len(kinds))
    return [np.sort(np.concatenate([members[i] for i in order[m::clients]])) for m in range(clients)]


def split(parts: Sequence[np.ndarray], fractions: Sequence[float], seed: Seed) -> list[Parts]:
    """Split every part at random: `train, validation = split(parts, (0.8, 0.2), seed)`.

    Sizes are the fractions of the part, rounded; a piece that would be empty is an error.

    >>> train, validation = split([np.arange(10)], (0.7, 0.3), seed=0)
    >>> len(train[0]), len(validation[0])
    (7, 3)
    """
    if not fractions or min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-9:
        raise FedbilevelError(f"the fractions of a split must be above 0 and add up to 1, not {tuple(fractions)}.")
    rng = np.random.default_rng(seed)
    pieces: list[Parts] = [[] for _ in fractions]
    for m, part in enumerate(parts):
        cuts = np.rint(np.cumsum(fractions)[:-1] * len(part)).astype(int)
        for piece, indices in zip(pieces, np.split(rng.permutation(part), cuts), strict=True):
            if not len(indices):
                raise FedbilevelError(f"client {m} has {len(part)} samples, too few to split by {tuple(fractions)}.")
            piece.append(np.sort(indices))
    return pieces


def counts(parts: Sequence[np.ndarray], labels: np.ndarray, classes: int | None = None) -> np.ndarray:
    """Count the samples of each class that each client has: (clients, classes).

    >>> counts([np.array([0, 1]), np.array([2])], np.array([1, 1, 0])).tolist()
    [[0, 2], [1, 0]]
    """
    labels = np.asarray(labels)
    number = int(labels.max(initial=-1)) + 1 if classes is None else classes
    if len(labels) and labels.max() >= number:
        raise FedbilevelError(f"labels go up to {labels.max()}, but there are only {number} classes.")
    return np.stack([np.bincount(labels[part], minlength=number) for part in parts])


MANY = 12


def describe(
    parts: Sequence[np.ndarray], labels: np.ndarray, classes: Sequence[str] | None = None, rows: int = 20
) -> Table:
    """Show a partition as a table: every client's size and classes.

    Up to 12 classes have a column each; with more, a client's number of classes and its three most frequent are shown.

    Args:
        parts: the partition.
        labels: of all samples.
        classes: their names. Default: numbers.
        rows: number of clients to show; the last line sums up the rest.
    """
    table = counts(parts, labels, len(classes) if classes else None)
    names = list(classes) if classes else list(map(str, range(table.shape[1])))
    sizes = table.sum(1)
    shown = Table(
        title=f"{len(parts)} clients, {sizes.sum()} samples: {sizes.min()} to {sizes.max()} each, "
        f"median {np.median(sizes):g}",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),  # ten classes of thousands fit into 80 columns
    )
    few = len(names) <= MANY
    for heading in ("client", "samples", "classes", *(names if few else [])):
        # Long names of classes are folded, never numbers.
        wide = max(4, len(str(max(table.max(), table[rows:].sum(0).max())))) if heading in names else len(heading)
        shown.add_column(heading, justify="right", overflow="fold", width=wide)
    if not few:
        shown.add_column("most frequent")
    for m, row in enumerate(table[:rows]):
        common = [k for k in np.argsort(-row, kind="stable")[:3] if row[k]]
        last = [str(n) if n else "-" for n in row] if few else [", ".join(f"{names[k]} ({row[k]})" for k in common)]
        shown.add_row(str(m), str(row.sum()), str((row > 0).sum()), *last)
    if len(parts) > rows:
        rest = table[rows:].sum(0)
        last = [str(n) if n else "-" for n in rest] if few else [""]
        shown.add_row(f"+{len(parts) - rows}", str(rest.sum()), str((rest > 0).sum()), *last)
    return shown


def heat_map(
    parts: Sequence[np.ndarray], labels: np.ndarray, path: str | Path, classes: Sequence[str] | None = None
) -> Path:
    """Draw a partition: clients down, classes across, darker where there are more samples. Returns the path."""
    # Here because it takes a while to import, and most runs draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = counts(parts, labels, len(classes) if classes else None)
    height, width = np.clip(0.25 * np.array(table.shape), 2.5, 9)
    figure = Figure(figsize=(width + 2, height + 1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(table, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    if table.shape[1] <= 2 * MANY:
        slanted = classes is not None and max(map(len, classes)) > 3
        axes.set_xticks(
            range(table.shape[1]), classes, rotation=45 if slanted else 0, ha="right" if slanted else "center"
        )
    if table.shape[0] <= 2 * MANY:
        axes.set_yticks(range(table.shape[0]))
    figure.colorbar(image, ax=axes, label="samples")
    figure.savefig(path, dpi=120)
    return Path(path)
