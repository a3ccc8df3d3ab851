"""A survey of sites before training: what each sends of its images, as counts that add up.

    images      [class of the federation, split] images
    renamed     [class of the federation] sites with another class whose name probably means it
    strangers   [1] sites with a class whose name resembles no class of the federation
    faults      [sites or images, kind of fault]
    sizes, modes, brightness, orientation   readable images by property
    totals      [sites, images, readable images]

Counts of images that leave by themselves are rounded down to a multiple of the policy's least
cell, so that small ones are 0 and differences say nothing about a single image. Whether a site has
a fault of a kind is always sent; which images it is about, only the site is shown.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedvl.data.catalogue import class_key
from fedvl.data.check import NAMES_OF_BARS, RARE_CLASS, CheckedImages, PropertyCount, bars, classes_of, histograms
from fedvl.data.faults import FAULT_KINDS
from fedvl.data.faults import NAMES as FAULTS
from fedvl.data.similar import probably_same, same_names
from fedvl.files import Content, Count, Names
from fedvl.tensors import IntArray
from fedvl.version import __version__

MAX_SURVEYED = 2**31  # images of a site: what claims more is a lie
PARTS = ("train", "test", "val", "")  # the last: of no split
OF_IMAGES = ("images", *NAMES_OF_BARS)

Tables = dict[str, IntArray]


class FaultAtSites(Content):
    """A kind of fault, and at how many sites."""

    kind: str
    title: str
    fix: str
    sites: Count
    images: Count


class SurveyedClass(Content):
    """Images of a class of the federation at all sites."""

    name: str
    train: Count
    test: Count
    renamed: Count  # sites with another name for it


class AlikeNames(Content):
    """Two class names that probably mean the same, and the sites that have one of them."""

    one: str
    other: str
    sites: Names


class Survey(Content):
    """survey.json: what the sites of a federation have, before training."""

    fedvl_version: str
    surveyed: str
    secure_sum: bool
    sites: Names
    missing: Names
    refused: Names
    images: Count
    readable: Count
    classes: list[SurveyedClass]
    rare: Names  # classes with few training images at all sites together
    strangers: Count  # sites with classes of other names
    faults: list[FaultAtSites]
    sizes: list[PropertyCount]
    modes: list[PropertyCount]
    brightness: list[PropertyCount]
    orientation: list[PropertyCount]
    compared: Names  # sites whose policy lets them send their class names
    alike: list[AlikeNames]

    @property
    def clean(self) -> bool:
        renamed = any(each.renamed for each in self.classes)
        return not (self.faults or self.rare or self.strangers or self.alike or renamed)


def survey_shapes(classes: int) -> dict[str, tuple[int, ...]]:
    return {
        "images": (classes, len(PARTS)),
        "renamed": (classes,),
        "strangers": (1,),
        "faults": (2, len(FAULTS)),
        **{key: (len(names),) for key, names in NAMES_OF_BARS.items()},
        "totals": (3,),
    }


def tables_of(checked: CheckedImages, class_names: Sequence[str], least: int) -> Tables:
    """Return what a site sends of a check of its images."""
    images = checked.images
    keys = [class_key(name) for name in class_names]
    found = {name: np.zeros(shape, np.int64) for name, shape in survey_shapes(len(class_names)).items()}
    for label, split in zip(images.labels, images.splits, strict=True):
        if class_key(label) in keys:
            found["images"][keys.index(class_key(label)), PARTS.index(split)] += 1
    for meant in other_names(classes_of(images), class_names).values():
        found["renamed"][meant] = 1
        found["strangers"][0] |= not meant
    for kind, count in Counter(fault.kind for fault in checked.faults).items():
        rows = {row for fault in checked.faults if fault.kind == kind for row in fault.rows}
        found["faults"][:, FAULTS.index(kind)] = bool(count), len(rows)
    found |= histograms(images, np.arange(len(images.readable)))
    found["totals"][:] = 1, len(images), len(images.readable)
    for table in (*(found[name] for name in OF_IMAGES), found["faults"][1], found["totals"][1:]):
        table -= table % least
    return found


def other_names(names: Sequence[str], class_names: Sequence[str]) -> dict[str, list[int]]:
    """Return the names that are not in the federation's list, with the classes they may mean."""
    keys = {class_key(name) for name in class_names}
    return {
        name: [number for number, known in enumerate(class_names) if probably_same(name, known)]
        for name in names
        if class_key(name) not in keys
    }


def alike_names(names: Mapping[str, Sequence[str]]) -> list[AlikeNames]:
    """Compare the class names of sites with each other."""
    pairs = same_names(name for each in names.values() for name in each)
    return [
        AlikeNames(one=one, other=other, sites=[site for site, each in names.items() if {one, other} & set(each)])
        for one, other in pairs
        if class_key(one) != class_key(other)
    ]


def misstated_survey(tables: Mapping[str, NDArray[np.int64]], classes: int, sites: int) -> str | None:
    """Return why these are not the tables of so many sites, or None."""
    if {name: tuple(table.shape) for name, table in tables.items()} != survey_shapes(classes):
        return "its counts have other shapes than those of a survey"
    if any(((table < 0) | (table > MAX_SURVEYED)).any() for table in tables.values()):
        return "its counts are negative or too large"
    by_site = (tables["renamed"], tables["strangers"], tables["faults"][0])
    if tables["totals"][0] != sites or any((table > sites).any() for table in by_site):
        return "its counts are of another number of sites"
    return None


def add_surveys(tables: Sequence[Tables]) -> Tables:
    found: Tables = {name: np.stack([table[name] for table in tables]).sum(0) for name in tables[0]}
    return found


def survey_of(
    tables: Tables,
    class_names: Sequence[str],
    sites: list[str],
    missing: list[str],
    refused: list[str],
    secure_sum: bool,
    moment: str,
    names: Mapping[str, Sequence[str]],
) -> Survey:
    """Return what the sum of the tables says; ``names``: of classes, by site that sent them."""
    counts, (_, images, readable) = tables["images"], tables["totals"].tolist()
    trained = counts[:, [0, 3]].sum(1)
    return Survey(
        fedvl_version=__version__,
        surveyed=moment,
        secure_sum=secure_sum,
        sites=sites,
        missing=missing,
        refused=refused,
        images=images,
        readable=readable,
        classes=[
            SurveyedClass(name=name, train=train, test=test, renamed=renamed)
            for name, train, test, renamed in zip(
                class_names, trained.tolist(), counts[:, 1].tolist(), tables["renamed"].tolist(), strict=True
            )
        ],
        rare=[name for name, train in zip(class_names, trained.tolist(), strict=True) if train < RARE_CLASS],
        strangers=int(tables["strangers"][0]),
        faults=[
            FaultAtSites(kind=kind, title=FAULT_KINDS[kind].title, fix=FAULT_KINDS[kind].fix, sites=at, images=of)
            for kind, at, of in zip(FAULTS, *tables["faults"].tolist(), strict=True)
            if at
        ],
        compared=list(names),
        alike=alike_names(names),
        **{key: bars(titles, tables[key]) for key, titles in NAMES_OF_BARS.items()},
    )
