from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvl.evaluation.metrics import (
    accuracy_by_mix,
    confusion_matrix,
    fairness,
    recall_by_class,
    summary,
)

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)


def test_by_hand():
    confusion = confusion_matrix(np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 1, 0]), 3)
    assert confusion.tolist() == [[1, 1, 0], [1, 2, 0], [0, 0, 0]]
    assert summary(confusion)["accuracy"] == 60.0
    assert recall_by_class(confusion) == [50.0, 200 / 3, None]


def test_the_accuracy_of_a_mix_of_classes():
    """A quarter of 80 % and three of 40 %; a class without a recall is left out, and a client without images has none."""
    counts = np.array([[1, 3, 0], [0, 2, 5], [0, 0, 7], [0, 0, 0]])
    assert accuracy_by_mix([80.0, 40.0, None], counts) == [50.0, 40.0, None, None]


@given(pairs=pairs)
def test_the_mix_of_the_test_itself_gives_its_accuracy(pairs):
    labels, predictions = (np.array(side) for side in zip(*pairs, strict=True))
    confusion = confusion_matrix(labels, predictions, 5)
    (found,) = accuracy_by_mix(recall_by_class(confusion), confusion.sum(axis=1)[None])
    assert found == pytest.approx(summary(confusion)["accuracy"])


def test_fairness_by_hand():
    twelve = fairness([70.0, 20.0, *[80.0] * 10])
    assert twelve["worst_client_accuracy"] == 20
    assert twelve["worst_tenth_accuracy"] == 45  # of 12 clients, two
    assert twelve["client_deviation"] == pytest.approx(np.std([70.0, 20.0, *[80.0] * 10]))
    assert fairness([60.0])["worst_tenth_accuracy"] == 60


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """Loaded before the first example is timed."""
    return import_module("sklearn.metrics")


@given(pairs=pairs)
def test_equals_scikit_learn(theirs, pairs):
    labels, predictions = np.array(pairs).T
    ours = summary(confusion_matrix(labels, predictions, 5))
    macro = theirs.precision_recall_fscore_support(labels, predictions, average="macro", zero_division=0)
    precision, recall, f1, _ = macro
    expected = [theirs.accuracy_score(labels, predictions), precision, recall, f1]
    np.testing.assert_allclose(list(ours.values()), 100 * np.array(expected), atol=1e-9)
