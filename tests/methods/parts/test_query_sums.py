"""Fed-MP's merge for a query from sums: by hand, and against the exact ratio of eq. 9."""

import torch

from fedvl.methods.parts.query_sums import (
    PLACE_SCALE,
    directions_of,
    first_places,
    place_of,
    settled,
    tailored_to_query,
    times,
)


def test_directions_are_those_in_which_texts_differ_most():
    texts = torch.tensor([[5.0, 3.0, 0.0], [5.0, -3.0, 0.0], [5.0, 0.0, 1.0]])
    found = directions_of(texts, 4)
    assert found.shape == (2, 3)  # three texts differ in two directions
    torch.testing.assert_close(found @ found.T, torch.eye(2))
    assert found[0].abs().argmax() == 1
    assert directions_of(texts, 1).shape == (1, 3)
    assert directions_of(texts[:1], 4).shape == (1, 3)


def test_a_sum_and_a_query_by_hand():
    """Clients at (0.5, 0.1) and (0.3, 0.5) move by 4 and 2: products 2, 0.4 and 0.6, 1, less those of the means 0.4, 0.3 and 3."""
    start = {"directions": torch.eye(3)[:2], "place": torch.zeros(2), "w": torch.ones(1), "tilt.w": torch.zeros(2, 1)}
    places = [
        place_of(start["directions"], torch.tensor(texts))
        for texts in ([[0.5, 0.1, 9.0]], [[0.0, 1.0, 0.0], [0.6, 0.0, 1.0]])
    ]
    torch.testing.assert_close(torch.stack(places) / PLACE_SCALE, torch.tensor([[0.5, 0.1], [0.3, 0.5]]))
    products = [times(place, torch.tensor([move])) for place, move in zip(places, (4.0, 2.0), strict=True)]
    torch.testing.assert_close(products[0], torch.tensor([[2.0], [0.4]]))
    mean = {"directions": 7 * torch.ones(2, 3), "place": torch.stack(places).mean(0), "w": torch.tensor([4.0])}
    found = settled(start, {**mean, "tilt.w": torch.stack(products).mean(0)})
    torch.testing.assert_close(found["tilt.w"], torch.tensor([[1.3 - 0.4 * 3], [0.7 - 0.3 * 3]]))
    assert torch.equal(found["directions"], start["directions"])  # whatever noise did to their mean
    assert not found["place"].any()
    merged = tailored_to_query(found, torch.tensor([0.5, 0.5, 7.0]))
    assert merged.keys() == {"w"}
    torch.testing.assert_close(merged["w"], torch.tensor([4.0 + 0.5 * 0.1 - 0.5 * 0.2]))


def test_sums_give_the_exact_ratio_up_to_second_order():
    """Clients whose texts differ half as much are merged four times as exactly; some do not move at all."""
    generator = torch.Generator().manual_seed(1)
    offsets = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    gates, query = torch.randn(5, 4, generator=generator).double(), torch.tensor([0.3, -0.8, 0.5]).double()
    gates[:2] = 0
    errors = []
    for size in (0.1, 0.05):
        texts = size * offsets
        weights = torch.softmax(texts @ query, 0)
        directions = torch.eye(3, dtype=torch.float64)
        places = [place_of(directions, own[None]) for own in texts]
        products = torch.stack([times(place, gate) for place, gate in zip(places, gates, strict=True)]).mean(0)
        before = {"directions": directions, "place": torch.zeros(3), "w": torch.zeros(4), "tilt.w": torch.zeros(3, 4)}
        mean = {"directions": directions, "place": torch.stack(places).mean(0), "w": gates.mean(0), "tilt.w": products}
        errors.append(float((tailored_to_query(settled(before, mean), query)["w"] - weights @ gates).norm()))
    assert 3.5 < errors[0] / errors[1] < 4.5


def test_sums_begin_at_zero():
    found = first_places({"w": torch.ones(2, 3)}, torch.randn(6, 5), 4)
    assert found["directions"].shape == (4, 5)
    assert found["tilt.w"].shape == (4, 2, 3)
    assert not found["tilt.w"].any()
    assert not found["place"].any()
