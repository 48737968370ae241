"""``predict``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedbilevel.cli.options import console
from fedbilevel.runs import prediction


def predict(
    folder: Annotated[Path, typer.Argument(help="Folder of a run on your own table; it has a model.safetensors.")],
    rows: Annotated[
        str, typer.Argument(metavar="NEW", help="New rows: a table, an .npy file or a folder of pictures.")
    ],
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("predictions.csv"),
    id_: Annotated[
        str | None, typer.Option("--id", help="Column with the names of the rows. Default: their lines.")
    ] = None,
) -> None:
    """Predict the classes of new rows with a trained model."""
    counts = prediction.write_predictions(folder, rows, out, id_)
    often = sorted(counts.items(), key=lambda entry: -entry[1])
    said = ", ".join(f"{name}: {count:,}" for name, count in often[:10]) + ", ..." * (len(often) > 10)
    console.print(escape(f"{sum(counts.values()):,} rows. {said}"), highlight=False, soft_wrap=True)
    console.print(f"Predictions in [bold]{escape(str(out))}[/bold]", highlight=False, soft_wrap=True)
