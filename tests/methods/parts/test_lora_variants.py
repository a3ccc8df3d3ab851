"""Merging low-rank factors: against dense products, with values computed by hand."""

import pytest
import torch
from torch.nn.functional import pad

from fedvl.methods.parts.lora_variants import VARIANTS, Factors, Pair, factorised, padded, stacked

FACTORS = Factors({"text": (2, 6)}, 1, (1, 3), torch.zeros(0), 5)


def pair(rank: int, seed: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(2, 1, rank, 6, generator=generator),
        torch.randn(2, 1, 6, rank, generator=generator),
    )


def product(factors: Pair) -> torch.Tensor:
    return factors[1] @ factors[0]


def test_a_is_uniform_within_one_over_root_width_and_b_is_0():
    drawn = FACTORS.drawn(3, torch.Generator().manual_seed(0))
    assert not drawn["text.B"].any()
    assert 0.3 < float(drawn["text.A"].abs().max()) <= 6**-0.5
    assert (drawn["text.A"].shape, drawn["text.B"].shape) == ((2, 1, 3, 6), (2, 1, 6, 3))


def test_averaged_factors_are_not_the_mean_of_products():
    updates = [pair(3, 1), pair(3, 2)]
    a, b = VARIANTS["fedit"](FACTORS).merge(pair(3, 0), updates, [0.25, 0.75])
    torch.testing.assert_close(a, 0.25 * updates[0][0] + 0.75 * updates[1][0])
    torch.testing.assert_close(b, 0.25 * updates[0][1] + 0.75 * updates[1][1])
    assert (b @ a - 0.25 * product(updates[0]) - 0.75 * product(updates[1])).norm() > 0.1


def test_a_stack_beyond_full_rank_is_the_product_itself():
    weighted = [(pair(3, 1), 0.25), (pair(3, 2), 0.75)]
    expected = 0.25 * product(weighted[0][0]) + 0.75 * product(weighted[1][0])
    full = stacked(weighted)
    assert full[0].shape[-2] == 6
    torch.testing.assert_close(product(full), expected)
    wide = stacked([*weighted, (pair(1, 3), 2.0)])
    torch.testing.assert_close(wide[0], expected + 2 * product(pair(1, 3)))
    assert torch.equal(wide[1], torch.eye(6).expand(2, 1, 6, 6))


def test_flora_adds_to_what_was_there_and_flexlora_replaces_it():
    before, update = pair(3, 0), pair(3, 1)
    torch.testing.assert_close(
        product(VARIANTS["flora"](FACTORS).merge(before, [update], [1.0])), product(before) + product(update)
    )
    torch.testing.assert_close(
        product(VARIANTS["flexlora"](FACTORS).merge(before, [update], [1.0])), product(update), rtol=1e-4, atol=1e-5
    )


def test_the_nearest_factors_come_largest_first() -> None:
    product = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    a, b = factorised(product, 3)
    sizes = torch.linalg.svdvals(product)
    torch.testing.assert_close((product - b @ a).norm(dim=(-2, -1)), sizes[:, 3:].norm(dim=-1))  # Eckart and Young
    torch.testing.assert_close((product - b[..., :2] @ a[..., :2, :]).norm(dim=(-2, -1)), sizes[:, 2:].norm(dim=-1))
    torch.testing.assert_close(a.norm(dim=-1), torch.ones(2, 3))


def test_padded_factors_are_weighted_by_the_norm_of_their_product():
    first, second = pair(1, 2), pair(3, 3)
    norms = [float(product(one).norm()) for one in (first, second)]
    share = norms[0] / sum(norms)
    a, b = padded([first, second], 3)
    torch.testing.assert_close(a, share * pad(first[0], (0, 0, 0, 2)) + (1 - share) * second[0])
    torch.testing.assert_close(b, share * pad(first[1], (0, 2)) + (1 - share) * second[1])
    zero = torch.zeros(1, 1, 2, 4)
    assert not padded([(zero, zero.mT)], 2)[0].isnan().any()


@pytest.mark.parametrize(
    ("variant", "shared", "roles"),
    [
        ("fedit", ("A", "B"), set()),
        ("ffa", ("B",), set()),
        ("fedsa", ("A",), {"text.B"}),
        ("hetlora", ("A", "B"), {"text.A", "text.B"}),
        ("flexlora", ("A", "B"), {"text.A", "text.B"}),
        ("flora", ("A", "B"), {"text.A", "text.B", "stack.text.A", "stack.text.B"}),
    ],
)
def test_what_travels_in_each_variant(variant: str, shared: tuple[str, ...], roles: set[str]) -> None:
    found = VARIANTS[variant](FACTORS)
    assert (found.shared, set(found.roles())) == (shared, roles)


def test_clients_take_ranks_in_turn():
    method = VARIANTS["hetlora"](FACTORS)
    shared = dict(zip(("text.A", "text.B"), pair(3, 0), strict=True))
    assert [method.hand_out(shared, client)["text.A"].shape[-2] for client in range(4)] == [1, 3, 1, 3]
