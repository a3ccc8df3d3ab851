"""Evaluate networks without text on unseen classes: cluster images and match clusters to classes.

This is how Fed-MP's paper evaluates plain networks. The matching uses the true test labels, which
no user has, so the accuracy is an upper bound.
"""

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvl.errors import FedVLError
from fedvl.methods.base import Samples

KMEANS_RESTARTS = 10  # of k-means; the one with the lowest inertia wins


def cluster(vectors: NDArray[np.float32], clusters: int) -> NDArray[np.int64]:
    """Return the k-means cluster of each row; the same rows always give the same clusters."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if not np.isfinite(vectors).all():
        raise FedVLError("The network's features are not finite and cannot be clustered; lower training.learning_rate.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters
        found = KMeans(min(clusters, len(vectors)), n_init=KMEANS_RESTARTS, random_state=0).fit_predict(vectors)
    return np.asarray(found, dtype=np.int64)


def name_clusters(clusters: NDArray[np.int64], labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Return each row's class under the best one-to-one matching of clusters to classes."""
    from scipy.optimize import linear_sum_assignment

    together = np.bincount(clusters * classes + labels, minlength=classes * classes).reshape(classes, classes)
    _, names = linear_sum_assignment(together, maximize=True)
    return np.asarray(names, dtype=np.int64)[clusters]


MAX_POINTS = 500  # more would overlap
PERPLEXITY = 30.0  # scikit-learn's default; lowered for fewer than about 90 points


def embedding_map(vectors: NDArray[np.float32], samples: Samples) -> dict[str, list[Any]]:
    """Return x, y, label and, if modalities may be missing, `present` of evenly spaced samples."""
    from sklearn.manifold import TSNE

    chosen = np.unique(np.linspace(0, len(vectors) - 1, min(MAX_POINTS, len(vectors))).astype(int))
    points = np.zeros((len(chosen), 2))
    if len(chosen) > 3:  # t-SNE needs more than three points
        perplexity = min(PERPLEXITY, (len(chosen) - 1) / 3)
        points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(vectors[chosen])
    found: dict[str, list[Any]] = {
        "x": points[:, 0].round(2).tolist(),
        "y": points[:, 1].round(2).tolist(),
        "label": samples.labels.cpu()[chosen].tolist(),
    }
    if "present" in samples.inputs:
        present = samples.inputs["present"].cpu().numpy()[chosen]
        found["present"] = ["both" if text and image else "text" if text else "image" for text, image in present]
    return found
