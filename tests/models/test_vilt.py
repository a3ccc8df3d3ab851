"""Prompts are arguments: gradients reach them, clients can be batched over them, and they mean what words mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from helpers.model_folders import unit
from torch import Tensor
from torch.func import grad, vmap

from fedvl.errors import FedVLError
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder

CLIENTS = 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def clip() -> DualEncoder:
    model = load_model("fedvl-tiny")
    assert isinstance(model, DualEncoder)
    return model


@pytest.fixture(scope="module")
def vilt() -> FusedEncoder:
    model = load_model("fedvl-tiny-vilt")
    assert isinstance(model, FusedEncoder)
    return model


def assert_batched_equals_loop(loss: Callable[[Tensor], Tensor], prompts: Tensor) -> Tensor:
    """The gradient by vmap over clients = one client after another, and vmap must not fall back to a loop itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batched = vmap(grad(loss))(prompts)
    looped = torch.stack([grad(loss)(one) for one in prompts])
    torch.testing.assert_close(batched, looped, rtol=1e-4, atol=1e-5)
    assert looped.abs().max() > 1e-3
    return looped


def test_gradients_reach_every_visual_prompt_and_clients_batch(clip: DualEncoder) -> None:
    pixels, target = draw(2, 3, 64, 64), draw(2, clip.dim, seed=1)
    prompts = 0.02 * draw(CLIENTS, clip.vision_layers, 2, clip.vision_width, seed=2)
    gradients = assert_batched_equals_loop(lambda p: (unit(clip.encode_image(pixels, p)) * target).sum(), prompts)
    assert (gradients.abs().amax(-1) > 0).all()
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in clip.parameters())


def test_clients_batch_over_images_too(clip: DualEncoder) -> None:
    pixels, prompts = draw(CLIENTS, 2, 3, 64, 64), 0.02 * draw(CLIENTS, 3, 2, clip.vision_width, seed=2)
    batched = vmap(clip.encode_image)(pixels, prompts)
    looped = torch.stack([clip.encode_image(x, p) for x, p in zip(pixels, prompts, strict=True)])
    torch.testing.assert_close(batched, looped, rtol=0, atol=1e-5)


def test_gradients_reach_the_text_context_and_clients_batch(clip: DualEncoder) -> None:
    tokens, target = clip.tokenise(["a dog", "a red car on the road"]), draw(2, clip.dim, seed=1)
    for shape in ((CLIENTS, 4, clip.text_width), (CLIENTS, 2, 4, clip.text_width)):
        context = 0.02 * draw(*shape)
        gradients = assert_batched_equals_loop(lambda c: (unit(clip.encode_text(tokens, c)) * target).sum(), context)
        assert (gradients.abs().amax(-1) > 0).all()


def test_visual_prompts_are_the_tokens_a_layer_sees_and_no_more(clip: DualEncoder) -> None:
    """Written out with the blocks themselves: P tokens behind the patches of the first two layers, then none."""
    pixels, prompts = draw(2, 3, 64, 64), draw(2, 5, clip.vision_width, seed=1)
    visual = clip.visual
    x = visual.conv1(pixels).flatten(2).transpose(1, 2)
    x = torch.cat([visual.class_embedding.expand(2, 1, -1), x], 1) + visual.positional_embedding
    x = visual.ln_pre(x)
    for layer, block in enumerate(visual.transformer.resblocks):
        behind = [prompts[layer].expand(2, -1, -1)] if layer < 2 else []
        x = block(torch.cat([x, *behind], 1))[:, :65]
    expected = visual.ln_post(x) @ visual.proj
    pooled, spatial = clip.encode_patches(pixels, prompts)
    torch.testing.assert_close(torch.cat([pooled[:, None], spatial], 1), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(clip.encode_image(pixels, prompts), pooled, rtol=0, atol=1e-5)
    assert (clip.encode_image(pixels) - pooled).abs().max() > 1e-3


def test_a_context_of_words_equals_the_words(clip: DualEncoder) -> None:
    names = ["dog", "red car"]
    words = clip.tokenise(["a photo of a"])[0, 1:-1]
    context = clip.embed_tokens(words)
    features = clip.encode_text(clip.tokenise(names), context)
    plain = clip.encode_text(clip.tokenise([f"a photo of a {name}" for name in names]))
    torch.testing.assert_close(features, plain, rtol=0, atol=1e-5)


def test_inference_mode_gives_the_same_features(clip: DualEncoder, vilt: FusedEncoder) -> None:
    """There the fused attention kernel is used; with a causal mask, with a padding mask and without one."""
    tokens, pixels = clip.tokenise(["a dog", "a red car on the road"]), draw(2, 3, 64, 64)
    for encode in (
        lambda: clip.encode_image(pixels),
        lambda: clip.encode_text(tokens),
        lambda: vilt.encode(tokens, pixels)[1],
    ):
        with torch.inference_mode():
            fused = encode()
        torch.testing.assert_close(unit(fused), unit(encode()), rtol=0, atol=1e-5)


def test_text_cut_to_the_longest_equals_text_padded_to_the_end(clip: DualEncoder) -> None:
    tokens = clip.tokenise(["a dog", "a red car on the road"])
    assert tokens.shape[1] < clip.context_length
    padded = torch.nn.functional.pad(tokens, (0, clip.context_length - tokens.shape[1]), value=int(tokens[0, -1]))
    torch.testing.assert_close(clip.encode_text(tokens), clip.encode_text(padded), rtol=0, atol=1e-5)


def test_too_long_a_context_and_too_many_layers_are_named(clip: DualEncoder) -> None:
    with pytest.raises(FedVLError, match="32 positions"):
        clip.encode_text(clip.tokenise(["dog"]), torch.zeros(30, clip.text_width))
    with pytest.raises(FedVLError, match="9 layers at most"):
        clip.encode_image(torch.zeros(1, 3, 64, 64), torch.zeros(10, 1, clip.vision_width))


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
