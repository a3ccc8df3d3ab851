"""The example images of three hospitals: every training image once, the same for one hospital as for all."""

from fedvl.data.sources import open_dataset
from tools.three_hospitals import HOSPITALS, write_images


def test_every_image_goes_to_one_hospital(tmp_path):
    write_images(tmp_path / "all")
    write_images(tmp_path / "b", "hospital-b")
    split = open_dataset("cifar10-mini").splits["train"]
    found = {int(path.stem): path for path in (tmp_path / "all").rglob("*.png")}
    assert sorted(found) == list(range(len(split)))
    assert len({path.parent for path in found.values()}) == 2 * 10 * len(HOSPITALS)
    shared = {path.relative_to(tmp_path / "all/hospital-b") for path in (tmp_path / "all/hospital-b").rglob("*.png")}
    assert {path.relative_to(tmp_path / "b") for path in (tmp_path / "b").rglob("*.png")} == shared
    dataset = open_dataset(str(tmp_path / "b"))
    assert set(dataset.splits) == {"train", "test"}
    assert len(dataset.splits["train"]) + len(dataset.splits["test"]) == len(shared)
