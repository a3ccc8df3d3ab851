"""Low-rank changes of a frozen tower: against dense weights, and the ways to merge them against each other."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.real import accuracy
from helpers.small import run_quietly, small_encoder, small_federation, small_method, small_samples
from torch.nn.functional import normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Update
from fedvl.methods.fedlora import FedLoRA, FedLoRAOptions
from fedvl.methods.zero_shot import ZeroShot
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

VARIANTS = ("fedit", "ffa", "fedsa", "flora", "hetlora", "flexlora")


def drawn(method: FedLoRA, seed: int, rank: int = 3) -> Tensors:
    """Factors of which none is zero."""
    generator = torch.Generator().manual_seed(seed)
    made = method.factors.drawn(rank, generator)
    return {name: 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in made.items()}


def products(tensors: Tensors, tower: str = "text") -> torch.Tensor:
    return tensors[f"{tower}.B"] @ tensors[f"{tower}.A"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_starts_as_zero_shot(variant: str) -> None:
    method = small_method("fedlora", variant=variant, rank=3)
    samples = small_samples(method)
    clip = method.task.clip
    task = method.task
    with torch.no_grad():
        texts = clip.encode_text(clip.tokenise([f"a photo of a {name}" for name in task.class_names]))
    tensors = method.hand_out(method.start(torch_generator(0, "start")), {}, 1)
    tensors |= method.join(samples, torch.Generator())
    expected = clip.logit_scale * samples.inputs["features"] @ normalize(texts, dim=-1).T
    torch.testing.assert_close(method.predict(tensors, samples.inputs), expected, rtol=1e-5, atol=1e-5)


def test_a_user_without_a_clients_b_is_answered_by_zero_shot_itself() -> None:
    method = small_method("fedlora", variant="fedsa")
    samples = small_samples(method)
    found = method.predict(method.start(torch.Generator()), samples.inputs)
    torch.testing.assert_close(found, ZeroShot(ZeroShot.options_type(), method.task).predict({}, samples.inputs))
    assert "zero-shot" in method.notes()[0]


def dense(layers: torch.nn.Module, method: FedLoRA, tensors: Tensors, tower: str) -> None:
    """Add s B A to the weights themselves."""
    total = method.options.alpha / method.factors.largest * products(tensors, tower)
    width = total.shape[-1]
    rows = {"q": 0, "k": 1, "v": 2}
    for layer, block in enumerate(layers.resblocks):  # type: ignore[arg-type]
        for place, target in enumerate(method.options.targets):
            if target == "o":
                block.attn.out_proj.weight += total[layer, place]
            else:
                first = rows[target] * width
                block.attn.in_proj_weight[first : first + width] += total[layer, place]


def test_deltas_of_both_towers_equal_changed_weights() -> None:
    method = small_method("fedlora", towers="both", rank=3, targets=("q", "k", "v", "o"))
    tensors = drawn(method, 1)
    changed = deepcopy(small_encoder())
    with torch.no_grad():
        dense(changed.transformer, method, tensors, "text")
        dense(changed.visual.transformer, method, tensors, "image")  # type: ignore[arg-type]
        pixels = torch.randint(256, (3, 3, 64, 64), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
        names = changed.tokenise([f"a photo of a {name}" for name in method.task.class_names])
        texts = normalize(changed.encode_text(names), dim=-1)
        images = normalize(changed.encode_image(changed.normalise(pixels).float()), dim=-1)
        expected = changed.logit_scale * images @ texts.T
        found = method.predict(tensors, {"pixels": pixels})
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, method.predict(method.start(torch.Generator()), {"pixels": pixels}), atol=1e-2)


def test_long_lists_of_classes_in_parts_have_the_same_gradients() -> None:
    method = small_method("fedlora", rank=3)
    whole, tensors = method.texts(drawn(method, 1)), drawn(method, 1)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    expected = torch.autograd.grad(method.texts(leaves)[:, 0].sum(), list(leaves.values()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedvl.methods.fedlora.CLASSES_AT_ONCE", 3)
        torch.testing.assert_close(method.texts(leaves), whole)
        found = torch.autograd.grad(method.texts(leaves)[:, 0].sum(), list(leaves.values()))
    torch.testing.assert_close(found, expected)


def merged(method: FedLoRA, updates: list[Update], shared: Tensors | None = None) -> Tensors:
    return method.merge(shared or method.start(torch.Generator()), updates)


def two(method: FedLoRA, ranks: tuple[int, int] = (3, 3)) -> list[Update]:
    return [Update(client, drawn(method, client + 1, rank), 1.0 + client) for client, rank in enumerate(ranks)]


def mean_product(updates: list[Update]) -> torch.Tensor:
    """Weights 1 and 2."""
    return (products(updates[0].tensors) + 2 * products(updates[1].tensors)) / 3


def test_a_stack_is_the_sum_of_the_products_and_stays_so_over_rounds() -> None:
    method = small_method("fedlora", variant="flora", rank=3)
    updates = two(method)
    once = merged(method, updates)
    assert once["text.A"].shape[-2] == 6
    torch.testing.assert_close(products(once), mean_product(updates))
    later = [Update(0, drawn(method, 7), 1.0)]
    twice = merged(method, later, once)
    torch.testing.assert_close(products(twice), mean_product(updates) + products(later[0].tensors))
    assert twice["text.A"].shape[-2] == 8  # 9 rows would be more than the weights have
    client = method.hand_out(twice, {}, 1)
    torch.testing.assert_close(
        products({name[6:]: t for name, t in client.items() if "stack" in name}), products(twice)
    )
    assert not client["text.B"].any()
    own = drawn(method, 4)
    trained = method.texts({**client, **own})
    torch.testing.assert_close(trained, method.texts(merged(method, [Update(1, own, 1.0)], twice)))


def test_averaging_products_differs_from_averaging_factors() -> None:
    """FFA's mean of B is the mean of products, FedIT's means of A and B are not; FlexLoRA at full rank is FLoRA."""
    method = small_method("fedlora", variant="ffa", rank=3)
    updates = two(method)
    frozen = method.same["text.A"]
    mean_b = (updates[0].tensors["text.B"] + 2 * updates[1].tensors["text.B"]) / 3
    of_products = (updates[0].tensors["text.B"] @ frozen + 2 * updates[1].tensors["text.B"] @ frozen) / 3
    torch.testing.assert_close(mean_b @ frozen, of_products)
    mean_a = (updates[0].tensors["text.A"] + 2 * updates[1].tensors["text.A"]) / 3
    assert (mean_b @ mean_a - mean_product(updates)).norm() > 0.1
    width = small_encoder().text_width
    full = merged(small_method("fedlora", variant="flexlora", rank=width), updates)
    torch.testing.assert_close(products(full), mean_product(updates), rtol=1e-4, atol=1e-5)


def test_a_client_of_a_smaller_rank_takes_the_first_factors() -> None:
    method = small_method("fedlora", variant="hetlora", ranks=(1, 3))
    shared = drawn(method, 1)
    small, large = (method.hand_out(shared, {}, client) for client in (2, 3))
    assert (small["text.A"].shape[-2], large["text.B"].shape[-1]) == (1, 3)
    assert torch.equal(small["text.B"], shared["text.B"][..., :1])


@pytest.mark.parametrize("variant", ["flora", "hetlora", "flexlora"])
def test_clients_of_different_ranks_train_together(variant: str) -> None:
    method = small_method("fedlora", variant=variant, ranks=(1, 2, 3))
    steps = {"learning_rate": 0.01}
    batched = run_quietly(small_federation(method, steps))
    single = run_quietly(small_federation(method, steps, one_by_one=True))
    torch.testing.assert_close(products(batched.shared), products(single.shared), rtol=1e-4, atol=1e-5)
    assert products(batched.shared).norm() > 1e-2
    assert all(not record.refused for record in batched.records)


def test_batched_equals_one_by_one_in_double_precision() -> None:
    """Where rounding is not magnified to what other tests would have to allow."""
    task = small_method("fedlora").task
    precise = replace(task, encoder=deepcopy(small_encoder()).double(), text_embeddings=task.text_embeddings.double())
    method = FedLoRA(FedLoRAOptions(rank=3), precise)
    whole = run_quietly(small_federation(method)).shared
    torch.testing.assert_close(run_quietly(small_federation(method, one_by_one=True)).shared, whole, rtol=0, atol=1e-9)
    torch.testing.assert_close(run_quietly(small_federation(method, chunk=2)).shared, whole, rtol=0, atol=1e-9)
    assert whole["text.A"].dtype == torch.float64


def test_half_of_the_factors_travel_where_half_are_kept() -> None:
    sizes = {}
    for variant in ("fedit", "ffa", "fedsa"):
        federation = run_quietly(small_federation(small_method("fedlora", variant=variant), rounds=1))
        sizes[variant] = federation.records[0].bytes_up
    assert sizes["ffa"] == sizes["fedsa"] == sizes["fedit"] / 2


def test_bad_options_are_refused() -> None:
    with pytest.raises(FedVLError, match="ranks from 1 to 4096 are for flora, hetlora, flexlora"):
        resolve_experiment({"method": {"name": "fedlora", "ranks": [2, 4]}})
    with pytest.raises(FedVLError, match=r"method\.variant"):
        resolve_experiment({"method": {"name": "fedlora", "variant": "dora"}})


@pytest.mark.parametrize("variant", ["fedit", "flora"])
def test_training_beats_zero_shot_on_real_images(variant: str) -> None:
    settings: dict[str, Any] = {
        "data": {"clients": 3, "shots": 16, "partition": "iid", "test_shots": 40},
        "federation": {"rounds": 4},
        "training": {"learning_rate": 0.003, "local_epochs": 3},
    }
    trained, zero_shot = accuracy("fedlora", settings, variant=variant)
    assert trained > zero_shot + 4  # 9 and 7 points were seen


def test_it_declares_what_the_table_says():
    assert_declared("fedlora")
