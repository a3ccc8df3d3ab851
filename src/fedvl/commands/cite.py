"""fedvl cite: BibTeX of what a run or a comparison used."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  fedvl cite runs/linear-cifar10-mini > paper.bib

  fedvl cite comparisons/comparison                each entry once
"""


def cite(folder: Annotated[Path, typer.Argument(help="A run, or a comparison.")]) -> None:
    """Print BibTeX of the method, the model and the data of a run, and of FedVL."""
    from fedvl.display import visible
    from fedvl.report.bibliography import citations

    print(visible(citations(folder)))
