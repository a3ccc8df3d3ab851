"""FedMVP: its prompts and loss against plain code, sentences from a file, when the block is held, and real images."""

import json

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.runs import run
from helpers.small import CLASSES, batch_of, run_quietly, small_federation, small_method, small_samples
from torch.nn.functional import cross_entropy, normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Samples
from fedvl.methods.parts.cross_attention import block
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator


def started(method, count=5):
    samples = small_samples(method, count)
    tensors = method.start(torch_generator(0, "start")) | method.join(samples, torch.Generator())
    return tensors, batch_of(samples, noise={"mirror": torch.tensor(0.4)})


def test_prompts_are_means_over_neighbouring_patches_of_what_they_found():
    """Two prompts of four patches, without low-rank changes: each is the mean of two patches' findings."""
    method = small_method("fedmvp", prompts=2)
    tensors, batch = started(method)
    tensors = {name: torch.zeros_like(t) if "pair" in name else t for name, t in tensors.items()}
    pixels = method.task.encoder.normalise(batch.inputs["pixels"]).float()
    lifted = method.task.text_features @ tensors["lift.weight"].T + tensors["lift.bias"]
    patches = method.task.encoder.visual.embed(pixels)[:, 1:]
    lifted = lifted[tensors["own_classes"]]
    keys = torch.nn.functional.layer_norm(lifted, (8,))
    expected = block(tensors, patches, keys, lifted).reshape(5, 2, 2, 8).mean(2)
    torch.testing.assert_close(method.generated(tensors, pixels), expected)


def test_the_loss_by_plain_code():
    """The prompted images through all layers, cross-entropy, and the distance to the frozen mirror images."""
    method = small_method("fedmvp", alpha=3.0)
    tensors, batch = started(method)
    encoder = method.task.encoder
    pixels = encoder.normalise(batch.inputs["pixels"]).float()
    tower = encoder.visual
    x = torch.cat([tower.embed(pixels), method.generated(tensors, pixels)], 1)
    images = normalize(tower.ln_post(tower.transformer(tower.ln_pre(x))[:, 0]) @ tower.proj, dim=-1)
    mirrored = normalize(encoder.encode_image(pixels.flip(-1)), dim=-1)
    scores = 10 * images @ method.task.text_features.T
    known = batch.labels.unique()
    expected = cross_entropy(scores[:, known], torch.searchsorted(known, batch.labels))
    expected = expected + 3 * (1 - (images * mirrored).sum(-1)).mean()
    torch.testing.assert_close(method.loss(tensors, batch), expected, rtol=1e-4, atol=1e-4)
    plain = normalize(encoder.encode_image(pixels), dim=-1)
    unturned = batch._replace(noise={"mirror": torch.tensor(0.6)})
    difference = 3 * ((images * mirrored).sum(-1) - (images * plain).sum(-1)).mean()
    torch.testing.assert_close(method.loss(tensors, unturned), expected + difference, rtol=1e-4, atol=1e-4)
    distances, fewer = 1 - (images * mirrored).sum(-1), batch._replace(mask=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))
    real = cross_entropy(scores[:3, known], torch.searchsorted(known, batch.labels[:3])) + 3 * distances[:3].mean()
    torch.testing.assert_close(method.loss(tensors, fewer), real, rtol=1e-4, atol=1e-4)
    method.mirrored = 1.0
    torch.testing.assert_close(method.loss(tensors, unturned), expected, rtol=1e-4, atol=1e-4)


def test_a_client_trains_with_the_sentences_of_its_own_classes():
    """A client of classes 0 and 2 alone has the loss, and the prompts, of a model that knows no other class."""
    method = small_method("fedmvp")
    samples = small_samples(method, 6)
    samples = Samples(samples.inputs, torch.tensor([0, 2, 2, 0, 2, 0]))
    shared = method.start(torch_generator(0, "start"))
    tensors = shared | method.join(samples, torch.Generator())
    assert tensors["own_classes"].tolist() == [True, False, True, False]
    fewer = small_method("fedmvp")
    fewer.sentences, fewer.shares = method.sentences[[0, 2]], torch.eye(2)
    noise = {"mirror": torch.tensor(0.4)}
    alone = Samples(samples.inputs, samples.labels // 2)
    expected = fewer.loss(shared | fewer.join(alone, torch.Generator()), batch_of(alone, noise=noise))
    torch.testing.assert_close(method.loss(tensors, batch_of(samples, noise=noise)), expected, rtol=1e-4, atol=1e-4)
    everything = small_method("fedmvp", classes="all").join(samples, torch.Generator())
    assert everything["own_classes"].all()
    unlabelled = Samples(samples.inputs, torch.full((6,), -1))
    assert method.join(unlabelled, torch.Generator())["own_classes"].all()


def test_a_classs_score_is_the_mean_over_its_sentences(tmp_path):
    file = tmp_path / "attributes.json"
    file.write_text(json.dumps({"class 1": ["it is striped", "it has two wheels"], "elsewhere": ["it flies"]}))
    method, plain = small_method("fedmvp", attributes=str(file)), small_method("fedmvp")
    images = normalize(torch.randn(3, 6, generator=torch.Generator().manual_seed(0)), dim=-1)
    found, by_template = method.scores(images), plain.scores(images)
    others = [0, 2, 3]
    torch.testing.assert_close(found[:, others], by_template[:, others])
    torch.testing.assert_close(by_template, 10 * images @ method.task.text_features.T)
    encoder = method.task.encoder
    texts = [
        normalize(encoder.encode_text(encoder.tokenise([text])), dim=-1)[0]
        for text in ("it is striped", "it has two wheels")
    ]
    torch.testing.assert_close(found[:, 1], 10 * (images @ texts[0] + images @ texts[1]) / 2)
    assert len(method.sentences) == CLASSES + 1


@pytest.mark.parametrize("content", ["[", "[]", '{"class 1": []}', '{"class 1": "striped"}', '{"class 1": [3]}'])
def test_a_bad_file_of_sentences_is_refused(content, tmp_path):
    file = tmp_path / "attributes.json"
    file.write_text(content)
    with pytest.raises(FedVLError, match=r"attributes\.json"):
        small_method("fedmvp", attributes=str(file))
    with pytest.raises(FedVLError, match=r"none\.json"):
        small_method("fedmvp", attributes=str(tmp_path / "none.json"))


def test_once_settled_a_client_trains_the_low_rank_changes_and_the_lift_alone():
    method = small_method("fedmvp")
    tensors, batch = started(method)

    def moved(settled):
        now = {**tensors, "settled": torch.tensor(settled)}
        gradients = torch.func.grad(lambda moving: method.objective({**now, **moving}, batch)[0])(
            {name: tensor for name, tensor in now.items() if tensor.is_floating_point()}
        )
        # a softmax does not see the keys' bias
        return {
            name
            for name, found in gradients.items()
            if name not in ("settled", "own_classes", "key.bias") and found.any()
        }

    pairs = {name for name in tensors if name.startswith("pair.")}
    lift = {"lift.weight", "lift.bias"}
    assert moved(1.0) == pairs | lift
    assert moved(0.0) == tensors.keys() - {"settled", "own_classes", "key.bias"}


def test_a_client_settles_when_a_batchs_loss_is_small_and_stays_so():
    method = small_method("fedmvp", settled_loss=1e9)
    tensors, batch = started(method)
    assert method.objective(tensors, batch)[1]["settled"] == 1
    strict = small_method("fedmvp", settled_loss=0.0)
    assert strict.objective(tensors, batch)[1]["settled"] == 0
    assert strict.objective({**tensors, "settled": torch.tensor(1.0)}, batch)[1]["settled"] == 1


def test_clients_count_equally_and_keep_nothing_but_whether_they_have_settled():
    federation = run_quietly(small_federation(small_method("fedmvp"), rounds=1))
    assert all(private.keys() == {"settled"} for private in federation.engine.private.values())
    trained = federation.engine.train(1, range(5), federation.shared)
    assert [result.update.weight for result in trained] == [1, 1, 1, 1]


def test_presets_are_the_published_settings():
    paper = resolve_experiment({"method": {"name": "fedmvp"}})
    assert (paper.training.learning_rate, paper.training.batch_size, paper.federation.rounds) == (0.003, 128, 100)
    assert paper.training.schedule == "cosine"
    with pytest.raises(FedVLError, match=r"method\.prompts"):
        resolve_experiment({"method": {"name": "fedmvp", "prompts": 0}})


def test_its_loss_falls_on_real_images_and_predictions_stay_near_zero_shot():
    """Small: each step runs the image tower. The loss holds features near the pretrained ones, as the page of methods says."""
    data = {"clients": 2, "shots": 3, "test_shots": 4, "partition": "iid"}
    training = {"learning_rate": 0.1, "batch_size": 15}  # all images of a client: one step a round
    finished = run({"method": {"name": "fedmvp"}, "data": data, "training": training, "federation": {"rounds": 3}})
    first, _, last = (record.loss for record in finished.federation.records)
    assert last < first - 0.2  # 2.39 and 1.88 were seen
    assert abs(finished.accuracy - finished.zero_shot_accuracy) < 15  # of 40 images


def test_it_declares_what_the_table_says():
    assert_declared("fedmvp")
