"""How well label errors are found: ``python -m benchmarks.cleaning`` fills the table of docs/cleaning.md.

Thirteen columns of data, noise and division into six clients with 20 trusted rows each, five seeds. Ours is federated;
the references see the rows of all clients pooled: cleanlab with logistic regression, the same with the trusted rows
added, and logistic regression on the trusted rows alone. Their weight decay is chosen by cross-validated loss. Beside
them stand ours without trusted rows, and the out-of-fold loss of models of the given labels (federated as well).

Nothing is chosen by the truth. Every (column, seed) is one row of ``--out``, written when it is done, so a run that is
stopped continues where it was. Adult and MNIST are left out where the data sets are not at hand.
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
from fedbilevel.cleaning import Findings, clean_arrays
from fedbilevel.cleaning.scaling import Scale, Sums
from fedbilevel.tasks.scores import auc

Array = np.ndarray
CLIENTS, TRUSTED, FOLDS = 6, 20, 5
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Inverse weight decay of scikit-learn's logistic regression, of which the best by cross-validated loss is taken."""
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

WAYS = {
    "ours": "fedbilevel",
    "cleanlab": "cleanlab, pooled",
    "cleanlab+": "cleanlab, pooled, with trusted rows",
    "trusted": "trusted rows alone, pooled",
    "alone": "fedbilevel, no trusted rows",
    "loss": "out-of-fold loss, federated, no trusted rows",
}


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


def reliability(wrong: Array, truth: Array, bins: int = 10) -> tuple[float, list[tuple[float, float, int]]]:
    """The expected calibration error of P(wrong), and its curve: in every bin the mean, what is true, and how many."""
    number = np.minimum((wrong * bins).astype(int), bins - 1)
    curve = [
        (float(wrong[here].mean()), float(truth[here].mean()), int(here.sum()))
        for here in (number == n for n in range(bins))
        if here.any()
    ]
    return float(sum(abs(said - true) * count for said, true, count in curve) / len(wrong)), curve


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
        f"{name} calibration": reliability(wrong, rows.wrong)[0],
        f"{name} noise": max(errors) if errors else float("nan"),
        f"{name} identified": float(findings.identified),
        f"{name} runs": findings.exchanged.fedavg_runs,
    }


def measure(column: Column, seed: int, thorough: bool) -> tuple[dict[str, float], list[tuple[float, float, int]]]:
    """Everything about one column and one seed, and the reliability curve of P(wrong)."""
    rows = planted(column, seed)
    scale = Scale.fit([Sums.of(rows.inputs)], images=rows.inputs.ndim > 2)
    began = time.perf_counter()
    ours = clean_arrays(rows.inputs, rows.given, rows.client, rows.trusted, rows.classes, thorough=thorough, seed=seed)
    seconds = time.perf_counter() - began
    suspicious = ~rows.trusted
    blind = rows._replace(
        inputs=rows.inputs[suspicious], right=rows.right[suspicious], given=rows.given[suspicious],
        client=rows.client[suspicious], trusted=np.zeros(suspicious.sum(), bool),
    )  # fmt: skip
    alone = clean_arrays(blind.inputs, blind.given, blind.client, None, rows.classes, thorough=thorough, seed=seed)
    found = {
        **of_findings("ours", rows, scale, ours),
        **of_findings("alone", blind, scale, alone),
        **of_references(rows, scale),
        "seconds": seconds,
    }
    return found, reliability(ours.wrong[suspicious], rows.wrong)[1]


def done(path: Path) -> dict[tuple[str, int], Mapping[str, float]]:
    """What has been measured so far."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            (row["column"], int(row["seed"])): {
                name: float(value) for name, value in row.items() if name not in ("column", "seed") and value
            }
            for row in csv.DictReader(file)
        }


def keep(path: Path, results: Mapping[tuple[str, int], Mapping[str, float]]) -> None:
    """Write all that has been measured."""
    names = list(dict.fromkeys(name for row in results.values() for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["column", "seed", *names])
        for (column, seed), row in results.items():
            table.writerow([column, seed, *(f"{row[name]:.5g}" if name in row else "" for name in names)])


def pages(results: Mapping[tuple[str, int], Mapping[str, float]]) -> str:
    """The tables of docs/cleaning.md."""
    names = [name for name in COLUMNS if any(column == name for column, _ in results)]
    of = lambda column, quantity: np.array([row[quantity] for (c, _), row in results.items() if c == column])
    ways = ("ours", "cleanlab", "cleanlab+", "trusted")
    mean = lambda values: float(np.mean(values[np.isfinite(values)])) if np.isfinite(values).any() else float("nan")
    lines = []
    for quantity, what, digits, shown in (
        ("auc", "AUC of detection", 4, (*ways, "alone")),
        ("accuracy", "Test accuracy after cleaning and retraining", 3, ways),
    ):
        lines += [f"**{what}**, mean and deviation over seeds, the best in bold:", ""]
        lines += ["| | seeds | " + " | ".join(WAYS[way] for way in shown) + " |", "|---" * (len(shown) + 2) + "|"]
        for name in names:
            values = [of(name, f"{way} {quantity}") for way in shown]
            best = max(float(v.mean()) for v in values[:4])
            cells = [f"{v.mean():.{digits}f} ± {v.std():.{digits}f}".replace("0.", ".") for v in values]
            cells = [
                f"**{c}**" if n < 4 and v.mean() >= best else c
                for n, (c, v) in enumerate(zip(cells, values, strict=True))
            ]
            lines.append(f"| {name} | {len(values[0])} | " + " | ".join(cells) + " |")
        means = [np.mean([of(name, f"{way} {quantity}").mean() for name in names]) for way in shown]
        lines += ["| mean | | " + " | ".join(f"{m:.{digits}f}".replace("0.", ".") for m in means) + " |", ""]
    lines += [
        "**Noise, calibration and cost of fedbilevel**: the largest difference of a client's estimated share of wrong",
        "labels from the real one, for clients with at least 100 rows (mean over seeds); the expected calibration",
        "error of P(wrong); and the cost in FedAvg runs. Without trusted rows: in how many seeds the noise was said to",
        "be identified.",
        "",
        "| | noise | calibration error | FedAvg runs | no trusted rows: identified | noise, where identified |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        noise, error, runs, told = (
            of(name, q) for q in ("ours noise", "ours calibration", "ours runs", "alone identified")
        )
        where = of(name, "alone noise")[told > 0]
        lines.append(
            f"| {name} | {mean(noise):.3f} | {error.mean():.3f} | {runs.mean():.1f} | {int(told.sum())} of "
            f"{len(told)} | {f'{mean(where):.3f}' if len(where) else '-'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/cleaning.csv"))
    parser.add_argument("--write", action="store_true", help="write the tables into docs/cleaning.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="sklearn")
    results = dict(done(options.out))
    for seed in options.seeds:
        for name in options.columns:
            if (name, seed) in results:
                continue
            try:
                found, curve = measure(COLUMNS[name], seed, options.thorough)
            except fb.FedbilevelError as error:
                print(f"{name}, seed {seed}: left out: {error}", flush=True)
                continue
            results[name, seed] = found
            keep(options.out, results)
            shown = " ".join(f"{key} {found[f'{key} auc']:.4f}" for key in ("ours", "cleanlab", "cleanlab+", "trusted"))
            print(f"{name}, seed {seed}: {shown}, {found['seconds']:.0f} s", flush=True)
            print("  P(wrong) -> true: " + " ".join(f"{a:.2f}:{b:.2f}" for a, b, _ in curve), flush=True)
    tables = pages(results)
    print(tables)
    if options.write:
        first, last = "<!-- table -->", "<!-- end of table -->"
        text = DOCS.read_text()
        before, after = text.split(first)[0], text.split(last)[1]
        DOCS.write_text(f"{before}{first}\n{tables}\n{last}{after}")


if __name__ == "__main__":
    main()
