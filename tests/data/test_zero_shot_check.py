"""Labels against the model's answers: exchanged and unconfirmed classes, and a model that knows too little."""

import numpy as np
import pytest

from fedvl.data.zero_shot_check import CERTAIN, MIN_IMAGES, OF_CLASS, of_classes, ranked, sample

NAMES = ["bird", "cat", "dog", "ship"]


def answers(labels, knows=(0, 1, 2, 3), seed=0, bias=0.0):
    """Logarithms of shares: each image of a known class ranks higher in its own, and cats are named too often."""
    scores = np.random.default_rng(seed).normal(0, 1, (len(labels), len(NAMES)))
    for row, label in enumerate(labels):
        scores[row, label] += 3 if label in knows else 0
    scores[:, 1] += bias
    return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)


def kinds(logs, labels):
    faults, note = of_classes(logs, labels, np.arange(len(labels)), NAMES)
    return [(fault.kind, fault.sentence) for fault in faults], note


TRUE = np.repeat(np.arange(4), 30)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("bias", [0.0, 4.0])
def test_right_labels_raise_no_alarm_though_the_model_prefers_a_class(seed, bias):
    assert kinds(answers(TRUE, seed=seed, bias=bias), TRUE) == ([], "")


def test_exchanged_classes_are_named():
    given = TRUE.copy()
    given[TRUE == 1], given[TRUE == 3] = 3, 1
    found, note = kinds(answers(TRUE), given)
    assert [kind for kind, _ in found] == ["exchanged"]
    assert "most images of cat for ship" in found[0][1]
    assert note == ""


def test_a_class_of_images_of_others_is_not_confirmed():
    given = TRUE.copy()
    shown = TRUE.copy()
    shown[TRUE == 2] = np.arange(30) % 2  # the folder of dogs has birds and cats
    found, _ = kinds(answers(shown), given)
    assert [kind for kind, _ in found] == ["labels"]
    assert "label dog" in found[0][1]


def test_a_model_that_knows_too_little_says_nothing():
    found, note = kinds(answers(TRUE, knows=()), TRUE)
    assert found == []
    assert "knows too little" in note


def test_few_images_say_nothing():
    few = np.repeat(np.arange(4), [30, MIN_IMAGES - 1, MIN_IMAGES - 1, MIN_IMAGES - 1])
    assert kinds(answers(few), few) == (
        [],
        f"Labels were not compared: fewer than two classes have {MIN_IMAGES} images.",
    )


def test_each_class_is_sampled_up_to_a_limit():
    labels = np.repeat([0, 1, 2], [OF_CLASS + 9, 5, 1])
    chosen = sample(labels, 3)
    assert np.bincount(labels[chosen]).tolist() == [OF_CLASS, 5, 1]
    assert chosen.tolist() == sorted(set(chosen.tolist()))


def test_ranks_of_ten_against_ten_reach_certainty():
    """Of 184,756 orders one has all of the ten first."""
    values, inside = np.arange(20.0), np.arange(20) >= 10
    assert ranked(values, inside, ~inside) == pytest.approx(1 / 184756)
    assert ranked(values, inside, ~inside) < CERTAIN
