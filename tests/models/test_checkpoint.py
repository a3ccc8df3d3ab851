"""Where a model may come from, and what is said when it cannot be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from helpers.models import full_copy
from safetensors.torch import load_file, save_file

from fedvl.errors import FedVLError
from fedvl.models import checkpoint
from fedvl.models.checkpoint import load_model, stored
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder
from fedvl.runs.folder import RunFolder
from tools.quantise import quantise, shrink


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_copy("fedvl-tiny", tmp_path_factory.mktemp("tiny"))


def test_embedded_models_have_the_sizes_of_their_cards() -> None:
    clip, vilt = load_model("fedvl-tiny"), load_model("fedvl-tiny-vilt")
    assert isinstance(clip, DualEncoder)
    assert isinstance(vilt, FusedEncoder)
    assert (clip.dim, clip.image_size, clip.vision_width, clip.vision_layers, clip.patches) == (256, 64, 320, 9, 64)
    assert (clip.text_width, clip.text_layers, clip.context_length) == (256, 4, 32)
    assert clip.logit_scale == pytest.approx(55.2, abs=0.05)
    assert sum(parameter.numel() for parameter in clip.parameters()) == pytest.approx(14.73e6, rel=1e-3)
    assert (vilt.width, vilt.layers, vilt.image_size) == (320, 6, 64)
    assert not any(parameter.requires_grad for model in (clip, vilt) for parameter in model.parameters())
    assert sum(path.stat().st_size for path in checkpoint.EMBEDDED_FOLDER.rglob("*")) < 25e6


def test_the_two_towers_of_fedvl_tiny_fit_together() -> None:
    """A plain green and a plain blue picture: each is nearer to its own words than to the other's."""
    model = load_model("fedvl-tiny")
    assert isinstance(model, DualEncoder)
    colours = torch.tensor([[30, 140, 40], [40, 90, 200]], dtype=torch.uint8)
    images = model.encode_image(model.normalise(colours[:, :, None, None].expand(-1, -1, 64, 64)))
    texts = model.encode_text(model.tokenise(["green leaves", "blue sky"]))
    scores = torch.nn.functional.normalize(images, dim=1) @ torch.nn.functional.normalize(texts, dim=1).T
    assert scores.argmax(1).tolist() == [0, 1]


def test_fingerprint_depends_on_weights_preprocessing_and_nothing_else(tiny: Path, tmp_path: Path) -> None:
    first = load_model(str(tiny)).fingerprint
    moved = shutil.copytree(tiny, tmp_path / "moved")
    assert load_model(str(moved)).fingerprint == first
    images = json.loads((moved / "preprocessor_config.json").read_text())
    (moved / "preprocessor_config.json").write_text(json.dumps({**images, "image_mean": [0.5, 0.5, 0.5]}))
    assert load_model(str(moved)).fingerprint != first
    (moved / "preprocessor_config.json").write_text(json.dumps(images))
    weights = load_file(moved / "model.safetensors")
    weights["text_projection.weight"][0, 0] += 1e-6
    save_file(weights, moved / "model.safetensors")
    assert load_model(str(moved)).fingerprint != first


def test_a_damaged_embedded_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(checkpoint.EMBEDDED_FOLDER, tmp_path / "embedded")
    monkeypatch.setattr(checkpoint, "EMBEDDED_FOLDER", copy)
    load_model("fedvl-tiny")
    path = copy / "fedvl-tiny" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FedVLError, match="install fedvl again"):
        load_model("fedvl-tiny")
    load_model("fedvl-tiny-vilt")


def test_sharded_weights_are_put_together(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "shards")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_model(str(folder)).fingerprint == load_model(str(tiny)).fingerprint


def test_an_open_clip_vit_file_equals_the_hugging_face_folder(tiny: Path, tmp_path: Path) -> None:
    """The same weights under OpenAI's names, with open_clip's configuration beside them for heads and activation."""
    model = load_model(str(tiny))
    weights = dict(model.state_dict())
    weights["logit_scale"] = weights.pop("log_scale")
    save_file(weights, tmp_path / "open_clip_model.safetensors")
    settings = {"vision_cfg": {"layers": 9, "width": 320, "head_width": 64}, "text_cfg": {"heads": 4}}
    mean, std = model.preprocessing.mean, model.preprocessing.std
    preprocessing = {"mean": mean, "std": std, "interpolation": "bicubic", "resize_mode": "shortest"}
    config = {"model_cfg": settings, "preprocess_cfg": preprocessing}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    shutil.copyfile(tiny / "tokenizer.json", tmp_path / "tokenizer.json")
    assert load_model(str(tmp_path)).fingerprint == model.fingerprint
    assert load_model(str(tmp_path / "open_clip_model.safetensors")).fingerprint == model.fingerprint
    config["preprocess_cfg"] = {**preprocessing, "resize_mode": "squash"}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(FedVLError, match="resized"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["fedvl-tny", "nowhere/at/all", "./nowhere", "missing.safetensors", ""])
def test_an_unknown_name_says_what_may_be_given(name: str) -> None:
    with pytest.raises(FedVLError, match="fedvl-tiny, fedvl-tiny-vilt, a folder"):
        load_model(name)


def test_unusable_folders_and_files_are_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(FedVLError, match="no pickles"):
        load_model(str(tmp_path / "weights.bin"))
    with pytest.raises(FedVLError, match="model_type"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FedVLError, match="JSON"):
        load_model(str(tmp_path))
    shutil.copyfile(tiny / "config.json", tmp_path / "config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FedVLError, match="convert the weights to safetensors"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(FedVLError, match="safetensors file"):
        load_model(str(tmp_path))
    weights = load_file(tiny / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if "projection" not in name}, tmp_path / "model.safetensors"
    )
    with pytest.raises(FedVLError, match="visual_projection"):
        load_model(str(tmp_path))
    weights["vision_model.post_layernorm.bias"] = torch.zeros(7)
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copyfile(tiny / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(FedVLError, match="do not fit together"):
        load_model(str(tmp_path))
    weights["text_model.embeddings.token_embedding.weight"] = torch.zeros(100, 256)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(FedVLError, match="another model"):
        load_model(str(tmp_path))


class Hub:
    """Stands for the hub: revisions with files, of which only those that match the patterns are copied to the cache."""

    def __init__(self, revisions: dict[str | None, Path], cache: Path) -> None:
        self.revisions, self.cache, self.asked = revisions, cache, list[str]()

    def snapshot_download(self, name: str, allow_patterns: list[str], revision: str | None = None) -> str:
        folder = self.cache / "snapshots" / str(revision).replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        self.asked += allow_patterns
        for pattern in allow_patterns:
            for path in self.revisions[revision].glob(pattern):
                shutil.copyfile(path, folder / path.name)
        return str(folder)


def test_a_hub_name_fetches_no_pickle_and_takes_the_converters_offer(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = shutil.copytree(tiny, tmp_path / "main")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    hub = Hub({None: pickled, "refs/pr/7": tiny}, tmp_path / "cache")
    offers = [
        SimpleNamespace(num=3, title="Fix the card"),
        SimpleNamespace(num=7, title="Adding `safetensors` variant"),
    ]
    api = SimpleNamespace(get_repo_discussions=lambda *_, **__: iter(offers))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    model = load_model("owner/model")
    assert model.fingerprint == load_model(str(tiny)).fingerprint
    assert model.name == "owner/model"
    assert not any("bin" in pattern or pattern == "*" for pattern in hub.asked)
    offers.clear()
    with pytest.raises(FedVLError, match="convert the weights to safetensors"):
        load_model("owner/model")


def test_a_failed_download_is_one_plain_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host\nlong trace")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FedVLError, match=r"Cannot fetch the model 'owner/model' \(no route to host\)"):
        load_model("owner/model")


def test_eight_bits_keep_every_value_within_half_a_step() -> None:
    tensor = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    tensor[2] = 0
    small, scales = quantise(tensor)
    assert small.dtype == torch.int8
    assert small[0].abs().max() == 127
    full = checkpoint._dequantised(shrink({"a.weight": tensor, "b.bias": tensor[0, 0]}))
    assert torch.equal(full["b.bias"], tensor[0, 0])
    assert ((full["a.weight"] - tensor).abs() <= scales[:, None, None] * 0.5001).all()
    assert set(full) == {"a.weight", "b.bias"}


def hub_cache(tiny: Path, root: Path) -> Path:
    """The hub's cache with one model in it; return the folder of its files."""
    model = root / "models--owner--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    return shutil.copytree(tiny, model / "snapshots" / ("0" * 40))


def test_a_hub_model_that_is_here_is_loaded_without_the_hub(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried on version 0.1: ``predict`` of a folder that somebody sent contacted the hub."""
    files = hub_cache(tiny, tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(checkpoint, "_download", lambda name: pytest.fail("it contacts the hub"))
    assert stored("owner/model") == files
    assert load_model("owner/model").fingerprint == load_model(str(tiny)).fingerprint
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('[model]\nname = "owner/model"\n')
    assert RunFolder(run).experiment.model.name == "owner/model"
    (files / "model.safetensors").unlink()  # as after a download that was interrupted
    assert stored("owner/model") is None
    with pytest.raises(FedVLError, match=r"would download the model owner/model from the hub; .* say --trust-method"):
        _ = RunFolder(run).experiment
    assert RunFolder(run, trust_method=True).experiment.model.name == "owner/model"
