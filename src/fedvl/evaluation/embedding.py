"""t-SNE map of the features that a method predicts test samples from."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvl.methods.base import Samples

MOST_POINTS = 500  # more would overlap
PERPLEXITY = 30.0  # scikit-learn's default; lowered for fewer than about 90 points


def embedding_map(vectors: NDArray[np.float32], samples: Samples) -> dict[str, list[Any]]:
    """Return x, y, label and, if modalities may be missing, `present` of evenly spaced samples."""
    from sklearn.manifold import TSNE

    chosen = np.unique(np.linspace(0, len(vectors) - 1, min(MOST_POINTS, len(vectors))).astype(int))
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
