"""Scores of cosines, in full precision also where training runs in bfloat16."""

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> torch.autocast:
    """Compute in a tensor's own dtype: the scale of scores would magnify what bfloat16 loses."""
    return torch.autocast(tensor.device.type, enabled=False)


def cosine_scores(scale: float, images: Tensor, texts: Tensor) -> Tensor:
    """Return scale <image, text> of unit vectors, rows x classes."""
    with full_precision(images):
        return scale * images @ texts.mT
