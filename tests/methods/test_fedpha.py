"""FedPHA: its projection and loss by hand, clients of other lengths, what stays local, and real images."""

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import SKEWED, gradient, settings
from helpers.real import accuracy
from helpers.small import RAGGED, batch_of, run_quietly, small_federation, small_method, small_samples

from fedvl.errors import FedVLError
from fedvl.methods.fedpha import FedPHA, FedPHAOptions
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator


def started(method):
    samples = small_samples(method)
    tensors = method.start(torch_generator(0, "start")) | method.join(samples, torch_generator(0, "join", 0))
    tensors["directions"] = method.directions("directions", tensors, {}, samples)
    tensors["local_context"] = 20 * tensors["local_context"]
    return tensors, batch_of(samples)


@pytest.mark.parametrize("space", ["null", "rows"])
def test_projecting_twice_is_projecting_once(space):
    method = small_method("fedpha", space=space, context=5)
    tensors, _ = started(method)
    once = method.project(tensors["local_context"], tensors["directions"])
    torch.testing.assert_close(method.project(once, tensors["directions"]), once)
    assert (once - tensors["local_context"]).abs().max() > 1e-3


def test_directions_by_hand():
    """Rows of length 5, 3, 2 and 1 along four axes: at ratio 0.5 two are main."""
    context = torch.zeros(4, 8)
    for row, (axis, length) in enumerate([(2, 3.0), (0, 5.0), (1, 1.0), (3, 2.0)]):
        context[row, axis] = length
    x = torch.arange(1.0, 9.0)[None]
    null = small_method("fedpha", context=4, ratio=0.5)
    assert null.directions("directions", {"context": context}, {}, None).abs().tolist() == torch.eye(8)[[0, 2]].tolist()
    assert null.project(x, null.directions("directions", {"context": context}, {}, None)).tolist() == [
        [0.0, 2.0, 0.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    ]
    rows = small_method("fedpha", context=4, ratio=0.5, space="rows")
    assert rows.project(x, rows.directions("directions", {"context": context}, {}, None)).tolist() == [
        [0.0, 2.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0]
    ]


def test_how_many_directions_are_kept():
    wide = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    method = small_method("fedpha", space="rows")
    method.main = int(16 * (1 - method.options.ratio))
    assert method.directions("directions", {"context": wide}, {}, None).shape == (13, 512)
    everything = small_method("fedpha", space="rows", ratio=1.0, context=4)
    assert everything.directions("directions", {"context": wide[:4]}, {}, None).shape == (4, 512)
    nothing_is_main = small_method("fedpha", ratio=1.0, context=4)
    tensors, _ = started(nothing_is_main)
    kept = nothing_is_main.project(tensors["local_context"], tensors["directions"])
    assert torch.equal(kept, tensors["local_context"])


def test_the_loss_is_the_sum_of_its_four_parts():
    method = small_method("fedpha", margin=1.5)
    tensors, batch = started(method)
    projected = method.project(tensors["local_context"], tensors["directions"])
    own, shared, target = (
        method.texts.features(context) for context in (tensors["local_context"], tensors["context"], projected)
    )
    expected = ((own - target) ** 2).mean() + torch.stack(
        [(1.5 - (a - b).norm()).clamp(min=0) for a, b in zip(own, shared, strict=True)]
    ).mean()
    for texts in (own, shared):
        scores = 10 * batch.inputs["features"] @ texts.T
        expected = expected + torch.nn.functional.cross_entropy(scores, batch.labels)
    torch.testing.assert_close(method.loss(tensors, batch), expected)


def test_directions_are_of_the_context_that_the_server_handed_out():
    method = small_method("fedpha")
    begun = small_federation(method).engine.begun(3, shared := {"context": torch.eye(16, 8)})
    assert torch.equal(begun["directions"], method.directions("directions", shared, {}, None))


def test_contexts_that_are_the_same_have_a_gradient_that_is_a_number():
    method = small_method("fedpha", words="a photo of a")
    tensors, batch = started(method)
    tensors["local_context"] = tensors["context"].clone()
    assert gradient(method, tensors, batch, "local_context").isfinite().all()


def test_clients_of_other_lengths_train_beside_each_other():
    method = small_method("fedpha", lengths=[2, 5, 9], context=4)
    together, alone = (run_quietly(small_federation(method, one_by_one=one)) for one in (False, True))
    lengths = {len(private["local_context"]) for private in together.engine.private.values()}
    assert len(lengths) > 1
    assert lengths <= {2, 5, 9}
    for client, private in together.engine.private.items():
        torch.testing.assert_close(private, alone.engine.private[client], rtol=0, atol=1e-5)
    torch.testing.assert_close(together.shared, alone.shared, rtol=0, atol=1e-5)


def test_a_short_context_is_read_at_its_own_end():
    """As in the whole sentence through the text tower."""
    method = small_method("fedpha", lengths=[3, 9])
    context = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    encoder = method.task.encoder
    plain = encoder.encode_text(encoder.tokenise([f"{name}." for name in method.task.class_names]), context)
    torch.testing.assert_close(method.texts.features(context), torch.nn.functional.normalize(plain, dim=-1))


def test_the_local_context_stays_and_directions_do_not_travel():
    federation = run_quietly(small_federation(small_method("fedpha"), rounds=1))
    assert federation.shared.keys() == {"context"}
    assert all(kept.keys() == {"local_context"} for kept in federation.engine.private.values())
    (record,) = federation.records
    assert record.bytes_up == 4 * 16 * 8 * 4  # clients with data, tokens, width, bytes
    assert record.bytes_down == len(RAGGED) * 16 * 8 * 4


def test_queries_are_answered_by_the_local_context_or_else_by_the_shared_one():
    method, plain = small_method("fedpha"), small_method("promptfl")
    tensors, batch = started(method)
    own, shared = ({"context": tensors[name]} for name in ("local_context", "context"))
    assert torch.equal(method.predict(tensors, batch.inputs), plain.predict(own, batch.inputs))
    assert torch.equal(method.predict(shared, batch.inputs), plain.predict(shared, batch.inputs))


def test_presets_are_the_published_settings_and_bad_options_are_refused():
    paper = resolve_experiment({"method": {"name": "fedpha"}})
    assert (paper.training.learning_rate, paper.training.local_epochs, paper.federation.rounds) == (0.001, 1, 50)
    released = resolve_experiment({"method": {"name": "fedpha", "preset": "released"}})
    assert released.method.options["space"] == "rows"
    with pytest.raises(FedVLError, match=r"method\.ratio"):
        resolve_experiment({"method": {"name": "fedpha", "ratio": 1.1}})
    with pytest.raises(FedVLError, match=r"method\.lengths"):
        resolve_experiment({"method": {"name": "fedpha", "lengths": []}})
    with pytest.raises(FedVLError, match="one token at least"):
        FedPHA(FedPHAOptions(lengths=[4, 0]), small_method("fedpha").task)


def test_it_learns_on_real_images():
    """Each client's own images of few classes; 100 times its paper's rate, for there are few rounds."""
    learned, zero_shot = accuracy("fedpha", settings(0.1, rounds=8, data=SKEWED), lengths=[2, 8], context=4)
    assert learned > zero_shot + 4


def test_it_declares_what_the_table_says():
    assert_declared("fedpha")
