"""How datasets and models are opened; each only once for many runs in one process."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedvl.config import DataConfig
from fedvl.data.imported import ImportedEncoder, open_model
from fedvl.data.sources import open_dataset
from fedvl.data.stores import Dataset
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder


class Opener(NamedTuple):
    dataset: Callable[[str, Path | None], Dataset] = open_dataset
    model: Callable[[str, str], DualEncoder | FusedEncoder | ImportedEncoder] = open_model

    def dataset_of(self, data: DataConfig) -> Dataset:
        """Open an experiment's dataset; one without labels gets its classes from there."""
        root = Path(data.root) if data.root else None
        return open_dataset(data.dataset, root, data.classes) if data.classes else self.dataset(data.dataset, root)

    @classmethod
    def once(cls) -> "Opener":
        return cls(cache(open_dataset), cache(open_model))


OPEN_ANEW = Opener()
