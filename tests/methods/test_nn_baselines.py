"""fedavg-nn, fedprox-nn and fedka: batch normalisation, heads, alignment by hand; clusters named by an oracle."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.small import RAGGED, doubled, run_quietly, small_federation, small_method, small_samples, small_task
from safetensors.torch import save_file

from fedvl.errors import FedVLError
from fedvl.evaluation.clusters import cluster, name_clusters
from fedvl.evaluation.predict import confusion
from fedvl.experiment import resolve_experiment, run
from fedvl.methods.base import Batch
from fedvl.methods.fedavg_nn import HEAD, FedAvgNN, NetworkOptions
from fedvl.methods.fedka import FedKA, FedKAOptions, discriminate
from fedvl.methods.parts.alignment import domain_loss, kernel_discrepancy, reverse_gradient
from fedvl.models.resnet import forward
from fedvl.preparation import Silent, prepare
from fedvl.seeding import torch_generator

NETWORKS = ("fedavg-nn", "fedprox-nn", "fedka")


def open_method(method_type=FedAvgNN, options_type=NetworkOptions, **options):
    return doubled(method_type(options_type(width=4, **options), replace(small_task(), protocol="open")))


def batch_of(method, count=5, received=None, noise=None):
    samples = small_samples(method, count)
    return Batch(samples.inputs, samples.labels, torch.ones(count), torch.arange(count), received or {}, noise or {})


# --- the network and its average --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth, parameters", [(18, 11_181_642), (50, 23_528_522)])
def test_what_travels_is_a_whole_resnet(depth, parameters):
    method = FedAvgNN(NetworkOptions(depth=depth), replace(small_task(), class_names=tuple("0123456789")))
    start = method.start(torch.Generator())
    assert sum(tensor.numel() for name, tensor in start.items() if method.trains(name)) == parameters
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


def test_gradients_leave_running_statistics_alone():
    method = small_method("fedka")
    assert [name for name in ("conv1.weight", "bn1.bias", "fc.bias") if method.trains(name)] == [
        "conv1.weight",
        "bn1.bias",
        "fc.bias",
    ]
    assert not any(method.trains(name) for name in ("bn1.running_mean", "layer1.0.bn2.running_var", "steps"))


def test_predictions_use_running_statistics_and_not_those_of_the_batch():
    method = small_method("fedavg-nn")
    tensors = method.start(torch.Generator().manual_seed(0))
    inputs = small_samples(method, 6).inputs
    together = method.predict(tensors, inputs)
    alone = torch.cat([method.predict(tensors, {"pixels": image[None]}) for image in inputs["pixels"]])
    torch.testing.assert_close(together, alone)


def test_proximal_term_counts_weights_alone():
    plain, proximal = small_method("fedavg-nn"), small_method("fedprox-nn", mu=0.4)
    start = plain.start(torch.Generator().manual_seed(0))
    shifted = {"fc.bias": 3.0, "bn1.bias": -1.0, "bn1.running_var": 100.0}  # 4 numbers each; a statistic is not pulled
    moved = {name: tensor + shifted.get(name, 0.0) for name, tensor in start.items()}
    batch = batch_of(plain, received=start)
    extra = proximal.objective(moved, batch)[0] - plain.objective(moved, batch)[0]
    assert float(extra) == pytest.approx(0.4 / 2 * (4 * 9.0 + 4 * 1.0))


# --- heads of one's own -----------------------------------------------------------------------------------------------


def test_in_the_open_protocol_heads_stay_with_clients_and_know_their_classes_alone():
    method = open_method()
    assert not set(HEAD) & method.start(torch.Generator()).keys()
    samples = small_samples(method, 6)
    samples = replace(samples, labels=torch.tensor([1, 3, 3, 1, 1, 3]))
    private = method.join(samples, torch.Generator().manual_seed(0))
    assert private["mine"].tolist() == [0, 1, 0, 1]
    tensors = {**method.start(torch.Generator().manual_seed(0)), **private}
    batch = batch_of(method, 6)._replace(labels=samples.labels)
    features, _ = forward(tensors, method.task.encoder.normalise(batch.inputs["pixels"]), training=True)
    own = torch.nn.functional.linear(features, private["fc.weight"][[1, 3]], private["fc.bias"][[1, 3]])
    expected = torch.nn.functional.cross_entropy(own, torch.tensor([0, 1, 1, 0, 0, 1]))
    torch.testing.assert_close(method.objective(tensors, batch)[0], expected)


@pytest.mark.parametrize("method_type, options_type", [(FedAvgNN, NetworkOptions), (FedKA, FedKAOptions)])
def test_open_training_is_the_same_batched_and_one_by_one_and_nothing_of_the_head_is_kept(method_type, options_type):
    finals = []
    for one_by_one in (False, True):
        federation = small_federation(open_method(method_type, options_type), rounds=1, one_by_one=one_by_one)
        finals.append(run_quietly(federation).shared)
        assert federation.engine.private == {}
        assert not any(name.startswith(("fc.", "domain.", "mine")) for name in federation.shared)
    for name, tensor in finals[0].items():
        torch.testing.assert_close(tensor, finals[1][name], rtol=0, atol=1e-9)


def test_a_network_without_a_head_does_not_pretend_to_name_classes():
    method = open_method()
    with pytest.raises(FedVLError, match="cannot name them"):
        method.predict(method.start(torch.Generator()), small_samples(method, 2).inputs)
    assert "true labels" in method.notes()[0]
    assert small_method("fedavg-nn").notes() == []


# --- clusters ---------------------------------------------------------------------------------------------------------


def test_planted_clusters_are_found_and_named_whatever_their_order():
    generator = np.random.default_rng(0)
    for classes in (2, 5, 11):
        labels = generator.permutation(np.arange(classes).repeat(7))
        centres = generator.permutation(classes)[labels]  # where a class lies says nothing of its number
        vectors = np.eye(classes, dtype=np.float32)[centres] * 10 + generator.normal(size=(len(labels), classes)) * 0.1
        assert name_clusters(cluster(vectors.astype(np.float32), classes), labels, classes).tolist() == labels.tolist()


def test_the_assignment_is_the_best_of_all_and_uses_no_name_twice():
    """Greedy naming would give cluster 0 class 0 (5 rows) and leave 1 + 4 right; the best is 4 + 4."""
    clusters = np.array([0] * 9 + [1] * 5)
    labels = np.array([0] * 5 + [1] * 4 + [0] * 4 + [1] * 1)
    named = name_clusters(clusters, labels, 2)
    assert (named == labels).sum() == 8
    assert set(named[clusters == 0]) == {1}
    assert set(named[clusters == 1]) == {0}


def test_fewer_images_or_places_than_classes():
    vectors = np.zeros((4, 2), dtype=np.float32)
    assert (name_clusters(cluster(vectors, 3), np.array([2, 2, 2, 0]), 3) == 2).all()  # one place is one cluster
    assert name_clusters(cluster(np.eye(2, dtype=np.float32), 5), np.array([4, 1]), 5).tolist() == [4, 1]
    with pytest.raises(FedVLError, match="not finite"):
        cluster(np.full((4, 2), np.nan, dtype=np.float32), 2)


def test_a_method_that_clusters_is_judged_by_its_clusters():
    class Planted(FedAvgNN):
        def represent(self, tensors, inputs):
            return inputs["pixels"].float().mean((1, 2, 3))[:, None]  # the brightness is the class, in another order

    method = Planted(NetworkOptions(), replace(small_task(), protocol="open"))
    samples = small_samples(method, 12)
    brightness = torch.tensor([90, 0, 200, 255], dtype=torch.uint8)[samples.labels]
    samples = replace(
        samples, inputs={"pixels": torch.zeros_like(samples.inputs["pixels"]) + brightness[:, None, None, None]}
    )
    counts = confusion(method, {}, samples, batch_size=5)
    assert np.array_equal(counts, np.diag(np.bincount(samples.labels.numpy(), minlength=4)))


# --- FedKA ------------------------------------------------------------------------------------------------------------


def test_discrepancy_of_two_points_by_hand():
    """Rows 0 and 3: the mean squared distance of different rows is 9, and each b is 9 times 1/4 ... 4."""
    left, right = torch.tensor([[0.0]]), torch.tensor([[3.0]])
    expected = sum(2 - 2 * math.exp(-1 / factor) for factor in (0.25, 0.5, 1, 2, 4))
    assert float(kernel_discrepancy(left, right, torch.ones(1))) == pytest.approx(expected, rel=1e-6)
    same = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    assert float(kernel_discrepancy(same, same, torch.ones(6))) == pytest.approx(0, abs=1e-6)


def test_discrepancy_equals_a_double_loop_and_ignores_padding():
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(4, 3, generator=generator), torch.randn(6, 3, generator=generator) + 1
    rows = [row.tolist() for row in (*left, *right)]

    def squared(a, b):
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))

    total = sum(squared(a, b) for a in rows for b in rows) / (10 * 9)

    def kernel(a, b):
        return sum(math.exp(-squared(a, b) / (total / 4 * 2**power)) for power in range(5))

    def mean(some, others):
        return sum(kernel(a, b) for a in some for b in others) / (len(some) * len(others))

    expected = mean(rows[:4], rows[:4]) + mean(rows[4:], rows[4:]) - 2 * mean(rows[:4], rows[4:])
    assert float(kernel_discrepancy(left, right, torch.ones(4))) == pytest.approx(expected, rel=1e-5)
    padded, mask = torch.cat([left, torch.full((2, 3), 50.0)]), torch.tensor([1.0, 1, 1, 1, 0, 0])
    assert float(kernel_discrepancy(padded, right, mask)) == pytest.approx(expected, rel=1e-5)
    gradient = torch.func.grad(kernel_discrepancy)(padded, right, mask)
    assert not gradient[4:].any()
    step = kernel_discrepancy(padded - 0.1 * gradient, right, mask)
    assert float(step) < expected  # downhill is towards the target


def test_identical_rows_have_no_discrepancy_and_a_finite_gradient():
    rows = torch.ones(3, 2)
    assert float(kernel_discrepancy(rows, rows, torch.ones(3))) == pytest.approx(0, abs=1e-6)
    assert torch.func.grad(kernel_discrepancy)(rows, rows, torch.ones(3)).isfinite().all()


def test_gradient_reversal_keeps_the_value_and_turns_the_gradient():
    x = torch.tensor([2.0, -3.0])

    def loss(x):
        return (reverse_gradient(x, torch.tensor(0.5)) ** 2).sum()

    gradient, value = torch.func.grad_and_value(loss)(x)
    assert value == 13.0
    assert gradient.tolist() == [-2.0, 3.0]  # -0.5 times 2x


def test_domain_loss_by_hand():
    scores = torch.tensor([0.0, math.log(3), 99.0]), torch.tensor([math.log(3)])
    # left: mean of log 2 and log 4 (the third row is padding); right: log(1 + 1/3)
    expected = ((math.log(2) + math.log(4)) / 2 + math.log(4 / 3)) / 2
    assert float(domain_loss(*scores, torch.tensor([1.0, 1.0, 0.0]))) == pytest.approx(expected, rel=1e-6)


def test_fedka_is_the_cross_entropy_plus_its_two_parts():
    method = small_method("fedka", alignment=2.0, adversarial=3.0, ramp=10)
    shared = method.start(torch.Generator().manual_seed(0))
    received = method.start(torch.Generator().manual_seed(1))
    private = method.join(small_samples(method, 5), torch.Generator().manual_seed(2))
    tensors = {**shared, **private, "steps": torch.tensor(4.0).double()}
    noise = {"target": torch.tensor([0, 3, 3, 7])}
    batch = batch_of(method, received=received, noise=noise)
    loss, changed = method.objective(tensors, batch)
    plain, own, _ = method.learn(tensors, batch)
    target, _ = forward(received, method.task.encoder.normalise(method.target[noise["target"]]), training=True)
    parts = 2.0 * kernel_discrepancy(own, target, batch.mask) + 3.0 * domain_loss(
        discriminate(tensors, own), discriminate(tensors, target), batch.mask
    )
    torch.testing.assert_close(loss, plain + parts)
    assert changed["steps"] == 5
    assert "bn1.running_mean" in changed


def test_the_discriminator_learns_while_the_network_unlearns():
    """With nothing but the adversarial part, the head's gradient goes down the loss and the network's goes up."""
    method = small_method("fedka", alignment=0.0, adversarial=1.0, ramp=1)
    start = method.start(torch.Generator().manual_seed(0))
    private = method.join(small_samples(method, 5), torch.Generator().manual_seed(2))
    batch = batch_of(method, received=start, noise={"target": torch.arange(8)})

    def gradients(steps):
        tensors = {**start, **private, "steps": torch.tensor(steps).double()}
        return torch.func.grad(lambda moved: method.objective({**tensors, **moved}, batch)[0])(
            {name: tensors[name] for name in ("conv1.weight", "domain.0.weight")}
        )

    untold, full = gradients(0.0), gradients(1e9)  # reversal of strength 0 and of strength 1

    def honest(moved):
        tensors = {**start, **private, **moved}
        own, _ = forward(tensors, method.task.encoder.normalise(batch.inputs["pixels"]), training=True)
        target, _ = forward(start, method.task.encoder.normalise(method.target), training=True)
        return domain_loss(discriminate(tensors, own), discriminate(tensors, target), batch.mask)

    true = torch.func.grad(honest)(
        {"conv1.weight": start["conv1.weight"], "domain.0.weight": private["domain.0.weight"]}
    )
    torch.testing.assert_close(full["domain.0.weight"], true["domain.0.weight"])
    torch.testing.assert_close(full["conv1.weight"] - untold["conv1.weight"], -true["conv1.weight"])
    assert true["conv1.weight"].abs().max() > 1e-6


def test_the_alignment_moves_the_network():
    method = small_method("fedka", alignment=1.0, adversarial=0.0)
    start = method.start(torch.Generator().manual_seed(0))
    private = method.join(small_samples(method, 5), torch.Generator().manual_seed(2))
    batch = batch_of(method, received=start, noise={"target": torch.arange(8)})
    target, _ = forward(start, method.task.encoder.normalise(method.target), training=True)

    def whole(stem):
        return method.objective({**start, **private, "conv1.weight": stem}, batch)[0]

    def by_parts(stem):
        loss, own, _ = method.learn({**start, "conv1.weight": stem}, batch)
        return loss + kernel_discrepancy(own, target, batch.mask)

    def without(stem):
        return method.learn({**start, "conv1.weight": stem}, batch)[0]

    gradients = [torch.func.grad(loss)(start["conv1.weight"]) for loss in (whole, by_parts, without)]
    torch.testing.assert_close(gradients[0], gradients[1])
    assert (gradients[0] - gradients[2]).abs().max() > 1e-6


def test_target_images_are_drawn_anew_for_each_step_and_client():
    method = small_method("fedka", target_batch=5)
    draws = [method.noise(torch_generator(0, "noise", 0, client))["target"] for client in range(3)]
    assert all(draw.shape == (5,) and draw.max() < 8 for draw in draws)
    assert len({tuple(draw.tolist()) for draw in draws}) == 3


# --- whole runs -------------------------------------------------------------------------------------------------------


def settings(name, **more):
    training = {"batch_size": 16, "learning_rate": 0.01, "local_epochs": 2}
    data = {"shots": 4, "clients": 2, "partition": "iid"}
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
    result = run(resolve_experiment(settings(name, federation={"rounds": 3})), tmp_path, Silent())
    assert result["per_round_loss"][-1] < result["per_round_loss"][0] - 0.1
    assert result["zero_shot_accuracy"] > 30  # from features, which the method itself never sees
    assert result["local_flops"] > 0
    assert result["notes"] == []


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("name", ["fedavg-nn", "fedka"])
def test_an_open_run_says_that_an_oracle_named_its_clusters(name, tmp_path):
    result = run(resolve_experiment(settings(name, evaluation={"protocol": "open"})), tmp_path, Silent())
    assert any("true labels" in note for note in result["notes"])
    assert any("unlabelled images" in note for note in result["notes"]) == (name == "fedka")
    assert result["accuracy"] >= 100 / len(result["class_names"])  # the best naming is no worse than chance
    assert result["per_round_loss"][-1] < result["per_round_loss"][0]


@pytest.mark.usefixtures("_cache")
def test_target_images_are_the_users_validation_images_without_labels():
    experiment = resolve_experiment(settings("fedka", evaluation={"protocol": "open"}))
    prepared = prepare(experiment, Silent())
    target = prepared.method.task.target["pixels"]
    tested = {bytes(image.numpy()) for image in prepared.test.inputs["pixels"]}
    assert len(target) == (len(target) + len(prepared.test)) // 5
    assert not tested & {bytes(image.numpy()) for image in target}


# --- bad input --------------------------------------------------------------------------------------------------------


def test_fedka_without_target_images_is_refused():
    with pytest.raises(FedVLError, match="--protocol open"):
        FedKA(FedKAOptions(), replace(small_task(), target=None))


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
    assert all(torch.equal(start[name], tensors[name]) for name in start if name not in HEAD)
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
