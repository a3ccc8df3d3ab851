"""Measure how far the clients of a round move apart (FedPP, eq. 6 and figure 3)."""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch.nn.functional import cosine_similarity

from fedvl.tensors import Tensors


def drift(before: Sequence[Tensors], after: Sequence[Tensors], names: Sequence[str]) -> dict[str, float]:
    """Return figures for each name; private tensors are known only in simulation."""
    figures = {}
    for name in names:
        shapes = {tensors[name].shape if name in tensors else None for tensors in (*before, *after)}
        if len(after) > 1 and len(shapes) == 1 and None not in shapes:
            ends = [tensors[name].double().flatten() for tensors in after]
            moves = torch.stack([end - start[name].double().flatten() for start, end in zip(before, ends, strict=True)])
            together = moves.sum(0).pow(2).sum()
            if together > 0:  # one client may send the others' moves back, and standing still has no direction
                figures[f"drift_diversity_{name}"] = float(moves.pow(2).sum() / together)  # eq. 6
            cosines = [cosine_similarity(one, other, dim=0) for one, other in combinations(ends, 2)]
            figures[f"cosine_distance_{name}"] = float(1 - torch.stack(cosines).mean())
    return figures
