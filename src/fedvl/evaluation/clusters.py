"""Unseen classes without words: images are clustered, and each cluster gets the class that fits the true labels best.

This is how Fed-MP's paper measures plain networks on classes that they were not trained on. The naming is an oracle's:
no user could do it without the labels that are being asked for, so the accuracy is an upper bound.
"""

import warnings

import numpy as np
from numpy.typing import NDArray

from fedvl.errors import FedVLError

RESTARTS = 10  # k-means from as many starts, the tightest wins


def cluster(vectors: NDArray[np.float32], clusters: int) -> NDArray[np.int64]:
    """The cluster of each row by k-means; the same rows always give the same clusters."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if not np.isfinite(vectors).all():
        raise FedVLError("The network's features are not finite and cannot be clustered; lower training.learning_rate.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters: some stay empty
        found = KMeans(min(clusters, len(vectors)), n_init=RESTARTS, random_state=0).fit_predict(vectors)
    return np.asarray(found, dtype=np.int64)


def name_clusters(clusters: NDArray[np.int64], labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """The class of each row when clusters are named so that most rows get their true label; no name is used twice."""
    from scipy.optimize import linear_sum_assignment

    together = np.bincount(clusters * classes + labels, minlength=classes * classes).reshape(classes, classes)
    _, names = linear_sum_assignment(together, maximize=True)
    return np.asarray(names, dtype=np.int64)[clusters]
