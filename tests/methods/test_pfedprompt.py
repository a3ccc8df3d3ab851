"""pfedprompt: a client's memory by hand, where it stays, and real images."""

import math

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import method_on, settings
from helpers.real import accuracy
from helpers.small import batch_of, run_quietly, small_encoder, small_federation, small_method, small_samples

from fedvl.errors import FedVLError
from fedvl.methods.base import Samples
from fedvl.methods.parts.losses import label_loss
from fedvl.methods.promptfl import PromptFL
from fedvl.runs.settings import resolve_experiment


def test_what_goes_over_the_wire_is_the_context():
    federation = run_quietly(small_federation(small_method("pfedprompt"), rounds=1))
    (record,) = federation.records
    assert record.bytes_up == 4 * 16 * 8 * 4  # 4 clients with data, 16 tokens of width 8, 4 bytes
    assert record.bytes_down == len(record.cohort) * 16 * 8 * 4


def test_a_bad_option_is_refused():
    with pytest.raises(FedVLError, match=r"method\.beta"):
        resolve_experiment({"method": {"name": "pfedprompt", "beta": 0}})


def memory_method(**options):
    return method_on("pfedprompt", small_encoder(2), alpha=2.0, beta=math.log(2), **options)


def test_the_memory_is_read_by_hand():
    """Entries on the axes, classes 0, 2 and 2, and one row of padding: 2^-(1 - cos) of each, times alpha 2."""
    method = memory_method()
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    private = method.join(Samples({"features": features}, torch.tensor([0, 2, 2])), torch.Generator())
    padded = {key: torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])]) for key, tensor in private.items()}
    question = {"features": torch.tensor([[1.0, 0.0]])}
    expected = torch.tensor([[2 * 1.0, 0.0, 2 * (0.5 + 0.25)]])  # cosines 1, 0 and -1
    torch.testing.assert_close(method.remembered(private, question), expected)
    torch.testing.assert_close(method.remembered(padded, question), expected)
    context = method.start(torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        method.predict({**context, **padded}, question), method.predict(context, question) + expected
    )


def test_in_training_an_image_does_not_read_its_own_label():
    method = memory_method()
    samples = Samples({"features": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}, torch.tensor([0, 1]))
    tensors = {**method.start(torch.Generator().manual_seed(0)), **method.join(samples, torch.Generator())}
    by_text = PromptFL.predict(method, tensors, samples.inputs)
    from_the_other = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])  # cosine 0: 2 * 2^-1 for the other's class
    expected = label_loss(by_text + from_the_other, batch_of(samples))
    torch.testing.assert_close(method.objective(tensors, batch_of(samples))[0], expected)


def test_the_memory_stays_with_its_client():
    method = small_method("pfedprompt")
    federation = small_federation(method)
    trained = federation.engine.train(0, [0, 3], federation.shared)
    assert all(result.update.tensors.keys() == {"context"} for result in trained)
    run_quietly(federation)
    assert federation.shared.keys() == {"context"}
    assert federation.last == {}
    first, last = (federation.engine.private_of(client) for client in (0, 3))
    samples = small_samples(method)
    assert torch.equal(first["memory"], samples.inputs["features"][:7])
    assert torch.equal(last["memory_classes"], samples.labels[8:20] + 1)


def test_without_a_memory_it_answers_as_promptfl_and_says_what_it_is():
    method, plain = small_method("pfedprompt"), small_method("promptfl")
    context, inputs = plain.start(torch.Generator().manual_seed(0)), small_samples(plain).inputs
    assert torch.equal(method.predict(context, inputs), plain.predict(context, inputs))
    assert "re-implemented from its description" in method.notes()[0]
    assert method.vocabulary == "trained"


def test_a_memory_of_ones_own_helps_a_client_with_few_classes():
    skewed = {"data": {"partition": "dirichlet:0.1"}, "evaluation": {"protocol": "personal"}}
    personal, _ = accuracy("pfedprompt", settings(0.03, rounds=2, **skewed))
    common, zero_shot = accuracy("promptfl", settings(0.03, rounds=2, **skewed))
    assert personal > max(common, zero_shot) + 10


def test_it_declares_what_the_table_says():
    assert_declared("pfedprompt")
