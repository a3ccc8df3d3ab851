"""SigLIP: against transformers, on random weights with the real configurations, through our loader.

There is no attention mask, so what is compared includes the padding that a text is read at the end of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lazy import lazily
from helpers.models import TEXTS, add_siglip_tokenizer, assert_batched_equals_loop, draw, random_model, unit
from helpers.prompts import method_on
from PIL import Image

from fedvl.api import run
from fedvl.errors import FedVLError
from fedvl.methods.parts.prompts import ClassTexts
from fedvl.models.checkpoint import _assemble, load_model
from fedvl.models.convert import siglip_from_hugging_face, siglip_shape
from fedvl.models.preprocessing import Squashing
from fedvl.models.siglip import Siglip
from fedvl.models.tokenizer import load_siglip_tokenizer

transformers = lazily("transformers")

# Of google/siglip2-base-patch16-224 and google/siglip2-so400m-patch14-384, but for the table of words, which has 256,000 rows
# there: a text looks up a few of them.
BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
SMALL = {"hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 3}


def random_siglip(sizes: dict[str, int], patch: int, side: int) -> Any:
    config = transformers.SiglipConfig(
        text_config={**sizes, "vocab_size": 300, "projection_size": sizes["hidden_size"]},
        vision_config={**sizes, "patch_size": patch, "image_size": side},
    )
    return random_model(transformers.SiglipModel, config)


def siglip_folder(folder: Path, sizes: dict[str, int], patch: int, side: int) -> tuple[Any, Siglip]:
    reference = random_siglip(sizes, patch, side)
    reference.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {"size": {"height": side, "width": side}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        )
    )
    add_siglip_tokenizer(folder)
    ours = load_model(str(folder))
    assert isinstance(ours, Siglip)
    return reference, ours


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(unit(ours), unit(theirs), rtol=0, atol=1e-5)


def assert_same(reference: Any, ours: Siglip, texts: list[str]) -> None:
    """Images, patches and texts, then the same with prompts at the first layers and a context before the words."""
    pixels, prompts = draw(1, 3, ours.image_size, ours.image_size), draw(2, 3, ours.vision_width, seed=1)
    tokens, context = ours.tokenise(texts), 0.1 * draw(5, ours.text_width, seed=2)
    padded = torch.nn.functional.pad(tokens, (0, ours.context_length - tokens.shape[1]), value=ours.tokenizer.pad)
    with torch.no_grad():
        outputs = reference(input_ids=padded, pixel_values=pixels)
        image, spatial = ours.encode_patches(pixels)
        text = ours.encode_text(tokens)
        close(image, outputs.image_embeds)
        close(text, outputs.text_embeds)
        scores = ours.logit_scale * unit(image) @ unit(text).T + ours.logit_bias
        torch.testing.assert_close(scores, outputs.logits_per_image, rtol=0, atol=1e-4)
        assert (unit(text)[0] - unit(text)[1]).abs().max() > 1e-3  # or agreement would mean nothing
        # A patch's feature is what the head makes of that patch alone.
        hidden = outputs.vision_model_output.last_hidden_state
        close(spatial[:, 3], reference.vision_model.head(hidden[:, 3:4]))
        close(ours.encode_image(pixels, prompts), prompted(reference.vision_model, pixels, prompts))
        words = reference.text_model.embeddings.token_embedding(padded[:, : ours.context_length - len(context)])
        with_context = torch.cat([context.expand(len(texts), -1, -1), words], 1)
        expected = of_embeddings(reference.text_model, with_context)
        close(ours.encode_text(tokens, context), expected)
        class_texts = ClassTexts(ours, [text.removesuffix(".") for text in texts], len(context))
        close(class_texts.features(context), expected)


def prompted(tower: Any, pixels: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    x = tower.embeddings(pixels)
    for number, layer in enumerate(tower.encoder.layers):
        behind = [prompts[number].expand(len(x), -1, -1)] if number < len(prompts) else []
        x = layer(torch.cat([x, *behind], 1), None)[:, : x.shape[1]]
    found: torch.Tensor = tower.head(tower.post_layernorm(x))
    return found


def of_embeddings(tower: Any, embedded: torch.Tensor) -> torch.Tensor:
    hidden = tower.encoder(inputs_embeds=tower.embeddings(inputs_embeds=embedded)).last_hidden_state
    found: torch.Tensor = tower.head(tower.final_layer_norm(hidden)[:, -1])
    return found


def test_siglip2_base_equals_transformers(tmp_path: Path) -> None:
    assert_same(*siglip_folder(tmp_path, BASE, 16, 224), [f"{text}." for text in TEXTS])


@pytest.mark.slow
def test_siglip2_so400m_equals_transformers(tmp_path: Path) -> None:
    """All widths and layers, on 16 patches instead of 729, and without 3 GB on disk."""
    reference = random_siglip(SO400M, 14, 56)
    tensors = siglip_from_hugging_face(reference.state_dict())
    add_siglip_tokenizer(tmp_path)
    tokenizer, shape = load_siglip_tokenizer(tmp_path, 64), siglip_shape(tensors, SO400M, SO400M)
    ours = _assemble(Siglip, "so400m", shape, Squashing(56, 56), tokenizer, tensors)
    assert_same(reference, ours, [f"{text}." for text in TEXTS[:2]])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Siglip]:
    return siglip_folder(tmp_path_factory.mktemp("siglip"), SMALL, 8, 32)


def test_gradients_reach_prompts_and_contexts_and_clients_batch(small: tuple[Any, Siglip]) -> None:
    _, model = small
    pixels, target = draw(2, 3, 32, 32), draw(2, model.dim, seed=1)
    prompts = 0.02 * draw(3, 2, 2, model.vision_width, seed=2)
    gradients = assert_batched_equals_loop(lambda p: (unit(model.encode_image(pixels, p)) * target).sum(), prompts)
    assert (gradients.abs().amax(-1) > 0).all()
    # a name a chunk: texts in chunks are computed again in the backward pass
    one, whole = (ClassTexts(model, ["dog", "red cars"], 4, at_once) for at_once in (1, 100))
    contexts = 0.02 * draw(3, 4, model.text_width)
    gradients = assert_batched_equals_loop(lambda c: (one.features(c) * target).sum(), contexts)
    assert (gradients.abs().amax(-1) > 0).all()
    expected = assert_batched_equals_loop(lambda c: (whole.features(c) * target).sum(), contexts)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


def test_a_context_of_words_equals_the_words(small: tuple[Any, Siglip]) -> None:
    _, model = small
    texts = ClassTexts(model, ["dog", "red cars"], None, words="a photo of a")
    start = texts.start(torch.Generator())
    assert len(start) == 4
    plain = model.encode_text(model.tokenise(["a photo of a dog.", "a photo of a red cars."]))
    torch.testing.assert_close(texts.features(start), unit(plain), rtol=0, atol=1e-5)


def test_texts_fill_the_positions_and_no_more(small: tuple[Any, Siglip]) -> None:
    _, model = small
    with pytest.raises(FedVLError, match="64 positions"):
        model.encode_text(model.tokenise(["dog"]), torch.zeros(63, model.text_width))
    with pytest.raises(FedVLError, match="takes 3 of the 64"):  # the name, a full stop and the end
        ClassTexts(model, ["dog"], 62)
    assert ClassTexts(model, ["dog"], 61).features(torch.zeros(61, model.text_width)).shape == (1, model.dim)
    long = model.tokenise(["dog " * 100])
    assert long.shape == (1, 64)
    assert int(long[0, -1]) == model.tokenizer.end  # a long text is cut before its end token


def test_images_are_squashed_as_their_own_processor_does(small: tuple[Any, Siglip], tmp_path: Path) -> None:
    _, model = small
    pixels = torch.randint(256, (40, 90, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    image = Image.fromarray(pixels.numpy())
    processor = transformers.SiglipImageProcessorPil(
        size={"height": 32, "width": 32}, resample=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    expected = processor(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(model.normalise(model.preprocess(image)[None]), expected, rtol=0, atol=1e-6)


def test_naflex_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip2"}))
    with pytest.raises(FedVLError, match="with a fixed resolution"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("method", ["promptfl", "linear"])
def test_a_run_on_it(small: tuple[Any, Siglip], method: str, tmp_path: Path) -> None:
    """From the folder, through the feature cache, to a result and predictions."""
    _, model = small
    found = run(
        method=method,
        dataset="cifar10-mini",
        model=model.name,
        clients=2,
        shots=2,
        rounds=1,
        out=tmp_path / method,
        quiet=True,
        **{"data.test_shots": 1, "evaluation.examples": 0},
    )
    assert found.accuracy is not None
    assert found.figures.model_fingerprint == model.fingerprint


def test_methods_with_prompts_take_it(small: tuple[Any, Siglip]) -> None:
    for name in ("promptfl", "fedotp", "fedtpg"):
        method = method_on(name, small[1])
        method.start(torch.Generator().manual_seed(0))
