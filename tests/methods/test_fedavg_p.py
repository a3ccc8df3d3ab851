"""fedavg-p: prompts of each kind of sample, and how they begin."""

import torch
from helpers.declarations import assert_declared
from helpers.small import run_quietly, small_federation, small_method, small_samples

KINDS = ("complete", "text-only", "image-only")


def test_a_sample_gets_the_prompts_of_its_kind_at_each_of_the_first_layers():
    method = small_method("fedavg-p", tokens=3)
    encoder = method.task.fused
    tensors = method.start(torch.Generator().manual_seed(0))
    assert tensors["prompts.complete"].shape == (2, 3, 8)  # the model has two layers
    inputs = small_samples(method).inputs
    inputs = {**inputs, "present": torch.tensor([[True, True], [True, False], [False, True]]).repeat(9, 1)[:25]}
    states = method.represent(tensors, inputs)
    for row, kind in enumerate(KINDS):
        one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        pixels = encoder.normalise(one["pixels"]) if kind != "text-only" else torch.ones(1, 3, 64, 64)
        tokens = torch.cat([encoder.embed_text(one["tokens"]), encoder.embed_image(pixels)], 1)
        mask = torch.cat([encoder.text_mask(one["tokens"]), encoder.image_mask(pixels)], 1)
        expected = encoder.pool(encoder.run(tokens, mask, tensors[f"prompts.{kind}"]), 6)
        torch.testing.assert_close(states[row : row + 1], expected)


def test_prompts_that_begin_alike_stay_alike():
    """Why prompts are drawn at random: in the public code's start, 15 of 16 do the work of one."""
    for initial, different in (("ones", 2), ("normal", 4)):
        method = small_method("fedavg-p", initial=initial, tokens=4)
        trained = run_quietly(small_federation(method)).shared["prompts.text-only"]
        assert len(torch.unique(trained[0].round(decimals=5), dim=0)) == different


def test_the_released_start_is_one_prompt_of_ones_a_kind():
    tensors = small_method("fedavg-p", initial="ones", tokens=4).start(torch.Generator())
    for place, kind in enumerate(KINDS):
        assert tensors[f"prompts.{kind}"].sum(-1).tolist() == [[8.0 * (token == place) for token in range(4)]] * 2


def test_prompts_train_at_a_rate_of_their_own():
    for name in ("fedavg-p", "fedmsplit-p"):
        role = small_method(name, prompt_rate=7.0).role
        assert role.shared("prompts.complete").rate == 7.0
        assert role.shared("classes.weight").rate == 1.0
        assert role.needs("prompts.complete") == role.needs("classes.weight")


def test_the_released_start_has_the_released_epsilon_and_the_models_own_stays():
    method = small_method("fedavg-p", initial="ones")
    norms = [m for m in method.encoder.transformer.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert {norm.eps for norm in (*norms, method.encoder.ln_final)} == {1e-6}
    assert method.task.fused.ln_final.eps == small_method("fedavg-p").encoder.ln_final.eps != 1e-6
    for ours, theirs in zip(method.encoder.parameters(), method.task.fused.parameters(), strict=True):
        assert ours is theirs


def test_it_declares_what_the_table_says():
    assert_declared("fedavg-p")
