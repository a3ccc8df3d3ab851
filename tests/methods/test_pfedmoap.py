"""pFedMoAP: its gate by hand, who the experts are, what a client keeps and gets, and real images."""

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import SKEWED, gradient, settings
from helpers.real import accuracy
from helpers.small import CLASSES, batch_of, run_quietly, small_federation, small_method, small_samples

from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator


def started(method, experts=3):
    samples = small_samples(method)
    tensors = method.start(torch_generator(0, "start")) | method.join(samples, torch_generator(0, "join", 0))
    drawn = [method.texts.start(torch_generator(0, "expert", number)) for number in range(experts)]
    tensors["experts"] = 20 * torch.stack(drawn)
    return {**tensors, "expert_texts": method.texts_of(tensors["experts"])}, batch_of(samples)


def scores(method, tensors, batch):
    texts = method.texts_of(tensors["experts"])
    return method.scores(tensors, tensors["context"], texts, batch.inputs["features"])


def test_a_silent_gate_leaves_lambda_times_promptfls_scores():
    method, plain = small_method("pfedmoap", own_weight=0.25), small_method("promptfl")
    tensors, batch = started(method)
    for kind in ("weight", "bias"):
        tensors[f"gate.out.{kind}"] = torch.zeros_like(tensors[f"gate.out.{kind}"])
    expected = 0.25 * plain.predict(tensors, batch.inputs)
    torch.testing.assert_close(scores(method, tensors, batch), expected)


def test_the_order_of_experts_does_not_matter_but_who_they_are_does():
    method = small_method("pfedmoap")
    tensors, batch = started(method)
    found = scores(method, tensors, batch)
    turned = {**tensors, "experts": tensors["experts"].flip(0)}
    torch.testing.assert_close(scores(method, turned, batch), found)
    others = {**tensors, "experts": -tensors["experts"]}
    assert (scores(method, others, batch) - found).abs().max() > 1e-3


def test_experts_that_say_what_the_client_says_all_weigh_the_same():
    method = small_method("pfedmoap")
    tensors, batch = started(method)
    own = method.texts.features(tensors["context"])
    images, texts = method.pool(batch.inputs["features"]), method.pool(own.expand(4, -1, -1))
    weights = method.attention(tensors, images, texts)
    torch.testing.assert_close(weights, torch.full((len(images), CLASSES, method.heads, 4), 0.25))


def test_scores_against_attention_one_image_class_and_head_at_a_time():
    """Independent code: loops over images, classes and heads."""
    method = small_method("pfedmoap", own_weight=0.5)
    tensors, batch = started(method)
    images = batch.inputs["features"][:3]
    texts = [method.texts.features(context) for context in (tensors["context"], *tensors["experts"])]
    (wq, bq), (wk, bk), (wv, bv), (wo, bo) = (
        (tensors[f"gate.{name}.weight"], tensors[f"gate.{name}.bias"]) for name in ("query", "key", "value", "out")
    )
    assert (method.width, method.heads, method.stride) == (6, 2, 1)
    expected = torch.zeros(3, CLASSES)
    for row, image in enumerate(images):
        for label in range(CLASSES):
            mixed = []
            for head in (slice(0, 3), slice(3, 6)):
                likeness = torch.stack([10 * (wq @ image + bq)[head] @ (wk @ t[label] + bk)[head] for t in texts])
                values = torch.stack([(wv @ t[label] + bv)[head] for t in texts])
                mixed.append(likeness.softmax(0) @ values)
            by_gate = image @ (wo @ torch.cat(mixed) + bo)
            expected[row, label] = 10 * (0.5 * image @ texts[0][label] + by_gate)
    found = method.scores(tensors, tensors["context"], tensors["expert_texts"], images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_context_and_the_gate():
    method = small_method("pfedmoap")
    tensors, batch = started(method)
    for name in ("context", "gate.query.weight", "gate.value.bias", "gate.out.weight"):
        assert gradient(method, tensors, batch, name).abs().max() > 0


def test_features_are_pooled_by_stride():
    method = small_method("pfedmoap")
    method.stride, method.width = 4, 128
    assert method.pool(torch.arange(512)).tolist() == list(range(0, 512, 4))


@pytest.mark.parametrize(("choice", "expected"), [("nearest", [2.0, 5.0]), ("drawn", None)])
def test_experts_are_the_nearest_others(choice, expected):
    """Client 1 is at 3; others at 0, 2, 5 and 9 are 3, 1, 2 and 6 away."""
    method = small_method("pfedmoap", experts=3, choice=choice, context=2)
    places = {0: 0.0, 1: 3.0, 2: 2.0, 3: 5.0, 4: 9.0}
    shape = method.start(torch.Generator())["context"].shape
    last = {client: {"context": torch.full(shape, place)} for client, place in places.items()}
    shared = {"context": torch.zeros(shape)}
    experts = method.hand_out(shared, last, 1)["experts"]
    found = experts[:, 0, 0].tolist()
    if expected is None:  # the first two of one order, whoever asks, but for oneself
        order = torch.randperm(5, generator=torch_generator(0, "experts")).tolist()
        expected = [places[client] for client in order if client != 1][:2]
    assert found == expected
    assert len(method.hand_out(shared, {1: last[1]}, 1)["experts"]) == 0  # nobody else
    assert len(method.hand_out(shared, {2: last[2]}, 1)["experts"]) == 0  # its own first round


def test_a_client_keeps_what_it_trained_and_whom_it_trained_with():
    federation = small_federation(small_method("pfedmoap", experts=3), rounds=2)
    run_quietly(federation)
    assert federation.shared.keys() == {"context"}
    for client, private in federation.engine.private.items():
        assert torch.equal(private["own_context"], federation.last[client]["context"])
        assert private["own_experts"].shape == (2, 16, 8)
    first, second = federation.records
    context = 16 * 8 * 4
    assert first.bytes_up == second.bytes_up == 4 * context
    assert first.bytes_down == 5 * context
    assert second.bytes_down == (5 + 4 * 2) * context  # two experts for each client that was there before


def test_the_gate_stands_still_until_there_are_experts():
    federation = small_federation(small_method("pfedmoap"), {"weight_decay": 0.0}, rounds=2)
    drawn = federation.engine.private_of(3)["gate.out.weight"]
    (first,) = federation.engine.train(0, [3], federation.method.hand_out(federation.shared, {}, 3))
    assert torch.equal(first.private["gate.out.weight"], drawn)
    run_quietly(federation)
    assert not torch.equal(federation.engine.private_of(3)["gate.out.weight"], drawn)


def test_queries_are_answered_by_the_own_context_and_gate_or_by_the_averaged_context():
    method, plain = small_method("pfedmoap"), small_method("promptfl")
    tensors, batch = started(method)
    context = {"context": tensors["context"]}
    assert torch.equal(method.predict(tensors, batch.inputs), plain.predict(context, batch.inputs))  # not trained yet
    assert torch.equal(method.predict(context, batch.inputs), plain.predict(context, batch.inputs))
    own = {**tensors, "own_context": -tensors["experts"][0], "own_experts": tensors["experts"]}
    expected = method.scores(tensors, own["own_context"], tensors["expert_texts"], batch.inputs["features"])
    torch.testing.assert_close(method.predict(own, batch.inputs), expected)


def test_presets_are_the_published_settings_and_secure_sums_are_refused():
    paper = resolve_experiment({"method": {"name": "pfedmoap"}})
    assert (paper.training.learning_rate, paper.method.options["gate_rate"], paper.training.local_epochs) == (
        0.002,
        5,
        5,
    )
    released = resolve_experiment({"method": {"name": "pfedmoap", "preset": "released"}})
    assert (released.training.learning_rate, released.method.options["gate_rate"]) == (0.002, 5)
    assert released.method.options["choice"] == "drawn"
    with pytest.raises(FedVLError, match=r"method\.experts"):
        resolve_experiment({"method": {"name": "pfedmoap", "experts": 0}})
    assert "secure" in small_method("pfedmoap").notes()[0]
    with pytest.raises(FedVLError, match="needs context of each client"):
        accuracy("pfedmoap", settings(0.03, data=SKEWED) | {"federation": {"secure_sum": True}})


def test_it_learns_on_real_images():
    """Each client's own images of few classes; 15 times its paper's rate, for there are few rounds."""
    learned, zero_shot = accuracy("pfedmoap", settings(0.03, rounds=2, data=SKEWED), context=4)
    assert learned > zero_shot + 4


def test_it_declares_what_the_table_says():
    assert_declared("pfedmoap")
