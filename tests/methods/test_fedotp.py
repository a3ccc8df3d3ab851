"""FedOTP: its score by hand, where gradients go, what is shared and what is not, and what is asked without a local context."""

import math

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.small import CLASSES, RAGGED, run_quietly, small_federation, small_method, small_samples, small_task
from pydantic import ValidationError

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.data.sources import open_dataset
from fedvl.federation.local import LocalEngine
from fedvl.federation.round import Federation
from fedvl.methods.base import Batch, Samples, Task
from fedvl.methods.fedotp import FedOTP, FedOTPOptions
from fedvl.methods.parts.prompts import CONTEXT_DEVIATION, ClassTexts
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.seeding import torch_generator

ROOT = 0.5**0.5


def both_contexts(method, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"context": method.texts.start(generator), "local_context": method.texts.start(generator)}


def batch_of(samples, count=6):
    part = samples.take(torch.arange(count))
    return Batch(part.inputs, part.labels, torch.ones(count), torch.arange(count), {})


def test_scores_by_hand():
    """One class whose global text is e1 and local text e2; patches 2 e1, e1 + e2 and -e1, in 16 bits as the cache has them.

    At mass 2/3 each text gets 1/3, just what a patch may give: with little entropy the first patch goes to the global text and
    the second to the local one, the third (cosine -1) stays at home: <T, S> = 1/3 (1 + 1/sqrt 2).
    """
    method = small_method("fedotp", mass=2 / 3, epsilon=0.02, iterations=500)
    texts = torch.eye(6)[None, :2]
    patches = torch.zeros(1, 3, 6, dtype=torch.float16)
    patches[0, :, 0], patches[0, 1, 1] = torch.tensor([2.0, 1.0, -1.0]), 1.0
    expected = 10 * (1 + ROOT) / 3  # the small encoder's scale is 10
    torch.testing.assert_close(method.scores(texts, patches), torch.tensor([[expected]]), rtol=1e-3, atol=0)


def test_the_transport_at_great_entropy_is_a_plain_mean():
    """Without a cost that matters, all pairs get alike: mass times the mean cosine."""
    method = small_method("fedotp", epsilon=1e4)
    generator = torch.Generator().manual_seed(3)
    texts = torch.nn.functional.normalize(torch.randn(4, 2, 6, generator=generator), dim=-1)
    patches = torch.nn.functional.normalize(torch.randn(5, 7, 6, generator=generator), dim=-1)
    cosines = torch.einsum("cnd,bmd->bcnm", texts, patches)
    torch.testing.assert_close(method.scores(texts, patches), 10 * 0.8 * cosines.mean((-2, -1)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mass", [0.8, 1.0])
def test_what_patches_give_and_contexts_get(mass):
    method = small_method("fedotp", mass=mass, iterations=500)
    similarity = torch.rand(3, 4, 2, 9, generator=torch.Generator().manual_seed(0))
    plan = method.plan(similarity)
    torch.testing.assert_close(plan.sum(-1), torch.full((3, 4, 2), mass / 2))
    given = plan.sum(-2)
    assert (given <= 1 / 9 + 1e-6).all()
    assert torch.allclose(given, torch.full_like(given, 1 / 9), atol=1e-5) == (mass == 1)


def test_gradients_reach_every_token_of_both_contexts_and_not_the_plan():
    method = small_method("fedotp")
    batch = batch_of(small_samples(method))
    tensors = both_contexts(method)

    def loss(tensors):
        return method.objective(tensors, batch)[0]

    gradients = torch.func.grad(loss)(tensors)
    assert all((gradients[name].abs().amax(-1) > 0).all() for name in tensors)

    # The same gradient by hand: scores are linear in the texts once the plan is a number.
    patches = torch.nn.functional.normalize(batch.inputs["patches"], dim=-1)
    with torch.no_grad():
        fixed = method.plan(torch.einsum("cnd,bmd->bcnm", method.class_texts(tensors), patches))

    def with_fixed_plan(tensors):
        scores = 10 * torch.einsum("bcnm,cnd,bmd->bc", fixed, method.class_texts(tensors), patches)
        return torch.nn.functional.cross_entropy(scores, batch.labels)

    by_hand = torch.func.grad(with_fixed_plan)(tensors)
    for name in tensors:
        torch.testing.assert_close(gradients[name], by_hand[name], rtol=1e-4, atol=1e-6)


def test_batched_clients_equal_one_by_one_in_what_they_keep_too():
    kept = []
    for one_by_one in (False, True):
        federation = run_quietly(small_federation(small_method("fedotp"), one_by_one=one_by_one))
        kept.append({f"{c}": p["local_context"] for c, p in federation.engine.private.items()} | federation.shared)
    assert kept[0].keys() == kept[1].keys() == {"0", "2", "3", "4", "context"}
    for name in kept[0]:
        torch.testing.assert_close(kept[0][name], kept[1][name], rtol=0, atol=1e-5)


def test_the_global_context_alone_is_sent_and_averaged_by_size():
    federation = small_federation(small_method("fedotp"))
    trained = federation.engine.train(0, range(len(RAGGED)), federation.shared)
    assert all(result.update.tensors.keys() == {"context"} for result in trained)
    assert [result.update.weight for result in trained] == [7, 1, 12, 5]
    merged = federation.method.merge(federation.shared, [result.update for result in trained])
    mean = sum(result.update.weight * result.update.tensors["context"] for result in trained) / 25
    torch.testing.assert_close(merged["context"], mean)


def test_clients_share_no_state():
    """What client 3 trains and keeps is the same to the last bit whether others train beside it or not."""
    company, alone = (small_federation(small_method("fedotp"), one_by_one=True) for _ in range(2))
    with_others = {r.update.client: r for r in company.engine.train(0, [0, 2, 3, 4], company.shared)}[3]
    (by_itself,) = alone.engine.train(0, [3], alone.shared)
    assert torch.equal(with_others.update.tensors["context"], by_itself.update.tensors["context"])
    assert torch.equal(with_others.private["local_context"], by_itself.private["local_context"])
    run_quietly(company)
    locals_ = [private["local_context"] for private in company.engine.private.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(locals_) for b in locals_[:i])
    assert len({tensor.data_ptr() for tensor in locals_}) == len(locals_)


def test_contexts_start_as_coop_draws_them():
    method = small_method("fedotp", context=4)
    start = method.start(torch_generator(0, "start"))
    assert start["context"].shape == (4, method.task.encoder.text_width)
    drawn = torch.cat([method.join(None, torch_generator(0, "join", c))["local_context"] for c in range(200)])
    assert math.isclose(float(drawn.std()), CONTEXT_DEVIATION, rel_tol=0.05)


def test_without_a_local_context_the_global_one_gets_all_the_mass():
    method = small_method("fedotp", epsilon=1e4)
    samples = small_samples(method)
    context = method.start(torch_generator(0, "start"))
    found = method.predict(context, samples.inputs)
    patches = torch.nn.functional.normalize(samples.inputs["patches"], dim=-1)
    expected = 10 * 0.8 * (patches @ method.texts.features(context["context"]).T).mean(1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    with_local = method.predict(both_contexts(method), samples.inputs)
    assert found.shape == with_local.shape == (len(samples), CLASSES)


def test_answers_do_not_depend_on_how_many_are_asked_at_once(monkeypatch):
    method = small_method("fedotp")
    inputs = small_samples(method).inputs
    whole = method.predict(both_contexts(method), inputs)
    monkeypatch.setattr("fedvl.methods.fedotp.SIMILARITIES_AT_ONCE", 3 * CLASSES * 2 * inputs["patches"].shape[1])
    torch.testing.assert_close(method.predict(both_contexts(method), inputs), whole)


def test_training_lowers_the_loss():
    federation = run_quietly(small_federation(small_method("fedotp"), {"learning_rate": 0.1}, rounds=8))
    assert federation.records[-1].loss < 0.95 * federation.records[0].loss


def real_patches(encoder, split, per_class):
    """The first images of each class, as the cache has them."""
    rows = [row for label in range(10) for row in (split.labels == label).nonzero()[0][:per_class]]
    pixels = torch.stack([encoder.preprocess(split.read(row)) for row in rows])
    with torch.inference_mode():
        patches = torch.cat([encoder.encode_patches(encoder.normalise(part))[1].half() for part in pixels.split(50)])
    return Samples({"patches": patches.clone()}, torch.from_numpy(split.labels[rows]))


def test_it_learns_on_real_images():
    """Two clients with ten images a class; patches of this model are not aligned with texts, so it starts near guessing."""
    encoder, dataset = load_model("fedvl-tiny"), open_dataset("cifar10-mini")
    assert isinstance(encoder, DualEncoder)
    task = Task(dataset.class_names, torch.zeros(10, encoder.dim), encoder, 2)
    method = FedOTP(FedOTPOptions(context=4, iterations=30), task)
    config = FederationConfig(rounds=5)
    training = TrainingConfig(learning_rate=0.01, momentum=0.9, batch_size=32, local_epochs=2)
    rows = [torch.arange(0, 200, 2), torch.arange(1, 200, 2)]
    engine = LocalEngine(method, real_patches(encoder, dataset.splits["train"], 20), rows, training, config, seed=0)
    federation = Federation(method, engine, config, 0, method.start(torch_generator(0, "start")))
    test = real_patches(encoder, dataset.splits["test"], 10)

    def accuracy():
        answers = [method.predict({**federation.shared, **engine.private_of(c)}, test.inputs) for c in range(2)]
        return 100 * float((torch.stack(answers).argmax(-1) == test.labels).float().mean())

    before = accuracy()
    run_quietly(federation)
    assert accuracy() > before + 10
    assert federation.records[-1].loss < 0.9 * federation.records[0].loss


def test_mixed_precision_gives_float32_gradients_of_about_the_same_direction():
    method = small_method("fedotp")
    method.texts = ClassTexts(method.task.encoder, method.task.class_names, 16, at_once=3)  # some are computed again
    batch, tensors = batch_of(small_samples(method)), both_contexts(method)

    def loss(tensors, mixed):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return method.objective(tensors, batch)[0]

    exact, mixed = (torch.func.grad(loss)(tensors, flag) for flag in (False, True))
    for name, gradient in mixed.items():
        assert gradient.dtype == torch.float32
        assert not torch.equal(gradient, exact[name])
        assert torch.cosine_similarity(gradient.flatten(), exact[name].flatten(), dim=0) > 0.95


def test_precision_is_a_matter_of_gpus():
    """On a processor bfloat16 changes nothing, to the last bit."""
    plain, asked = (
        run_quietly(small_federation(small_method("fedotp"), {"precision": precision})).shared["context"]
        for precision in ("float32", "bfloat16")
    )
    assert torch.equal(plain, asked)


@pytest.mark.parametrize("option", [{"mass": 0.0}, {"mass": 1.1}, {"epsilon": 0.0}, {"iterations": 0}, {"context": 0}])
def test_impossible_options_are_refused(option):
    with pytest.raises(ValidationError):
        FedOTP(FedOTPOptions(**option), small_task())


def test_it_declares_what_the_table_says():
    assert_declared("fedotp")
