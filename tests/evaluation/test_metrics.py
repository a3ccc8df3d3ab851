from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvl.evaluation.metrics import confusion_matrix, recall_by_class, summary

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)


def test_by_hand():
    confusion = confusion_matrix(np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 1, 0]), 3)
    assert confusion.tolist() == [[1, 1, 0], [1, 2, 0], [0, 0, 0]]
    assert summary(confusion)["accuracy"] == 60.0
    assert recall_by_class(confusion) == [50.0, 200 / 3, None]


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
