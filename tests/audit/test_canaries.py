"""Empirical epsilon: the bound of a sound mechanism stays below its claim, broken ones are found."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.audited import evidence_of

from fedvl.audit.canaries import amplitude, coefficients, empirical_epsilon, plant
from fedvl.config import PrivacyConfig

COUPLED = Path(__file__).parents[1] / "helpers" / "coupled.py"
RECORD = PrivacyConfig(unit="record", epsilon=2.0)
CLIENT = PrivacyConfig(unit="client", epsilon=2.0, clip=0.01)
SETTINGS: dict[str, dict[str, Any]] = {
    "record": {"privacy": RECORD},
    "client": {"privacy": CLIENT},
    "client, its clip found": {"privacy": CLIENT.model_copy(update={"clip": None})},
    "client, sampled": {"privacy": CLIENT, "clients": 20, "federation": {"per_round": 10}},
    "client in shares": {"privacy": CLIENT, "secure_sum": True},
}


def measured(seed=0, **settings):
    found = empirical_epsilon(evidence_of(rounds=3, seed=seed, **settings))
    assert found is not None
    return found


@pytest.mark.parametrize("unit", SETTINGS)
def test_the_bound_of_a_sound_mechanism_is_below_its_claim_and_says_something(unit):
    found = [measured(seed, **SETTINGS[unit]) for seed in range(8)]
    bounds = [each.bound for each in found]
    assert max(bounds) <= 2.0
    assert np.median(bounds) > (0.0 if "sampled" in unit else 0.05)
    first = found[0]
    assert first.spent == pytest.approx(2.0, abs=1e-3)
    assert first.rounds == 3
    assert not any(each.violated for each in found)
    assert f"Measured: at least {first.bound:.2f} at 95% confidence" in first.sentence
    assert "does not prove it" in first.sentence


def weak(deviation_of):
    """Noise of a tenth of the deviation."""

    def less(*arguments, **named):
        return {name: tensor / 10 for name, tensor in deviation_of(*arguments, **named).items()}

    return less


@pytest.mark.parametrize("unit", ["record", "client", "client, its clip found"])
def test_noise_ten_times_too_small_is_found(unit, monkeypatch):
    from fedvl.federation import privacy

    monkeypatch.setattr(privacy, "noise_for", weak(privacy.noise_for))
    found = measured(**SETTINGS[unit])
    assert found.violated
    assert found.bound > 2.0
    assert "The claimed guarantee does not hold." in found.sentence


def test_a_share_of_noise_ten_times_too_small_is_found(monkeypatch):
    from fedvl.federation.privacy import ClientPrivacy

    share = ClientPrivacy.share
    monkeypatch.setattr(ClientPrivacy, "share", lambda self, *arguments: share(self, *arguments) / 10)
    assert measured(**SETTINGS["client in shares"]).violated


def test_gradients_that_are_not_cut_are_found(monkeypatch):
    def uncut(gradients, mask, clip, unit):
        return {name: torch.tensordot(mask, gradient, 1) for name, gradient in gradients.items()}

    monkeypatch.setattr("fedvl.federation.steps.row_gradients", uncut)
    assert measured(**SETTINGS["record"]).violated


def test_an_image_that_changes_the_loss_of_all_others_is_found():
    """The broken sensitivity of FedTPG at record level: epsilon 1 is claimed."""
    settings: dict[str, Any] = {"privacy": RECORD.model_copy(update={"epsilon": 1.0}), "clients": 200, "skew": 0.05}
    assert not measured(**settings).violated
    assert measured(method=COUPLED, **settings).violated


def test_no_coin_changes_the_number_of_a_clients_batches():
    evidence = evidence_of(rounds=1, images=23, batch_size=10, privacy=RECORD)
    samples, planted = plant(evidence)
    for each in planted:
        fewest, most = len(each.base), len(each.base) + len(each.canaries)
        assert -(-fewest // 10) == -(-most // 10) == 3
        assert len(each.rows) == fewest + each.included.sum()
    rows = torch.cat([each.canaries for each in planted])
    assert len(torch.unique(rows)) == len(rows)
    assert rows.min() == len(evidence.training.samples)
    assert (samples.labels[rows] != evidence.own.labels[: len(rows)]).all()
    coins = np.concatenate([each.included for each in planted])
    assert 0.3 < coins.mean() < 0.7


def test_coefficients_are_of_least_squares_with_their_precision():
    generator = torch.Generator().manual_seed(0)
    effects = torch.randn(4, 500, generator=generator).double()
    change = effects.T @ torch.tensor([5.0, 1.0, 0.0, 2.0]).double()
    noise = 0.5 * torch.randn(500, generator=generator).double()
    found, precision = coefficients(effects, change + noise)
    assert found == pytest.approx(np.array([1.0, 0.0, 2.0]), abs=0.1)
    # of directions that hardly meet: the square of an effect's length over that of the noise
    assert precision == pytest.approx(np.full(3, 500 / 0.25), rel=0.3)


def test_the_amplitude_is_that_of_the_half_that_is_in():
    generator = np.random.default_rng(0)
    included, precision = generator.random(300) < 0.5, np.full(300, 100.0)
    found = 0.8 * included + 0.1 * generator.standard_normal(300)
    assert amplitude(found, precision) == pytest.approx(0.8, rel=0.15)


def test_without_noise_there_is_nothing_to_check():
    assert empirical_epsilon(evidence_of(rounds=1)) is None
