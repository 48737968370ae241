"""The tables of docs/cleaning.md, from what ``python -m benchmarks.cleaning`` has measured."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Array = np.ndarray
Results = Mapping[tuple[str, int, str], Mapping[str, float]]
"""What was measured, by column, seed and way: "pooled" (the references), "thorough" or "default"."""
REFERENCES = {
    "cleanlab": "cleanlab, pooled",
    "cleanlab+": "cleanlab, pooled, with trusted rows",
    "trusted": "trusted rows alone, pooled",
}
BINS = 10
"""Of the reliability curve."""


class Measured:
    """What one effort has measured, with the references on the same columns and seeds.

    Args:
        results: all that was measured.
        effort: "thorough" or "default".
        columns: their order.
    """

    def __init__(self, results: Results, effort: str, columns: Sequence[str]) -> None:
        here = [(c, seed) for c, seed, way in results if way == effort and (c, seed, "pooled") in results]
        self.results, self.effort = results, effort
        self.seeds = {c: sorted(seed for name, seed in here if name == c) for c in columns if c in dict(here)}

    def of(self, column: str, way: str, quantity: str) -> Array:
        """A quantity for every seed."""
        return np.array([self.results[column, seed, way][quantity] for seed in self.seeds[column]])

    def ours(self, column: str, quantity: str) -> Array:
        """A quantity of fedbilevel, for every seed."""
        return self.of(column, self.effort, quantity)

    def best(self, column: str, quantity: str) -> float:
        """The mean over seeds of the best reference: the one with the best mean."""
        return max(float(self.of(column, "pooled", f"{name} {quantity}").mean()) for name in REFERENCES)

    def ahead(self, column: str, quantity: str) -> float:
        """How far fedbilevel is above the best reference."""
        return float(self.ours(column, f"ours {quantity}").mean()) - self.best(column, quantity)

    def blind(self, column: str) -> float:
        """How far fedbilevel without trusted rows is above pooled cleanlab without them, in AUC."""
        return float((self.ours(column, "alone auc") - self.of(column, "pooled", "cleanlab auc")).mean())


def pages(results: Results, columns: Sequence[str]) -> str:
    """All tables."""
    efforts = [m for m in (Measured(results, effort, columns) for effort in ("thorough", "default")) if m.seeds]
    lines = goals(efforts, results)
    for measured in efforts:
        seeds = sorted({seed for each in measured.seeds.values() for seed in each})
        lines += ["", f"### {measured.effort.capitalize()}, seeds {', '.join(map(str, seeds))}", ""]
        lines += ["AUC of detection:", "", *compared(measured, "auc", 4)]
        lines += ["", "Test accuracy after cleaning and retraining:", "", *compared(measured, "accuracy", 3)]
        lines += ["", "Noise, calibration and cost:", "", *details(measured)]
        lines += ["", "P(wrong) and how many of these labels are wrong, all columns together:", "", *curve(measured)]
    return "\n".join(lines)


def goals(efforts: Sequence[Measured], results: Results) -> list[str]:
    """What we want to hold, and whether it does."""
    lines = ["| wanted, of the means over seeds | " + " | ".join(m.effort for m in efforts) + " |"]
    lines += ["|---" * (len(efforts) + 1) + "|"]

    def add(what: str, cell: Callable[[Measured], str]) -> None:
        lines.append(f"| {what} | " + " | ".join(cell(m) for m in efforts) + " |")

    def least(of: Callable[[Measured, str], float], bound: float, digits: int) -> Callable[[Measured], str]:
        def cell(measured: Measured) -> str:
            each = {column: of(measured, column) for column in measured.seeds}
            short = [f"{c} {each[c]:+.{digits}f}" for c in sorted(each, key=each.__getitem__) if each[c] < bound]
            return f"**no**: {', '.join(short)}" if short else f"yes (lowest {min(each.values()):+.{digits}f})"

        return cell

    def mean(quantity: str, digits: int) -> Callable[[Measured], str]:
        def cell(measured: Measured) -> str:
            ahead = float(np.mean([measured.ahead(c, quantity) for c in measured.seeds]))
            return f"{'yes' if ahead > 0 else '**no**'} ({ahead:+.{digits}f})"

        return cell

    def most(quantity: str, bound: float, digits: int = 3) -> Callable[[Measured], str]:
        def cell(measured: Measured) -> str:
            each = {c: _mean(measured.ours(c, quantity)) for c in measured.seeds}
            each = {c: value for c, value in each.items() if np.isfinite(value)}
            over = [f"{c} {each[c]:.{digits}f}" for c in sorted(each, key=lambda c: -each[c]) if each[c] > bound]
            return f"**no**: {', '.join(over)}" if over else f"yes (highest {max(each.values(), default=0):.{digits}f})"

        return cell

    def behind(measured: Measured) -> str:
        if measured.effort != "default":
            return "-"
        both = {
            (c, s): results[c, s, "default"]["ours auc"] - results[c, s, "thorough"]["ours auc"]
            for c, s, way in results
            if way == "thorough" and (c, s, "default") in results
        }
        if not both:
            return "not measured"
        each = {c: float(np.mean([gap for (name, _), gap in both.items() if name == c])) for c, _ in both}
        short = [f"{c} {gap:+.4f}" for c, gap in each.items() if gap < -0.005]
        return f"**no**: {', '.join(short)}" if short else f"yes (lowest {min(each.values()):+.4f})"

    add("columns measured", lambda m: str(len(m.seeds)))
    add("AUC at most .002 below the best reference, everywhere", least(lambda m, c: m.ahead(c, "auc"), -0.002, 4))
    add("AUC above the best reference in the mean over columns", mean("auc", 4))
    add(
        "accuracy at most .005 below the best reference, everywhere",
        least(lambda m, c: m.ahead(c, "accuracy"), -0.005, 3),
    )
    add("accuracy above the best reference in the mean over columns", mean("accuracy", 4))
    add("share of wrong labels right to .05 for every client with 100 rows", most("ours noise", 0.05))
    add("calibration error of P(wrong) at most .05", most("ours calibration", 0.05))
    add("without trusted rows, AUC at most .005 below pooled cleanlab", least(Measured.blind, -0.005, 4))
    add("default at most .005 AUC below thorough", behind)
    bound = {"thorough": 45, "default": 10}
    add(
        "cost at most 45 FedAvg runs, 10 by default",
        lambda m: most("ours runs", bound[m.effort], 1)(m),
    )
    return lines


def compared(measured: Measured, quantity: str, digits: int) -> list[str]:
    """Ours and the references in every column, the best in bold."""
    blind = quantity == "auc"
    heads = ["", "seeds", "fedbilevel", *REFERENCES.values(), "ahead of the best"]
    heads += ["fedbilevel, no trusted rows", "ahead of cleanlab"] if blind else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    rows = []
    for column, seeds in measured.seeds.items():
        values = [
            measured.ours(column, f"ours {quantity}"),
            *(measured.of(column, "pooled", f"{r} {quantity}") for r in REFERENCES),
        ]
        best = max(v.mean() for v in values)
        cells = [_cell(v, digits) for v in values]
        cells = [f"**{cell}**" if v.mean() >= best else cell for cell, v in zip(cells, values, strict=True)]
        ahead = [measured.ahead(column, quantity)] + ([measured.blind(column)] if blind else [])
        alone = measured.ours(column, "alone auc") if blind else np.array([])
        signed = [_short(f"{a:+.{digits}f}") for a in ahead]
        cells = [*cells, signed[0], *([_cell(alone, digits), signed[1]] if blind else [])]
        lines.append(f"| {column} | {len(seeds)} | {' | '.join(cells)} |")
        rows.append([*(v.mean() for v in values), ahead[0], *([alone.mean(), ahead[1]] if blind else [])])
    means = [f"{m:+.{digits}f}" if n in (4, 6) else f"{m:.{digits}f}" for n, m in enumerate(np.mean(rows, 0))]
    return [*lines, f"| mean | | {' | '.join(_short(m) for m in means)} |"]


def details(measured: Measured) -> list[str]:
    """How well the noise is estimated and P(wrong) calibrated, and what it costs."""
    heads = [
        "",
        "largest error of a client's share (100 rows or more)",
        "calibration error",
        "FedAvg runs",
        "seconds",
        "no trusted rows: said to be identified",
        "error of a share, where identified",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for column in measured.seeds:
        noise, error, runs, seconds, told = (
            measured.ours(column, q)
            for q in ("ours noise", "ours calibration", "ours runs", "seconds", "alone identified")
        )
        where = measured.ours(column, "alone noise")[told > 0]
        cells = [
            _number(noise), _number(error), f"{runs.mean():.1f}", f"{seconds.mean():.0f}",
            f"{int(told.sum())} of {len(told)}", _number(where),
        ]  # fmt: skip
        lines.append(f"| {column} | {' | '.join(cells)} |")
    return lines


def curve(measured: Measured) -> list[str]:
    """The reliability curve."""
    sums = {
        what: [
            sum(float(measured.ours(c, f"{what} {n}").sum()) for c in measured.seeds) for n in range(BINS)
        ]
        for what in ("said", "true", "rows")
    }  # fmt: skip
    used = [n for n in range(BINS) if sums["rows"][n]]
    lines = ["| P(wrong) | " + " | ".join(f"{n / BINS:.1f} to {(n + 1) / BINS:.1f}" for n in used) + " |"]
    lines += ["|---" * (len(used) + 1) + "|"]
    for what, name in (("said", "said"), ("true", "wrong")):
        lines.append(f"| {name} | " + " | ".join(f"{sums[what][n] / sums['rows'][n]:.2f}" for n in used) + " |")
    return [*lines, "| rows | " + " | ".join(f"{sums['rows'][n]:.0f}" for n in used) + " |"]


def _mean(values: Array) -> float:
    """Of what is known."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _number(values: Array) -> str:
    mean = _mean(values)
    return f"{mean:.3f}" if np.isfinite(mean) else "-"


def _cell(values: Array, digits: int) -> str:
    deviation = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return _short(f"{values.mean():.{digits}f}{deviation}")


def _short(number: str) -> str:
    return number.replace("0.", ".")
