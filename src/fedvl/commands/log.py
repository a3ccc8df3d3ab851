"""fedvl log: export a run's event log to other programs."""

from pathlib import Path
from typing import Annotated

import typer

from fedvl.errors import FedVLError


def log(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    to: Annotated[
        str, typer.Option(help="tensorboard, mlflow or wandb (offline); each is an extra of fedvl.")
    ] = "tensorboard",
    out: Annotated[Path, typer.Option(help="Folder of the other program's files.")] = Path("logs"),
) -> None:
    """Export the rounds, settings and results of runs to TensorBoard, MLflow or W&B."""
    from fedvl.report.event_logs import EXPORTERS, read_log

    if to not in EXPORTERS:
        raise FedVLError(f"--to is {' or '.join(EXPORTERS)}, not '{to}'.")
    for folder in folders:
        command = EXPORTERS[to](read_log(folder), out)
    print(f"Exported {len(folders)} to {out}; view it with: {command}")
