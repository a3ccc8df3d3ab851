"""FedMGP: one group is PromptFL, its diversity, which groups are drawn and sent, and real images."""

import math

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import SKEWED, gradient, settings
from helpers.real import accuracy
from helpers.small import batch_of, drawn, run_quietly, small_federation, small_method, small_samples
from torch.nn.functional import cross_entropy, normalize

from fedvl.errors import FedVLError
from fedvl.methods.fedmgp import FedMGP, FedMGPOptions, distance_of_groups, gumbel, mean_cosine
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import Uniform, torch_generator


def started(method, count=6):
    samples = small_samples(method, count)
    tensors = method.start(torch_generator(0, "start")) | method.join(samples, torch_generator(0, "join", 0))
    received = {kind: tensors[kind] for kind in method.kinds}
    return tensors, batch_of(samples, received, drawn(method))


def places(chosen):
    return chosen.argmax(-1).tolist()


def test_one_group_without_visual_prompts_is_promptfl_with_two_tokens():
    method = small_method("fedmgp", groups=1, sent=1, visual_tokens=0, tail="")
    plain = small_method("promptfl", context=2)
    tensors, batch = started(method)
    own = {"context": tensors["own.text"][0]}
    assert own["context"].shape == (2, 8)
    torch.testing.assert_close(method.predict(tensors, batch.inputs), plain.predict(own, batch.inputs))
    torch.testing.assert_close(method.loss(tensors, batch), plain.loss(own, batch))
    found = gradient(method, tensors, batch, "own.text")[0]
    torch.testing.assert_close(found, gradient(plain, own, batch, "context"))


def test_scores_are_the_mean_over_groups_of_each_ones_images_and_texts():
    """Independent code: one group after another through both towers."""
    method = small_method("fedmgp", groups=3)
    tensors, batch = started(method)
    encoder = method.task.encoder
    pixels = encoder.normalise(batch.inputs["pixels"]).float()
    tokens = encoder.tokenise([f"of a {name}." for name in method.task.class_names])
    expected = []
    for context, visual in zip(tensors["own.text"], tensors["own.visual"], strict=True):
        texts = normalize(encoder.encode_text(tokens, context), dim=-1)
        x = torch.cat([encoder.visual.embed(pixels), visual.expand(len(pixels), -1, -1)], 1)
        x = encoder.visual.transformer(encoder.visual.ln_pre(x))[:, 0]
        images = normalize(encoder.visual.ln_post(x) @ encoder.visual.proj, dim=-1)
        expected.append(10 * images @ texts.T)
    torch.testing.assert_close(method.predict(tensors, batch.inputs), sum(expected) / 3, rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_groups_mean_and_the_weighted_cosines_of_texts_and_images():
    """Independent code, over the four real rows of six."""
    method = small_method("fedmgp", groups=3, diversity="cosine", diversity_weight=2.0)
    tensors, batch = started(method)
    tensors = {name: 20 * tensor if name.startswith("own") else tensor for name, tensor in tensors.items()}
    images, texts = method.features(tensors, batch.inputs)
    images, labels = images[:, :4], batch.labels[:4]
    losses = [cross_entropy(10 * image @ text.T, labels) for image, text in zip(images, texts, strict=True)]
    pairs = [(0, 1), (0, 2), (1, 2)]
    cosines = [(kind[a] * kind[b]).sum(-1).mean() for kind in (texts, images) for a, b in pairs]
    expected = sum(losses) / 3 + 2 * sum(cosines) / 6
    padded = batch._replace(mask=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(method.loss(tensors, padded), expected)


def test_the_cosine_between_groups_by_hand():
    """Three groups of one row: e1, e2 and e1 again have cosines 0, 1 and 0."""
    assert mean_cosine(torch.eye(4)[[0, 1, 0]][:, None]).tolist() == pytest.approx([1 / 3])


@pytest.mark.parametrize(("diversity", "sign"), [("cosine", -1), ("one-minus", 1), ("l1", 1)])
def test_a_step_against_the_diversity_loss_lowers_cosines_in_the_paper_and_raises_them_by_a_distance(diversity, sign):
    method = small_method("fedmgp", groups=3, diversity=diversity, diversity_weight=1000.0, words="")
    tensors, batch = started(method)
    tensors = {name: 20 * tensor if name.startswith("own") else tensor for name, tensor in tensors.items()}

    def cosine(tensors):
        images, texts = method.features(tensors, batch.inputs)
        return float((mean_cosine(texts).mean() + mean_cosine(images).mean()) / 2)

    moved = {
        name: tensor - 1e-6 * gradient(method, tensors, batch, name) if name.startswith("own") else tensor
        for name, tensor in tensors.items()
    }
    assert sign * (cosine(moved) - cosine(tensors)) > 0


def test_the_l1_distance_by_hand():
    """Groups (0, 0), (1, 3) and (2, 0): mean |difference| of the pairs 2, 1 and 2."""
    groups = torch.tensor([[[0.0, 0.0]], [[1.0, 3.0]], [[2.0, 0.0]]])
    assert distance_of_groups(groups).tolist() == pytest.approx([(2 + 1 + 2) / 3])
    assert distance_of_groups(torch.ones(3, 4, 2)).tolist() == [0.0] * 4


def test_means_replace_the_groups_that_were_drawn_last():
    method = small_method("fedmgp", groups=4, sent=2)
    tensors, _ = started(method)
    assert torch.equal(method.groups("text", tensors), tensors["own.text"])  # none was drawn yet
    tensors["chosen"] = torch.eye(4)[[3, 1]]
    found = method.groups("text", tensors)
    own, means = tensors["own.text"], tensors["text"]
    torch.testing.assert_close(found, torch.stack([own[0], means[1], own[2], means[0]]))


def test_groups_are_drawn_by_noise_alone_at_first_and_later_by_likeness_too():
    method = small_method("fedmgp", groups=4, sent=2, visual_tokens=0, temperature=0.1)
    tensors, _ = started(method)
    tensors["own.text"] = torch.eye(16)[:4].reshape(4, 2, 8)
    received = {"text": torch.eye(16)[[2, 0]].reshape(2, 2, 8)}
    tensors["draws"] = torch.tensor([0.0, 3.0, 2.0, 1.0])
    assert places(method.choose("chosen", tensors, received, None)) == [1, 2]
    tensors["chosen"] = torch.eye(4)[[0, 3]]
    tensors["text"] = torch.eye(16)[[0, 3]].reshape(2, 2, 8)  # the same groups again: 10 more for groups 0 and 2
    assert places(method.choose("chosen", tensors, received, None)) == [2, 0]


def test_noise_makes_a_draw_by_the_softmax():
    """Of two groups with logits 0 and log 3 the second is drawn first in three of four cases."""
    noise = gumbel(Uniform((4000, 2))(torch.tensor([0]))[0])
    share = ((noise + torch.tensor([0.0, math.log(3)])).argmax(-1) == 1).float().mean()
    assert float(share) == pytest.approx(0.75, abs=0.025)


def test_a_client_sends_the_groups_that_it_drew_and_keeps_all():
    method = small_method("fedmgp", visual_tokens=0)
    federation = small_federation(method, rounds=2)
    for result in federation.engine.train(0, range(5), federation.shared):
        own, chosen = result.private["own.text"], result.private["chosen"]
        assert torch.equal(result.update.tensors["text"], own[places(chosen)])
        assert len(set(places(chosen))) == 2
        assert result.private.keys() == {"own.text", "chosen"}
    run_quietly(federation)
    assert federation.shared["text"].shape == (2, 2, 8)
    assert federation.records[0].bytes_up == 4 * 2 * 2 * 8 * 4  # clients with data, groups, tokens, width, bytes


def test_the_second_round_trains_what_the_server_sent_in_place_of_what_was_drawn():
    """With a rate near 0 a client's groups are its own, but for the drawn ones: the means."""
    method = small_method("fedmgp", visual_tokens=0, groups=3)
    federation = small_federation(method, {"learning_rate": 1e-12}, rounds=1)
    run_quietly(federation)
    before = federation.engine.private[3]
    (after,) = federation.engine.train(1, [3], federation.shared)
    expected = before["own.text"].clone()
    expected[places(before["chosen"])] = federation.shared["text"]
    torch.testing.assert_close(after.private["own.text"], expected)


def test_a_new_user_is_answered_by_the_means_alone():
    method = small_method("fedmgp", visual_tokens=0, tail="")
    plain = small_method("promptfl", context=2)
    shared, inputs = method.start(torch_generator(0, "start")), small_samples(method).inputs
    each = [plain.predict({"context": context}, inputs) for context in shared["text"]]
    torch.testing.assert_close(method.predict(shared, inputs), (each[0] + each[1]) / 2)


def test_presets_are_the_published_settings_and_bad_options_are_refused():
    paper = resolve_experiment({"method": {"name": "fedmgp"}})
    assert (paper.training.batch_size, paper.training.local_epochs, paper.federation.rounds) == (8, 2, 10)
    released = resolve_experiment({"method": {"name": "fedmgp", "preset": "released"}})
    assert (released.method.options["diversity"], released.method.options["weights"]) == ("l1", "clients")
    assert FedMGP.forms(FedMGPOptions(visual_tokens=0)) == ("features",)
    with pytest.raises(FedVLError, match="lower method"):
        FedMGP(FedMGPOptions(groups=2, sent=3), small_method("fedmgp").task)


def test_it_learns_on_real_images():
    """Without visual prompts, which would encode all images five times in each step."""
    short = settings(0.1, rounds=4, data=SKEWED, training={"learning_rate": 0.1, "batch_size": 32})
    learned, zero_shot = accuracy("fedmgp", short, visual_tokens=0, groups=3, tail="")
    assert learned > zero_shot + 4


def test_it_declares_what_the_table_says():
    assert_declared("fedmgp")
