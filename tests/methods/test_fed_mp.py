"""Fed-MP: its equations by hand, what the server does with what clients send, the presets, and real images."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.runs import run_experiment
from helpers.small import RAGGED, encoder_of, run_quietly, small_federation, small_method, small_samples, small_task
from torch.nn.functional import normalize

from fedvl.config import PrivacyConfig
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.predict import answer_all, predict_classes
from fedvl.federation.merging import last_updates, merge
from fedvl.federation.round import Federation
from fedvl.methods.base import Batch, Samples, Task, Update
from fedvl.methods.fed_mp import GATE, FedMP, FedMPOptions
from fedvl.methods.parts import query_sums
from fedvl.methods.parts.adapters import gated
from fedvl.runs.experiment import local_engine, make_judge
from fedvl.runs.preparation import prepare
from fedvl.runs.requirements import check_privacy, check_secure_sum
from fedvl.runs.settings import command_for, resolve_experiment
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors, count_bytes, count_elements, load, unflatten


def method_for(texts, scale=1.0, **options):
    """Fed-MP for a user whose classes have these texts."""
    names = tuple(f"class {c}" for c in range(len(texts)))
    return FedMP(FedMPOptions(**options), Task(names, torch.tensor(texts), encoder_of(logit_scale=scale), 2))


def gate_of(bias):
    """A gate that does not look at the image: softmax(bias) for all."""
    width = len(bias)
    zeros = torch.zeros(width, width)
    return {
        "gate.0.weight": zeros,
        "gate.0.bias": torch.zeros(width),
        "gate.1.weight": zeros,
        "gate.1.bias": torch.tensor(bias),
    }


def kept_of(*texts):
    """What the server keeps of clients that sent these texts; the gates are told apart by their bias."""
    return {
        f"{client}/{name}": tensor
        for client, sent in enumerate(texts)
        for name, tensor in {**gate_of([float(client), 0.0]), "perturbed_texts": torch.tensor(sent)}.items()
    }


def test_gate_perturbed_text_and_score_by_hand():
    """Eq. 3: gate (3/4, 1/4) turns (4, 4) into (3, 1). Eq. 4: (1, 2) + 0.3 (10, -10) = (4, -1). Eq. 1: 2 cos."""
    method = method_for([[1.0, 2.0]], scale=2.0)
    gate = gate_of([math.log(3), 0.0])
    torch.testing.assert_close(
        method.perturbed(torch.tensor([[10.0, -10.0]]), torch.tensor([0])), torch.tensor([[4.0, -1.0]])
    )
    adapted = method.adapted(gate, {"embeddings": torch.tensor([[4.0, 4.0]])})
    torch.testing.assert_close(adapted, torch.tensor([[3.0, 1.0]]) / math.sqrt(10))
    score = method.predict(gate, {"embeddings": torch.tensor([[4.0, 4.0]])})
    torch.testing.assert_close(score, torch.tensor([[2 * 5 / math.sqrt(50)]]))


def test_loss_by_hand():
    """Eq. 5: an even gate, images along the axes; residuals turn the texts (1, 0) and (0, 1) into (0, 1) and (1, 0).

    Cosines are 0 on the diagonal and 1 beside it, so that each direction costs log(1 + e^5).
    """
    gate, images = gate_of([0.0, 0.0]), torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    residuals = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]) / 0.3
    batch = Batch({"embeddings": images}, torch.tensor([0, 1]), torch.ones(2), torch.arange(2), {}, {})
    one_way = math.log(1 + math.exp(5))
    for directions, expected in (("summed", 2 * one_way), ("averaged", one_way)):
        method = method_for([[1.0, 0.0], [0.0, 1.0]], scale=5.0, directions=directions)
        loss, changed = method.objective({**gate, "residuals": residuals}, batch)
        torch.testing.assert_close(loss, torch.tensor(expected))
        assert changed == {}


def test_both_directions_of_the_loss_count_over_real_rows():
    """Scores 2 cos are ((2, 1.2), (0, 1.6)): rows and columns differ. The third row is padding."""
    method = method_for([[1.0, 0.0], [0.6, 0.8]], scale=2.0, directions="averaged")
    images, labels = torch.tensor([[3.0, 0.0], [0.0, 4.0], [5.0, 5.0]]), torch.tensor([0, 1, -1])
    batch = Batch({"embeddings": images}, labels, torch.tensor([1.0, 1.0, 0.0]), torch.arange(3), {}, {})
    loss, _ = method.objective({**gate_of([0.0, 0.0]), "residuals": torch.zeros(2, 2)}, batch)
    to_text = (math.log(1 + math.exp(-0.8)) + math.log(1 + math.exp(-1.6))) / 2
    to_image = (math.log(1 + math.exp(-2.0)) + math.log(1 + math.exp(-0.4))) / 2
    torch.testing.assert_close(loss, torch.tensor((to_text + to_image) / 2))


def test_a_client_sends_unit_vectors_of_its_own_classes_or_their_mean():
    """Eq. 6 for a client of classes 0 and 2: (3, 4) and (0, -2) + 0.3 (0, 10) = (0, 1)."""
    texts, residuals = [[3.0, 4.0], [9.0, 9.0], [0.0, -2.0]], torch.tensor([[0.0, 0.0], [7.0, 7.0], [0.0, 10.0]])
    samples = Samples({"embeddings": torch.zeros(3, 2)}, torch.tensor([2, 0, 2]))
    sent = method_for(texts, share="classes").perturbed_texts("", {"residuals": residuals}, {}, samples)
    torch.testing.assert_close(sent, torch.tensor([[0.6, 0.8], [0.0, 1.0]]))
    sent = method_for(texts, share="mean").perturbed_texts("", {"residuals": residuals}, {}, samples)
    torch.testing.assert_close(sent, torch.tensor([[0.3, 0.9]]))


def test_a_class_without_examples_is_levelled_by_hand():
    """Eq. 12 with an even gate: cosines with the texts are (.6, .8, 0), with both examples .8; class 2 has none.

    Its text counts twice, plus the mean of what the examples add to the texts of the others: (.2 + 0) / 2.
    """
    method = method_for(torch.eye(3).tolist(), scale=2.0)
    session = {
        "sums": torch.tensor([[0.0, 5.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        "counts": torch.tensor([5.0, 1, 0]),
    }
    answer = method.answer(gate_of([0.0, 0.0, 0.0]), session, {"embeddings": torch.tensor([[1.2, 1.6, 0.0]])})
    torch.testing.assert_close(answer.scores, 2 * torch.tensor([[0.6 + 0.8, 0.8 + 0.8, 0.1]]))


def test_weights_and_merge_by_hand():
    """Eq. 7 to 9: a user asks about (1, 0) and (0, 1), of mean (.5, .5); clients tell (1, 0) twice and (0.6, -0.8)."""
    kept = kept_of([[1.0, 0.0], [1.0, 0.0]], [[0.6, -0.8]])
    near, far = 0.5, -0.1
    shared = gate_of([0.0, 0.0])
    method = method_for([[2.0, 0.0], [0.0, 5.0]])
    second = math.exp(far) / (math.exp(near) + math.exp(far))
    assert method.client_weights(unflatten(kept)) == pytest.approx({0: 1 - second, 1: second})
    merged = method.tailor(shared, unflatten(kept))
    torch.testing.assert_close(merged["gate.1.bias"], torch.tensor([second, 0.0]))  # clients have the bias 0 and 1
    linear = method_for([[2.0, 0.0], [0.0, 5.0]], weights="linear")
    assert linear.client_weights(unflatten(kept_of([[1.0, 0.0]], [[0.0, 0.5]]))) == pytest.approx({0: 2 / 3, 1: 1 / 3})


def test_linear_weights_are_never_wild():
    """Similarities of 0.5 and -0.499 would give the weights 500 and -499."""
    linear = method_for([[1.0, 0.0]], weights="linear")
    assert linear.client_weights(unflatten(kept_of([[0.5, 0.0]], [[-0.499, 0.0]]))) == {0: 1.0, 1: 0.0}
    assert linear.client_weights(unflatten(kept_of([[0.0, 1.0]], [[-0.5, 0.0]]))) == {0: 0.5, 1: 0.5}


def test_long_vectors_buy_no_more_than_a_perfect_match():
    method = method_for([[1.0, 0.0]])
    honest = method.client_weights(unflatten(kept_of([[0.2, 0.0]], [[1.0, 0.0]])))
    assert method.client_weights(unflatten(kept_of([[0.2, 0.0]], [[900.0, 0.0]]))) == honest


def test_the_mean_tells_the_server_as_much_as_one_vector_a_class():
    """The remedy costs nothing: the same weights and, bit for bit, the same model; only the message is smaller."""
    runs = {share: run_quietly(small_federation(small_method("fed-mp", share=share))) for share in ("mean", "classes")}
    user = FedMP(FedMPOptions(), replace(small_task(), text_embeddings=torch.randn(3, 6)))
    weights = [user.client_weights(run.last) for run in runs.values()]
    assert weights[0] == weights[1]
    assert len(set(weights[0].values())) == 4  # each client counts differently
    models = [user.tailor(run.shared, run.last) for run in runs.values()]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    up = {share: run.records[-1].bytes_up for share, run in runs.items()}
    classes = sum(len(run_rows.unique()) for run_rows in small_samples(small_method("fed-mp")).labels.split(RAGGED))
    assert up["classes"] - up["mean"] == 4 * 6 * (classes - 4)  # four clients have images


def test_two_users_get_different_models_from_one_run():
    federation = run_quietly(small_federation(small_method("fed-mp")))
    task = federation.method.task
    users = [FedMP(FedMPOptions(), replace(task, text_embeddings=texts)) for texts in task.text_embeddings.split(2)]
    models = [user.tailor(federation.shared, federation.last) for user in users]
    for name, shared in federation.shared.items():
        assert not torch.equal(models[0][name], models[1][name])
        assert not torch.equal(models[0][name], shared)
    plain = FedMP(FedMPOptions(adaptive=False), users[0].task)
    assert plain.tailor(federation.shared, federation.last) is federation.shared


def test_rounds_go_on_from_the_plain_mean_whatever_a_client_holds():
    federation = run_quietly(small_federation(small_method("fed-mp"), rounds=1))
    for name, shared in federation.shared.items():
        gates = [federation.last[client][name] for client in (0, 2, 3, 4)]  # client 1 has no image
        torch.testing.assert_close(shared, torch.stack(gates).mean(0))


def test_the_server_keeps_the_last_gate_of_clients_that_sat_out():
    method = small_method("fed-mp")
    first = last_updates(method, {}, [Update(c, {"w": torch.full((1,), float(c))}, 1.0) for c in (0, 1)])
    second = last_updates(method, first, [Update(1, {"w": torch.tensor([5.0])}, 1.0)])
    assert {client: sent["w"].item() for client, sent in second.items()} == {0: 0.0, 1: 5.0}
    assert first[1]["w"].item() == 1.0


def test_before_any_round_the_shared_gate_answers():
    method = small_method("fed-mp")
    shared = method.start(torch.Generator())
    assert method.tailor(shared, {}) is shared


def test_a_client_that_sends_other_texts_is_refused(monkeypatch):
    method = small_method("fed-mp")
    federation = small_federation(method)
    honest = federation.engine.train

    def tampered(*asked):
        results = honest(*asked)
        first = results[0]
        long = {**first.update.tensors, "perturbed_texts": torch.ones(2, 6)}
        return [first._replace(update=first.update._replace(tensors=long)), *results[1:]]

    monkeypatch.setattr(federation.engine, "train", tampered)
    run_quietly(federation)
    assert "shape (2, 6), not (1, 6)" in federation.records[0].refused[0].reason
    assert 0 not in federation.last


def test_residuals_of_own_classes_are_kept_and_trained():
    federation = run_quietly(small_federation(small_method("fed-mp"), rounds=2))
    labels = small_samples(federation.method).labels.split(RAGGED)
    assert sorted(federation.engine.private) == [0, 2, 3, 4]
    for client, private in federation.engine.private.items():
        own = labels[client].unique()
        start = federation.method.join(Samples({}, labels[client]), torch_generator(0, "join", client))["residuals"]
        others = [c for c in range(4) if c not in own]
        assert not private["residuals"][others].any()
        assert start[own].abs().max() <= 5
        if client != 2:  # a lone image has no other to be told from
            assert not torch.equal(private["residuals"][own], start[own])
    assert not any("residuals" in sent for sent in federation.last.values())


def test_released_residuals_are_the_same_noise_for_all_and_do_not_last():
    method = small_method("fed-mp", residuals="common", residual_range=2.0)
    drawn = [
        method.join(Samples({}, torch.tensor(labels)), torch_generator(0, "join", client))["residuals"]
        for client, labels in enumerate(([0, 1], [2, 3, 3]))
    ]
    assert torch.equal(drawn[0][:2], drawn[1][2:])  # the j-th class of each client
    assert drawn[0].abs().max() <= 2
    other_seed = FedMP(method.options, replace(method.task, seed=1)).join(
        Samples({}, torch.tensor([0, 1])), torch_generator(0, "join", 0)
    )
    assert not torch.equal(other_seed["residuals"], drawn[0])
    federation = run_quietly(small_federation(method))
    assert federation.engine.private == {}


# --- eq. 9 from sums


def summed(**federation):
    return run_quietly(small_federation(small_method("fed-mp", merging="summed"), **federation))


def test_sums_over_clients_answer_each_user_with_a_model_of_its_own():
    """What a server has of a secure sum alone merges gates nearly as eq. 9 does with every client's."""
    quiet = {"residual_range": 0.2, "query_directions": 6}
    found = [
        run_quietly(small_federation(small_method("fed-mp", merging=merging, **quiet), rounds=1, secure_sum=secure))
        for merging, secure in (("kept", False), ("summed", True))
    ]
    kept, sums = found
    assert sums.last == {}
    images = sums.engine.data.inputs["embeddings"]
    models = []
    for texts in sums.method.task.text_embeddings.split(2):
        task = replace(sums.method.task, text_embeddings=texts)
        exact = FedMP(FedMPOptions(**quiet), task).tailor(kept.shared, kept.last)
        user = FedMP(FedMPOptions(merging="summed", **quiet), task)
        assert user.tailor(sums.shared, {}) is sums.shared
        gate = query_sums.tailored_to_query(sums.shared, task.text_features.mean(0))
        wanted, got = (
            torch.cat([(merged[name] - kept.shared[name]).flatten() for name in GATE]) for merged in (exact, gate)
        )
        assert float(torch.cosine_similarity(wanted, got, dim=0)) > 0.9
        assert 0.5 < float(got.norm() / wanted.norm()) < 1.5
        adapted = user.adapted(sums.shared, {"embeddings": images})
        torch.testing.assert_close(adapted, normalize(gated(gate, images), dim=-1))
        models.append(adapted)
    assert not torch.allclose(models[0], models[1], atol=1e-6)


def test_a_summed_update_holds_no_texts_and_rounds_go_on_from_the_mean_gate():
    sums, kept = summed(), run_quietly(small_federation(small_method("fed-mp")))
    for name in kept.shared:
        torch.testing.assert_close(sums.shared[name], kept.shared[name])
    (result,) = sums.engine.train(0, [0], sums.shared)
    assert result.update.tensors.keys() == sums.shared.keys()
    assert not any("texts" in name or "residuals" in name or "received" in name for name in result.update.tensors)
    assert sums.engine.private[0].keys() == {"residuals"}


def test_sums_of_rounds_are_covariances_of_texts_and_moves():
    """T after two rounds: of each round the covariance of a client's place and its move, added up."""
    federation = small_federation(small_method("fed-mp", merging="summed"), rounds=2)
    method, directions = federation.method, federation.shared["directions"].double()
    expected = torch.zeros_like(federation.shared["tilt.gate.1.bias"], dtype=torch.float64)
    for index in range(2):
        trained, before = federation.engine.train(index, range(5), federation.shared), federation.shared
        samples = [federation.engine.data.take(federation.engine.rows[result.update.client]) for result in trained]
        texts = [
            method.perturbed_texts("", r.private, {}, own)[0].double() for r, own in zip(trained, samples, strict=True)
        ]
        moves = [result.update.tensors["gate.1.bias"].double() - before["gate.1.bias"] for result in trained]
        places = torch.stack(texts) @ directions.T
        expected += (places - places.mean(0)).T @ torch.stack(moves) / len(moves)
        federation.engine.keep(trained)
        federation.shared = method.step(before, merge(method, before, [result.update for result in trained]))
    torch.testing.assert_close(federation.shared["tilt.gate.1.bias"].double(), expected, rtol=1e-3, atol=1e-6)


def test_noise_leaves_the_directions_alone():
    hidden = PrivacyConfig(unit="client", epsilon=3.0, clip=0.1)
    for secure in (False, True):
        federation = small_federation(small_method("fed-mp", merging="summed"), privacy=hidden, secure_sum=secure)
        before = federation.shared["directions"].clone()
        run_quietly(federation)
        assert torch.equal(federation.shared["directions"], before)
        assert float(federation.shared["tilt.gate.0.weight"].std()) > 0.01  # where noise is


def test_sums_are_accepted_where_single_clients_are_hidden():
    settings = {"federation": {"secure_sum": True}, "privacy": {"unit": "client", "clip": 0.1}}
    for options in ({"merging": "summed"}, {"merging": "summed", "adaptive": False}):
        method = small_method("fed-mp", **options)
        experiment = resolve_experiment({"method": {"name": "fed-mp", **options}, "data": {"clients": 5}, **settings})
        check_secure_sum(method, experiment)
        check_privacy(method, experiment)
    assert set(method.start(torch.Generator())) == set(GATE)  # the mean gate needs no sums beside it
    kept = resolve_experiment({"method": {"name": "fed-mp"}, **settings})
    with pytest.raises(FedVLError, match=r"method\.merging=summed"):
        check_secure_sum(small_method("fed-mp"), kept)
    with pytest.raises(FedVLError, match=r"method\.merging=summed"):
        check_privacy(small_method("fed-mp"), kept)
    with pytest.raises(FedVLError, match=r'method\.weights="exp"'):
        small_method("fed-mp", merging="summed", weights="linear")


@pytest.mark.parametrize(("width", "numbers"), [(768, 1_181_184), (512, 525_312), (1024, 2_099_200)])
def test_numbers_on_the_wire(width, numbers):
    """methods.md, table 0.2: the gate both ways; up also one vector, or 9 for 9 classes (6,912 numbers for d = 768)."""
    task = Task(tuple("abcdefghi"), torch.randn(9, width), encoder_of(logit_scale=1.0), 1)
    samples = Samples({}, torch.arange(9))
    for share, vectors in (("mean", 1), ("classes", 9)):
        method = FedMP(FedMPOptions(share=share), task)
        assert count_elements(method.start(torch.Generator())) == numbers
        sent = method.perturbed_texts("", method.join(samples, torch.Generator()), {}, samples)
        assert count_bytes({"perturbed_texts": sent}) == 4 * vectors * width


def session_problem(**options):
    method = small_method("fed-mp", uncertainty=0.6, **options)
    return method, method.start(torch.Generator().manual_seed(0)), small_samples(method, 60).inputs["embeddings"]


def test_first_images_are_answered_by_text_and_later_ones_by_examples_too():
    method, gate, images = session_problem()
    first, session, *_ = method.answer(gate, {}, {"embeddings": images[:30]})
    by_text = method.predict(gate, {"embeddings": images})
    torch.testing.assert_close(first, 2 * by_text[:30])
    assert 0 < session["counts"].sum() < 30
    second, later, *_ = method.answer(gate, session, {"embeddings": images[30:]})
    centre = normalize(session["sums"], dim=-1)
    by_examples = method.scale * method.adapted(gate, {"embeddings": images[30:]}) @ centre.T
    assert session["counts"].all()
    torch.testing.assert_close(second, by_text[30:] + by_examples)
    assert later["counts"].sum() > session["counts"].sum()


def test_an_answer_says_what_became_an_example():
    method, gate, images = session_problem()
    answer = method.answer(gate, {}, {"embeddings": images})
    admitted = answer.example_of >= 0
    assert torch.equal(torch.bincount(answer.example_of[admitted], minlength=4), answer.session["counts"].long())
    assert torch.equal(admitted, answer.entropy <= 0.6 * math.log(4))
    assert torch.equal(answer.example_of[admitted], answer.scores.argmax(-1)[admitted])


def test_pseudo_labels_of_text_or_of_all():
    """The released code sums entropies of scores with examples, whose range is larger: it admits more."""
    admitted = {}
    for kind in ("text", "combined"):
        method, gate, images = session_problem(pseudo_labels=kind)
        session: Tensors = {}
        for batch in images.split(10):
            session = method.answer(gate, session, {"embeddings": batch}).session
        admitted[kind] = session["counts"].sum()
    assert admitted["combined"] > admitted["text"]


def test_without_prototypes_nothing_is_remembered_and_the_order_does_not_matter():
    method, gate, images = session_problem(prototypes=False)
    samples = Samples({"embeddings": images}, torch.zeros(60, dtype=torch.long))
    answers = answer_all(method, gate, samples, 7)
    assert (answers == method.predict(gate, {"embeddings": images}).argmax(-1).numpy()).all()
    answer = method.answer(gate, {}, {"embeddings": images})
    assert (answer.example_of == -1).all()
    assert answer.session == {}


def test_one_class_asked_and_a_session_of_another_user():
    method, gate, images = session_problem()
    lone = FedMP(method.options, replace(method.task, text_embeddings=method.task.text_embeddings[:1]))
    scores, session, *_ = lone.answer(gate, {}, {"embeddings": images})
    assert scores.shape == (60, 1)
    assert session["counts"].tolist() == [60]
    with pytest.raises(FedVLError, match="begin a new session"):
        method.answer(gate, session, {"embeddings": images})


def test_an_image_without_any_feature_is_answered():
    method, gate, _ = session_problem()
    scores, session, *_ = method.answer(gate, {}, {"embeddings": torch.zeros(1, 6)})
    assert scores.tolist() == [[0.0] * 4]
    assert not session["counts"].any()


def test_presets_differ_where_paper_and_code_do():
    paper, released = (
        resolve_experiment({"method": {"name": "fed-mp", "preset": preset}}) for preset in ("paper", "released")
    )
    for experiment in (paper, released):
        assert experiment.training.batch_size == experiment.evaluation.batch_size == 18
        assert experiment.training.local_epochs == experiment.federation.rounds == 2
        assert (experiment.data.shots, experiment.evaluation.protocol) == (8, "open")  # of 10, 2 are for validation
        assert experiment.data.templates == "bare"
    assert (paper.training.optimiser, paper.training.learning_rate) == ("adamw", 1e-5)
    assert (released.training.optimiser, released.training.learning_rate) == ("adam", 5e-5)
    assert (released.training.betas, released.training.weight_decay) == ((0.9, 0.98), 0.2)
    differing = {key for key, value in paper.method.options.items() if released.method.options[key] != value}
    assert differing == {
        "residuals", "directions", "weights", "uncertainty", "pseudo_labels", "empty", "unit_centroids",
    }  # fmt: skip


def test_the_threshold_is_the_papers_for_its_datasets_unless_set():
    def threshold(dataset, **method):
        asked = {"method": {"name": "fed-mp", **method}, "data": {"dataset": dataset}}
        return resolve_experiment(asked).method.options["uncertainty"]

    assert [threshold(name) for name in ("food101", "stanford-cars", "photos/food101.parquet")] == [0.3, 0.1, 0.3]
    assert threshold("food101", uncertainty=0.7) == 0.7
    assert threshold("food101", preset="released") == 0.3
    assert (threshold("my-photos"), threshold("my-photos", preset="released")) == (0.2, 0.1)
    asked = {"method": {"name": "fed-mp", "uncertainty": 0.2}, "data": {"dataset": "food101"}}
    assert "method.uncertainty=0.2" in command_for(resolve_experiment(asked))  # food101's own is another


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Runs on cifar10-mini: 3 clients of 2 classes each, 4 classes asked about; three seeds."""
    torch.set_num_threads(1)  # as these runs do: texts depend on it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVL_CACHE", str(tmp_path_factory.mktemp("cache")))
        runs = []
        for seed in range(3):
            settings = {"method": {"name": "fed-mp"}, "data": {"dataset": "cifar10-mini", "clients": 3}, "seed": seed}
            settings |= {"device": "cpu", "federation": {"threads": 1}}
            prepared = prepare(resolve_experiment(settings), Silent())
            start = prepared.method.start(torch_generator(seed, "start"))
            run = Federation(prepared.method, local_engine(prepared), prepared.experiment.federation, seed, start)
            runs.append((prepared, run_quietly(run)))
        return runs


def accuracy(prepared, run, **options):
    asked = FedMP(prepared.queried.options.model_copy(update=options), prepared.queried.task)
    answers = predict_classes(asked, asked.tailor(run.shared, run.last), prepared.test.samples, 18).classes
    return 100 * float((answers == prepared.test.samples.labels.numpy()).mean())


def test_real_images_of_unseen_classes(real):
    for prepared, run in real:
        assert len(prepared.queried.task.class_names) == 4
        assert not set(prepared.queried.task.class_names) & set(prepared.method.task.class_names)
        weights = prepared.queried.client_weights(run.last)
        assert sum(weights.values()) == pytest.approx(1)
        assert all(abs(weight - 1 / 3) < 0.1 for weight in weights.values())  # eq. 9 is nearly even
        judged = make_judge(prepared, run.engine).judge_zero_shot()
        assert judged is not None
        zero_shot = judged.figures["accuracy"]
        assert zero_shot > 50  # of 4 classes
        assert abs(accuracy(prepared, run, prototypes=False) - zero_shot) < 5  # 2 rounds at 1e-5 hardly move a gate


def test_a_run_folder_holds_what_answers_any_user(real, tmp_path):
    prepared, in_memory = real[0]
    result = run_experiment(prepared.experiment, tmp_path, Silent())
    shared, kept = load(tmp_path / "model.safetensors"), load(tmp_path / "kept.safetensors")
    expected = prepared.queried.tailor(in_memory.shared, in_memory.last)
    tailored = prepared.queried.tailor(shared, unflatten(kept))
    assert all(torch.equal(tailored[name], expected[name]) for name in expected)
    assert result.accuracy == pytest.approx(accuracy(prepared, in_memory))
    assert result.bytes_up_per_client_round - result.bytes_down_per_client_round == 4 * 256  # one vector


def test_prototypes_help_where_the_model_is_right_more_often_than_not(real):
    gains = [accuracy(*run) - accuracy(*run, prototypes=False) for run in real]
    assert sum(gains) / len(gains) > 1
    released = {"pseudo_labels": "combined", "empty": "all-or-nothing", "unit_centroids": False, "uncertainty": 0.1}
    gains = [accuracy(*run, **released) - accuracy(*run, prototypes=False) for run in real]
    assert sum(gains) / len(gains) > 1


def test_neither_form_hides_the_names_of_a_client_of_two_classes(real):
    """The server looks up the texts nearest to what it was sent, among ten names: the mean guarantees no privacy."""
    found = {"classes": 0, "mean": 0}
    total = 0
    for prepared, run in real:
        names = (*prepared.method.task.class_names, *prepared.queried.task.class_names)
        texts = torch.cat([prepared.method.task.text_features, prepared.queried.task.text_features])
        for client, private in run.engine.private.items():
            rows = Samples({}, run.engine.data.labels[run.engine.rows[client]])
            own = {prepared.method.task.class_names[c] for c in rows.labels.unique()}
            total += len(own)
            for share in found:
                told = FedMP(FedMPOptions(share=share), prepared.method.task).perturbed_texts("", private, {}, rows)
                guesses = (told @ texts.T).topk(len(own) // len(told)).indices.flatten()
                found[share] += len(own & {names[guess] for guess in guesses})
    assert found["classes"] == total
    assert found["mean"] > 0.8 * total  # a mean of more classes tells less of each, see docstring of the method


def test_it_declares_what_the_table_says():
    assert_declared("fed-mp")
