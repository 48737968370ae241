"""Make a table of patients with wrong diagnoses, to try ``fedbilevel clean`` on.

    python examples/planted_errors.py            # writes patients.csv and truth.csv
    fedbilevel clean patients.csv --label diagnosis --client hospital --trusted checked --id patient

The rows are the 569 tumours of the breast cancer data that ship with scikit-learn, at four hospitals. Every hospital
has checked the diagnosis of 15 of its patients. Of the other diagnoses, a share is wrong: 5 % at the first hospital,
10, 20 and 30 % at the others. Some measurements are missing. truth.csv says which diagnoses are wrong.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer

HOSPITALS = {"north": 0.05, "south": 0.10, "east": 0.20, "west": 0.30}
CHECKED = 15
MISSING = 0.01


def patients(seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table with wrong diagnoses, and the truth."""
    rng = np.random.default_rng(seed)
    raw: Any = load_breast_cancer()
    rows = rng.permutation(len(raw.target))
    names = np.array(["malignant", "benign"])
    right, hospital = raw.target[rows], np.arange(len(rows)) % len(HOSPITALS)
    checked, wrong = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
    for number, share in enumerate(HOSPITALS.values()):
        own = rng.permutation(np.flatnonzero(hospital == number))
        checked[own[:CHECKED]] = True
        wrong[own[CHECKED:][: round(share * (len(own) - CHECKED))]] = True
    measured = np.where(rng.random((len(rows), 30)) < MISSING, np.nan, raw.data[rows])
    patient = [f"P{n:04}" for n in rng.permutation(len(rows))]
    table = pd.DataFrame({"patient": patient, "hospital": np.array(list(HOSPITALS))[hospital]})
    table[[name.replace(" ", "_") for name in raw.feature_names]] = measured
    table["diagnosis"] = names[np.where(wrong, 1 - right, right)]
    table["checked"] = np.where(checked, "yes", "no")
    truth = pd.DataFrame({"patient": patient, "diagnosis": names[right], "wrong": np.where(wrong, "yes", "no")})
    return table, truth


def main() -> None:
    """Write both tables."""
    parser = argparse.ArgumentParser(description="Write patients.csv, with wrong diagnoses, and truth.csv.")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, table in zip(("patients.csv", "truth.csv"), patients(arguments.seed), strict=True):
        table.to_csv(arguments.out / name, index=False)
        print(f"wrote {arguments.out / name}: {len(table)} rows")


if __name__ == "__main__":
    main()
