"""Exported folders against transformers: the same class for every picture, by the README's own lines."""

import json
import re
import runpy
import sys

import numpy as np
import pytest
import torch
from helpers.finished import asked_rows, finish, png
from helpers.lazy import lazily
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import normalize

from fedvl.data.features import encode_split
from fedvl.data.images import BadImage, decode
from fedvl.data.protocols import PROTOCOLS, Labels
from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError
from fedvl.files import file_sha256
from fedvl.models.checkpoint import load_model
from fedvl.runs.folder import RunFolder
from fedvl.serve.export import export
from fedvl.serve.model import TrainedModel

transformers = lazily("transformers")


def told_by_readme(folder, image, monkeypatch, capsys):
    """What the lines of code in the exported README print for a picture."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 14
    (folder / "photo.jpg").write_bytes(image)
    (folder / "use.py").write_text(code)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "image", raising=False)
    capsys.readouterr()
    return runpy.run_path("use.py"), capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["fed-mp", "linear", "fedpp"])
def test_the_readme_gives_the_same_answer_as_fedvl(folder_of, tmp_path, monkeypatch, capsys, name):
    run = TrainedModel(RunFolder(folder_of(name)))
    client = 1 if name == "fedpp" else None
    export(run, tmp_path / "out", client=client)
    conversation = run.user(client=client).conversation
    chosen = json.loads((tmp_path / "out" / "thresholds.json").read_text())
    assert list(chosen["shares"]) == list(run.user(client=client).names)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert chosen["chosen"] in readme
    assert readme.startswith("---\nlibrary_name: transformers\n")
    assert "license: apache-2.0\n---\n" in readme
    for row in asked_rows(run.result)[:3]:
        used, printed = told_by_readme(tmp_path / "out", png(row), monkeypatch, capsys)
        (encoded,) = run.encode([run.read(png(row))])
        assert not isinstance(encoded, BadImage)
        inputs = {form: tensor[None] for form, tensor in encoded.items()}
        with torch.no_grad():
            expected = conversation.method.predict(conversation.tensors, inputs)
        torch.testing.assert_close(used["scores"], expected, atol=0.05, rtol=0.01)  # FedVL keeps features in 16 bits
        assert printed == run.user(client=client).names[int(expected.argmax())]


def odd_images():
    """Pictures that a plain conversion reads wrongly: turned by EXIF, of 16 bits, transparent in three ways, CMYK."""
    noise = np.random.default_rng(0).integers(0, 256, (12, 20, 4), dtype=np.uint8)
    plain, exif = Image.fromarray(noise[..., :3]), Image.Exif()
    for turn in range(1, 9):
        exif[0x0112] = turn
        yield f"turned {turn}", plain, {"format": "PNG", "exif": exif.tobytes()}
    yield "16 bits", Image.fromarray(noise[..., 0].astype(np.uint16) * 257 + 3), {"format": "PNG"}
    yield "alpha", Image.fromarray(noise), {"format": "PNG"}
    yield "grey and alpha", Image.fromarray(noise).convert("LA"), {"format": "PNG"}
    yield "palette", plain.quantize(16), {"format": "PNG", "transparency": 3}
    yield "CMYK", plain.convert("CMYK"), {"format": "JPEG"}


def test_the_exported_reader_opens_odd_images_as_fedvl_does(folder_of, tmp_path):
    export(TrainedModel(RunFolder(folder_of("linear"))), tmp_path / "out")
    open_rgb = runpy.run_path(str(tmp_path / "out" / "image.py"))["open_rgb"]
    for name, image, options in odd_images():
        path = tmp_path / name
        image.save(path, **options)
        ours, theirs = decode(path), open_rgb(path)
        assert (theirs.mode, theirs.size) == ("RGB", ours.size), name
        assert theirs.tobytes() == ours.tobytes(), name


def test_an_exported_encoder_is_the_one_that_was_used(folder_of, tmp_path):
    run = TrainedModel(RunFolder(folder_of("fed-mp")))
    export(run, tmp_path / "out", ["cat", "ship", "猫"])
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "ship", "猫"]
    card = json.loads((tmp_path / "out" / "model_card.json").read_text())
    assert card["exported"]["classes"] == ["cat", "ship", "猫"]
    assert card["hashes"]["state"] == run.result.state_sha256
    for name, sha256 in card["exported"]["files_sha256"].items():
        assert file_sha256(tmp_path / "out" / name) == sha256
        assert f"| {name} of this folder | {sha256} |" in (tmp_path / "out" / "MODEL_CARD.md").read_text()
    theirs = transformers.CLIPModel.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = ["a photo of a cat.", "Ein Schiff, 12 naïve 猫"]
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    assert tokens["input_ids"].tolist() == run.encoder.tokenise(texts).tolist()
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        image = theirs.visual_projection(theirs.vision_model(pixels).pooler_output)
        text = theirs.text_projection(theirs.text_model(**tokens).pooler_output)
        torch.testing.assert_close(image, run.encoder.encode_image(pixels), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(text, run.encoder.encode_text(run.encoder.tokenise(texts)), atol=1e-4, rtol=1e-4)
    again = load_model(str(tmp_path / "out"))
    for key, tensor in run.encoder.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)


def test_what_cannot_be_exported_says_why(folder_of, tmp_path):
    settings = {"data": {"shots": 2, "clients": 2, "minimum": 0}, "federation": {"rounds": 1, "threads": 1}}
    finish(tmp_path / "cache", {"method": {"name": "cachefl"}, **settings})
    with pytest.raises(FedVLError, match="'cachefl' are not a linear function"):
        export(TrainedModel(RunFolder(tmp_path / "cache")), tmp_path / "out")
    run = TrainedModel(RunFolder(folder_of("linear")))
    run.forms = ("patches",)
    with pytest.raises(FedVLError, match="reads more of an image"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(FedVLError, match="exists already"):
        export(TrainedModel(RunFolder(folder_of("linear"))), tmp_path / "taken")


@pytest.mark.parametrize("client", [None, 1])
def test_the_card_has_the_accuracy_of_what_is_exported_from_a_personal_run(folder_of, tmp_path, client):
    """Not the mean over the clients' own models, which the run reports."""
    run = TrainedModel(RunFolder(folder_of("fedpp")))
    export(run, tmp_path / "out", client=client)
    head = load_file(tmp_path / "out" / "classifier.safetensors")
    dataset, data = open_dataset("cifar10-mini"), run.experiment.data
    train, test = (dataset.splits[part].labels for part in ("train", "test"))
    parts = PROTOCOLS["personal"](Labels(train, test, 10), data, run.experiment.seed).parts
    rows = np.arange(len(test)) if client is None else parts[client]
    features = normalize(encode_split(dataset.splits["test"], run.encoder, "features").tensor, dim=-1)[rows]
    right = (features @ head["weight"].T + head["bias"]).argmax(-1).numpy() == test[rows]
    found = json.loads((tmp_path / "out" / "model_card.json").read_text())
    assert found["accuracy"]["images"] == len(rows)
    assert found["accuracy"]["percent"] == pytest.approx(100 * right.mean())
    assert found["exported"]["tested"]
    text = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert f"of {len(rows):,} test images{'' if client is None else ' of client 1'}, protocol personal" in text
    assert "the figure above is the run's own" not in text
