"""BibTeX of what a run used: the method, the model, the data, and FedVL itself."""

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from fedvl.comparisons.verification import COMPARISON, read_comparison
from fedvl.config import Experiment, resolve
from fedvl.data.catalogue import lookup
from fedvl.methods import method_names
from fedvl.runs.folder import RunFolder

OWN = "fedvl"  # the key of FedVL


class Publication(BaseModel):
    """An entry of `bibliography.toml`; its fields in the order in which they are printed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["article", "inproceedings", "misc", "software", "techreport"]
    title: str
    author: str
    booktitle: str | None = None
    journal: str | None = None
    institution: str | None = None
    volume: str | None = None
    number: str | None = None
    pages: str | None = None
    version: str | None = None
    year: int
    doi: str | None = None
    arxiv: str | None = None
    license: str | None = None
    note: str | None = None

    def bibtex(self, key: str) -> str:
        """Return the entry of BibTeX."""
        fields = {name: str(value) for name, value in self if name not in ("kind", "arxiv") and value is not None}
        if self.arxiv:
            fields |= {"eprint": self.arxiv, "archiveprefix": "arXiv"}
        width = max(map(len, fields))
        lines = (f"  {name:{width}} = {{{value}}}" for name, value in fields.items())
        return f"@{self.kind}{{{key},\n" + ",\n".join(lines) + "\n}"


class Cited(BaseModel):
    """The keys of what to cite, and what to know about them; without keys why there are none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[str, ...] = ()
    note: str = ""
    variants: dict[str, tuple[str, ...]] = {}


class Bibliography(BaseModel):
    """`bibliography.toml`, whose first comments explain the tables."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    publications: dict[str, Publication]
    methods: dict[str, Cited]
    models: dict[str, Cited]
    datasets: dict[str, Cited]


@cache
def bibliography() -> Bibliography:
    text = (Path(__file__).parent / "bibliography.toml").read_text(encoding="utf-8")
    return Bibliography.model_validate(tomllib.loads(text))


def citations(folder: Path) -> str:
    """Return the BibTeX of a run, or of all runs of a comparison, each entry once."""
    return bibtex_of(resolve([run.settings]) for run in runs_of(folder))


def runs_of(folder: Path) -> list[RunFolder]:
    """Return the run in a folder, a party's newest, or all runs of a comparison."""
    if not (folder / COMPARISON).is_file():
        return [RunFolder.open(folder)]
    names = dict.fromkeys(run for cell in read_comparison(folder).cells for run in cell.runs)
    return [RunFolder(folder / "runs" / name) for name in names]


def bibtex_of(experiments: Iterable[Experiment]) -> str:
    """Return the entries of what the experiments use, and of FedVL; notes are comments."""
    sources = [source for experiment in experiments for source in cited_by(experiment)]
    keys = dict.fromkeys(key for source in sources for key in source.keys)
    notes = dict.fromkeys(source.note for source in sources if source.note)
    entries = (bibliography().publications[key].bibtex(key) for key in (*keys, OWN))
    return "\n\n".join([*filter(None, ["\n".join(f"% {note}." for note in notes)]), *entries])


def cited_by(experiment: Experiment) -> list[Cited]:
    """Return what to cite for the method, the model and each dataset of an experiment."""
    datasets = experiment.data.dataset.split("+")
    return [of_method(experiment), of_model(experiment.model.name), *map(of_dataset, datasets)]


def of_method(experiment: Experiment) -> Cited:
    method = experiment.method
    if method.name not in method_names():
        return Cited(note=f"{method.label} is a method of your own; cite it as you published it")
    found = bibliography().methods[method.name]
    if not found.variants:
        return found
    variant = str(method.options.get("variant", next(iter(found.variants))))
    return found.model_copy(update={"keys": (*found.keys, *found.variants[variant])})


def of_model(name: str) -> Cited:
    """Return the first of the known models whose name is part of a name or of a path's end."""
    end = "/".join(Path(name).parts[-2:]).lower()
    for part, found in bibliography().models.items():
        if part in end:
            return found
    return Cited(note=f"There is no entry for the model {Path(name).name}; cite it as its authors ask")


def of_dataset(name: str) -> Cited:
    entry = lookup(Path(name).stem)
    if entry is None:
        return Cited(note=f"There is no entry for the data {Path(name).name}; cite it as its authors ask")
    return bibliography().datasets[entry.name]
