"""Fed-MP's prototypes (eq. 10 to 13): by hand, and against an oracle that keeps every vector in Python lists."""

import math
from typing import Literal

import pytest
import torch
from torch.nn.functional import normalize

from fedvl.errors import FedVLError
from fedvl.methods.parts import prototypes

TEXTS = torch.eye(3)


def unit(*rows):
    return normalize(torch.tensor(rows), dim=-1)


def test_a_session_begins_without_examples():
    session = prototypes.begin_session(TEXTS)
    assert not session["sums"].any()
    assert session["counts"].tolist() == [0, 0, 0]
    assert not prototypes.centroids(session).any()


def test_centroid_is_the_mean_of_the_examples():
    """Eq. 13: (0.6, 0.8, 0) and (1, 0, 0) have the mean (0.8, 0.4, 0)."""
    session = {"sums": torch.tensor([[1.6, 0.8, 0.0], [0.0] * 3, [0.0] * 3]), "counts": torch.tensor([2.0, 0.0, 0.0])}
    torch.testing.assert_close(prototypes.centroids(session)[0], torch.tensor([0.8, 0.4, 0.0]))


def test_scores_by_hand():
    """Eq. 12 for the image (0.6, 0.8, 0) and the centroids (0.8, 0.4, 0), (0, 1, 0) and (0, 0, 1)."""
    session = {
        "sums": torch.tensor([[1.6, 0.8, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0]]),
        "counts": torch.tensor([2.0, 3.0, 1.0]),
    }
    image = unit([3.0, 4.0, 0.0])
    product = 0.6 * 0.8 + 0.8 * 0.4
    for empty in ("levelled", "doubled", "all-or-nothing"):  # no class is empty: all the same
        raw = prototypes.prototype_scores(image, TEXTS, session, empty, unit_centroids=False)
        torch.testing.assert_close(raw, torch.tensor([[0.6 + product, 0.8 + 0.8, 0.0]]))
        cosine = prototypes.prototype_scores(image, TEXTS, session, empty, unit_centroids=True)
        torch.testing.assert_close(cosine, torch.tensor([[0.6 + product / math.sqrt(0.8), 1.6, 0.0]]))


def test_a_class_without_examples():
    """Image (0.6, 0.8, 0); classes 0 and 1 have the example (0, 1, 0): worth 0.8, and 0.2 and 0 above their texts."""
    session = {"sums": torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0] * 3]), "counts": torch.tensor([1.0, 1, 0])}
    image, texts = unit([3.0, 4.0, 0.0]), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.8, 0.0, 0.6]])
    expected: dict[Literal["doubled", "levelled", "all-or-nothing"], list[float]] = {
        "doubled": [0.6 + 0.8, 0.8 + 0.8, 0.48 + 0.48],
        "levelled": [0.6 + 0.8, 0.8 + 0.8, 0.48 + 0.48 + (0.2 + 0.0) / 2],
        "all-or-nothing": [0.6, 0.8, 0.48],
    }
    for empty, scores in expected.items():
        torch.testing.assert_close(
            prototypes.prototype_scores(image, texts, session, empty, unit_centroids=True), torch.tensor([scores])
        )


@pytest.mark.parametrize("empty", ["levelled", "doubled", "all-or-nothing"])
def test_with_no_example_at_all_the_text_decides(empty):
    images = unit(*torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).tolist())
    scores = prototypes.prototype_scores(images, TEXTS, prototypes.begin_session(TEXTS), empty, unit_centroids=True)
    assert torch.equal(scores.argmax(-1), (images @ TEXTS.T).argmax(-1))


def test_judge_by_hand():
    """Two classes at 3 : 1 have an entropy of 0.5623 nats, which is 0.8113 of log 2 (0.8113 bits)."""
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    verdict = prototypes.judge(logits, 0.8114)
    torch.testing.assert_close(verdict.entropy, torch.tensor([0.56234, math.log(2)]), rtol=0, atol=1e-5)
    assert verdict.admitted.tolist() == [True, False]
    assert prototypes.judge(logits, 0.8112).admitted.tolist() == [False, False]


def test_certain_images_are_admitted_although_a_probability_underflows():
    """p log p by itself would be 0 * -inf, NaN, and the surest image would be left out (as in the released code)."""
    verdict = prototypes.judge(torch.tensor([[2000.0, 0.0, -2000.0]]), 0.0)
    assert verdict.entropy.tolist() == [0.0]
    assert verdict.admitted.tolist() == [True]
    assert verdict.labels.tolist() == [0]


def test_one_class_is_always_certain():
    assert prototypes.judge(torch.tensor([[3.0], [-3.0]]), 0.2).admitted.all()


def test_only_admitted_images_join_and_the_old_session_stays():
    images = unit([1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0])
    before = prototypes.begin_session(TEXTS)
    verdict = prototypes.PrototypeVerdict(torch.tensor([1, 1, 0]), torch.zeros(3), torch.tensor([True, True, False]))
    after = prototypes.admit_prototypes(before, images, verdict)
    assert after["counts"].tolist() == [0, 2, 0]
    assert after["sums"][1].tolist() == [1, 1, 0]
    assert not before["sums"].any()
    assert not before["counts"].any()


def test_a_session_of_other_classes_is_refused():
    with pytest.raises(FedVLError, match=r"has shape \(3, 3\), but the query has \(2, 3\).*new session"):
        prototypes.check_session(prototypes.begin_session(TEXTS), TEXTS[:2])
    with pytest.raises(FedVLError, match="new session"):
        prototypes.check_session({"something": TEXTS}, TEXTS)


def naive(batches, texts, scale, uncertainty, pseudo_labels):
    """Eq. 10 to 13 as sets, in plain Python, image after image; examples of a batch count from the next batch on."""

    def cosine(a, b):
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    def likelihood(logits):
        powers = [math.exp(value - max(logits)) for value in logits]
        return [power / sum(powers) for power in powers]

    examples: list[list[list[float]]] = [[] for _ in texts]
    answers = []
    for batch in batches:
        before = [list(found) for found in examples]
        for image in batch:
            scores = []
            for text, found in zip(texts, before, strict=True):
                if found:
                    middle = [sum(column) / len(found) for column in zip(*found, strict=True)]
                    scores.append(cosine(image, text) + cosine(image, middle))
                else:
                    scores.append(2 * cosine(image, text))
            answers.append(scores)
            chosen = [cosine(image, text) for text in texts] if pseudo_labels == "text" else scores
            chances = likelihood([scale * score for score in chosen])
            if -sum(p * math.log(p) for p in chances if p > 0) <= uncertainty * math.log(len(texts)):
                length = math.sqrt(sum(x * x for x in image))
                examples[chances.index(max(chances))].append([x / length for x in image])
    return answers, examples


@pytest.mark.parametrize("pseudo_labels", ["text", "combined"])
@pytest.mark.parametrize("size", [1, 7, 60])
def test_running_centroids_equal_sets_of_all_vectors(size, pseudo_labels):
    generator = torch.Generator().manual_seed(3)
    texts = normalize(torch.randn(4, 6, generator=generator, dtype=torch.float64), dim=-1)
    labels = torch.randint(4, (60,), generator=generator)
    images = texts[labels] + 0.4 * torch.randn(60, 6, generator=generator, dtype=torch.float64)
    session, answers = prototypes.begin_session(texts), []
    for batch in normalize(images, dim=-1).split(size):
        scores = prototypes.prototype_scores(batch, texts, session, "doubled", unit_centroids=True)
        logits = 10.0 * (batch @ texts.T if pseudo_labels == "text" else scores)
        session = prototypes.admit_prototypes(session, batch, prototypes.judge(logits, 0.5))
        answers.append(scores)
    batches = [batch.tolist() for batch in images.split(size)]
    expected, examples = naive(batches, texts.tolist(), 10.0, 0.5, pseudo_labels)
    torch.testing.assert_close(torch.cat(answers), torch.tensor(expected, dtype=torch.float64))
    assert session["counts"].tolist() == [len(found) for found in examples]
    assert 0 < session["counts"].sum() <= 60
    assert size == 60 or session["counts"].all()
