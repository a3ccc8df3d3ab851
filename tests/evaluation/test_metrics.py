import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, precision_recall_fscore_support

from fedvl.evaluation.metrics import confusion_matrix, recall_by_class, summary

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)


def test_by_hand():
    confusion = confusion_matrix(np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 1, 0]), 3)
    assert confusion.tolist() == [[1, 1, 0], [1, 2, 0], [0, 0, 0]]
    assert summary(confusion)["accuracy"] == 60.0
    assert recall_by_class(confusion) == [50.0, 200 / 3, None]


@given(pairs)
def test_equals_scikit_learn(pairs):
    labels, predictions = np.array(pairs).T
    ours = summary(confusion_matrix(labels, predictions, 5))
    precision, recall, f1, _ = precision_recall_fscore_support(labels, predictions, average="macro", zero_division=0)
    expected = [accuracy_score(labels, predictions), precision, recall, f1]
    np.testing.assert_allclose(list(ours.values()), 100 * np.array(expected), atol=1e-9)
