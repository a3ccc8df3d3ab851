"""A map of the test samples: what a method reads its answers from, laid out in the plane by t-SNE."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvl.methods.base import Samples

MOST_POINTS = 500  # more only blacken the picture
PERPLEXITY = 30.0  # scikit-learn's own; fewer than three times as many points ask for less


def embedding_map(vectors: NDArray[np.float32], samples: Samples) -> dict[str, list[Any]]:
    """x, y, label and, where modalities may lack, which are there ("both", "text", "image"), of evenly spaced samples."""
    from sklearn.manifold import TSNE

    chosen = np.unique(np.linspace(0, len(vectors) - 1, min(MOST_POINTS, len(vectors))).astype(int))
    points = np.zeros((len(chosen), 2))
    if len(chosen) > 3:  # no map of fewer
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
