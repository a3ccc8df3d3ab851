"""A temperature that was put into scores is found again, from shares alone."""

import pytest
import torch

from fedvl.evaluation.calibration import fit_temperature


@pytest.mark.parametrize("temperature", [0.005, 0.02, 1.0, 40.0])
def test_the_temperature_of_made_up_shares_is_found(temperature: float) -> None:
    scores = torch.randn(200, 9, generator=torch.Generator().manual_seed(0)) * temperature * 3
    assert fit_temperature(scores, torch.softmax(scores / temperature, -1)) == pytest.approx(temperature, rel=1e-3)
