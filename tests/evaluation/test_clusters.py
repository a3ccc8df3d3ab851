"""Clusters, and the names that an oracle gives them."""

import numpy as np
import pytest

from fedvl.errors import FedVLError
from fedvl.evaluation.clusters import cluster, name_clusters


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
