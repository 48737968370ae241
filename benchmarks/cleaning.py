"""How well label errors are found: ``python -m benchmarks.cleaning --write`` makes the tables of docs/cleaning.md.

Thirteen columns of data, noise and division into six clients with 20 trusted rows each, five seeds. Ours is federated,
with and without the trusted rows, thorough and by default. The references see the rows of all clients pooled: cleanlab
with logistic regression, the same with the trusted rows added, and logistic regression on the trusted rows alone. Their
weight decay is chosen by cross-validated loss.

Nothing is chosen by the truth. What was measured of a column and a seed is written to --out at once, so a run that is
stopped continues where it was, and a later one adds columns and seeds. Columns whose data set is not at hand are left
out. With both efforts, a seed takes about an hour on two cores, two thirds of it for MNIST.
"""

import argparse
import csv
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedbilevel as fb
from benchmarks.cleaning_tables import BINS, Results, pages
from fedbilevel.cleaning import Findings, clean_arrays
from fedbilevel.cleaning.scaling import Scale, Sums
from fedbilevel.storage.compiled import enable
from fedbilevel.tasks.scores import auc

Array = np.ndarray
CLIENTS, TRUSTED, FOLDS = 6, 20, 5
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Inverse weight decay of scikit-learn's logistic regression, of which the best by cross-validated loss is taken."""
KEYS = ("column", "seed", "way")
DOCS = Path(__file__).parents[1] / "docs" / "cleaning.md"


class Column(NamedTuple):
    """A data set, how its labels go wrong, and how its rows are divided among clients."""

    data: str
    noise: float | Sequence[float]
    division: str = "iid"
    to_next: bool = False  # a wrong label is the next class, not any other one
    one_class: bool = False  # the trusted rows of a client are of one class


COLUMNS = {
    "digits .1": Column("digits", 0.1),
    "digits .4": Column("digits", 0.4),
    "digits .4 shards": Column("digits", 0.4, "shards"),
    "breast .1": Column("breast-cancer", 0.1),
    "breast .4": Column("breast-cancer", 0.4),
    "Adult .1": Column("adult", 0.1),
    "Adult .4": Column("adult", 0.4),
    "MNIST .1": Column("mnist", 0.1),
    "MNIST .4": Column("mnist", 0.4),
    "digits .4 y+1": Column("digits", 0.4, to_next=True),
    "digits .05-.6": Column("digits", (0.05, 0.16, 0.27, 0.38, 0.49, 0.6)),
    "digits .4 Dirichlet": Column("digits", 0.4, "dirichlet"),
    "digits .4 one class": Column("digits", 0.4, one_class=True),
}
SIZES = {"digits": (1397, 400), "breast-cancer": (419, 150), "adult": (6000, 2000), "mnist": (6000, 2000)}
"""Rows of all clients together, and test rows."""


class Rows(NamedTuple):
    """The rows of all clients with planted errors, and test rows."""

    inputs: Array
    right: Array
    given: Array
    client: Array
    trusted: Array
    test: Array
    test_labels: Array
    classes: int

    @property
    def wrong(self) -> Array:
        """Which labels are wrong, of the suspicious rows."""
        return (self.given != self.right)[~self.trusted]


def planted(column: Column, seed: int) -> Rows:
    """Draw rows, divide them, and make labels wrong."""
    rng = np.random.default_rng(seed)
    data = fb.data.load(column.data).train
    size, tests = SIZES[column.data]
    drawn = rng.permutation(len(data.labels))[: size + tests]
    inputs, labels = np.asarray(data.inputs)[drawn], np.asarray(data.labels)[drawn].astype(np.int32)
    (test, inputs), (test_labels, right) = (np.split(part, [tests]) for part in (inputs, labels))
    divide: Callable[[], list[Array]] = {
        "iid": lambda: fb.data.iid(right, CLIENTS, seed),
        "shards": lambda: fb.data.shards(right, CLIENTS, seed=seed),
        "dirichlet": lambda: fb.data.dirichlet(right, CLIENTS, seed, alpha=0.3, smallest=2 * TRUSTED),
    }[column.division]
    client, trusted = np.zeros(len(right), int), np.zeros(len(right), bool)
    given, classes = right.copy(), int(labels.max()) + 1
    levels = np.broadcast_to(column.noise, CLIENTS)
    for m, part in enumerate(divide()):
        client[part] = m
        chosen = rng.permutation(part)
        chosen = chosen[right[chosen] == m % classes] if column.one_class else chosen
        trusted[chosen[:TRUSTED]] = True
        rest = rng.permutation(part[~trusted[part]])
        bad = rest[: round(levels[m] * len(rest))]
        given[bad] = (right[bad] + (1 if column.to_next else rng.integers(1, classes, len(bad)))) % classes
    return Rows(inputs, right, given, client, trusted, test, test_labels, classes)


def regression(inputs: Array, labels: Array, strength: float) -> Any:
    """Logistic regression with this inverse weight decay."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, max_iter=100, tol=1e-3).fit(inputs, labels)


def probabilities(model: Any, inputs: Array, classes: int) -> Array:
    """Of all classes, also of those that the model has not seen."""
    full = np.zeros((len(inputs), classes))
    full[:, model.classes_] = model.predict_proba(inputs)
    return full


def loss(said: Array, labels: Array) -> float:
    """The mean of -log of the probability of the labels."""
    return float(-np.log(np.maximum(said[np.arange(len(labels)), labels], 1e-9)).mean())


def out_of_fold(inputs: Array, labels: Array, classes: int, strength: float, more: tuple[Array, Array] | None) -> Array:
    """What models that were not trained on a row say about it; ``more`` are rows that all of them are trained on."""
    from sklearn.model_selection import KFold, StratifiedKFold

    splitter = StratifiedKFold if np.bincount(labels, minlength=classes).min() >= FOLDS else KFold
    said = np.zeros((len(labels), classes))
    for train, held_out in splitter(FOLDS, shuffle=True, random_state=0).split(inputs, labels):
        known, their = inputs[train], labels[train]
        if more is not None:
            known, their = np.concatenate([known, more[0]]), np.concatenate([their, more[1]])
        said[held_out] = probabilities(regression(known, their, strength), inputs[held_out], classes)
    return said


def tuned(inputs: Array, labels: Array, classes: int, more: tuple[Array, Array] | None = None) -> tuple[Array, float]:
    """The out-of-fold probabilities of the strength with the smallest out-of-fold loss, and this strength. The loss has
    one valley: from the middle, the search goes on to the better neighbour while there is one.
    """
    tried: dict[int, Array] = {}

    def loss_of(n: int) -> float:
        if not 0 <= n < len(STRENGTHS):
            return float("inf")
        if n not in tried:
            tried[n] = out_of_fold(inputs, labels, classes, STRENGTHS[n], more)
        return loss(tried[n], labels)

    here, best = -1, STRENGTHS.index(1e-2)
    while here != best:
        here = best
        best = min((here, here - 1, here + 1), key=loss_of)
    return tried[best], STRENGTHS[best]


def retrained(rows: Rows, scale: Scale, kept: Array) -> float:
    """The test accuracy of logistic regression, the same for all, on the rows that are kept and the trusted ones."""
    used = rows.trusted.copy()
    used[np.flatnonzero(~rows.trusted)[kept]] = True
    labels = np.where(rows.trusted, rows.right, rows.given)[used]
    inputs = scale(rows.inputs[used])
    _, strength = tuned(inputs, labels, rows.classes)
    return float(np.mean(regression(inputs, labels, strength).predict(scale(rows.test)) == rows.test_labels))


def reliability(wrong: Array, truth: Array) -> dict[str, float]:
    """The curve of P(wrong): in every bin the sum of what is said, how many are true, and how many rows there are."""
    number = np.minimum((wrong * BINS).astype(int), BINS - 1)
    of = lambda weights: np.bincount(number, weights, minlength=BINS)
    sums = {"said": of(wrong), "true": of(truth), "rows": of(np.ones(len(wrong)))}
    return {f"{what} {n}": float(values[n]) for what, values in sums.items() for n in range(BINS)}


def calibration(curve: Mapping[str, float]) -> float:
    """The expected calibration error."""
    rows = sum(curve[f"rows {n}"] for n in range(BINS))
    return sum(abs(curve[f"said {n}"] - curve[f"true {n}"]) for n in range(BINS)) / rows


def of_references(rows: Rows, scale: Scale) -> dict[str, float]:
    """AUC and accuracy of the pooled references."""
    from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]
    from cleanlab.rank import get_label_quality_scores  # pyright: ignore[reportMissingImports]

    table, sure = scale(rows.inputs), rows.trusted
    suspicious, given = table[~sure], rows.given[~sure]
    trusted = (table[sure], rows.right[sure])
    with_trusted, _ = tuned(suspicious, given, rows.classes, trusted)
    pooled, _ = tuned(suspicious, given, rows.classes)
    _, strength = tuned(*trusted, rows.classes)
    alone = probabilities(regression(*trusted, strength), suspicious, rows.classes)
    found = {}
    for name, said in (("cleanlab", pooled), ("cleanlab+", with_trusted)):
        found[f"{name} auc"] = auc(rows.wrong, -get_label_quality_scores(given, said))
        # Cleanlab needs every class among the labels that it is given.
        issues = (
            find_label_issues(given, said, n_jobs=1)
            if len(np.unique(given)) == rows.classes
            else given != said.argmax(1)
        )
        found[f"{name} accuracy"] = retrained(rows, scale, ~issues)
    found["trusted auc"] = auc(rows.wrong, -alone[np.arange(len(given)), given])
    found["trusted accuracy"] = retrained(rows, scale, given == alone.argmax(1))
    return found


def of_findings(name: str, rows: Rows, scale: Scale, findings: Findings) -> dict[str, float]:
    """What is reported of ours."""
    suspicious = ~rows.trusted
    wrong = findings.wrong[suspicious]
    errors = [
        abs(each.level - (rows.given != rows.right)[suspicious & (rows.client == each.client)].mean())
        for each in findings.noise
        if each.rows >= 100
    ]
    return {
        f"{name} auc": auc(rows.wrong, -findings.quality[suspicious]),
        f"{name} accuracy": retrained(rows, scale, ~findings.issue[suspicious]),
        f"{name} calibration": calibration(reliability(wrong, rows.wrong)),
        f"{name} noise": max(errors) if errors else float("nan"),
        f"{name} identified": float(findings.identified),
        f"{name} runs": findings.exchanged.fedavg_runs,
    }


def measure(column: Column, seed: int, way: str) -> dict[str, float]:
    """Everything about one column, one seed and one way: the references, or ours with an effort."""
    rows = planted(column, seed)
    scale = Scale.fit([Sums.of(rows.inputs)], images=rows.inputs.ndim > 2)
    if way == "pooled":
        return of_references(rows, scale)
    settings = {"thorough": way == "thorough", "seed": seed}
    began = time.perf_counter()
    ours = clean_arrays(rows.inputs, rows.given, rows.client, rows.trusted, rows.classes, **settings)
    seconds = time.perf_counter() - began
    suspicious = ~rows.trusted
    blind = rows._replace(
        inputs=rows.inputs[suspicious], right=rows.right[suspicious], given=rows.given[suspicious],
        client=rows.client[suspicious], trusted=np.zeros(suspicious.sum(), bool),
    )  # fmt: skip
    alone = clean_arrays(blind.inputs, blind.given, blind.client, None, rows.classes, **settings)
    return {
        **of_findings("ours", rows, scale, ours),
        **of_findings("alone", blind, scale, alone),
        **reliability(ours.wrong[suspicious], rows.wrong),
        "seconds": seconds,
    }


def done(path: Path) -> dict[tuple[str, int, str], Mapping[str, float]]:
    """What has been measured so far."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            (row["column"], int(row["seed"]), row["way"]): {
                name: float(value) for name, value in row.items() if name not in KEYS and value
            }
            for row in csv.DictReader(file)
        }


def keep(path: Path, results: Results) -> None:
    """Write all that has been measured."""
    names = list(dict.fromkeys(name for row in results.values() for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*KEYS, *names])
        for keys, row in results.items():
            table.writerow([*keys, *(f"{row[name]:.6g}" if name in row else "" for name in names)])


def main() -> None:
    """Measure what is missing, and write the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cleaning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4], help="default: 0 1 2 3 4; none: only the tables"
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        default=list(COLUMNS),
        choices=list(COLUMNS),
        metavar="COLUMN",
        help="one or several of: " + ", ".join(f'"{name}"' for name in COLUMNS),
    )
    parser.add_argument(
        "--efforts", nargs="+", default=["default", "thorough"], choices=["default", "thorough"], help="default: both"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/cleaning.csv"), help="what was measured (default: %(default)s)"
    )
    parser.add_argument("--write", action="store_true", help="write the tables into docs/cleaning.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="sklearn")
    enable()
    for effort in options.efforts:
        for seed in options.seeds:
            for name in options.columns:
                for way in ("pooled", effort):
                    if (name, seed, way) not in done(options.out):
                        one(name, seed, way, options.out)
    tables = pages(done(options.out), list(COLUMNS))
    print(tables)
    if options.write:
        first, last = "<!-- table -->", "<!-- end of table -->"
        text = DOCS.read_text()
        before, after = text.split(first)[0], text.split(last)[1]
        DOCS.write_text(f"{before}{first}\n\n{tables}\n\n{last}{after}")


def one(name: str, seed: int, way: str, out: Path) -> None:
    """Measure one way in one column with one seed, and add it to the file."""
    try:
        found = measure(COLUMNS[name], seed, way)
    except fb.FedbilevelError as error:
        print(f"{name}, seed {seed}, {way}: left out: {error}", flush=True)
        return
    keep(out, {**done(out), (name, seed, way): found})
    shown = ", ".join(f"{key} {value:.4f}" for key, value in found.items() if key.endswith((" auc", " accuracy")))
    print(f"{name}, seed {seed}, {way}: {shown}", flush=True)


if __name__ == "__main__":
    main()
