"""CacheFL: equations by hand, the cache against Tip-Adapter's formula, what its gradient gives away, real images."""

import math

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.small import encoder_of, small_method, small_samples, small_task
from pydantic import ValidationError
from torch.nn.functional import cross_entropy, normalize, one_hot

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.data.catalogue import catalogue
from fedvl.data.features import encode_split
from fedvl.data.inputs import embed_classes
from fedvl.data.protocols import Labels, closed
from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine
from fedvl.federation.round import Federation
from fedvl.methods.base import Batch, Samples, Task, Update
from fedvl.methods.cachefl import CacheFL, CacheOptions
from fedvl.models.checkpoint import load_model
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator
from fedvl.tensors import count_elements

LN2 = math.log(2)


def plain_task(texts, scale=100.0):
    return Task(tuple(map(str, range(len(texts)))), texts, encoder_of(logit_scale=scale), 2)


def tiny(**options):
    """Two classes along the axes, one key a class, on the texts themselves: f, keys and texts all have two numbers."""
    settings = {"cache_shots": 1, "sigma": 0.0, "alpha": 2.0, "beta": LN2, "scale": 1.0, **options}
    return CacheFL(CacheOptions(**settings), plain_task(torch.eye(2)))


def batch_of(features, labels):
    count = len(labels)
    return Batch({"features": features}, torch.tensor(labels), torch.ones(count), torch.arange(count), {}, {})


def test_equations_3_to_7_by_hand():
    method = tiny()
    keys = method.start(torch.Generator())["keys"]
    torch.testing.assert_close(keys, torch.eye(2))  # eq. 3: unit features, class by class
    # f is the first axis: affinities 1 and 0, 2^-(1 - a) = 1 and 1/2 (eq. 6), times 2, plus f.W = 1 and 0 (eq. 5 and 7)
    scores = method.predict({"keys": keys}, {"features": torch.tensor([[1.0, 0.0]])})
    torch.testing.assert_close(scores, torch.tensor([[1.0 + 2.0, 0.0 + 1.0]]))


def test_equation_8_by_hand():
    """d loss / d key_j = alpha beta exp(-beta (1 - a_j)) (p - y)_j f, and one step of SGD goes against it."""
    method = tiny()
    features, keys = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    gradient = torch.func.grad(lambda t: method.objective(t, batch_of(features, [0]))[0])({"keys": keys})["keys"]
    wrong = 1 / (1 + math.exp(2.0))  # scores are 3 and 1: the chance of class 1
    expected = torch.tensor([[-2 * LN2 * 1.0 * wrong, 0.0], [2 * LN2 * 0.5 * wrong, 0.0]])
    torch.testing.assert_close(gradient, expected)
    engine = LocalEngine(
        method,
        Samples({"features": features}, torch.tensor([0])),
        [torch.tensor([0])],
        TrainingConfig(learning_rate=0.1, momentum=0.0),
        FederationConfig(),
        seed=0,
    )
    (trained,) = engine.train(0, [0], {"keys": keys})
    torch.testing.assert_close(trained.update.tensors["keys"], keys - 0.1 * expected)


def test_equation_9_weights_clients_by_their_samples():
    method = tiny()
    assert method.weighting == "samples"
    updates = [Update(0, {"keys": torch.zeros(2, 2)}, 1.0), Update(1, {"keys": torch.full((2, 2), 4.0)}, 3.0)]
    torch.testing.assert_close(method.merge({"keys": torch.eye(2)}, updates)["keys"], torch.full((2, 2), 3.0))


def test_with_one_batch_a_client_the_partition_cannot_matter():
    """Equations 8 and 9 together: one step by each client, averaged by n_k, is one step on the pooled data."""
    method = small_method("cachefl")
    samples, start = small_samples(method, 20), method.start(torch.Generator().manual_seed(0))
    training = TrainingConfig(learning_rate=0.5, momentum=0.9, weight_decay=0.01, batch_size=20)

    def final(rows, epochs=1):
        steps = training.model_copy(update={"local_epochs": epochs})
        config = FederationConfig(rounds=3)
        engine = LocalEngine(method, samples, rows, steps, config, seed=0)
        federation = Federation(method, engine, config, 0, dict(start))
        federation.run()
        return federation.shared["keys"]

    pooled, skewed = [torch.arange(20)], list(samples.labels.argsort().split([1, 11, 8]))
    torch.testing.assert_close(final(skewed), final(pooled), rtol=0, atol=1e-5)
    assert (final(skewed, epochs=5) - final(pooled, epochs=5)).abs().max() > 1e-3  # several steps: now it does


def test_the_untrained_cache_is_tip_adapter_with_explicit_one_hot_values():
    generator = torch.Generator().manual_seed(3)
    texts = normalize(torch.randn(5, 8, generator=generator), dim=-1)
    method = CacheFL(CacheOptions(cache_shots=3, sigma=0.3, alpha=1.7, beta=5.5), plain_task(texts))
    keys = method.start(generator)["keys"]
    features = normalize(torch.randn(11, 8, generator=generator), dim=-1)
    w1, w2 = keys.T, one_hot(torch.arange(5).repeat_interleave(3)).T.float()  # C x NK and N x NK, as in the paper
    expected = 100.0 * features @ texts.T + 1.7 * ((-5.5 * (1 - features @ w1)).exp() @ w2.T)
    torch.testing.assert_close(method.predict({"keys": keys}, {"features": features}), expected, rtol=1e-5, atol=1e-4)


def test_the_loss_is_the_cross_entropy_of_torch():
    method = small_method("cachefl", beta=2.0)
    samples = small_samples(method, 9)
    keys = method.start(torch.Generator().manual_seed(0))
    loss, changed = method.objective(keys, batch_of(samples.inputs["features"], samples.labels.tolist()))
    torch.testing.assert_close(loss, cross_entropy(method.predict(keys, samples.inputs), samples.labels))
    assert changed == {}


@pytest.mark.parametrize(
    "width, classes, parameters",
    [
        (1024, 100, 1_638_400),
        (1024, 47, 770_048),
        (1024, 10, 163_840),
        (1024, 101, 1_654_784),
        (1024, 102, 1_671_168),
        (1024, 37, 606_208),
        (1024, 196, 3_211_264),
        (1024, 397, 6_504_448),
        (512, 47, 770_048 // 2),
        (768, 10, 163_840 * 3 // 4),
    ],
)
def test_sizes_of_the_reference_table(width, classes, parameters):
    method = CacheFL(CacheOptions(), plain_task(torch.ones(classes, width)))
    assert count_elements(method.start(torch.Generator())) == parameters


def test_a_batch_of_one_gives_its_feature_and_label_away():
    """Each key's gradient is a multiple of the image feature; the keys of the true class alone point against it."""
    generator = torch.Generator().manual_seed(5)
    texts = normalize(torch.randn(6, 32, generator=generator), dim=-1)
    method = CacheFL(CacheOptions(sigma=0.05), plain_task(texts, scale=5.0))
    keys = method.start(generator)
    feature = normalize(torch.randn(1, 32, generator=generator), dim=-1)
    gradient = torch.func.grad(lambda t: method.objective(t, batch_of(feature, [4]))[0])(keys)["keys"]
    cosines = normalize(gradient, dim=-1) @ feature[0]
    torch.testing.assert_close(cosines.abs(), torch.ones(6 * 16), rtol=0, atol=1e-5)
    assert (cosines.view(6, 16) < 0).all(1).tolist() == [False, False, False, False, True, False]


def test_the_cache_depends_on_the_seed_and_the_scale_on_the_model():
    method = small_method("cachefl")
    first, again, other = (method.start(torch_generator(seed, "start"))["keys"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert method.scale == small_task().encoder.logit_scale
    assert small_method("cachefl", scale=3.0).scale == 3.0


def test_alpha_and_beta_come_from_the_catalogue_unless_said_otherwise():
    def options(dataset, **own):
        return resolve_experiment({"method": {"name": "cachefl", **own}, "data": {"dataset": dataset}}).method.options

    flowers = catalogue()["flowers102"]
    assert (options("flowers102")["alpha"], options("flowers102")["beta"]) == (flowers.methods["cachefl"]["alpha"], 1.0)
    assert options("flowers102", alpha=2.5)["alpha"] == 2.5
    assert options("cifar10-mini")["alpha"] == CacheOptions().alpha == 1.17


def test_the_preset_is_the_papers():
    experiment = resolve_experiment({"method": {"name": "cachefl"}})
    training = experiment.training
    assert (training.optimiser, training.learning_rate, training.local_epochs) == ("sgd", 0.001, 1)
    assert (experiment.federation.rounds, experiment.data.shots, experiment.data.clients) == (20, 16, 10)


@pytest.mark.parametrize("wrong", [{"alpha": -1}, {"beta": 0}, {"cache_shots": 0}, {"sigma": -0.1}, {"gamma": 1}])
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValidationError):
        CacheOptions(**wrong)
    with pytest.raises(FedVLError, match=f"method.{next(iter(wrong))}"):
        resolve_experiment({"method": {"name": "cachefl", **wrong}})


def test_the_report_says_where_the_cache_came_from():
    (note,) = small_method("cachefl", alpha=3.0).notes()
    assert "drawn around the class texts" in note
    assert "alpha is 3 and beta 1" in note
    assert "images in my/pictures" in small_method("cachefl", synthetic="my/pictures").notes()[0]
    assert "training images that no client holds" in small_method("cachefl", synthetic="held-out").notes()[0]
    made = small_method("cachefl", synthetic="diffusers:models/painter").notes()[0]
    assert "models/painter generated" in made
    assert "painter-" in made


def test_training_beats_the_untrained_cache_and_zero_shot_on_real_images():
    dataset, encoder = open_dataset("cifar10-mini"), load_model("fedvl-tiny")
    experiment = resolve_experiment(
        {
            "method": {"name": "cachefl", "alpha": 3.0},
            "data": {"partition": "dirichlet:0.1"},
            "training": {"learning_rate": 3.0, "local_epochs": 3},  # several steps a client, so that the skew counts
        }
    )
    splits = {}
    for name in ("train", "test"):
        encoded = encode_split(dataset.splits[name], encoder, "features")
        labels = torch.from_numpy(dataset.splits[name].labels[encoded.kept])
        splits[name] = Samples({"features": normalize(encoded.tensor, dim=-1)}, labels)
    task = Task(dataset.class_names, embed_classes(dataset, "default", encoder, "cpu"), encoder, 10)
    method = CacheFL(CacheOptions.model_validate(experiment.method.options), task)
    train, test = splits["train"], splits["test"]
    dealt = closed(Labels(train.labels.numpy(), test.labels.numpy(), 10), experiment.data, seed=0)
    rows = [torch.from_numpy(client) for client in dealt.clients]
    engine = LocalEngine(method, train, rows, experiment.training, experiment.federation, 0)
    federation = Federation(method, engine, experiment.federation, 0, method.start(torch_generator(0, "start")))

    def accuracy(scores):
        return float((scores.argmax(1) == test.labels).float().mean())

    zero_shot = accuracy(test.inputs["features"] @ task.text_features.T)
    untrained = accuracy(method.predict(federation.shared, test.inputs))
    federation.run()
    trained = accuracy(method.predict(federation.shared, test.inputs))
    assert abs(untrained - zero_shot) < 0.02  # keys around the texts say what the texts say
    assert trained > max(untrained, zero_shot) + 0.05


def test_the_preset_tip_adapter_is_that_papers_optimiser():
    experiment = resolve_experiment({"method": {"name": "cachefl", "preset": "tip-adapter"}})
    training = experiment.training
    assert (training.optimiser, training.learning_rate, training.epsilon) == ("adamw", 0.001, 1e-4)
    assert training.batch_size < 160 // experiment.data.clients  # several steps in a round of 10 classes


def test_held_out_images_are_not_known_to_one_party():
    with pytest.raises(FedVLError, match="name a folder of images as method"):
        tiny(synthetic="held-out").start(torch.Generator())


def test_one_step_a_round_does_not_depend_on_the_partition_and_several_do():
    """Of SGD, weighted by samples: the mean of one step of each client is one step on all data together."""
    samples = small_samples(small_method("cachefl"), 40)
    halves = {"even": [range(0, 20), range(20, 40)], "uneven": [range(0, 5), range(5, 40)]}
    found = {}
    for batch_size in (40, 5):
        for name, rows in halves.items():
            method = small_method("cachefl")
            engine = LocalEngine(
                method,
                samples,
                [torch.tensor(list(part)) for part in rows],
                TrainingConfig(learning_rate=1.0, momentum=0.0, batch_size=batch_size),
                FederationConfig(rounds=3),
                0,
            )
            federation = Federation(method, engine, FederationConfig(rounds=3), 0, method.start(torch_generator(0)))
            federation.run()
            found[batch_size, name] = federation.shared["keys"]
    torch.testing.assert_close(found[40, "even"], found[40, "uneven"], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[5, "even"], found[5, "uneven"], rtol=1e-3, atol=1e-4)


def test_it_declares_what_the_table_says():
    assert_declared("cachefl")
