"""Pictures: found again where pixels follow from features, not where they do not."""

import torch

from fedvl.audit.picture import Decoder, picture_findings, upright


def images(count, seed, features=None):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 12, generator=generator).double() if features is None else features
    maps = torch.randn(12, 3 * 8 * 8, generator=torch.Generator().manual_seed(0)).double()
    return features, (0.5 + 0.04 * features @ maps).view(-1, 3, 8, 8)


def figures(found, originals, others, mean):
    return {each.name: each for each in picture_findings(found, originals, others, mean)}


def test_pixels_that_follow_from_features_come_back():
    known, own = images(100, 1)
    wanted, originals = images(20, 2)
    found = figures(Decoder(known, own).pictures(wanted), originals, images(80, 3)[1], own.mean(0))
    assert found["picture"].value > 30
    assert found["picture"].leaks
    assert found["picture-linking"].value == 1.0


def test_unrelated_features_give_no_picture():
    known, own = images(100, 1)
    _, originals = images(20, 2)
    unrelated, _ = images(20, 4)
    found = figures(Decoder(known, own).pictures(unrelated), originals, images(80, 3)[1], own.mean(0))
    assert not found["picture"].leaks
    assert not found["picture-linking"].leaks


def test_a_feature_that_came_back_upside_down_is_turned():
    known = torch.tensor([[1.0, 0.1], [0.9, 0.2]])
    assert (upright(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), known)[:, 0] > 0).all()
