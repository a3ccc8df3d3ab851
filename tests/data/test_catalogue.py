"""The catalogue: complete, consistent, and helpful about unknown names."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedvl.data.catalogue import catalogue, class_key, find, general_templates, lookup, numbered_groups
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
    for raw, class_name in entry.rename.items():  # no folder's name is another class's
        assert class_key(raw) not in {class_key(other) for other in entry.class_names if other != class_name}
    for left_out in entry.class_lists.values():
        assert set(left_out) < set(entry.class_names)
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


@pytest.mark.parametrize(
    ("name", "order", "last_base", "first_new"),
    [
        ("flowers102", ["pink primrose", "hard-leaved pocket orchid", "canterbury bells"], "petunia", "wild pansy"),
        ("caltech101", ["face", "leopard", "motorbike", "accordion", "airplane"], "helicopter", "ibis"),
        ("fgvc-aircraft", ["707-320", "727-200", "737-200"], "Cessna 525", "Cessna 560"),
        ("imagenet", ["tench", "goldfish", "great white shark"], "cleaver", "cliff dwelling"),
        ("stanford-cars", ["2000 AM General Hummer SUV"], "1998 Eagle Talon Hatchback", "2012 FIAT 500 Abarth"),
        (
            "sun397",
            ["abbey", "airplane cabin", "airport terminal"],
            "indoor ice skating rink",
            "outdoor ice skating rink",
        ),
    ],
)
def test_classes_are_in_the_order_of_the_official_labels(
    name: str, order: list[str], last_base: str, first_new: str
) -> None:
    """CoOp's halves: Flowers by the numbers 1 to 102, Caltech by its folders, capitals first, without Faces_easy.

    Cars, SUN397 and Aircraft are in the order of their own files, ImageNet by WordNet number.
    """
    entry = find(name)
    left_out = entry.class_lists.get("coop100", ())
    classes = [class_name for class_name in entry.class_names if class_name not in left_out]
    assert list(classes[: len(order)]) == order
    middle = (len(classes) + 1) // 2
    assert classes[middle - 1 : middle + 1] == [last_base, first_new]


def test_names_of_folders_and_of_classes_differ_as_in_coop() -> None:
    """The year of a car and the place of a scene come first; folders of ImageNet are WordNet numbers."""
    assert find("stanford-cars").rename["Ram C/V Cargo Van Minivan 2012"] == "2012 Ram C/V Cargo Van Minivan"
    scenes = find("sun397").rename
    assert scenes["church indoor"] == "indoor church"
    assert scenes["theater indoor seats"] == "indoor seats theater"
    assert scenes["bus interior"] == "bus interior"  # one folder in the dataset, bus_interior
    assert find("imagenet").rename["n15075141"] == "toilet paper"
    assert find("imagenet").rename["n02012849"] != find("imagenet").rename["n03126707"]  # two cranes


def test_neighbours_in_the_official_orders() -> None:
    """Numbers that the label file of Flowers-102 gives, and folders of Caltech-101 beside each other."""
    flowers = find("flowers102").class_names
    known = {
        21: "fire lily",
        45: "bolero deep blue",
        60: "pink-yellow dahlia",
        77: "passion flower",
        102: "blackberry lily",
    }
    assert {number: flowers[number - 1] for number in known} == known
    caltech = find("caltech101").class_names
    assert caltech.index("faces easy") == caltech.index("face") + 1
    assert caltech[-2:] == ("wrench", "yin yang")
    assert find("caltech101").class_lists == {"coop100": ("faces easy",)}
    capitals = {"face", "faces easy", "leopard", "motorbike"}
    assert set(caltech[:4]) == capitals
    assert list(caltech[4:]) == sorted(caltech[4:])


def test_groups_of_cifar100() -> None:
    entry = find("cifar100")
    assert len(entry.groups) == 20
    assert sorted(name for names in entry.groups.values() for name in names) == sorted(entry.class_names)
    assert {len(names) for names in entry.groups.values()} == {5}
    numbers = numbered_groups("cifar100", entry.class_names)
    assert numbers is not None
    assert numbers[:10] == [4, 1, 14, 8, 0, 6, 7, 7, 18, 3]  # apple, aquarium fish, baby, bear, beaver, ...
    assert numbers[-5:] == [0, 17, 8, 14, 13]  # whale, willow tree, wolf, woman, worm
    assert numbered_groups("cifar100", ["tulip", "Maple_tree"]) == [2, 17]
    assert numbered_groups("cifar100", ["tulip", "no such class"]) is None
    assert numbered_groups("cifar10", find("cifar10").class_names) is None
    assert numbered_groups("no such dataset", ["tulip"]) is None


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
