"""Print the catalogue and single datasets as tables in the terminal."""

from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from fedvl.data.catalogue import catalogue
from fedvl.data.sources import default_data_root, open_dataset
from fedvl.data.stores import Dataset
from fedvl.display import Console


def list_datasets() -> None:
    table = Table("dataset", "title", "classes", "how to get it", box=None, pad_edge=False)
    for name, entry in catalogue().items():
        table.add_row(name, entry.title, str(entry.classes), how(entry.embedded, entry.fetchable))
    console = Console()
    console.print(table)
    console.print(
        f"\nName one behind its command: fedvl data get cifar10. Datasets are stored in {default_data_root()}. "
        "Your own folder needs no entry.",
        soft_wrap=True,
    )


def how(embedded: bool, fetchable: bool) -> str:
    if embedded:
        return "embedded"
    return "fedvl data get" if fetchable else "fedvl data show"


def show_dataset(name: str, root: Path | None) -> None:
    dataset = open_dataset(name, root)
    console = Console()
    console.print(Text.assemble((dataset.name, "bold"), f": {len(dataset.class_names)} classes"))
    table = Table("class", *dataset.splits, box=None, pad_edge=False)
    counts = {
        split: np.bincount(part.labels[part.labels >= 0], minlength=len(dataset.class_names))
        for split, part in dataset.splits.items()
    }
    for index, class_name in enumerate(dataset.class_names):
        table.add_row(Text(class_name), *(str(count[index]) for count in counts.values()))
    table.add_section()
    table.add_row("all", *(str(len(part)) for part in dataset.splits.values()))
    console.print(table)
    describe_templates(dataset, console)
    for note in dataset.notes:
        console.print(f"Note: {note}", highlight=False)


def describe_templates(dataset: Dataset, console: Console) -> None:
    for key, templates in dataset.templates.items():
        console.print(f"templates {key}: {' | '.join(templates)}", highlight=False, soft_wrap=True)
