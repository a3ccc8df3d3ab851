"""The catalogue: complete, consistent, and helpful about unknown names."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedvl.data.catalogue import catalogue, class_key, find, general_templates, lookup
from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError

OF_THE_PAPERS = {
    "caltech101", "ucf101", "food101", "flowers102", "fgvc-aircraft", "fgvc-aircraft-families", "stanford-cars",
    "cifar10", "cifar100", "cinic10", "dtd", "resisc45", "cub", "imagenet", "eurosat", "oxford-pets", "sun397",
    "upmc-food101", "mm-imdb",
}  # fmt: skip


def test_all_datasets_of_the_papers_are_there() -> None:
    assert set(catalogue()) >= OF_THE_PAPERS
    assert {"cifar10-mini", "emoji-mini", "emoji"} <= set(catalogue())


@pytest.mark.parametrize("name", catalogue())
def test_entries_are_consistent(name: str) -> None:
    entry = catalogue()[name]
    assert {"default", "ensemble"} <= set(entry.templates)
    for texts in entry.templates.values():
        assert texts
        assert all(text.count("{}") == 1 for text in texts)
        assert all(text.format("cat") for text in texts)
    if entry.class_names:
        assert len(entry.class_names) == entry.classes
        assert len({class_key(class_name) for class_name in entry.class_names}) == entry.classes
    assert set(entry.rename.values()) <= set(entry.class_names)
    if entry.splits:
        assert sum(entry.splits.values()) == entry.images
    assert entry.source
    assert entry.licence


def test_class_names_that_prompts_depend_on() -> None:
    assert find("cifar10").class_names[:2] == ("airplane", "automobile")
    assert find("cinic10").class_names == find("cifar10").class_names
    assert find("eurosat").rename["SeaLake"] == "sea or lake"
    assert find("caltech101").ignore == ("BACKGROUND_Google",)
    assert find("cifar100").class_names[-1] == "worm"
    assert "boxing punching bag" in find("ucf101").class_names
    counts = {"dtd": 47, "oxford-pets": 37, "flowers102": 102, "food101": 101, "ucf101": 101, "resisc45": 45}
    assert {name: len(find(name).class_names) for name in counts} == counts


def test_templates_of_the_papers() -> None:
    assert find("food101").templates["default"] == ("a photo of a {}",)
    assert find("food101").templates["bare"] == ("a photo of {}",)
    assert find("food101").templates["coop"] == ("a photo of {}, a type of food.",)
    assert find("dtd").templates["coop"] == ("{} texture.",)
    assert find("eurosat").templates["coop"] == ("a centered satellite photo of {}.",)
    assert "coop" not in find("cifar10").templates
    assert general_templates()["default"] == ("a photo of a {}",)


def test_settings_of_cachefl_and_fed_mp() -> None:
    alphas = {
        entry.name: entry.methods["cachefl"]["alpha"] for entry in catalogue().values() if "cachefl" in entry.methods
    }
    assert alphas == {
        "imagenet": 0.6, "caltech101": 3, "dtd": 2, "eurosat": 2, "fgvc-aircraft": 5, "food101": 1.17, "flowers102": 10,
        "oxford-pets": 1.17, "stanford-cars": 3, "sun397": 1.17, "ucf101": 3,
    }  # fmt: skip
    assert all(find(name).methods["cachefl"]["beta"] == 1 for name in alphas)
    entropies = {
        entry.name: entry.methods["fed-mp"]["uncertainty"]
        for entry in catalogue().values()
        if "fed-mp" in entry.methods
    }
    assert entropies == {
        "caltech101": 0.2, "ucf101": 0.2, "flowers102": 0.2, "fgvc-aircraft-families": 0.3, "food101": 0.3, "stanford-cars": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("spelling", ["OxfordPets", "oxford_pets", "oxford-pets", "OXFORD PETS"])
def test_spelling_of_a_name_does_not_matter(spelling: str) -> None:
    assert find(spelling).name == "oxford-pets"


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(FedVLError, match=r"'flowers12'.*did you mean flowers102"):
        find("flowers12")
    with pytest.raises(FedVLError, match="fedvl data list"):
        find("quite another thing")
    assert lookup("") is None


@pytest.mark.parametrize("name", [name for name, entry in catalogue().items() if not entry.embedded])
def test_a_dataset_that_is_not_there_says_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(FedVLError) as caught:
        open_dataset(name, tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(tmp_path) in text
    if find(name).fetchable:
        assert f"fedvl data get {name}" in text
    else:
        assert find(name).source in text
        assert str(tmp_path / f"{name}.parquet") in text


def test_the_catalogue_is_light() -> None:
    script = (
        "import sys, fedvl.data.catalogue; fedvl.data.catalogue.catalogue(); "
        "print([name for name in ('torch', 'PIL', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
