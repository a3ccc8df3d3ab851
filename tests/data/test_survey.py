"""A survey of sites: planted faults are found in the sum of counts, and none at clean sites; small counts are withheld."""

import shutil

import numpy as np
import pytest
from data.test_check import PLANTED
from helpers import planted

from fedvl.data.check import PropertyCount, check
from fedvl.data.faults import NAMES
from fedvl.data.survey import (
    OF_IMAGES,
    AlikeNames,
    add_surveys,
    alike_names,
    misstated_survey,
    other_names,
    survey_of,
    tables_of,
)
from fedvl.display import Silent

SITES = ("east", "north", "south")
CLASSES = planted.CLASSES


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    root = tmp_path_factory.mktemp("clean")
    planted.write_sites(root, SITES)
    return root


def tables(folder, least=1):
    return {site: tables_of(check(str(folder / site), Silent(), None)[1], CLASSES, least) for site in SITES}


def survey(found):
    return survey_of(add_surveys(list(found.values())), CLASSES, list(SITES), [], [], True, "now", {})


def test_clean_sites_have_no_fault(clean):
    found = survey(tables(clean))
    assert found.clean
    assert (found.images, found.readable) == (270, 270)
    assert [(each.name, each.train, each.test, each.renamed) for each in found.classes] == [
        (name, 36, 18, 0) for name in CLASSES
    ]
    assert [bar for bar in found.sizes if bar.images] == [PropertyCount(name="32 to 63 px", images=270)]
    assert sum(bar.images for bar in found.brightness) == 270


@pytest.mark.parametrize("least", [1, 5])
def test_twelve_planted_faults_are_found_each_at_one_site(clean, tmp_path, least):
    shutil.copytree(clean, tmp_path, dirs_exist_ok=True)
    for number, plant in reversed(list(enumerate(PLANTED))):  # a later one would undo the effect of an earlier one
        plant(tmp_path / SITES[number % 3])
    found = survey(tables(tmp_path, least))
    wanted = set.union(*PLANTED.values())
    assert len(wanted) == 12
    assert {each.kind: each.sites for each in found.faults} == dict.fromkeys(wanted, 1)
    images = {each.kind: each.images for each in found.faults}
    assert images["unreadable"] == (1 if least == 1 else 0), "a small count is withheld, the fault itself is not"
    assert all(each.fix.endswith(".") for each in found.faults)


def test_names_that_mean_a_class_of_the_federation_and_others(clean, tmp_path):
    shutil.copytree(clean, tmp_path, dirs_exist_ok=True)
    planted.misspelt(tmp_path / "north")
    (tmp_path / "south" / "train" / "bird").rename(tmp_path / "south" / "train" / "mushroom")
    found = survey(tables(tmp_path))
    assert {each.name: each.renamed for each in found.classes if each.renamed} == {"automobile": 1}
    assert found.strangers == 1
    assert not found.clean
    assert found.classes[0].train == 24


def test_a_class_that_is_rare_at_all_sites_together(clean, tmp_path):
    shutil.copytree(clean, tmp_path, dirs_exist_ok=True)
    for site in SITES:
        planted.rare(tmp_path / site)
    assert survey(tables(tmp_path)).rare == ["deer"]


def test_counts_that_leave_by_themselves_are_rounded_down(clean, tmp_path):
    shutil.copytree(clean, tmp_path, dirs_exist_ok=True)
    planted.rare(tmp_path / "east")  # three training images are left
    found = tables(tmp_path, 5)
    row = CLASSES.index("deer")
    assert found["east"]["images"][row].tolist() == [0, 5, 0, 0]
    assert found["north"]["images"][row].tolist() == [10, 5, 0, 0]
    assert found["east"]["totals"].tolist() == [1, 80, 80]
    total = add_surveys([found["east"], found["north"]])
    assert total["images"][row].tolist() == [10, 10, 0, 0]
    assert total["faults"][:, NAMES.index("rare-class")].tolist() == [1, 5]
    for name in OF_IMAGES:
        assert not (found["east"][name] % 5).any()


def test_what_are_no_tables_of_a_survey(clean):
    good = tables(clean)["east"]
    assert misstated_survey(good, len(CLASSES), 1) is None
    assert "shapes" in str(misstated_survey(good, 4, 1))
    assert "shapes" in str(misstated_survey({**good, "more": np.zeros(1, np.int64)}, len(CLASSES), 1))
    assert "another number of sites" in str(misstated_survey(good, len(CLASSES), 2))
    assert "negative or too large" in str(misstated_survey({**good, "sizes": good["sizes"] - 1}, len(CLASSES), 1))
    assert "negative or too large" in str(misstated_survey({**good, "sizes": good["sizes"] + 2**40}, len(CLASSES), 1))
    assert "number of sites" in str(misstated_survey({**good, "renamed": good["renamed"] + 2}, len(CLASSES), 1))


def test_names_outside_of_the_agreed_list_are_compared_with_it():
    agreed = ["Melanoma", "naevus"]
    assert other_names(["melanoma", "melanom", "scar", "Naevus"], agreed) == {"melanom": [0], "scar": []}


def test_class_names_of_sites_are_compared_with_each_other():
    """Two sites whose names both differ from the agreed list are found, and neither spelling of one name is."""
    names = {"east": ["Keratosis", "scar"], "north": ["keratosys", "Scar"], "south": ["wart", "keratosys"]}
    assert alike_names(names) == [AlikeNames(one="Keratosis", other="keratosys", sites=["east", "north", "south"])]
    assert alike_names({"east": ["stage 1"], "north": ["stage 2"]}) == []
