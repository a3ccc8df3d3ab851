"""The scores of membership, each against values by hand; the regression against scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import normalize

from fedvl.audit.candidates import Part, Signature
from fedvl.audit.membership_scores import PENALTY, deviations, logistic, matched_weights, told_by_score
from fedvl.audit.scores import Item

GENERATOR = torch.Generator()


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=GENERATOR.manual_seed(seed))


def item_of(delta, name="tensor", raw=None):
    """An item of 40 candidates, of which the last 20 are known; classes alternate."""
    part = Part.of((delta.shape[1], delta.shape[2]), 10**6)
    return Item(name, Signature(delta if raw is None else raw, delta, part), torch.arange(40) % 2, slice(20, 40))


def scores_of(item, message, centre=None, count=20):
    return dict(item.scores(message, centre, count))


def test_leverage_tells_the_rows_that_a_matrix_spans():
    features = normalize(drawn(40, 30), dim=1)
    item = item_of(torch.einsum("ni,nj->nij", features, features))
    gram = features[:6].T @ features[:6]
    found = scores_of(item, gram)["span of rows 0.0001"]
    assert found[:6].min() > found[6:].max() + 2
    # a direction outside the span has the largest leverage there is, 1 / floor, in proportion to what lies outside
    basis = torch.linalg.svd(gram, full_matrices=False).Vh[:6]
    outside = 1 - (features[10] @ basis.T).square().sum()
    assert float(found[10]) == pytest.approx(float(-(outside / 1e-4).log()), abs=0.05)


def test_leverage_is_also_of_columns():
    features = drawn(40, 30)
    codes = drawn(40, 4, seed=1)
    item = item_of(torch.einsum("ni,nj->nij", features, codes))  # 30 x 4: features are columns
    message = features[:2].T @ codes[:2]
    found = scores_of(item, message)
    assert found["span of columns 0.0001"][:2].min() > found["span of columns 0.0001"][2:].max() + 2


def test_whitening_takes_out_what_images_have_in_common():
    common = drawn(1, 50, seed=2)
    strength = 10 * drawn(40, 1, seed=3)
    own = drawn(40, 50, seed=4)
    item = item_of((strength * common + own)[:, None])
    message = own[:3].sum(0)[None] + 30 * common
    found = scores_of(item, message)
    plain, white = found["cosine"], found["whitened 0.01"]
    assert white[:3].mean() > white[3:].mean() + 2 * white[3:].std()
    assert (plain[:3].mean() - plain[3:].mean()).abs() < plain[3:].std()


def test_a_row_that_was_copied_is_the_nearest_wherever_it_stands():
    features = drawn(40, 1, 16)
    found = scores_of(item_of(features), drawn(9, 16, seed=5).index_copy(0, torch.tensor([4]), features[7]))
    assert int(found["nearest row"].argmax()) == 7
    assert float(found["nearest row"][7]) == pytest.approx(-np.log(1e-6), abs=0.1)  # as near as can be told
    assert "cosine" not in found  # of another number of rows


def test_a_number_that_was_copied_is_the_nearest():
    hashes = torch.rand(40, 1, 1, generator=GENERATOR.manual_seed(6))
    message = torch.cat([torch.rand(1, 30, generator=GENERATOR), hashes[3]], dim=1)
    found = scores_of(item_of(hashes), message)
    assert int(found["nearest number"].argmax()) == 3


def test_low_bits_are_compared_number_by_number():
    bits = torch.randint(256, (40, 2, 64), generator=GENERATOR.manual_seed(7)).float()
    message = torch.randint(256, (5, 64), generator=GENERATOR).float()
    message[2] = bits[11, 1]
    message[2, ::2] += 1  # half of them are spoiled
    found = scores_of(item_of(bits, "low bits of tensor"), message)
    assert list(found) == ["equal"]
    assert int(found["equal"].argmax()) == 11
    assert 0.3 < float(found["equal"][11]) < 0.7


def test_no_score_depends_on_how_an_item_is_scaled():
    delta, message = drawn(40, 3, 20), drawn(3, 20, seed=8)
    plain, tiny = (scores_of(item_of(scale * delta), scale * message) for scale in (1.0, 1e-6))
    for name, found in plain.items():
        assert torch.allclose(found, tiny[name], rtol=1e-3, atol=1e-3), name


def test_an_item_that_is_the_same_for_all_candidates_does_not_vary():
    assert not item_of(torch.ones(40, 2, 3)).varies
    assert item_of(drawn(40, 2, 3)).varies


def test_of_a_large_item_a_part_is_compared():
    part = Part.of((100, 64), 640)
    assert (len(part.rows), len(part.columns), part.share) == (10, 64, 0.1)
    assert Part.of((2, 1000), 500).share == pytest.approx(0.25)
    assert Part.of((10, 64), 640).share == 1.0


def test_deviations_are_by_class_and_by_images_outside():
    scores = torch.tensor([1.0, 3.0, 2.0, 10.0, 30.0, 20.0, 5.0])
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 0])
    free = torch.tensor([True] * 6 + [False])
    found = deviations(scores, labels, free)
    assert found.tolist() == pytest.approx([-1, 1, 0, -1, 1, 0, 3])  # (5 - 2) / 1
    assert deviations(scores, labels, free)[6] <= 12


def test_images_outside_have_the_classes_of_those_inside():
    labels, inside = torch.tensor([0, 0, 1, 0, 1, 1, 2]), torch.tensor([True] * 3 + [False] * 4)
    assert matched_weights(labels, inside).tolist() == [1, 1, 1, 2, 0.5, 0.5, 0]


def test_a_score_tells_members_on_average_or_a_few_surely():
    generator = np.random.default_rng(0)
    inside = torch.from_numpy(np.arange(1000) < 200)
    noise = torch.from_numpy(generator.standard_normal(1000))
    weights = torch.ones(1000)
    assert told_by_score(noise, inside, weights) < 3
    assert told_by_score(noise + 0.5 * inside, inside, weights) > 3
    few = noise.clone()
    few[:12] += 10  # 6 % of the members, which hardly move the mean rank
    assert told_by_score(few, inside, weights) > 3


def test_the_regression_is_scikit_learns():
    table = drawn(300, 3).double()
    inside = (table @ torch.tensor([1.0, -0.5, 0.0]).double() + drawn(300, seed=9) > 0).double()
    weights = torch.rand(300, generator=GENERATOR).double() + 0.5
    wanted = LogisticRegression(C=1 / PENALTY, tol=1e-10, max_iter=1000)
    wanted.fit(table.numpy(), inside.numpy(), sample_weight=weights.numpy())
    assert logistic(table, inside, weights).numpy() == pytest.approx(wanted.coef_[0], abs=1e-4)
