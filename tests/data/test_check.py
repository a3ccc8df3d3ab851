"""A check of images finds each planted fault, and none in clean images."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import planted
from PIL import Image

from fedvl.data import zero_shot_check
from fedvl.data.check import RARE_CLASS, DataCheck, between, check, mode_of, of_pixels
from fedvl.data.images import decode_fully
from fedvl.display import Silent
from fedvl.errors import FedVLError

PLANTED = {
    planted.unreadable: {"unreadable"},
    planted.repeated: {"duplicate"},
    planted.leaked: {"leak"},
    planted.nearly_repeated: {"near-duplicate"},
    planted.in_two_classes: {"conflict"},
    planted.rare: {"rare-class"},
    planted.blank: {"blank"},
    planted.thumbnails: {"small"},
    planted.outside_any_class: {"left-out"},
    planted.twelve_bits: {"dim"},
    planted.one_class_enlarged: {"shortcut"},
    planted.emptied: {"empty-class"},
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    root = tmp_path_factory.mktemp("clean")
    planted.write_sites(root, ("site",))
    return root / "site"


@pytest.fixture
def site(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "site")


def kinds(found: DataCheck) -> set[str]:
    return {fault.kind for fault in found.faults}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_and_nothing_else(site, plant):
    plant(site)
    found, _ = check(str(site), Silent(), None)
    assert kinds(found) == PLANTED[plant]
    for fault in found.faults:
        assert fault.fix.endswith(".")
        assert fault.images == len(fault.files)


def test_clean_images_have_no_fault(site, monkeypatch):
    monkeypatch.setattr(zero_shot_check, "MAX_TURNED", 40)
    found, checked = check(str(site), Silent())
    assert found.clean
    assert found.faults == []
    assert found.not_sought == []
    assert (found.images, found.readable) == (90, 90)
    assert [(each.name, each.train, each.test) for each in found.classes] == [
        (name, planted.TRAIN, planted.TEST) for name in planted.CLASSES
    ]
    assert [(bar.name, bar.images) for bar in found.sizes if bar.images] == [("32 to 63 px", 90)]
    assert sum(bar.images for bar in found.brightness) == 90
    assert found.agreement is not None
    assert found.agreement > 60
    assert checked.agreement is not None
    assert len(checked.agreement.rows) == 90
    assert json.loads(found.model_dump_json())["model"] == "fedvl-tiny"


@pytest.mark.parametrize("plant, kind", [(planted.inverted, "inverted"), (planted.exchanged, "exchanged")])
def test_the_model_finds_what_pixels_alone_do_not_tell(site, plant, kind, monkeypatch):
    monkeypatch.setattr(zero_shot_check, "MAX_TURNED", 40)
    plant(site)
    assert kinds(check(str(site), Silent())[0]) == {kind}


def test_a_class_with_a_misspelt_twin(site):
    (site / "train" / "Automobil").mkdir()
    for path in planted.images_of(site, "automobile")[:RARE_CLASS]:
        path.rename(site / "train" / "Automobil" / path.name)
    (site / "test" / "Automobil").mkdir()
    planted.images_of(site, "automobile", "test")[0].rename(site / "test" / "Automobil" / "0.png")
    found, _ = check(str(site), Silent(), None)
    assert kinds(found) == {"similar-names", "rare-class"}  # two images are left of the first


def test_a_class_without_test_images(site):
    for path in planted.images_of(site, "ship", "test"):
        path.unlink()
    (site / "test" / "ship").rmdir()
    found, _ = check(str(site), Silent(), None)
    assert [fault.sentence for fault in found.faults] == ["ship has no test image."]


def test_patients_in_training_and_test(site):
    lines = ["path,label,split,patient"]
    for number, path in enumerate(planted.every(site)):
        part, label = path.relative_to(site).parts[:2]
        lines.append(f"{path.relative_to(site)},{label},{part},p{number // 9}")
    (site / "manifest.csv").write_text("\n".join(lines))
    found, checked = check(str(site), Silent(), None)
    assert kinds(found) == {"unit-split"}
    both = {row["patient"] for row in rows_of(lines) if row["split"] == "test"} & {
        row["patient"] for row in rows_of(lines) if row["split"] == "train"
    }
    assert f"{len(both)} patient" in found.faults[0].sentence
    assert len(checked.faults[0].rows) == 9 * len(both)


def rows_of(lines):
    head = lines[0].split(",")
    return [dict(zip(head, line.split(","), strict=True)) for line in lines[1:]]


def test_classes_called_by_numbers(site):
    for part in ("train", "test"):
        for number, name in enumerate(planted.CLASSES):
            (site / part / name).rename(site / part / str(number))
    assert kinds(check(str(site), Silent(), None)[0]) == {"numbered-names"}


def test_images_without_labels_are_checked_too(tmp_path):
    for number in range(3):
        Image.effect_noise((40, 40), 60 + number).save(tmp_path / f"{number}.png")
    (tmp_path / "3.png").write_bytes((tmp_path / "0.png").read_bytes())
    found, checked = check(str(tmp_path), Silent())
    assert kinds(found) == {"duplicate"}
    assert found.unlabelled == 4
    assert checked.agreement is None
    assert found.notes == ["Labels and orientation were not compared with a pretrained model."]
    assert set(found.not_sought) == {"labels", "exchanged", "turned", "inverted"}


def test_few_dark_images_are_named_and_a_dark_set_is_not(site):
    planted.change(planted.images_of(site, "dog")[:2], lambda image: image.point(lambda value: value // 16))
    found, checked = check(str(site), Silent(), None)
    assert kinds(found) == {"exposure"}
    checked.images.brightness[:] = [5.0] * 90
    assert of_pixels(checked.images) == []


def test_turned_files_and_kinds_of_pixels_are_counted(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    picture = Image.effect_noise((40, 30), 60)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.convert("RGB").save(tmp_path / "a" / "0.jpg", exif=exif)
    picture.convert("RGBA").save(tmp_path / "a" / "1.png")
    picture.rotate(180).save(tmp_path / "b" / "2.png")
    Image.fromarray(np.asarray(picture.rotate(90), np.uint16) * 250).save(tmp_path / "b" / "3.png")
    found, checked = check(str(tmp_path), Silent(), None)
    assert [bar.images for bar in found.orientation] == [3, 1]
    assert [bar.images for bar in found.modes] == [1, 1, 1, 1, 0]
    assert checked.images.sides[0] == (30, 40)  # as it is seen


@pytest.mark.parametrize(
    "mode, number", [("RGB", 0), ("L", 1), ("1", 1), ("P", 3), ("LA", 3), ("CMYK", 4), ("I;16", 2)]
)
def test_kinds_of_pixels(tmp_path, mode, number):
    path = tmp_path / "image.tiff"
    image = Image.fromarray(np.full((20, 20), 9000, np.uint16)) if mode == "I;16" else Image.new(mode, (20, 20))
    image.save(path)
    assert mode_of(decode_fully(path)) == number


def test_a_name_that_does_not_exist():
    with pytest.raises(FedVLError, match="no dataset, folder or file 'cifar-mini'"):
        check("cifar-mini", Silent())
    with pytest.raises(FedVLError, match="is not in"):
        check("oxford_pets", Silent())


def test_groups_between_splits_and_classes_are_counted():
    """Of three groups one is in training and test, one in training alone, and two in two classes."""
    images: Any = SimpleNamespace(
        splits=["train", "test", "train", "train", "test", "test"],
        labels=["cat", "cat", "cat", "dog", "dog", "cat"],
        of=lambda group: group,
    )
    groups = [(0, 1), (2, 3), (4, 5)]
    said = " (1 of 3 groups in training and test; 2 of 3 groups in two classes)"
    assert between(groups, images) == said
    assert between(groups[:1], images) == " (1 of 1 groups in training and test)"
    assert between(groups[1:], images) == " (2 of 2 groups in two classes)"
    images.labels = ["cat"] * 6
    assert between(groups[1:], images) == ""
