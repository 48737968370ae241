"""A small table of four hospitals with planted wrong labels; tests that search share its shape and one program."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

HOSPITALS = ("north", "south", "east", "west")
CODES = {"no": 0, "yes": 1}


def patients(seed: int = 0, trusted: bool = True) -> tuple[pd.DataFrame, np.ndarray]:
    """240 rows with four numbers and a code, and which labels are wrong; 40 rows are checked."""
    rng = np.random.default_rng(seed)
    outcome = rng.integers(0, 2, 240)
    numbers = rng.normal(size=(240, 4)) + 1.6 * outcome[:, None]
    checked = np.arange(240) < 40
    wrong = ~checked & (rng.random(240) < np.array([0.1, 0.1, 0.2, 0.3])[np.arange(240) % 4])
    frame = pd.DataFrame(numbers.round(6), columns=["age", "weight", "pulse", "dose"])
    frame["ward"] = np.where(np.arange(240) % 3 == 0, "007", "7")
    frame.insert(0, "patient", [f"P{n:03}" for n in rng.permutation(240)])
    frame["outcome"] = np.where(np.where(wrong, 1 - outcome, outcome) == 1, "yes", "no")
    frame["hospital"] = np.array(HOSPITALS)[np.arange(240) % 4]
    if trusted:
        frame["checked"] = np.where(checked, "yes", "no")
    return frame, wrong


def as_csv(folder: Path, **options: Any) -> tuple[Path, pd.DataFrame, np.ndarray]:
    """The same as a file."""
    frame, wrong = patients(**options)
    path = folder / "patients.csv"
    frame.to_csv(path, index=False)
    return path, frame, wrong
