"""promptfl, promptprox, pfedprompt and fedtpg: by hand, against torch's own layers, against plain loops, on real images."""

import math

import pytest
import torch
from helpers.real import accuracy
from helpers.small import RAGGED, run_quietly, small_encoder, small_federation, small_method, small_samples
from torch.nn.functional import cross_entropy, gelu, multi_head_attention_forward, normalize

from fedvl.errors import FedVLError
from fedvl.experiment import resolve_experiment
from fedvl.methods import load_method
from fedvl.methods.base import Batch, Samples, Task
from fedvl.methods.fedtpg import FedTPG, FedTPGOptions, attention
from fedvl.methods.parts.losses import label_loss
from fedvl.methods.promptfl import PromptFL
from fedvl.seeding import torch_generator
from fedvl.tensors import count_elements

PROMPTS = ["promptfl", "promptprox", "pfedprompt", "fedtpg"]


def task_of(encoder, names=("cat", "dog", "ship")):
    generator = torch.Generator().manual_seed(3)
    return Task(tuple(names), torch.randn(len(names), encoder.dim, generator=generator), encoder, 2)


def method_on(name, encoder, names=("cat", "dog", "ship"), **options):
    method_type = load_method(name)
    return method_type(method_type.options_type(**options), task_of(encoder, names))


def batch_of(samples, received=None):
    count = len(samples)
    return Batch(samples.inputs, samples.labels, torch.ones(count), torch.arange(count), received or {})


def gradient(method, tensors, batch, name):
    def loss(tensor):
        return method.objective({**tensors, name: tensor}, batch)[0]

    return torch.func.grad(loss)(tensors[name])


def plain_scores(method, context, features):
    """The whole sentence through the text tower, as the paper has it."""
    encoder = method.task.encoder
    tokens = encoder.tokenise([f"{name}." for name in method.task.class_names])
    return 10.0 * features @ normalize(encoder.encode_text(tokens, context), dim=-1).T


# --- PromptFL


def test_promptfl_averages_what_plain_loops_learn_and_counts_clients_equally():
    """Independent code: the sentence in full, torch.optim.SGD, one client after another; then the mean by hand."""
    method = small_method("promptfl", context=5)
    settings = {"learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.01, "local_epochs": 1}
    federation = small_federation(method, settings, rounds=1)
    start, samples = federation.shared["context"].clone(), small_samples(method)
    learned = []
    for client, rows in enumerate(torch.arange(sum(RAGGED)).split(RAGGED)):
        if not len(rows):
            continue
        context = start.clone().requires_grad_()
        optimiser = torch.optim.SGD([context], lr=0.02, momentum=0.9, weight_decay=0.01)
        for chosen in torch.randperm(len(rows), generator=torch_generator(0, "order", 0, client)).split(4):
            scores = plain_scores(method, context, samples.inputs["features"][rows[chosen]])
            optimiser.zero_grad()
            cross_entropy(scores, samples.labels[rows[chosen]]).backward()
            optimiser.step()
        learned.append(context.detach())
    found = run_quietly(federation).shared["context"]
    assert len(learned) == 4
    torch.testing.assert_close(found, sum(learned) / 4, rtol=0, atol=1e-6)
    assert (found - learned[-1]).abs().max() > 1e-3  # the released code's "mean" is the last client's


@pytest.mark.parametrize("name", PROMPTS)
def test_nothing_of_one_client_reaches_another(name):
    """Alone or among others, first or second in its process, a client learns the same, and the server's copy stays."""
    method = small_method(name)
    federation = small_federation(method, {"momentum": 0.9})
    sent = {key: tensor.clone() for key, tensor in federation.shared.items()}
    among_others = federation.engine.train(0, [0, 2, 3, 4], federation.shared)[3].update.tensors
    alone = small_federation(small_method(name), {"momentum": 0.9}).engine.train(0, [4], sent)[0].update.tensors
    for key, tensor in sent.items():
        torch.testing.assert_close(among_others[key], alone[key], rtol=0, atol=1e-5)
        assert torch.equal(federation.shared[key], tensor)
        assert among_others[key].data_ptr() != federation.shared[key].data_ptr()


@pytest.mark.parametrize("name", PROMPTS)
def test_batched_equals_one_by_one_to_1e_5_with_chunks_of_classes(name, monkeypatch):
    monkeypatch.setattr("fedvl.methods.parts.prompts.ClassTexts.__init__.__defaults__", (2, ""))
    method = small_method(name)
    assert len(method.texts.chunks) == 2
    final = [run_quietly(small_federation(method, one_by_one=alone)).shared for alone in (False, True)]
    for key in final[0]:
        torch.testing.assert_close(final[0][key], final[1][key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PROMPTS)
def test_candidate_sets_are_trained_on_where_there_are_such(name):
    method = small_method(name)
    samples = small_samples(method, 6)
    candidates = torch.zeros(6, 4).scatter(1, samples.labels[:, None], 1.0)
    private = method.join(samples, torch.Generator())
    tensors = {**method.start(torch.Generator().manual_seed(0)), **private}
    received = {key: tensor for key, tensor in tensors.items() if key not in private}
    by_label = method.objective(tensors, batch_of(samples, received))[0]
    one = Samples({**samples.inputs, "candidates": candidates}, samples.labels)
    torch.testing.assert_close(method.objective(tensors, batch_of(one, received))[0], by_label)
    two = Samples({**samples.inputs, "candidates": candidates + candidates.roll(1, 1)}, samples.labels)
    assert method.objective(tensors, batch_of(two, received))[0] < by_label


@pytest.mark.parametrize("width, parameters", [(512, 8_192), (768, 12_288)])
@pytest.mark.parametrize("name", ["promptfl", "promptprox", "pfedprompt"])
def test_contexts_have_the_sizes_of_the_reference_table(name, width, parameters):
    method = method_on(name, small_encoder(text_width=width))
    assert count_elements(method.start(torch.Generator())) == parameters


def test_what_goes_over_the_wire_is_the_context():
    federation = run_quietly(small_federation(small_method("pfedprompt"), rounds=1))
    (record,) = federation.records
    assert record["bytes_up"] == 4 * 16 * 8 * 4  # 4 clients with data, 16 tokens of width 8, 4 bytes
    assert record["bytes_down"] == len(record["cohort"]) * 16 * 8 * 4


def test_presets_are_the_published_settings():
    training = resolve_experiment({"method": {"name": "promptfl"}}).training
    assert (training.learning_rate, training.momentum, training.weight_decay, training.batch_size) == (
        0.001,
        0.9,
        5e-4,
        32,
    )
    released = resolve_experiment({"method": {"name": "promptfl", "preset": "released"}})
    assert (released.training.local_epochs, released.federation.rounds) == (5, 20)
    network = resolve_experiment({"method": {"name": "fedtpg"}}).training
    assert (network.learning_rate, network.weight_decay, network.batch_size, network.schedule) == (
        0.003,
        1e-5,
        200,
        "cosine",
    )
    assert resolve_experiment({"method": {"name": "fedtpg", "preset": "released"}}).federation.rounds == 500


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("promptfl", {"context": 0}),
        ("promptprox", {"mu": -1}),
        ("pfedprompt", {"beta": 0}),
        ("fedtpg", {"classes": "x"}),
    ],
)
def test_bad_options_are_refused(name, wrong):
    with pytest.raises(FedVLError, match=f"method.{next(iter(wrong))}"):
        resolve_experiment({"method": {"name": name, **wrong}})


@pytest.mark.parametrize("name", PROMPTS)
def test_class_names_without_room_for_the_context_are_refused(name):
    with pytest.raises(FedVLError, match=r"leaves no room for a context of 30 tokens; use --set method.context=28 or"):
        method_on(name, small_encoder(), context=30)


# --- PromptProx


def test_promptprox_pulls_with_a_gradient():
    """mu (context - received), by hand; the released code's is 0 everywhere."""
    plain, proximal = small_method("promptfl"), small_method("promptprox", mu=0.4)
    received = plain.start(torch.Generator().manual_seed(0))
    moved = {"context": received["context"] + 2.0}
    batch = batch_of(small_samples(plain, 5), received)
    extra = proximal.objective(moved, batch)[0] - plain.objective(moved, batch)[0]
    torch.testing.assert_close(extra, torch.tensor(0.4 / 2 * 16 * 8 * 4.0), rtol=1e-5, atol=0)
    pull = gradient(proximal, moved, batch, "context") - gradient(plain, moved, batch, "context")
    torch.testing.assert_close(pull, torch.full((16, 8), 0.4 * 2.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradient(proximal, received, batch, "context"), gradient(plain, received, batch, "context")
    )


def test_promptprox_stays_nearer_to_what_it_received_and_without_mu_is_promptfl():
    def distance(name, **options):
        federation = small_federation(small_method(name, **options), {"learning_rate": 0.1}, rounds=1)
        sent = federation.shared["context"]
        moved = [trained.update.tensors["context"] for trained in federation.engine.train(0, [3], federation.shared)]
        return float((moved[0] - sent).norm())

    assert distance("promptprox", mu=5.0) < 0.95 * distance("promptfl")
    assert distance("promptprox", mu=0.0) == distance("promptfl")


# --- pFedPrompt


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
    assert federation.kept == {}
    first, last = (federation.engine.private_of(client) for client in (0, 3))
    samples = small_samples(method)
    assert torch.equal(first["memory"], samples.inputs["features"][:7])
    assert torch.equal(last["memory_classes"], samples.labels[8:20] + 1)


def test_without_a_memory_it_answers_as_promptfl_and_says_what_it_is():
    method, plain = small_method("pfedprompt"), small_method("promptfl")
    context, inputs = plain.start(torch.Generator().manual_seed(0)), small_samples(plain).inputs
    assert torch.equal(method.predict(context, inputs), plain.predict(context, inputs))
    assert "re-implemented from its description" in method.notes()[0]
    assert not method.answers_new_classes


# --- FedTPG


@pytest.mark.parametrize("width, parameters", [(512, 4_206_080), (768, 9_454_848)])
def test_the_network_has_the_size_of_the_reference_table(width, parameters):
    method = method_on("fedtpg", small_encoder(joint=width, text_width=width))
    tensors = method.start(torch.Generator().manual_seed(0))
    assert count_elements(tensors) == parameters
    assert tensors["queries"].shape == (4, width)


def randomised(method, seed=0):
    """Every tensor random, so that no bias or norm is left out of a comparison."""
    generator = torch.Generator().manual_seed(seed)
    start = method.start(generator)
    return {name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}


@pytest.mark.parametrize("present", [None, [True, False, True, True, False]])
def test_attention_is_torchs(present):
    """Queries of the text tower's width (8), names of the joint width (6)."""
    tensors = randomised(method_on("fedtpg", small_encoder()))
    generator = torch.Generator().manual_seed(1)
    queries, names = torch.randn(4, 8, generator=generator), torch.randn(5, 6, generator=generator)
    mask = None if present is None else torch.tensor(present)
    expected, _ = multi_head_attention_forward(
        queries[:, None],
        names[:, None],
        names[:, None],
        embed_dim_to_check=8,
        num_heads=4,
        in_proj_weight=None,
        in_proj_bias=torch.cat([tensors[f"{name}.bias"] for name in ("query", "key", "value")]),
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=tensors["mixed.weight"],
        out_proj_bias=tensors["mixed.bias"],
        training=False,
        key_padding_mask=None if mask is None else ~mask[None],
        use_separate_proj_weight=True,
        q_proj_weight=tensors["query.weight"],
        k_proj_weight=tensors["key.weight"],
        v_proj_weight=tensors["value.weight"],
    )
    torch.testing.assert_close(attention(tensors, queries, names, mask), expected[:, 0])


def test_the_network_is_that_of_torchs_layers():
    """LayerNorm on both sides, attention without a residual, then LayerNorm, GEGLU and a residual."""
    method = method_on("fedtpg", small_encoder(joint=8))
    tensors = randomised(method)
    names = normalize(method.task.encoder.encode_text(method.task.encoder.tokenise(["cat", "dog", "ship"])), dim=-1)
    attending = torch.nn.MultiheadAttention(8, 4, batch_first=True)
    attending.load_state_dict(
        {
            "in_proj_weight": torch.cat([tensors[f"{name}.weight"] for name in ("query", "key", "value")]),
            "in_proj_bias": torch.cat([tensors[f"{name}.bias"] for name in ("query", "key", "value")]),
            "out_proj.weight": tensors["mixed.weight"],
            "out_proj.bias": tensors["mixed.bias"],
        }
    )

    def layer(kind, name, *shape):
        made = kind(*shape)
        made.load_state_dict({key: tensors[f"{name}.{key}"] for key in ("weight", "bias")})
        return made

    norm = torch.nn.LayerNorm
    keys = layer(norm, "norm.names", 8)(names)
    attended, _ = attending(layer(norm, "norm.queries", 8)(tensors["queries"]), keys, keys)
    widened = layer(torch.nn.Linear, "wide", 8, 64)(layer(norm, "norm.hidden", 8)(attended))
    expected = attended + layer(torch.nn.Linear, "narrow", 32, 8)(widened[:, :32] * gelu(widened[:, 32:]))
    torch.testing.assert_close(method.generated(tensors), expected)


def test_other_names_give_another_context_and_their_order_does_not_matter():
    encoder = small_encoder()
    tensors = randomised(method_on("fedtpg", encoder))

    def context(*names):
        return method_on("fedtpg", encoder, names).generated(tensors)

    assert (context("cat", "dog", "ship") - context("cat", "dog", "airplane")).abs().max() > 1e-3
    torch.testing.assert_close(context("cat", "dog", "ship"), context("ship", "cat", "dog"))


def test_a_client_trains_with_the_names_of_its_own_classes_only():
    """Classes 0 and 2 of four, against a task that has no other classes; with "all" it is another loss."""
    encoder, names = small_encoder(), ("cat", "dog", "ship", "truck")
    whole, every = (method_on("fedtpg", encoder, names, classes=classes) for classes in ("own", "all"))
    part = method_on("fedtpg", encoder, ("cat", "ship"))
    generator = torch.Generator().manual_seed(0)
    features = {"features": normalize(torch.randn(5, 6, generator=generator), dim=-1)}
    labels = torch.tensor([0, 2, 2, 0, 2])
    tensors = randomised(whole)

    def loss(method, labels):
        samples = Samples(features, labels)
        return method.objective({**tensors, **method.join(samples, generator)}, batch_of(samples))[0]

    torch.testing.assert_close(loss(whole, labels), loss(part, labels // 2))
    assert abs(loss(every, labels) - loss(whole, labels)) > 1e-3
    unlabelled = whole.join(Samples(features, torch.full((5,), -1)), generator)
    assert unlabelled["own_classes"].all()  # a client that cannot tell its classes names all


def test_a_width_that_the_heads_cannot_share_is_refused():
    with pytest.raises(FedVLError, match="4 heads, and the text width of small, 6"):
        FedTPG(FedTPGOptions(), task_of(small_encoder(text_width=6)))


# --- real images


def settings(rate, rounds=5, **further):
    return {"training": {"learning_rate": rate}, "federation": {"rounds": rounds, "threads": 1}, **further}


def test_contexts_that_clients_learn_together_beat_zero_shot_on_real_images():
    """30 times PromptFL's rate and 3 times FedTPG's: at their own, 5 rounds on this small model hardly move anything."""
    for name, rate in (("promptfl", 0.03), ("fedtpg", 0.01)):
        learned, zero_shot = accuracy(name, settings(rate))
        assert learned > zero_shot + 4, name


def test_a_memory_of_ones_own_helps_a_client_with_few_classes():
    skewed = {"data": {"partition": "dirichlet:0.1"}, "evaluation": {"protocol": "personal"}}
    personal, _ = accuracy("pfedprompt", settings(0.03, rounds=2, **skewed))
    common, zero_shot = accuracy("promptfl", settings(0.03, rounds=2, **skewed))
    assert personal > max(common, zero_shot) + 10


@pytest.mark.parametrize("name", ["promptfl", "fedtpg"])
def test_a_new_user_can_ask_about_other_classes(name):
    """Four classes that nobody trained on, from three clients of two classes each: well above guessing (25%)."""
    asked = {"data": {"clients": 3}, "evaluation": {"protocol": "open"}}
    learned, _ = accuracy(name, settings(0.003 if name == "fedtpg" else 0.03, rounds=2, **asked))
    assert learned > 40


def test_a_context_that_begins_as_words_serves_classes_that_nobody_trained_on():
    """Ones drawn at random are mended by training for the trained classes alone; words keep what the model knew."""
    asked = settings(0.001, rounds=2, data={"clients": 3}, evaluation={"protocol": "open"})
    drawn, zero_shot = accuracy("promptfl", asked)
    begun_as_words, _ = accuracy("promptfl", asked, words="a photo of a")
    assert begun_as_words > max(drawn + 10, zero_shot - 5)
