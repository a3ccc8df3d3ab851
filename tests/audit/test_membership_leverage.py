"""Leverage by hand, and membership from sums of ridge regression."""

import pytest
import torch

from fedvl.audit import membership_leverage
from fedvl.audit.evidence import gather
from fedvl.audit.finding import Finding
from fedvl.audit.membership_leverage import scores_of
from fedvl.display import Silent
from fedvl.methods.parts.moments import packed
from fedvl.runs.settings import resolve_experiment

SECURE = {"federation": {"secure_sum": True, "least_clients": 100}}
PRIVATE = SECURE | {"privacy": {"unit": "record", "epsilon": 3.0}}


def test_scores_by_hand():
    """G = diag(1, 3) and H = [[2, 0], [0, 4]]: leverage 1 / (1 + a) of the first axis, 1 / (3 + a) of the second."""
    sums = {
        "gram": packed(torch.diag(torch.tensor([1.0, 3.0]).double())),
        "cross": torch.diag(torch.tensor([2.0, 4.0])),
    }
    eye = torch.eye(2).double()
    found = scores_of(sums, eye, eye, eye)
    torch.testing.assert_close(found["leverage 1.0"], torch.tensor([-1 / 2, -1 / 4]).double())
    torch.testing.assert_close(found["answer 1.0"], torch.tensor([2 / 2, 4 / 4]).double())
    torch.testing.assert_close(found["both 1.0"], torch.tensor([1 / 2, 3 / 4]).double())
    torch.testing.assert_close(found["along H"], torch.tensor([2.0, 4.0]).double())
    torch.testing.assert_close(found["along G"], torch.tensor([1.0, 3.0]).double())


@pytest.mark.parametrize(
    ("remedies", "least", "most"),
    [({}, 0.99, 1.0), (SECURE, 0.55, 0.8), (PRIVATE, 0.0, 0.6)],
    ids=["none", "sum", "eps"],
)
def test_images_are_found_in_single_sums_and_hardly_in_noised_ones(remedies, least, most):
    settings = {
        "method": {"name": "ridge"},
        "device": "cpu",
        "data": {"dataset": "cifar10-mini", "clients": 100, "partition": "dirichlet:0.1"},
    }
    evidence = gather(resolve_experiment(settings | remedies), 12, 1, Silent())
    found = {each.name: each for each in membership_leverage.attack(evidence) if isinstance(each, Finding)}
    assert least <= found["membership-leverage"].value <= most
    assert set(found["membership-leverage"].items) == {"gram", "cross", "count" if "privacy" in remedies else "counts"}


def test_a_method_without_sums_of_features_is_not_attacked():
    settings = {"method": {"name": "linear"}, "device": "cpu", "data": {"clients": 4}, "federation": {"rounds": 1}}
    evidence = gather(resolve_experiment(settings), 2, 1, Silent())
    assert not [each for each in membership_leverage.attack(evidence) if isinstance(each, Finding)]
