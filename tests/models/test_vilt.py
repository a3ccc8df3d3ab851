"""The fused encoder: against transformers, through our loader; prompts that are arguments, and what masks hide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.lazy import lazily
from helpers.models import TEXTS, assert_batched_equals_loop, draw, full_copy, random_model, unit
from PIL import Image

from fedvl.models.checkpoint import load_model
from fedvl.models.vilt import FusedEncoder

transformers = lazily("transformers")
processing = lazily("transformers.models.vilt.image_processing_pil_vilt")

CLIENTS = 3


@pytest.fixture(scope="module")
def vilt() -> FusedEncoder:
    model = load_model("fedvl-tiny-vilt")
    assert isinstance(model, FusedEncoder)
    return model


def test_inference_mode_gives_the_same_features(vilt: FusedEncoder) -> None:
    """There the fused attention kernel is used, with a padding mask."""
    tokens, pixels = vilt.tokenise(["a dog", "a red car on the road"]), draw(2, 3, 64, 64)
    with torch.inference_mode():
        fused = vilt.encode(tokens, pixels)[1]
    torch.testing.assert_close(unit(fused), unit(vilt.encode(tokens, pixels)[1]), rtol=0, atol=1e-5)


def test_vilt_input_prompts_batch_over_clients(vilt: FusedEncoder) -> None:
    tokens, pixels = vilt.tokenise(["a dog", "a red car on the road"]), draw(2, 3, 64, 64)
    target = draw(2, vilt.width, seed=1)
    for shape in ((CLIENTS, 3, vilt.width), (CLIENTS, 2, 3, vilt.width)):
        prompts = draw(*shape)
        gradients = assert_batched_equals_loop(lambda p: (vilt.encode(tokens, pixels, p)[1] * target).sum(), prompts)
        assert (gradients.abs().amax(-1) > 0).all()
    hidden, pooled = vilt.encode(tokens, pixels, prompts[0])
    assert hidden.shape == (2, 3 + tokens.shape[1] + 65, vilt.width)
    torch.testing.assert_close(pooled, vilt.pool(hidden, 3))


def test_vilt_prompts_at_several_layers_grow_the_sequence(vilt: FusedEncoder) -> None:
    """Missing-aware prompts: put in front at each of the first layers, kept; written out with the blocks themselves."""
    tokens, pixels = vilt.tokenise(["a dog", "a red car on the road"]), draw(2, 3, 64, 64)
    embedded = torch.cat([vilt.embed_text(tokens), vilt.embed_image(pixels)], 1)
    mask = torch.cat([vilt.text_mask(tokens), vilt.image_mask(pixels)], 1)
    prompts = draw(2, 2, 4, vilt.width)  # layers x samples x P x width
    x, seen = embedded, mask
    for layer, block in enumerate(vilt.transformer.resblocks):
        if layer < 2:
            x = torch.cat([prompts[layer], x], 1)
            seen = torch.cat([torch.ones(2, 4, dtype=torch.bool), seen], 1)
        x = block(x, seen[:, None, None, :])
    hidden = vilt.run(embedded, mask, prompts)
    torch.testing.assert_close(hidden, vilt.ln_final(x), rtol=0, atol=1e-5)
    assert hidden.shape[1] == embedded.shape[1] + 8


def test_what_a_mask_hides_has_no_effect(vilt: FusedEncoder) -> None:
    tokens, pixels = vilt.tokenise(["a dog", "a dog on the road"]), draw(2, 3, 64, 64)
    mask = vilt.text_mask(tokens)
    assert mask.tolist() == [[True] * 4 + [False] * 3, [True] * 7]
    changed = tokens.clone()
    changed[0, 5] = 300
    torch.testing.assert_close(vilt.encode(changed, pixels)[1], vilt.encode(tokens, pixels)[1], rtol=0, atol=1e-6)
    hidden_image = torch.zeros(2, 65, dtype=torch.bool)
    one, other = (vilt.encode(tokens, x, image_mask=hidden_image)[1] for x in (pixels, pixels.flip(0)))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


VILT_VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] a photo of dog two red car ##s , parked in front the house deer"


def vilt_states(reference: torch.nn.Module, ours: FusedEncoder, pixels: torch.Tensor) -> None:
    """Compare the pooled and the text's hidden states: transformers shuffles the patches, which changes neither."""
    tokens = ours.tokenise(TEXTS[: len(pixels)])
    with torch.no_grad():
        mask = ours.text_mask(tokens).long()
        theirs = reference(input_ids=tokens, attention_mask=mask, pixel_values=pixels)
        hidden, pooled = ours.encode(tokens, pixels)
    torch.testing.assert_close(unit(pooled), unit(theirs.pooler_output), rtol=0, atol=1e-5)
    length = tokens.shape[1]
    seen = mask.bool()
    expected = theirs.last_hidden_state[:, :length][seen]
    torch.testing.assert_close(unit(hidden[:, :length][seen]), unit(expected), rtol=0, atol=1e-5)
    assert (pooled[0] - pooled[1]).abs().max() > 1e-4


def test_vilt_equals_transformers_with_images_that_are_not_square(tmp_path: Path) -> None:
    reference = random_model(transformers.ViltModel, transformers.ViltConfig())
    reference.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text(VILT_VOCABULARY.replace(" ", "\n"))
    processing.ViltImageProcessorPil().save_pretrained(tmp_path)
    ours = load_model(str(tmp_path))
    assert isinstance(ours, FusedEncoder)
    assert (ours.width, ours.layers, ours.image_size) == (768, 12, 384)
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((60, 90), (60, 90))]
    pixels = ours.normalise(torch.stack([ours.preprocess(image) for image in images]))
    processed = processing.ViltImageProcessorPil()(images, return_tensors="pt")
    torch.testing.assert_close(pixels, processed["pixel_values"], rtol=0, atol=1e-6)
    assert pixels.shape[-2] != pixels.shape[-1]
    vilt_states(reference, ours, pixels)


def test_fedvl_tiny_vilt_equals_transformers(tmp_path: Path) -> None:
    folder = full_copy("fedvl-tiny-vilt", tmp_path)
    reference = transformers.ViltModel.from_pretrained(folder, local_files_only=True).eval()
    ours = load_model("fedvl-tiny-vilt")
    assert isinstance(ours, FusedEncoder)
    vilt_states(reference, ours, torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0)))


def test_a_run_reads_photos_of_any_shape_as_squares(vilt: FusedEncoder) -> None:
    whole = FusedEncoder(vilt.name, vilt.shape, replace(vilt.preprocessing, crop=0), vilt.tokenizer)
    square = whole.for_runs()
    assert {square.preprocess(Image.new("RGB", size)).shape for size in ((90, 60), (60, 90), (70, 70))} == {(3, 64, 64)}
    assert square.fingerprint != whole.fingerprint
    assert vilt.for_runs() is vilt  # it is square as it is


def test_text_positions_are_interpolated_as_fed_primes_code_does(vilt: FusedEncoder) -> None:
    longer = vilt.for_runs(128)
    plane = vilt.text_positions[None, None]
    expected = torch.nn.functional.interpolate(plane, size=(128, vilt.width), mode="bilinear")[0, 0]
    torch.testing.assert_close(longer.text_positions, expected)
    tokens = longer.tokenise(["word " * 300])
    assert tokens.shape == (1, 128)
    assert longer.embed_text(tokens).shape == (1, 128, vilt.width)
    assert vilt.tokenise(["word " * 300]).shape == (1, vilt.tokenizer.length)
    assert longer.patches.weight.data_ptr() == vilt.patches.weight.data_ptr()
