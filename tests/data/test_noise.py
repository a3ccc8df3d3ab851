"""Wrong labels: as many at each client as was asked for, and of the right kind."""

import numpy as np
import pytest

from fedvl.data.noise import Noise, with_wrong_labels
from fedvl.errors import FedVLError

LABELS = np.tile(np.arange(4), 50)
CLIENTS = [np.arange(40), np.arange(40, 150), np.arange(150, 150)]


def noisy(text: str, seed: int = 0) -> np.ndarray:
    return with_wrong_labels(LABELS, CLIENTS, 4, Noise.parse(text), seed)


@pytest.mark.parametrize("kind", ["symmetric", "pair"])
def test_a_share_of_each_client_is_wrong_and_nobody_else(kind: str) -> None:
    changed = noisy(f"{kind}:0.4") != LABELS
    assert [int(changed[rows].sum()) for rows in CLIENTS] == [16, 44, 0]
    assert not changed[150:].any()
    assert not np.array_equal(noisy(f"{kind}:0.4"), noisy(f"{kind}:0.4", seed=1))


def test_a_pair_is_the_next_class_and_symmetric_noise_any_other() -> None:
    steps = {kind: (noisy(f"{kind}:1") - LABELS)[:150] % 4 for kind in ("pair", "symmetric")}
    assert set(steps["pair"]) == {1}
    assert set(steps["symmetric"]) == {1, 2, 3}
    assert np.allclose(np.bincount(steps["symmetric"])[1:], 50, atol=25)


def test_unknown_labels_stay_unknown() -> None:
    labels = np.array([0, -1, 1, -1])
    found = with_wrong_labels(labels, [np.arange(4)], 2, Noise.parse("symmetric:1"), 0)
    assert found.tolist() == [1, -1, 0, -1]


@pytest.mark.parametrize("text", ["symmetric", "pair:1.2", "other:0.1", "symmetric:nan", "pair:x"])
def test_other_noise_is_refused(text: str) -> None:
    with pytest.raises(FedVLError, match="use symmetric:SHARE or pair:SHARE"):
        Noise.parse(text)
