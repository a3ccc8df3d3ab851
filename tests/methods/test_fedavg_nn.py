"""fedavg-nn: batch normalisation, heads of one's own, whole runs; and what all methods that train a network have in common."""

from dataclasses import replace

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.runs import run_experiment
from helpers.small import (
    RAGGED,
    batch_of,
    run_quietly,
    small_federation,
    small_method,
    small_open_method,
    small_samples,
    small_task,
)
from safetensors.torch import save_file

from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.methods.fedavg_nn import LAST_LAYER, FedAvgNN, NetworkOptions
from fedvl.methods.fedka import FedKA, FedKAOptions
from fedvl.models.resnet import forward
from fedvl.runs.settings import resolve_experiment

NETWORKS = ("fedavg-nn", "fedprox-nn", "fedka")


@pytest.mark.parametrize("depth, parameters", [(18, 11_181_642), (50, 23_528_522)])
def test_what_travels_is_a_whole_resnet(depth, parameters):
    method = FedAvgNN(NetworkOptions(depth=depth), replace(small_task(), class_names=tuple("0123456789")))
    start = method.start(torch.Generator())
    assert sum(tensor.numel() for name, tensor in start.items() if method.role.shared(name).trained) == parameters
    assert start["fc.weight"].shape == (10, method.feature_width)


def test_running_statistics_follow_the_batch_and_are_averaged_by_examples():
    """One step a client on the stem's normalisation, whose input we compute with torch's own convolution."""
    method = small_method("fedavg-nn")
    federation = small_federation(method, {"batch_size": 16, "local_epochs": 1}, rounds=1)
    start = federation.shared
    samples = small_samples(method)
    means, variances = [], []
    for rows in torch.arange(sum(RAGGED)).split(RAGGED):
        images = method.task.encoder.normalise(samples.inputs["pixels"][rows])
        if not len(rows):
            continue
        stem = torch.nn.functional.conv2d(images, start["conv1.weight"], stride=2, padding=3)
        means.append(0.1 * stem.mean((0, 2, 3)))  # the old mean is 0
        variances.append(0.9 + 0.1 * stem.transpose(0, 1).flatten(1).var(1))  # the old variance is 1
    shares = torch.tensor([7.0, 1.0, 12.0, 5.0]).double() / 25
    merged = run_quietly(federation).shared
    torch.testing.assert_close(merged["bn1.running_mean"], shares @ torch.stack(means))
    torch.testing.assert_close(merged["bn1.running_var"], shares @ torch.stack(variances))


def test_predictions_use_running_statistics_and_not_those_of_the_batch():
    method = small_method("fedavg-nn")
    tensors = method.start(torch.Generator().manual_seed(0))
    inputs = small_samples(method, 6).inputs
    together = method.predict(tensors, inputs)
    alone = torch.cat([method.predict(tensors, {"pixels": image[None]}) for image in inputs["pixels"]])
    torch.testing.assert_close(together, alone)


def test_in_the_open_protocol_heads_stay_with_clients_and_know_their_classes_alone():
    method = small_open_method()
    assert not set(LAST_LAYER) & method.start(torch.Generator()).keys()
    samples = small_samples(method, 6)
    samples = replace(samples, labels=torch.tensor([1, 3, 3, 1, 1, 3]))
    private = method.join(samples, torch.Generator().manual_seed(0))
    assert private["mine"].tolist() == [0, 1, 0, 1]
    tensors = {**method.start(torch.Generator().manual_seed(0)), **private}
    batch = batch_of(samples)
    features, _ = forward(tensors, method.task.encoder.normalise(batch.inputs["pixels"]), training=True)
    own = torch.nn.functional.linear(features, private["fc.weight"][[1, 3]], private["fc.bias"][[1, 3]])
    expected = torch.nn.functional.cross_entropy(own, torch.tensor([0, 1, 1, 0, 0, 1]))
    torch.testing.assert_close(method.objective(tensors, batch)[0], expected)


@pytest.mark.parametrize("method_type, options_type", [(FedAvgNN, NetworkOptions), (FedKA, FedKAOptions)])
def test_open_training_is_the_same_batched_and_one_by_one_and_nothing_of_the_head_is_kept(method_type, options_type):
    finals = []
    for one_by_one in (False, True):
        federation = small_federation(small_open_method(method_type, options_type), rounds=1, one_by_one=one_by_one)
        finals.append(run_quietly(federation).shared)
        assert federation.engine.private == {}
        assert not any(name.startswith(("fc.", "domain.", "mine")) for name in federation.shared)
    for name, tensor in finals[0].items():
        torch.testing.assert_close(tensor, finals[1][name], rtol=0, atol=1e-9)


def test_a_network_without_a_head_does_not_pretend_to_name_classes():
    method = small_open_method()
    with pytest.raises(FedVLError, match="cannot name them"):
        method.predict(method.start(torch.Generator()), small_samples(method, 2).inputs)
    assert "true labels" in method.notes()[0]
    assert small_method("fedavg-nn").notes() == []


def settings(name, **more):
    training = {"batch_size": 16, "learning_rate": 0.01, "local_epochs": 2}
    data = {"shots": 4, "test_shots": 10, "clients": 2, "partition": "iid"}
    return {
        "method": {"name": name, "width": 4},
        "data": data,
        "training": training,
        "federation": {"rounds": 2},
        **more,
    }


@pytest.fixture(scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("name", ["fedavg-nn", "fedprox-nn"])
def test_a_closed_run_learns(name, tmp_path):
    result = run_experiment(resolve_experiment(settings(name, federation={"rounds": 3})), tmp_path, Silent())
    assert result.per_round_loss[-1] < result.per_round_loss[0] - 0.1
    assert result.zero_shot_accuracy > 30  # from features, which the method itself never sees
    assert result.local_flops > 0
    assert result.notes == []


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("name", ["fedavg-nn", "fedka"])
def test_an_open_run_says_that_an_oracle_named_its_clusters(name, tmp_path):
    result = run_experiment(resolve_experiment(settings(name, evaluation={"protocol": "open"})), tmp_path, Silent())
    assert any("true labels" in note for note in result.notes)
    assert any("unlabelled images" in note for note in result.notes) == (name == "fedka")
    assert result.accuracy >= 100 / len(result.class_names)  # the best naming is no worse than chance
    assert result.per_round_loss[-1] < result.per_round_loss[0]


def test_only_known_depths_are_taken():
    with pytest.raises(FedVLError, match=r"method\.depth"):
        resolve_experiment({"method": {"name": "fedavg-nn", "depth": 34}})


def test_weights_of_ones_own(tmp_path):
    donor = FedAvgNN(NetworkOptions(width=4), replace(small_task(), class_names=tuple("abcdefg")))
    tensors = donor.start(torch.Generator().manual_seed(9))
    path = tmp_path / "resnet.safetensors"
    save_file({**tensors, "bn1.num_batches_tracked": torch.tensor(7)}, path)
    start = FedAvgNN(NetworkOptions(width=4, weights=str(path)), small_task()).start(torch.Generator().manual_seed(0))
    assert start["fc.weight"].shape[0] == 4  # a head for the task's own classes
    assert all(torch.equal(start[name], tensors[name]) for name in start if name not in LAST_LAYER)
    assert start.keys() == tensors.keys()
    for options, words in (({"width": 8}, "has shape"), ({"depth": 50, "width": 4}, "has no tensor|has shape")):
        with pytest.raises(FedVLError, match=words):
            FedAvgNN(NetworkOptions(weights=str(path), **options), small_task()).start(torch.Generator())
    with pytest.raises(FedVLError, match="Cannot read"):
        FedAvgNN(NetworkOptions(weights=str(tmp_path / "absent")), small_task()).start(torch.Generator())


@pytest.mark.parametrize("name", NETWORKS)
def test_one_image_alone_leaves_finite_tensors(name):
    method = small_method(name)
    federation = small_federation(method, rounds=1)
    (trained,) = federation.engine.train(0, [2], federation.shared)
    assert trained.update.weight == 1
    assert all(tensor.isfinite().all() for tensor in trained.update.tensors.values())


def test_it_declares_what_the_table_says():
    assert_declared("fedavg-nn")
