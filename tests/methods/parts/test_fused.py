"""What the methods on a fused encoder share, against the encoder's own ways and PyTorch's modules."""

import torch
from helpers.small import small_fused_encoder, small_method, small_samples

from fedvl.methods.parts.fused import classifier_start, classify, embed, read

ENCODER = small_fused_encoder()


def some_inputs():
    return small_samples(small_method("fedavg-p"), 25).inputs


def test_an_absent_image_is_all_ones_whatever_lies_in_memory():
    inputs = some_inputs()
    absent = ~inputs["present"][:, 1]
    assert absent.any()
    assert not absent.all()
    seen = embed(ENCODER, inputs)
    length = inputs["tokens"].shape[1]
    ones = ENCODER.embed_image(torch.ones(1, 3, *inputs["pixels"].shape[-2:]))
    torch.testing.assert_close(seen.tokens[absent, length:], ones.expand(int(absent.sum()), -1, -1))
    there = ENCODER.embed_image(ENCODER.normalise(inputs["pixels"][~absent]))
    torch.testing.assert_close(seen.tokens[~absent, length:], there)
    other = embed(ENCODER, {**inputs, "pixels": 255 - inputs["pixels"]})
    assert torch.equal(other.tokens[absent], seen.tokens[absent])
    assert not torch.equal(other.tokens[~absent], seen.tokens[~absent])


def test_padding_behind_a_text_is_not_seen():
    inputs = some_inputs()
    tensors = classifier_start(ENCODER, 4, torch.Generator().manual_seed(0))
    prompts = torch.randn(1, 25, 3, ENCODER.width, generator=torch.Generator().manual_seed(1))
    longer = {**inputs, "tokens": torch.nn.functional.pad(inputs["tokens"], (0, 2), value=ENCODER.tokenizer.end)}
    states = [read(ENCODER, tensors, embed(ENCODER, i), prompts, 3) for i in (inputs, longer)]
    torch.testing.assert_close(*states)


def test_the_state_read_is_the_encoders_own_pooled_state_at_that_position():
    inputs = {name: tensor[-5:] for name, tensor in some_inputs().items()}  # all have their images
    tensors = classifier_start(ENCODER, 4, torch.Generator().manual_seed(0))
    prompts = torch.randn(5, 3, ENCODER.width, generator=torch.Generator().manual_seed(1))
    hidden, pooled = ENCODER.encode(inputs["tokens"], ENCODER.normalise(inputs["pixels"]), prompts)
    seen = embed(ENCODER, inputs)
    torch.testing.assert_close(read(ENCODER, tensors, seen, prompts[None], 3), pooled)
    torch.testing.assert_close(read(ENCODER, tensors, seen, prompts[None], 0), ENCODER.pool(hidden, 0))
    deep = torch.randn(2, 5, 3, ENCODER.width, generator=torch.Generator().manual_seed(2))
    expected = ENCODER.pool(ENCODER.run(seen.tokens, seen.mask, deep), 6)
    torch.testing.assert_close(read(ENCODER, tensors, seen, deep, 6), expected)


def test_the_classifier_is_two_layers_with_norm_and_gelu():
    tensors = classifier_start(ENCODER, 4, torch.Generator().manual_seed(0))
    width = ENCODER.width
    modules = torch.nn.Linear(width, 2 * width), torch.nn.LayerNorm(2 * width), torch.nn.Linear(2 * width, 4)
    for name, module in zip(("hidden", "norm", "classes"), modules, strict=True):
        module.load_state_dict({part: tensors[f"{name}.{part}"] for part in ("weight", "bias")})
    state = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    network = torch.nn.Sequential(modules[0], modules[1], torch.nn.GELU(), modules[2])
    torch.testing.assert_close(classify(tensors, state), network(state))
