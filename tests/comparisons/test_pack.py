"""Packs: a comparison that others execute again without images and weights, and hostile archives."""

import json
import os
import shutil
import stat
import zipfile

import pytest
import torch
from helpers import forging
from helpers.forging import compared_with, edited, forged_right, summarised_again, verdict_of
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.comparisons.pack import check_members, check_packable, pack_folder
from fedvl.data.imported import import_vectors, imported_path
from fedvl.errors import FedVLError
from fedvl.files import file_sha256
from fedvl.runs.settings import resolve_experiment


def packed(folder, out):
    done = CliRunner().invoke(app, ["pack", str(folder), "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "Features tell much of an image" in done.output
    return out


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    words = ["--methods", "linear,promptfl", "--seeds", "1", "--no-references"]
    return compared_with(tmp_path_factory.mktemp("honest") / "c", *words)


@pytest.fixture(scope="module")
def pack(comparison, tmp_path_factory):
    return packed(comparison, tmp_path_factory.mktemp("packs") / "honest.zip")


def test_a_pack_is_verified_to_the_same_bits_without_images(pack, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    found = verdict_of(pack)
    assert (found["verdict"], found["left"]) == ("same bits", 0)
    assert len(found["runs"]) == 2


def test_a_pack_holds_neither_images_nor_pickle_and_has_the_same_bytes_again(pack, comparison, tmp_path):
    with zipfile.ZipFile(pack) as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        names = archive.namelist()
        described = json.loads(archive.read("pack.json"))
    assert {name.rpartition(".")[2] for name in names} == {"json", "jsonl", "toml", "safetensors"}
    assert sorted(described["files"]) == sorted(set(names) - {"pack.json"})
    assert packed(comparison, tmp_path / "again.zip").read_bytes() == pack.read_bytes()
    assert os.listdir(tmp_path) == ["again.zip"]


def opened(pack, out):
    """Unpack a pack to a folder."""
    with zipfile.ZipFile(pack) as archive:
        archive.extractall(out)
    return out


def sealed(folder):
    """Put the hashes of the files into pack.json, as a forger would."""
    edited(
        folder / "pack.json", lambda found: found["files"].update({n: file_sha256(folder / n) for n in found["files"]})
    )
    return folder


def test_a_changed_file_is_refused_and_a_forger_who_hashes_anew_is_found(pack, tmp_path):
    folder = opened(pack, tmp_path / "p")
    run = sorted((folder / "runs").iterdir())[0]
    edited(run / "result.json", forged_right)
    assert "does not have the SHA-256 that pack.json names" in verdict_of(folder, code=2)["error"]
    summarised_again(folder)
    assert verdict_of(sealed(folder), code=1)["verdict"] == "different"
    assert "right" in json.dumps(verdict_of(folder, code=1)["runs"])


@pytest.mark.parametrize("part", ["features", "labels", "identity"])
def test_features_of_an_embedded_dataset_are_compared_with_those_of_the_package(pack, tmp_path, part):
    folder = opened(pack, tmp_path / "p")
    if part == "features":
        tensors = load_file(folder / "sources/0.safetensors")
        tensors["features/test"] = tensors["features/test"].flip(0).contiguous()
        save_file(tensors, folder / "sources/0.safetensors")
    else:
        splits = {"labels": [0] * 1000, "identity": "0" * 64}
        edited(folder / "pack.json", lambda found: found["sources"][0]["splits"]["test"].update({part: splits[part]}))
    refused = verdict_of(sealed(folder), code=2)["error"]
    assert refused == "The pack is forged: the test features or labels are not those of cifar10-mini."


def test_features_that_do_not_fit_their_labels_are_refused(pack, tmp_path):
    folder = opened(pack, tmp_path / "p")
    tensors = load_file(folder / "sources/0.safetensors")
    save_file(tensors | {"features/test": torch.full((3, 2), torch.nan)}, folder / "sources/0.safetensors")
    assert "do not fit its labels" in verdict_of(sealed(folder), code=2)["error"]


def test_own_images_and_vectors_of_another_encoder_are_not_needed(tmp_path, monkeypatch):
    """The images and the model of whoever packs are gone when the pack is verified."""
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    photos, images = tmp_path / "photos", []
    for split, count in (("train", 6), ("test", 3)):
        for label, name in enumerate(("cat", "dog")):
            (photos / split / name).mkdir(parents=True)
            for number in range(count):
                path = photos / split / name / f"{number}.png"
                picture = torch.randint(256, (8, 8, 3), dtype=torch.uint8).numpy()
                Image.fromarray(picture).save(path)
                images.append((file_sha256(path), label))
    vectors = {
        "images": torch.stack([torch.eye(2)[label] + torch.rand(2) for _, label in images]),
        "texts": torch.eye(2),
    }
    save_file(vectors, tmp_path / "vectors.safetensors")
    manifest = {"name": "mine", "sha256": "0" * 64, "normalised": False, "images": [sha256 for sha256, _ in images]}
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "classes": ["cat", "dog"]}))
    import_vectors(tmp_path / "vectors.safetensors", tmp_path / "manifest.json")
    words = [
        "--methods",
        "linear",
        "--seeds",
        "1",
        "--no-references",
        "--set",
        "model.name=mine",
        "--dataset",
        str(photos),
    ]
    monkeypatch.setattr(forging, "SMALL", {"federation.rounds": 2, "data.test_shots": 3, "evaluation.examples": 0})
    pack = packed(compared_with(tmp_path / "c", *words), tmp_path / "p.zip")
    shutil.rmtree(photos)
    imported_path("mine").unlink()
    assert verdict_of(pack)["verdict"] == "same bits"
    done = CliRunner().invoke(app, ["verify", str(pack), "--quiet"])
    assert "The features and labels of photos cannot be checked without its images." in done.output


OWN = "from fedvl.methods.linear import Linear\n\n\nclass Mine(Linear):\n    pass\n"


def test_a_method_of_ones_own_is_packed_and_runs_only_if_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    folder = compared_with(tmp_path / "c", "--methods", "./mine.py", "--seeds", "1", "--no-references")
    pack = packed(folder, tmp_path / "p.zip")
    (tmp_path / "mine.py").unlink()
    assert "is code that a run would execute" in verdict_of(pack, code=2)["error"]
    assert verdict_of(pack, "--trust-method")["verdict"] == "same bits"


@pytest.mark.parametrize(
    "settings, says",
    [
        (
            {"method": {"name": "fedpp"}},
            "fedpp needs pixels of each image, which a pack does not have; leave fedpp out",
        ),
        (
            {"method": {"name": "promptfl"}, "model": {"name": "openai/clip"}},
            "trains through the text tower of 'openai/clip'",
        ),
        ({"model": {"encoding": "bfloat16"}}, "no model.encoding"),
    ],
)
def test_what_needs_more_than_features_is_refused_by_name(settings, says):
    check_packable(resolve_experiment({"method": {"name": "linear"}}))
    with pytest.raises(FedVLError, match=says):
        check_packable(resolve_experiment(settings))


def test_a_refused_comparison_leaves_no_file(tmp_path):
    given = {"training.local_epochs": 1, "data.shots": 2, "data.test_shots": 2, "federation.rounds": 1}
    folder = compared_with(tmp_path / "c", "--methods", "fedpp", "--seeds", "1", "--no-references", **given)
    done = CliRunner().invoke(app, ["pack", str(folder), "--out", str(tmp_path / "p.zip")])
    assert "fedpp needs pixels" in str(done.exception)
    assert os.listdir(tmp_path) == ["c"]


# --- archives of an enemy


def archive_of(path, *members):
    with zipfile.ZipFile(path, "w") as archive:
        for member, content, how in members:
            archive.writestr(member, content, how)
    return path


def link(name):
    member = zipfile.ZipInfo(name)
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member


STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


@pytest.mark.parametrize(
    "member, how, says",
    [
        ("../pack.json", STORED, "it has a file '../pack.json'"),
        ("/etc/passwd", STORED, "it has a file '/etc/passwd'"),
        ("runs/../../x/config.toml", STORED, "it has a file"),
        ("runs/a/config.toml/", STORED, "it has a file"),
        ("methods/../mine.py", STORED, "it has a file"),
        ("sources/0.pickle", STORED, "it has a file"),
        ("comparison.json", DEFLATED, "is a link or is compressed"),
        (link("comparison.json"), STORED, "is a link or is compressed"),
    ],
)
def test_an_archive_with_other_files_links_or_compression_is_refused(tmp_path, member, how, says):
    path = archive_of(tmp_path / "p.zip", (member, "0" * 10_000, how))
    with pytest.raises(FedVLError, match="is not a pack") as error:
        pack_folder(path, tmp_path)
    assert says in str(error.value)
    assert os.listdir(tmp_path) == ["p.zip"]


def test_files_that_lie_on_each_other_are_refused(tmp_path):
    path = archive_of(tmp_path / "p.zip", ("comparison.json", "0" * 10_000, STORED))
    with zipfile.ZipFile(path) as archive:
        (member,) = archive.infolist()
    others = []
    for number in range(3):
        other = zipfile.ZipInfo(f"sources/{number}.safetensors")
        other.file_size = other.compress_size = member.file_size
        others.append(other)
    with pytest.raises(FedVLError, match="claim more bytes than it has"):
        check_members(path, [member, *others])
    with pytest.raises(FedVLError, match="a file twice"):
        check_members(path, [member, member])


def test_a_damaged_archive_and_a_folder_with_a_link_are_refused(pack, tmp_path):
    (tmp_path / "cut.zip").write_bytes(pack.read_bytes()[:5000])
    assert "is not a whole pack" in verdict_of(tmp_path / "cut.zip", code=2)["error"]
    folder = opened(pack, tmp_path / "p")
    (folder / "sources" / "1.safetensors").symlink_to("0.safetensors")
    assert "is a link" in verdict_of(folder, code=2)["error"]
    (folder / "sources" / "1.safetensors").unlink()
    (folder / "comparison.json").unlink()
    assert "are not those that its pack.json names" in verdict_of(folder, code=2)["error"]
