"""What each client contributes to a value: leave-one-out and Shapley values.

A game gives each coalition of players a value, such as the accuracy of the model that these clients
train. The Shapley value of a player is its mean marginal value over all orders in which the players
can join (Shapley, 1953): the only division of the total that is efficient, symmetric and additive.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedvl.config import MAX_CLIENTS
from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import student_half
from fedvl.files import Bounds, Content, Count, Finite

Coalition = frozenset[int]
Game = Callable[[Coalition], float]
MAX_EXACT = 12  # players; 2^12 coalitions


class Contributions(Content):
    """contributions.json: each player's share of a total, in the order of the players."""

    players: list[Annotated[int, Field(ge=0, lt=MAX_CLIENTS)]]
    total: Finite  # the value of all players together
    empty: Finite  # the value without any player
    leave_one_out: list[Finite]  # what is lost without the player
    shapley: list[Finite]
    intervals: list[Bounds]  # of 95 %, of the Shapley values; empty where these are exact
    orders: Count  # that were drawn; 0 where all coalitions were valued
    valued: Count  # different coalitions

    @model_validator(mode="after")
    def lengths_agree(self) -> Self:
        lengths = {len(self.players), len(self.leave_one_out), len(self.shapley), len(self.intervals or self.players)}
        if len(lengths) != 1:
            raise ValueError("each client needs one value of each kind")
        return self


def shapley_values(game: Game, players: Sequence[int], orders: int = 0, seed: int = 0) -> Contributions:
    """Return exact Shapley values, or estimates from random ``orders`` with their intervals."""
    if orders == 1:
        raise FedVLError("One order has no interval; draw at least two orders.")
    values = dict[Coalition, float]()

    def value(coalition: Coalition) -> float:
        if coalition not in values:
            values[coalition] = game(coalition)
        return values[coalition]

    everyone = frozenset(players)
    total, empty = value(everyone), value(frozenset())
    left_out = [total - value(everyone - {player}) for player in players]
    if orders:
        shapley, intervals = sampled(value, players, orders, seed)
    else:
        shapley, intervals = exact(value, players), ()
    return Contributions(
        players=list(players),
        total=total,
        empty=empty,
        leave_one_out=left_out,
        shapley=list(shapley),
        intervals=[list(bounds) for bounds in intervals],
        orders=orders,
        valued=len(values),
    )


def exact(value: Game, players: Sequence[int]) -> tuple[float, ...]:
    """Weigh each marginal value by the share of orders in which it occurs: 1 / (n C(n - 1, s))."""
    count = len(players)
    found = []
    for player in players:
        others = [other for other in players if other != player]
        found.append(
            sum(
                (value(frozenset((*group, player))) - value(frozenset(group))) / (count * comb(count - 1, size))
                for size in range(count)
                for group in combinations(others, size)
            )
        )
    return tuple(found)


def sampled(
    value: Game, players: Sequence[int], orders: int, seed: int
) -> tuple[tuple[float, ...], tuple[tuple[float, float], ...]]:
    """Average marginal values over random orders, each walked in both directions.

    The two directions of an order are one observation for the t interval, since they depend on each
    other; their sum telescopes, so that estimates add up to the total as exact values do.
    """
    from fedvl.seeding import numpy_generator  # imports torch, which a report of the values does not need

    generator = numpy_generator(seed, "shapley")
    drawn = np.array([both_directions(value, players, generator.permutation(len(players))) for _ in range(orders)])
    means = drawn.mean(axis=0)
    half = student_half(drawn.std(axis=0, ddof=1), orders)
    return tuple(means.tolist()), tuple(zip((means - half).tolist(), (means + half).tolist(), strict=True))


def both_directions(value: Game, players: Sequence[int], order: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean marginal value of each player along an order and along its reverse."""
    marginal = np.zeros(len(players))
    for direction in (order, order[::-1]):
        joined, before = frozenset[int](), value(frozenset())
        for place in direction.tolist():
            joined |= {players[place]}
            after = value(joined)
            marginal[place] += (after - before) / 2
            before = after
    return marginal
