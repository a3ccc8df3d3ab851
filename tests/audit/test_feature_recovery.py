"""Feature recovery: exact of one image, some of a few, nothing of noise."""

import pytest
import torch
from helpers.audited import WIDTH, evidence_of, silenced
from torch.nn.functional import normalize

from fedvl.audit.feature_recovery import attack, separate
from fedvl.audit.finding import SERVER, Finding, Unmeasured


def figures(evidence):
    return {each.name: each for each in attack(evidence) if isinstance(each, Finding)}


@pytest.mark.parametrize("method", ["linear", "cachefl"])
def test_a_single_image_comes_back_whole(method):
    found = figures(evidence_of(method, rounds=1))
    assert found["one-image-recovery"].value > 0.95
    assert found["one-image-linking"].value > 0.95
    assert found["one-image-linking"].leaks


def test_few_images_of_different_classes_come_back_too():
    generator = torch.Generator().manual_seed(0)
    features = normalize(torch.rand(4, WIDTH, generator=generator) ** 8, dim=1).double()
    known = normalize(torch.rand(300, WIDTH, generator=generator) ** 8, dim=1).double()
    change = torch.tensor([[1, 0.1, 0, 0], [0, 1, 0.1, 0.1], [0.1, 0, 1, 0], [0, 0.1, 0, -1]]).double() @ features
    found = separate(change, 4, known)
    assert ((features @ found.T).abs().amax(1) > 0.95).all()


def test_noise_holds_no_feature():
    found = figures(silenced(evidence_of(rounds=1)))
    assert not found["feature-recovery"].leaks


def test_a_method_that_reads_no_features_is_not_attacked():
    evidence = evidence_of(rounds=1)
    inputs = evidence.training.samples.inputs
    inputs["pixels"] = inputs.pop("features")
    outcomes = [each for each in attack(evidence) if each.view == SERVER]
    assert outcomes
    assert all(isinstance(each, Unmeasured) and "no features" in each.sentence for each in outcomes)
