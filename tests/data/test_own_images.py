"""A client's own images: matched to the federation's classes by name, labelled or not."""

import numpy as np
import pytest
from PIL import Image

from fedvl.data.own_images import open_own
from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError

CLASSES = ("benign nevus", "melanoma", "keratosis")
TEMPLATES: dict[str, tuple[str, ...]] = {"default": ("a photo of a {}.",)}


def draw(path, count=2):
    path.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(path / f"{number}.png")


def test_classes_are_matched_by_name_whatever_their_spelling_and_order(tmp_path):
    draw(tmp_path / "Melanoma")
    draw(tmp_path / "benign_nevus", 3)
    own = open_own(str(tmp_path), CLASSES, TEMPLATES)
    assert own.class_names == CLASSES
    assert own.splits["train"].labels.tolist() == [1, 1, 0, 0, 0]
    assert "test" not in own.splits


def test_what_is_marked_as_test_is_not_trained_on(tmp_path):
    draw(tmp_path / "train" / "melanoma", 3)
    draw(tmp_path / "test" / "melanoma", 1)
    draw(tmp_path / "test" / "keratosis", 1)
    own = open_own(str(tmp_path), CLASSES, TEMPLATES)
    assert [own.splits[part].labels.tolist() for part in ("train", "test")] == [[1, 1, 1], [2, 1]]


def test_images_without_folders_have_no_labels(tmp_path):
    draw(tmp_path / "scans", 4)
    own = open_own(str(tmp_path / "scans"), CLASSES, TEMPLATES)
    assert own.splits["train"].labels.tolist() == [-1] * 4
    assert own.splits["train"].read(3).size == (8, 8)


def test_a_manifest_beside_the_images_has_their_labels(tmp_path):
    draw(tmp_path / "scans", 3)
    (tmp_path / "scans" / "manifest.csv").write_text("path,label\n0.png,melanoma\n1.png,keratosis\n2.png,\n")
    assert open_own(str(tmp_path / "scans"), CLASSES, TEMPLATES).splits["train"].labels.tolist() == [1, 2, -1]


def test_a_manifest_may_lack_some_labels(tmp_path):
    draw(tmp_path / "images")
    (tmp_path / "list.csv").write_text("path,label\nimages/0.png,MELANOMA\nimages/1.png,\n")
    assert open_own(str(tmp_path / "list.csv"), CLASSES, TEMPLATES).splits["train"].labels.tolist() == [1, -1]


def test_a_manifest_says_whose_images_are(tmp_path):
    draw(tmp_path / "images", 3)
    lines = ["path,label,split,patient", *(f"images/{n}.png,melanoma,{s},p{n // 2}" for n, s in enumerate("aat"))]
    (tmp_path / "list.csv").write_text("\n".join(lines).replace(",a,", ",train,").replace(",t,", ",test,"))
    own = open_own(str(tmp_path / "list.csv"), CLASSES, TEMPLATES)
    assert [own.splits[part].units for part in ("train", "test")] == [{"patient": ("p0", "p0")}, {"patient": ("p1",)}]


def test_a_dataset_of_the_catalogue_is_renumbered():
    known = open_dataset("cifar10-mini")
    own = open_own("cifar10-mini", known.class_names[::-1], known.templates)
    assert (own.splits["train"].labels == 9 - known.splits["train"].labels).all()


def test_a_class_that_the_federation_does_not_know_is_named(tmp_path):
    draw(tmp_path / "melanoma")
    draw(tmp_path / "cyst")
    with pytest.raises(FedVLError, match=r"does not know \(cyst\); rename them to some of its own \(benign nevus"):
        open_own(str(tmp_path), CLASSES, TEMPLATES)


@pytest.mark.parametrize(("name", "said"), [("nowhere", "no folder or file"), ("", "has no images")])
def test_where_nothing_is_a_sentence_says_so(name, said, tmp_path):
    with pytest.raises(FedVLError, match=said):
        open_own(str(tmp_path / name), CLASSES, TEMPLATES)


def test_all_samples_are_of_the_one_client():
    from fedvl.data.partition import partition, partition_test

    labels = np.array([0, 1, -1, 1])
    drawn = partition(labels, "only:2", 3, seed=0)
    assert [rows.tolist() for rows in drawn.clients] == [[], [], [0, 1, 2, 3]]
    assert drawn.counts.tolist() == [[0, 0], [0, 0], [1, 2]]
    assert [len(rows) for rows in partition_test(drawn, np.array([1, 1])).clients] == [0, 0, 2]


def test_for_a_survey_other_classes_and_empty_folders_are_left_out(tmp_path):
    for name in ("cat", "melanom", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
    for name in ("cat", "melanom"):
        Image.new("RGB", (8, 8)).save(tmp_path / "train" / name / "1.png")
    with pytest.raises(FedVLError):
        open_own(str(tmp_path), ("cat", "dog"), {})
    found = open_own(str(tmp_path), ("cat", "dog"), {}, known_only=True)
    assert [len(split) for split in found.splits.values()] == [1]
    assert found.splits["train"].labels.tolist() == [0]
