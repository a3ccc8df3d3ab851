"""The pretraining tool end to end at a tiny size on made-up data, and its parts against values worked out by hand."""

import csv
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.lazy import lazily
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]


transformers = lazily("transformers")
build_dev = lazily("tools.pretrain.build_dev")
build_shards = lazily("tools.pretrain.build_shards")
build_text = lazily("tools.pretrain.build_text")
centre = lazily("tools.pretrain.centre")
evaluate = lazily("tools.pretrain.evaluate")
folders = lazily("tools.pretrain.folders")
fused = lazily("tools.pretrain.fused")
images = lazily("tools.pretrain.images")
learning = lazily("tools.pretrain.learner")
probe_vilt = lazily("tools.pretrain.probe_vilt")
rehearsal = lazily("tools.pretrain.rehearsal")
runtime = lazily("tools.pretrain.runtime")
teachers = lazily("tools.pretrain.teachers")
train_clip = lazily("tools.pretrain.train_clip")
train_vilt = lazily("tools.pretrain.train_vilt")
training_set = lazily("tools.pretrain.training_set")

CPU = torch.device("cpu")
SMALL = {
    "steps": 4,
    "text-steps": 3,
    "text-batch": 12,
    "batch": 10,
    "caption-batch": 4,
    "concepts": 14,
    "words": 12,
    "teacher-size": 32,
    "vision-width": 64,
    "vision-layers": 2,
    "vision-hidden": 64,
    "text-layers": 1,
    "checks": 1,
    "log-every": 2,
    "warmup": 2,
}


def arguments(root: Path, *names: str) -> list[str]:
    """Flags of what has been made under a root."""
    places = {
        "tiny-imagenet": "tiny",
        "image-teacher": "r50.safetensors",
        "sentence-teacher": "sentences",
        "keys": "shards/keys.json",
        "shard": "shards/shard0",
    }
    return [part for name in names for part in (f"--{name}", str(root / places.get(name, name)))]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    rehearsal.main(["--out", str(root)])
    shard_flags = arguments(root, "tiny-imagenet", "flickr", "fruits", "data")
    build_shards.main([*shard_flags, "--out", str(root / "shards"), "--shards", "2", "--workers", "1"])
    text_flags = arguments(root, "wordnet", "keys", "flickr", "data")
    build_text.main([*text_flags, "--out", str(root / "text"), "--vocabulary", "1000", "--variants", "3"])
    build_dev.main([*arguments(root, "data", "flickr"), "--out", str(root / "dev")])
    return root


def train(root: Path, out: str) -> Path:
    flags = arguments(root, "shards", "text", "image-teacher", "sentence-teacher", "dev", "cache")
    small = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    train_clip.main([*flags, *small, "--out", str(root / out)])
    return root / out


@pytest.fixture(scope="module")
def trained(world: Path) -> Path:
    return train(world, "trained")


# ---------------------------------------------------------------------------------------------------- training
def test_budget_by_steps_and_by_clock() -> None:
    assert [runtime.Budget(9.0, 4).progress(step) for step in (0, 1, 4)] == [0, 0.25, 1]
    clock = runtime.Budget(1000.0, None)
    assert clock.progress(50) == 0  # the clock has not started
    clock.step_done()
    assert 0 <= clock.progress(50) < 1
    assert runtime.Budget(0.0, None).progress(0) == 1


def test_trained_folder_is_a_clip_model(trained: Path) -> None:
    model = transformers.CLIPModel.from_pretrained(trained, dtype=torch.float32).eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(trained)
    assert {value.dtype for value in load_file(trained / "model.safetensors").values()} == {torch.float16}
    assert model.config.text_config.eos_token_id == tokenizer.eos_token_id
    tokens = tokenizer(["a photo of a leopard", "red"], padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model(**tokens, pixel_values=torch.randn(3, 3, 64, 64))
    assert out.logits_per_image.shape == (3, 2)
    assert out.logits_per_image.isfinite().all()
    log = json.loads((trained / "train_log.json").read_text())
    assert (log["steps"], log["images_seen"]) == (4, 56)
    assert [entry["step"] for entry in log["history"]] == [2, 4]
    assert set(log["history"][0]) == {"step", "seconds", "seen", *train_clip.LOSS_WEIGHTS}
    scores = json.loads((trained / "dev.json").read_text())
    assert set(scores) == {*(name for name, _, _ in build_dev.SAMPLES), "flickr_test"}
    assert "probe" in scores["cifar10"]


def test_training_by_steps_is_repeatable(world: Path, trained: Path) -> None:
    again = load_file(train(world, "again") / "model.safetensors")
    for name, value in load_file(trained / "model.safetensors").items():
        assert torch.equal(value, again[name]), name


def test_training_learns(world: Path) -> None:
    """Many steps on the few images and texts must fit them: both the text stage and the joint losses fall."""
    torch.manual_seed(0)
    data = training_set.load_training_set(world / "shards", world / "text", None, CPU)
    meanings = training_set.load_meanings(data.arrays, world / "text", world / "sentences", None, CPU)
    settings = learning.Settings(
        text_steps=15,
        text_batch=24,
        batch=16,
        caption_batch=4,
        concepts=14,
        words=16,
        teacher_size=32,
        mixed=0.0,
        vision_width=64,
        vision_layers=1,
        vision_hidden=64,
        text_layers=1,
    )
    learner = train_clip.Learner(settings, data, meanings, teachers.load_image_teacher(world / "r50.safetensors", CPU))
    tokens, meaning = learner.draw_items(24)

    def text_loss() -> float:
        with torch.no_grad():
            return learner.heads.text_loss(learner.encode_texts(tokens), meaning).item()

    before = text_loss()
    assert train_clip.text_stage(learner) == 15
    assert text_loss() < 0.9 * before
    batch = learner.draw()
    with torch.no_grad():
        first = learner.joint_losses(batch)
    train_clip.set_learning_rate(learner.optimiser, 1e-3)
    for _ in range(20):
        train_clip.descend(learner.optimiser, sum(learner.joint_losses(batch).values()))
    with torch.no_grad():
        last = learner.joint_losses(batch)
    for name in ("class", "to_image", "caption", "feature", "text", "ancestor"):
        assert last[name] < first[name], name


def test_averaged_weights_follow_the_formula() -> None:
    run = train_clip.Run.__new__(train_clip.Run)
    run.settings, run.step = learning.Settings(averaging=0.5), 0
    run.average, learner = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    run.learner = type("Any", (), {"model": learner})()
    run.average.weight.data.fill_(10.0)
    learner.weight.data.fill_(0.0)
    run.update_average()  # keeps min(0.5, 1/10)
    assert run.average.weight.item() == pytest.approx(1.0)
    run.step = 100  # keeps min(0.5, 101/110)
    run.update_average()
    assert run.average.weight.item() == pytest.approx(0.5)
    run.settings = learning.Settings()
    run.step = 0
    assert run.learning_rate(0.0) == pytest.approx(1.2e-3 / 600)
    run.step = 5000
    assert run.learning_rate(0.5) == pytest.approx(1.2e-3 * (0.5 * 0.995 + 0.005))
    assert run.learning_rate(1.0) == pytest.approx(1.2e-3 * 0.005)


def test_defaults_are_those_of_the_shipped_run() -> None:
    log = json.loads((ROOT / "tools/pretrain/train_log.json").read_text())
    settings = learning.Settings()
    assert {name: getattr(settings, name) for name in log["settings"]} == log["settings"]
    assert log["loss_weights"] == train_clip.LOSS_WEIGHTS
    assert log["source_shares"] == training_set.SOURCE_SHARES


# ---------------------------------------------------------------------------------------------------- centring, export
def test_centring_removes_the_common_part(world: Path, trained: Path) -> None:
    flags = ["--model", str(trained), *arguments(world, "shard", "text"), "--images", "30", "--nouns", "20"]
    centre.main([*flags, "--out", str(world / "centred")])
    before, after = folders.load_clip(trained), folders.load_clip(world / "centred")
    pixels, _ = images.read_pack(world / "shards/shard0", 30)
    tokens = centre.noun_tokens(world / "text", 20)
    for embed, given in ((centre.image_embeddings, pixels), (centre.text_embeddings, tokens)):
        old, new = embed(before, given), embed(after, given)
        part = centre.common_part(old)
        torch.testing.assert_close(new, old - part, atol=0.02, rtol=0)  # up to fp16 weights
        assert new.mean(0).norm() < 0.05 * old.mean(0).norm()
    transformers.CLIPModel.from_pretrained(world / "centred")
    assert (world / "centred/preprocessor_config.json").exists()


def test_common_part_by_hand() -> None:
    embeddings = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(centre.common_part(embeddings), torch.tensor([1.0, 1.0]))
    torch.manual_seed(0)
    projection, part = torch.randn(3, 5), torch.randn(3)
    torch.testing.assert_close(projection @ centre.bias_shift(projection, part), part)


# ---------------------------------------------------------------------------------------------------- evaluation
def test_retrieval_and_recall_by_hand() -> None:
    pictures, texts = torch.eye(7), torch.eye(7).roll(1, 0)
    texts[0] = torch.eye(7)[0]
    # Text 0 finds its image, each of the six others finds its neighbour's.
    assert evaluate.retrieval(pictures, texts)["t2i_R1"] == pytest.approx(14.29)
    assert evaluate.retrieval(pictures, torch.eye(7)) == {"t2i_R1": 100.0, "t2i_R5": 100.0}


def test_linear_probe_separates_what_can_be_separated() -> None:
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    features = torch.randn(60, 8) * 0.1 + F.one_hot(labels, 8)
    assert evaluate.linear_probe(features[:30], labels[:30], features[30:], labels[30:], 3) == 100.0
    assert evaluate.linear_probe(features[:30], labels[:30], features[30:], (labels[30:] + 1) % 3, 3) == 0.0


def test_evaluation_command(world: Path, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    sets = ["--sets", "cifar10", "eurosat_rgb", "caltech101", "grocery_pypi_eccd"]
    data = world / "data"
    with (data / "eurosat_rgb/split.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "all"]
    evaluate.main(["--model", str(trained), "--data", str(data), *sets, "--probe-images", "12", "--out", str(out)])
    scores = json.loads(out.read_text())
    assert scores["eurosat_rgb"]["n"] == len(rows[::9])
    assert scores["caltech101"]["n"] == 2  # rows 5 and 10; row 0 is background
    assert scores["cifar10"]["n"] == 12
    mean = sum(scores["cifar10"]["per_class"].values()) / 3  # four images of each class
    assert scores["cifar10"]["plain"] == pytest.approx(mean, abs=0.1)
    assert {"plain", "ensemble", "prompt"} <= set(scores["eurosat_rgb"])
    names = evaluate.read_set(data, "grocery_pypi_eccd").class_names
    assert names == ["blue thing fruit", "red thing fruit"]


# ---------------------------------------------------------------------------------------------------- ViLT
@pytest.fixture(scope="module")
def vilt(world: Path, trained: Path) -> Path:
    flags = [*arguments(world, "shards", "text"), "--clip", str(trained), "--steps", "3", "--batch", "24"]
    train_vilt.main([*flags, "--layers", "2", "--out", str(world / "vilt")])
    return world / "vilt"


def test_vilt_folder_loads_and_fuse_is_its_forward(world: Path, vilt: Path) -> None:
    model = transformers.ViltModel.from_pretrained(vilt, dtype=torch.float32).eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(vilt)
    end = tokenizer.eos_token_id
    tokens = tokenizer(["a leopard", "a photo of a chair"], padding="max_length", max_length=12, return_tensors="pt")
    mask = fused.text_mask(tokens["input_ids"], end)
    assert mask.sum(1).tolist() == [len(tokenizer(text)["input_ids"]) for text in ("a leopard", "a photo of a chair")]
    pixels = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        theirs = model(
            input_ids=tokens["input_ids"],
            attention_mask=mask,
            pixel_values=pixels,
            pixel_mask=torch.ones(2, 64, 64, dtype=torch.long),
        )
        hidden, pooled = fused.fuse(model, tokens["input_ids"], mask, pixels)
    torch.testing.assert_close(pooled, theirs.pooler_output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden[:, :12], theirs.last_hidden_state[:, :12], atol=1e-4, rtol=1e-4)


def test_vilt_starts_as_the_vision_tower(trained: Path) -> None:
    clip = folders.load_clip(trained)
    model = fused.build_vilt(clip, 1, 30, 29)
    fused.start_from_clip(model, clip)
    layer, source = model.encoder.layer[0], clip.vision_model.encoder.layers[0]
    assert torch.equal(layer.attention.attention.query.weight, source.self_attn.q_proj.weight)
    assert torch.equal(layer.output.dense.bias, source.mlp.fc2.bias)
    assert model.config.vocab_size == 31


def test_pairs_are_what_they_say(world: Path, trained: Path) -> None:
    torch.manual_seed(0)
    data = training_set.load_training_set(world / "shards", world / "text", None, CPU)
    pairs = train_vilt.PairSource(data, folders.load_clip(trained), 400).draw()
    assert not (pairs.no_text & pairs.no_image).any()
    assert 15 < pairs.no_text.sum() < 50  # 8 % of 400 are 32
    assert 15 < pairs.no_image.sum() < 50
    assert (pairs.pixels[pairs.no_image] == 0).all()
    assert (pairs.tokens[pairs.no_text, 1:] == data.end).all()
    assert (pairs.tokens[:, 0] == data.start).all()
    assert not (pairs.hidden_word & ((pairs.tokens == data.start) | (pairs.tokens == data.end))).any()
    assert 0.4 < pairs.match.float().mean() < 0.8
    torch.testing.assert_close(pairs.image_target.norm(dim=1), torch.ones(400))


def test_vilt_probe_command(world: Path, trained: Path, vilt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--vilt", str(vilt), "--clip", str(trained), *arguments(world, "data"), "--set", "products"]
    probe_vilt.main(flags)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "12 images to train on, 8 to test, 2 classes"
    # One image and one text a class: everything but a wrong pairing of rows separates them.
    assert [line.rsplit(": ")[1] for line in lines[1:]] == ["100.0 %"] * 6
