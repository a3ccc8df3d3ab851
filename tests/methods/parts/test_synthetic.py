"""The made-up set: features around texts, pictures in folders, pictures that a (fake) diffusers pipeline draws."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Samples, Task
from fedvl.methods.cachefl import CacheFL, CacheOptions
from fedvl.methods.parts.synthetic import (
    features_around,
    features_held_out,
    features_of_pictures,
    generate_pictures,
    pictures_folder,
    prompts_of,
)
from fedvl.models.preprocessing import Preprocessing


class MeanColour(torch.nn.Module):
    """An encoder whose embedding is the mean of each channel (0 to 255), so that it can be worked out by hand."""

    name = "mean colour"
    encoding = "float32"
    preprocessing = Preprocessing(4, 4)
    fingerprint = "mean colour 1"
    logit_scale = 100.0

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()), requires_grad=False)

    def preprocess(self, image):
        return torch.from_numpy(np.array(image.convert("RGB").resize((2, 2)))).permute(2, 0, 1)

    def normalise(self, pixels):
        return pixels.float()

    def encode_image(self, pixels):
        return self.weight * pixels.mean((2, 3))

    def encode_patches(self, pixels):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))


def paint(folder, name, colours):
    (folder / name).mkdir(parents=True)
    for number, colour in enumerate(colours):
        Image.new("RGB", (4, 4), colour).save(folder / name / f"{number}.png")


def unit(*rows):
    return normalize(torch.tensor(rows, dtype=torch.float32), dim=-1)


def test_features_around_texts_are_class_major_unit_vectors_of_that_spread():
    texts = normalize(torch.randn(3, 500, generator=torch.Generator().manual_seed(0)), dim=-1)
    exact = features_around(texts, 2, 0.0, torch.Generator())
    torch.testing.assert_close(exact, texts[[0, 0, 1, 1, 2, 2]])
    drawn = features_around(texts, 40, 0.05, torch.Generator().manual_seed(1))
    torch.testing.assert_close(drawn.norm(dim=-1), torch.ones(120))
    assert (drawn @ texts.T).argmax(1).tolist() == [0] * 40 + [1] * 40 + [2] * 40
    # |noise|^2 is sigma^2 d = 1.25 beside the text's 1, so that the mean cosine is near 1 / sqrt(2.25)
    assert abs(float((drawn * texts.repeat_interleave(40, 0)).sum(-1).mean()) - 2 / 3) < 0.02


def test_pictures_are_matched_to_classes_however_they_are_spelled(tmp_path):
    paint(tmp_path / "made", "Tiger_Lily", [(255, 0, 0), (0, 0, 255), (9, 9, 9)])
    paint(tmp_path / "made", "oxeye-daisy", [(0, 255, 0), (255, 255, 0)])
    paint(tmp_path / "made", "something else", [(1, 2, 3)])
    keys = features_of_pictures(tmp_path / "made", ("oxeye daisy", "tiger lily"), 2, MeanColour())
    torch.testing.assert_close(keys, unit((0, 1, 0), (1, 1, 0), (1, 0, 0), (0, 0, 1)))


def test_names_that_differ_by_punctuation_alone_are_told_apart(tmp_path):
    paint(tmp_path / "made", "c", [(255, 0, 0)])
    paint(tmp_path / "made", "c++", [(0, 255, 0)])
    keys = features_of_pictures(tmp_path / "made", ("c++", "c"), 1, MeanColour())
    torch.testing.assert_close(keys, unit((0, 1, 0), (1, 0, 0)))
    with pytest.raises(FedVLError, match="have no class 'c#'"):
        features_of_pictures(tmp_path / "made", ("c#", "c++", "c"), 1, MeanColour())


def test_a_lacking_class_too_few_pictures_and_a_bad_one_are_named(tmp_path):
    made = tmp_path / "made"
    with pytest.raises(FedVLError, match=r"no synthetic images at .*made"):
        features_of_pictures(made, ("cat",), 1, MeanColour())
    paint(made, "cat", [(255, 0, 0)] * 3)
    with pytest.raises(FedVLError, match="have no class 'dog'"):
        features_of_pictures(made, ("cat", "dog"), 1, MeanColour())
    paint(made, "dog", [(0, 255, 0)] * 2)
    with pytest.raises(FedVLError, match=r"have 2 of class 'dog' where 3 are needed.*cache_shots=2"):
        features_of_pictures(made, ("cat", "dog"), 3, MeanColour())
    (made / "dog" / "1.png").write_bytes(b"not an image")
    with pytest.raises(FedVLError, match=r"dog/1\.png .*replace it"):
        features_of_pictures(made, ("cat", "dog"), 2, MeanColour())
    assert features_of_pictures(made, ("cat", "dog"), 1, MeanColour()).shape == (2, 3)  # it is not asked for


COLOURS = {"a photo of a cat": (200, 0, 0), "a photo of a sea/lake": (0, 0, 200), "a photo of a .dot": (0, 200, 0)}


class FakePipeline:
    drawn: list = []
    loaded: list = []

    @classmethod
    def from_pretrained(cls, model, use_safetensors):
        if model == "nothing":
            raise OSError("nothing has no model_index.json.\nMore lines.")
        assert use_safetensors  # a pickle is never read
        cls.loaded.append(model)
        return cls()

    def set_progress_bar_config(self, disable):
        self.quiet = disable

    def to(self, device):
        self.device = str(device)
        return self

    def __call__(self, prompt, generator):
        assert self.quiet
        shade = int(torch.randint(50, (), generator=generator))
        self.drawn.append((prompt, shade))
        return SimpleNamespace(images=[Image.new("RGB", (8, 8), tuple(c + shade if c else 0 for c in COLOURS[prompt]))])


@pytest.fixture
def diffusers(monkeypatch):
    module: Any = ModuleType("diffusers")
    module.DiffusionPipeline = FakePipeline
    monkeypatch.setitem(sys.modules, "diffusers", module)
    FakePipeline.drawn, FakePipeline.loaded = [], []


def test_a_pipeline_writes_pictures_once_and_only_those_that_lack(diffusers):
    names, steps = ("cat", "sea/lake", ".dot"), []
    folder = generate_pictures("painter", "a photo of a {}", names, 2, progress=lambda *done: steps.append(done))
    assert folder == pictures_folder("painter", "a photo of a {}")
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png")) == [
        "%2Edot/000.png", "%2Edot/001.png", "cat/000.png", "cat/001.png", "sea%2Flake/000.png", "sea%2Flake/001.png",
    ]  # fmt: skip
    assert steps == [(n, 6) for n in range(1, 7)]
    first = list(FakePipeline.drawn)
    assert len(set(first)) == 6  # every picture has a seed of its own
    (folder / "cat" / "001.png").unlink()
    generate_pictures("painter", "a photo of a {}", names, 2)
    assert FakePipeline.drawn[6:] == [first[1]]  # the lost one again, and the same
    generate_pictures("painter", "a photo of a {}", names, 2)
    assert FakePipeline.loaded == ["painter", "painter"]  # nothing lacked: the model was not even loaded
    keys = features_of_pictures(folder, names, 2, MeanColour())
    torch.testing.assert_close(keys, unit(*[(1, 0, 0)] * 2, *[(0, 0, 1)] * 2, *[(0, 1, 0)] * 2))
    assert pictures_folder("painter", "a drawing of a {}") != folder


def test_cachefl_builds_its_keys_from_folders_and_pipelines(diffusers, tmp_path):
    paint(tmp_path / "made", "cat", [(255, 0, 0)] * 2)
    paint(tmp_path / "made", "sea lake", [(0, 255, 255)] * 2)
    stages = []
    stage = lambda name: lambda done, total: stages.append((name, done, total))  # noqa: E731
    encoder: Any = MeanColour()
    task = Task(("cat", "sea/lake"), torch.eye(2, 3), encoder, 2, stage=stage)
    keys = CacheFL(CacheOptions(cache_shots=2, synthetic=str(tmp_path / "made")), task).start(torch.Generator())["keys"]
    torch.testing.assert_close(keys, unit((1, 0, 0), (1, 0, 0), (0, 1, 1), (0, 1, 1)))
    method = CacheFL(CacheOptions(cache_shots=2, synthetic="diffusers:painter"), task)
    torch.testing.assert_close(method.start(torch.Generator())["keys"], unit(*[(1, 0, 0)] * 2, *[(0, 0, 1)] * 2))
    assert str(pictures_folder("painter", "a photo of a {}")) in method.notes()[0]
    assert ("Generate images", 4, 4) in stages
    assert ("Encode synthetic images", 4, 4) in stages


def test_a_missing_diffusers_or_model_is_told_with_what_to_do(diffusers, monkeypatch):
    with pytest.raises(
        FedVLError, match=r"'nothing' is not a text-to-image model.*\(nothing has no model_index\.json\)"
    ):
        generate_pictures("nothing", "a photo of a {}", ("cat",), 1)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(FedVLError, match=r'pip install "accelerate>=1" "diffusers>=0.30" "transformers>=5"; or name'):
        generate_pictures("painter", "a photo of a {}", ("cat",), 1)


def test_a_folder_that_cannot_be_written_is_told(diffusers, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "file"))
    with pytest.raises(FedVLError, match="cannot be written"):
        generate_pictures("painter", "a photo of a {}", ("cat",), 1)


def test_held_out_images_are_chosen_class_by_class_and_nested():
    labels = torch.tensor([1, 0, 1, -1, 0, 1])
    features = torch.nn.functional.one_hot(torch.arange(6)).float() * 3
    samples = Samples({"features": features}, labels)
    two = features_held_out(samples, ("cat", "dog"), 2, seed=0)
    rows = two.argmax(-1)
    assert labels[rows].tolist() == [0, 0, 1, 1]
    assert len(set(rows.tolist())) == 4
    torch.testing.assert_close(two.norm(dim=-1), torch.ones(4))
    one = features_held_out(samples, ("cat", "dog"), 1, seed=0).argmax(-1)
    assert set(one.tolist()) < set(rows.tolist())
    with pytest.raises(FedVLError, match="3 images of class 'cat' that no client holds, and there are 2; give clients"):
        features_held_out(samples, ("cat", "dog"), 3, seed=0)


def test_descriptions_of_classes_come_from_a_file(diffusers, tmp_path):
    """Lines are found by class, in any order and spelling; a changed file has pictures of its own."""
    file = tmp_path / "descriptions.txt"
    file.write_text("Sea Lake: water: wide and blue\n\ndog: a photo of a cat\nother: unused\n", encoding="utf-8")
    prompt = f"@{file}"
    assert prompts_of(prompt, ["dog", "sea_lake"]) == ["a photo of a cat", "water: wide and blue"]
    assert prompts_of("a {} on a {}", ["dog"]) == ["a dog on a dog"]
    folder = generate_pictures("painter", prompt, ["dog"], 1)
    assert [drawn for drawn, _ in FakePipeline.drawn] == ["a photo of a cat"]
    with pytest.raises(FedVLError, match="has no description of class 'owl'; add a line 'owl: description'"):
        prompts_of(prompt, ["dog", "owl"])
    file.write_text("dog: a small cat", encoding="utf-8")
    assert pictures_folder("painter", prompt) != folder
    file.unlink()
    with pytest.raises(FedVLError, match=r"Cannot read class descriptions from .*descriptions\.txt; give a text file"):
        prompts_of(prompt, ["dog"])
