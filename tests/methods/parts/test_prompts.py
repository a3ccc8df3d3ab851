"""Class texts with a learned context: against the plain text tower, chunk by chunk, and within bounded memory.

What all methods that learn a context have in common is at the end.
"""

import pytest
import torch
from helpers.prompts import PROMPTS, method_on
from helpers.small import batch_of, run_quietly, small_encoder, small_federation, small_method, small_samples
from torch.nn.functional import cross_entropy, normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Samples
from fedvl.methods.parts.prompts import ClassTexts, recomputed
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.tensors import count_elements

NAMES = ["cat", "a very old wooden sailing ship", "dog", "automobile", "red fire truck", "airplane", "frog"]


def plain(encoder, names, context):
    """What the text tower makes of each text by itself, the context among its tokens."""
    return normalize(encoder.encode_text(encoder.tokenise([f"{name}." for name in names]), context), dim=-1)


@pytest.mark.parametrize("model", ["small", "fedvl-tiny"])
def test_a_context_of_real_words_gives_the_feature_of_the_sentence(model):
    encoder = small_encoder() if model == "small" else load_model(model)
    assert isinstance(encoder, DualEncoder)
    words = encoder.embed_tokens(encoder.tokenise(["a photo of a"]))[0, 1:-1]
    found = ClassTexts(encoder, NAMES, len(words)).features(words)
    sentences = encoder.encode_text(encoder.tokenise([f"a photo of a {name}." for name in NAMES]))
    torch.testing.assert_close(found, normalize(sentences, dim=-1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("at_once", [1, 3, 7, 100])
@pytest.mark.parametrize("length", [1, 5])
def test_sharing_the_prefix_and_chunks_change_nothing(at_once, length):
    encoder = small_encoder()
    texts = ClassTexts(encoder, NAMES, length, at_once)
    assert len(texts.chunks) == -(-len(NAMES) // at_once)
    contexts = torch.randn(3, length, encoder.text_width, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(len(NAMES), encoder.dim, generator=torch.Generator().manual_seed(1))

    def gradients(features):
        """One by one, and all in one kernel as the engine does it."""

        def total(context):
            return (features(context) * weights).sum()

        leaves = contexts.clone().requires_grad_()
        (together,) = torch.autograd.grad(torch.func.vmap(total)(leaves).sum(), leaves)
        torch.testing.assert_close(torch.stack([torch.func.grad(total)(c) for c in contexts]), together)
        return together

    torch.testing.assert_close(texts.features(contexts[0]), plain(encoder, NAMES, contexts[0]))
    expected = gradients(lambda context: plain(encoder, NAMES, context))
    torch.testing.assert_close(gradients(texts.features), expected, rtol=1e-4, atol=1e-5)
    assert (expected.abs().amax(-1) > 0).all()  # every token of the context is trained


def test_scores_are_scaled_cosines():
    encoder = small_encoder()
    texts, generator = ClassTexts(encoder, NAMES, 4), torch.Generator().manual_seed(0)
    context, images = texts.start(generator), normalize(torch.randn(5, encoder.dim, generator=generator), dim=-1)
    expected = 10 * torch.nn.functional.cosine_similarity(images[:, None], plain(encoder, NAMES, context)[None], dim=-1)
    torch.testing.assert_close(texts.scores(context, images), expected)


def test_a_context_starts_small_and_by_the_seed():
    texts = ClassTexts(small_encoder(text_width=512), NAMES, 16)
    first, again, other = (texts.start(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert first.shape == (16, 512)
    assert abs(float(first.std()) - 0.02) < 0.001
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_context_may_begin_as_words():
    encoder = small_encoder()
    texts = ClassTexts(encoder, NAMES, None, words="a photo of a")
    start = texts.start(torch.Generator().manual_seed(0))
    assert texts.context == len(start) == 4
    sentences = encoder.encode_text(encoder.tokenise([f"a photo of a {name}." for name in NAMES]))
    torch.testing.assert_close(texts.features(start), normalize(sentences, dim=-1), rtol=0, atol=2e-6)
    start.zero_()
    assert texts.start(torch.Generator()).abs().max() > 0  # training one client's context leaves the words as they are


def test_words_are_repeated_to_the_length_of_a_context():
    encoder = small_encoder()
    four = ClassTexts(encoder, NAMES, None, words="a photo of a").start(torch.Generator())
    assert torch.equal(ClassTexts(encoder, NAMES, 6, words="a photo of a").words, torch.cat([four, four[:2]]))
    assert torch.equal(ClassTexts(encoder, NAMES, 3, words="a photo of a").words, four[:3])


def saved_bytes(texts):
    """What a forward pass keeps for the backward pass."""
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = texts.features(texts.start(torch.Generator().manual_seed(0)).requires_grad_())
    return sum(kept.values()), features.numel() * features.element_size()


def test_memory_does_not_grow_with_the_classes_but_for_their_features():
    encoder = small_encoder()
    names = [f"thing {number}" for number in range(200)]
    few, few_features = saved_bytes(ClassTexts(encoder, names[:100], 4, at_once=10))
    many, many_features = saved_bytes(ClassTexts(encoder, names, 4, at_once=10))
    whole, _ = saved_bytes(ClassTexts(encoder, names, 4, at_once=200))
    assert many - few <= 3 * (many_features - few_features)  # the features before and after they are made unit vectors
    assert whole > 5 * many


def test_recomputing_gives_the_same_derivatives_of_every_input():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*shape, generator=generator).double() for shape in ((4, 3, 2), (4, 2)))

    def directly(x, y):
        return torch.sin(x * y).exp()

    def gradients(function):
        return torch.func.grad(lambda x, y: function(x, y).sum(), (0, 1))

    def again(x, y):
        return recomputed(directly, x, y)

    torch.testing.assert_close(gradients(again)(left[0], right[0]), gradients(directly)(left[0], right[0]))
    batched = (torch.func.vmap(gradients(function))(left, right) for function in (again, directly))
    torch.testing.assert_close(*batched)


def test_16_bit_products_are_recomputed_in_16_bits():
    """Outside of autocast, where a backward pass runs, the second pass would not be the first one's."""
    encoder = small_encoder()
    context = torch.randn(4, encoder.text_width, generator=torch.Generator().manual_seed(0))
    images = normalize(torch.randn(7, encoder.dim, generator=torch.Generator().manual_seed(1)), dim=-1)

    def gradient(at_once, mixed):
        def loss(context):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                return cross_entropy(ClassTexts(encoder, NAMES, 4, at_once).scores(context, images), torch.arange(7))

        leaf = context.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)[0]

    exact, chunked = gradient(100, False), gradient(2, True)
    assert chunked.dtype == torch.float32
    assert 0 < (chunked - exact).norm() < 0.1 * exact.norm()


def test_a_name_that_leaves_no_room_for_the_context_is_refused_with_what_to_do():
    encoder = small_encoder()  # 32 positions
    long = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    with pytest.raises(
        FedVLError, match=r"'one two three.* of the 32 text positions of small.*method.context=\d"
    ) as error:
        ClassTexts(encoder, ["cat", long], 16)
    room = int(str(error.value).split("method.context=")[1].split(" ")[0])
    ClassTexts(encoder, ["cat", long], room)
    with pytest.raises(FedVLError):
        ClassTexts(encoder, ["cat", long], room + 1)
    with pytest.raises(FedVLError, match="shorter class names"):
        ClassTexts(encoder, ["cat", f"{long} {long} {long}"], 1)


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


@pytest.mark.parametrize("name", PROMPTS)
def test_class_names_without_room_for_the_context_are_refused(name):
    with pytest.raises(FedVLError, match=r"leaves no room for a context of 30 tokens; use --set method.context=28 or"):
        method_on(name, small_encoder(), context=30)
