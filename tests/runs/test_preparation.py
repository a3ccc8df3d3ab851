"""What a method is handed before the first round."""

import numpy as np
import pytest
import torch
from helpers.runs import prepare, run
from helpers.small import SIDE, small_fused_encoder
from PIL import Image, ImageOps
from torch.overrides import TorchFunctionMode

import fedvl.runs.preparation as preparation
from fedvl.data.sources import Opener, open_dataset
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.round import Federation
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.vilt import FusedEncoder
from fedvl.runs.experiment import local_engine, make_judge
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator


def test_patches_are_those_of_the_encoder_in_16_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    drawn = np.random.default_rng(0).integers(0, 256, (8, 40, 40, 3), dtype=np.uint8)
    for number, pixels in enumerate(drawn):
        folder = tmp_path / "images" / ("train", "test")[number // 4] / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    dataset = str(tmp_path / "images")
    prepared = prepare(
        {"method": {"name": "fedotp"}, "device": "cpu", "data": {"dataset": dataset, "clients": 2, "partition": "iid"}}
    )
    encoder = load_model("fedvl-tiny")
    assert isinstance(encoder, DualEncoder)
    order = [0, 2, 1, 3]  # class by class
    for samples, images in ((prepared.training.samples, drawn[:4]), (prepared.test.samples, drawn[4:])):
        pixels = torch.stack([encoder.preprocess(Image.fromarray(images[number])) for number in order])
        with torch.inference_mode():
            expected = encoder.encode_patches(encoder.normalise(pixels))[1]
        assert samples.labels.tolist() == [0, 0, 1, 1]
        found = samples.inputs["patches"]
        assert found.shape == (4, 64, encoder.dim)
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-3)


def whole_photos(name, device):
    """A small fused model that keeps the aspect ratio of photos, as ViLT does."""
    small = small_fused_encoder()
    whole = FusedEncoder(name, small.shape, Preprocessing(SIDE, 0, divisor=SIDE // 2), small.tokenizer)
    whole.load_state_dict(small.state_dict())
    return whole.requires_grad_(False).eval()


def test_fed_prime_trains_on_photos_of_several_shapes_and_long_texts(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    generator, lines = np.random.default_rng(0), ["path,label,split,text"]
    for number in range(24):
        side = (30, 20) if number % 2 else (20, 45)
        Image.fromarray(generator.integers(0, 256, (*side, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        label = ("cat", "dog", "red_panda")[number % 3]
        lines.append(f"{number}.png,{label},{'test' if number < 9 else 'train'},{'a word ' * 30}{label}")
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    settings = {
        "method": {"name": "fed-prime", "prompts": 4, "top_k": 2},
        "device": "cpu",
        "data": {"dataset": str(tmp_path / "manifest.csv"), "clients": 3, "classes": ["red panda", "cat"]},
        "model": {"name": "whole", "text_length": 48},
        "federation": {"rounds": 2},
    }
    prepared = preparation.prepare(resolve_experiment(settings), Silent(), Opener(open_dataset, whole_photos))
    assert prepared.class_names == ["cat", "red panda"]
    assert len(prepared.training.samples) == 10  # five of fifteen photos are of dogs
    assert prepared.training.samples.inputs["pixels"].shape == (10, 3, SIDE, SIDE)
    assert prepared.training.samples.inputs["tokens"].shape[1] == 48
    engine, start = local_engine(prepared), prepared.method.start(torch_generator(0, "start"))
    federation = Federation(prepared.method, engine, prepared.experiment.federation, 0, start)
    federation.run()
    assert [len(record.refused) for record in federation.records] == [0, 0]
    assert not torch.equal(federation.shared["classes.weight"], start["classes.weight"])
    conditions = make_judge(prepared, engine).judge_conditions(federation.shared, federation.last)
    assert len(conditions) == 7


def test_an_open_query_is_about_every_image_of_classes_that_no_client_holds():
    """Images of both splits, each with its own picture, and none that a client trains on."""
    prepared = prepare({"method": {"name": "fed-mp"}, "device": "cpu", "data": {"clients": 3}})
    samples, classes = prepared.test.samples, len(prepared.queried.task.class_names)
    assert classes == 4
    assert len(samples) == 0.8 * classes * (200 + 100)  # a fifth is for validation
    trained = {row for rows in prepared.training.rows for row in rows.tolist()}
    held = {str(prepared.training.samples.inputs["embeddings"][row].tolist()) for row in trained}
    assert held.isdisjoint(str(row) for row in samples.inputs["embeddings"].tolist())
    encoder = load_model("fedvl-tiny")
    assert isinstance(encoder, DualEncoder)
    rows = list(range(6))  # of either split
    pixels = torch.stack([encoder.preprocess(prepared.test.read(row)) for row in rows])
    with torch.inference_mode():
        expected = torch.nn.functional.normalize(encoder.encode_image(encoder.normalise(pixels)), dim=-1)
    torch.testing.assert_close(samples.inputs["features"][rows], expected, rtol=0, atol=2e-3)


def test_images_that_no_client_holds_are_those_of_the_training_split_that_are_left():
    data = {"clients": 3, "shots": 16, "minimum": 0}
    prepared = prepare({"method": {"name": "cachefl", "synthetic": "held-out"}, "device": "cpu", "data": data})
    free = prepared.method.task.held_out()
    assert torch.bincount(free.labels).tolist() == [200 - 16] * 10
    held = prepared.training.samples.inputs["features"][torch.cat(prepared.training.rows)]
    keys = prepared.method.start(torch.Generator())["keys"]
    assert keys.shape == (160, held.shape[1])
    for others in (held, prepared.test.samples.inputs["features"]):
        assert float((keys @ torch.nn.functional.normalize(others, dim=-1).T).max()) < 0.9999


def test_clients_hold_out_a_share_of_their_own_images_and_train_on_the_rest():
    """30 images a client, of which a fifth is 6; the same images are held out whoever has withdrawn."""
    data = {"clients": 4, "shots": 12, "partition": "iid"}
    settings = {"data": data, "evaluation": {"validation": 0.2, "protocol": "personal"}}
    whole = prepare({"data": data}).training.rows
    prepared = prepare(settings).training
    assert prepared.validation is not None
    assert [len(part) for part in prepared.validation.parts] == [6] * 4
    features = prepared.samples.inputs["features"]
    for client, part in enumerate(prepared.validation.parts):
        held = [row for row in whole[client].tolist() if row not in prepared.rows[client].tolist()]
        assert len(held) == 6
        assert torch.equal(prepared.validation.samples.inputs["features"][part], features[held])
        assert torch.equal(prepared.validation.samples.labels[part], prepared.true_labels[held])
    left = prepare({**settings, "federation": {"withdrawn": [1]}}).training
    assert left.validation is not None
    assert [len(part) for part in left.validation.parts] == [6, 0, 6, 6]
    assert torch.equal(left.rows[2], prepared.rows[2])


class SecondGpu(TorchFunctionMode):
    """A machine with a second GPU: what torch is asked to do there is noted, and done on the processor."""

    def __init__(self):
        super().__init__()
        self.asked: list[tuple[str, str]] = []  # function and GPU

    def __torch_function__(self, function, types, args=(), kwargs=None):
        named = {name: self.moved(function, value) for name, value in (kwargs or {}).items()}
        return function(*(self.moved(function, each) for each in args), **named)

    def moved(self, function, value):
        if not isinstance(value, str | torch.device) or not str(value).startswith("cuda"):
            return value
        self.asked.append((function.__name__, str(value)))
        return "cpu"


def test_the_second_gpu_gets_the_model_and_the_samples():
    """torch is asked for cuda:1 and for no other GPU; what was asked for cuda alone would land on the first."""
    settings = {"method": {"name": "linear"}, "data": {"clients": 2, "shots": 2, "test_shots": 2, "partition": "iid"}}
    asked = {}
    for device in ("cuda:1", "cpu"):
        with SecondGpu() as machine:
            prepared = preparation.prepare(resolve_experiment({**settings, "device": device}), Silent())
        assert sum(map(len, prepared.training.rows)) == 20
        asked[device] = machine.asked
    assert asked["cpu"] == []
    functions = [function for function, _ in asked["cuda:1"]]
    assert {device for _, device in asked["cuda:1"]} == {"cuda:1"}
    assert functions[:2] == ["empty", "_parse_to"]  # whether there is such a device; then the model, by Module.to
    assert functions.count("to") >= 2 + 2 + 2  # features, labels and rows, to train on and to test with


STYLES = {
    "negative": ImageOps.invert,
    "plain": lambda image: image,
    "pale": lambda image: image.point(lambda v: 128 + v // 2),
}


def write_styles(folder, each=10):
    """Write embedded emoji of three classes in three styles, the domains, with a manifest of them."""
    (folder / "images").mkdir(parents=True)
    split, lines = open_dataset("emoji-mini").splits["train"], ["path,label,split,domain"]
    for label, name in enumerate(("activities", "animals", "flags")):
        for number, row in enumerate(np.flatnonzero(split.labels == label)[:each]):
            for style, change in STYLES.items():
                path = f"images/{style}-{label}-{number}.png"
                change(split.read(int(row)).convert("RGB")).resize((64, 64)).save(folder / path)
                lines.append(f"{path},{name},{'test' if number % 4 == 3 else 'train'},{style}")
    (folder / "styles.csv").write_text("\n".join(lines))
    return str(folder / "styles.csv")


def test_a_domain_that_nobody_has_is_asked_about(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    settings = {
        "data": {
            "dataset": write_styles(tmp_path / "styles"),
            "partition": "iid",
            "clients": 4,
            "target_domain": "plain",
        },
        "federation": {"rounds": 8},
        "training": {"learning_rate": 0.3},
        "evaluation": {"protocol": "leave-one-domain-out"},
    }
    finished = run(settings)
    assert len(finished.prepared.test.samples) == 24  # four fifths of 30
    assert [len(rows) for rows in finished.prepared.training.rows] == [12, 12, 12, 12]  # two of each other style
    assert finished.prepared.training.note.startswith("Domain plain is left out for the test.")
    assert finished.accuracy > finished.zero_shot_accuracy
    settings["data"] |= {"partition": "dirichlet:0.3", "client_shots": 1, "minimum": 1}
    prepared = prepare({**settings, "method": {"name": "fedka", "width": 4}})
    assert all(len(rows) <= 3 for rows in prepared.training.rows)  # one of each class
    assert prepared.method.task.target is not None
    assert prepared.method.task.target["pixels"].shape[0] == 6  # the other fifth, unlabelled


def test_wrong_labels_are_trained_on_and_true_ones_are_kept():
    data = {"clients": 2, "shots": 10, "partition": "iid", "label_noise": "pair:0.3"}
    prepared = prepare({"data": data, "evaluation": {"validation": 0.2}})
    rows = torch.cat(prepared.training.rows)
    given, true = prepared.training.samples.labels[rows], prepared.training.true_labels[rows]
    assert int((given != true).sum()) == 24  # 30 % of each client's 40
    assert torch.equal(given[given != true], (true[given != true] + 1) % 10)
    held = prepared.training.validation
    assert held is not None
    plain = prepare({"data": data | {"label_noise": None}, "evaluation": {"validation": 0.2}}).training.validation
    assert plain is not None
    assert torch.equal(held.samples.labels, plain.samples.labels)
    with pytest.raises(FedVLError, match="none can be wrong from outside"):
        prepare({"method": {"name": "fst-cbdg"}, "data": data})


def test_a_long_tail_is_shared_by_the_clients():
    prepared = prepare({"data": {"clients": 2, "long_tail": 10, "partition": "iid"}})
    assert prepared.training.counts.sum(0).tolist() == [200, 155, 120, 93, 72, 56, 43, 33, 26, 20]


def test_a_run_says_that_clients_are_simulated_and_what_the_test_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    counts = {"train": {"cat": 3, "dog": 3, "elk": 2}, "test": {"cat": 10, "dog": 9}}
    for part, classes in counts.items():
        for number, (name, count) in enumerate(classes.items()):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (8, 8), (40 * number, 10 * index, len(part))).save(folder / f"{index}.png")
    own = {"dataset": str(tmp_path / "photos")}
    thin = ["No test image, so nothing is known of: elk.", "Fewer than 10 test images, so little is known of: dog."]
    assert prepare({"data": own}).notes == thin
    first, *others = prepare({"data": {**own, "clients": 2, "partition": "iid"}}).notes
    assert first == (
        "2 simulated clients share your images (partition iid); without --clients and --partition, one client has all of them."
    )
    assert others == thin


def test_images_of_twelve_bits_in_sixteen_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    for place in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (tmp_path / "scans" / place).mkdir(parents=True)
        for index in range(2):
            values = np.full((8, 8), 60_000 + 1000 * index + 100 * len(place), np.uint16)
            Image.fromarray(values).save(tmp_path / "scans" / place / f"{index}.tiff")
    Image.fromarray(np.full((8, 8), 4095, np.uint16)).save(tmp_path / "scans" / "train" / "cat" / "wide.png")
    notes = [note for note in prepare({"data": {"dataset": str(tmp_path / "scans")}}).notes if "16 bits" in note]
    assert notes == [
        "Read as nearly black, since their values use a small part of 16 bits: train/cat/wide.png; scale them to the whole range."
    ]
