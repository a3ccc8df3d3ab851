"""Rules that merge updates of which some may be hostile.

Each takes the clients' moves (clients x numbers) and weights and returns one move. Rules that
compare clients with each other reject an honest minority too, where clients have different
classes; ``root`` compares them with an update that the server trained on images of its own.
"""

from collections.abc import Callable

import torch
from torch import Tensor

SHARE_OF_LIARS = 0.2  # of the clients that a rule withstands: those that it trims, or does not choose
WEISZFELD_STEPS = 10  # of Weiszfeld's iteration, as Pillutla et al. use few
CLIPPINGS = 3  # of centred clipping in a round
SMALLEST = 1e-6  # distance, so that a move at the median itself can be divided by

Rule = Callable[[Tensor, Tensor], Tensor]


def mean(moves: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, None] * moves).sum(0) / weights.sum()


def median(moves: Tensor, weights: Tensor) -> Tensor:
    """Take the median of each number (Yin et al., 2018)."""
    ordered = moves.sort(0).values
    return (ordered[(len(moves) - 1) // 2] + ordered[len(moves) // 2]) / 2


def trimmed(moves: Tensor, weights: Tensor) -> Tensor:
    """Leave out the largest and smallest fifth of each number (Yin et al., 2018)."""
    cut = int(SHARE_OF_LIARS * len(moves))
    return moves.sort(0).values[cut : len(moves) - cut].mean(0)


def multi_krum(moves: Tensor, weights: Tensor) -> Tensor:
    """Average the moves that are nearest to their neighbours (Blanchard et al., 2017)."""
    hostile = int(SHARE_OF_LIARS * len(moves))
    judges = len(moves) - hostile - 2  # of fewer than five moves none is left out, whatever this is
    distances = torch.stack([(moves - one).square().sum(1) for one in moves]).sort(1).values[:, 1 : judges + 1].sum(1)
    chosen = distances.argsort(stable=True)[: len(moves) - hostile]
    return mean(moves[chosen], weights[chosen])


def geometric_median(moves: Tensor, weights: Tensor) -> Tensor:
    """Minimise the weighted sum of distances, by Weiszfeld's iteration (Pillutla et al., 2022)."""
    centre = median(moves, weights)
    for _ in range(WEISZFELD_STEPS):
        nearness = weights / (moves - centre).norm(dim=1).clamp(min=SMALLEST)
        centre = mean(moves, nearness)
    return centre


def centred_clipping(moves: Tensor, weights: Tensor) -> Tensor:
    """Clip the distances from the centre at their median (Karimireddy et al., 2021)."""
    centre = torch.zeros_like(moves[0])
    for _ in range(CLIPPINGS):
        away = moves - centre
        lengths = away.norm(dim=1).clamp(min=SMALLEST)
        centre = centre + mean(away * (median_length(lengths) / lengths).clamp(max=1)[:, None], weights)
    return centre


def median_length(lengths: Tensor) -> Tensor:
    """Return the median length of those that move: many clients may have nothing to learn."""
    moving = lengths[lengths > SMALLEST]
    return (moving if len(moving) else lengths).median()


RULES: dict[str, Rule] = {
    "mean": mean,
    "median": median,
    "trimmed": trimmed,
    "multi-krum": multi_krum,
    "geometric-median": geometric_median,
    "centred-clipping": centred_clipping,
}


def merged_move(rule: Rule, moves: Tensor, weights: Tensor) -> Tensor:
    """Apply a rule; under any but the mean, no client weighs more than the median client.

    A client declares its own number of examples, and could outweigh all others.
    """
    return rule(moves, weights if rule is mean else weights.clamp(max=float(weights.median())))


def by_root(moves: Tensor, root: Tensor) -> Tensor:
    """Trust moves as far as they point where the server's own does (FLTrust, Cao et al., 2021).

    All are made as long as the server's, so that nobody decides how far the model goes.
    """
    lengths, far = moves.norm(dim=1).clamp(min=SMALLEST), root.norm().clamp(min=SMALLEST)
    # summed one by one: the bits of a matrix product depend on where in memory it is
    trust = ((moves * root).sum(1) / (lengths * far)).clamp(min=0)
    if not trust.sum() > 0:  # nobody agrees with the server: it goes its own way
        return root
    return mean(moves * (far / lengths)[:, None], trust)
