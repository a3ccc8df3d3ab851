"""Own, base and new classes: candidate sets and means, against values computed by hand."""

from typing import Any

import numpy as np
import pytest
from helpers.runs import OPENER, prepare

from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.base_to_new import Hits, figures_with_intervals, harmonic_mean, kept, mean_intervals, set_figures
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment


def test_means_of_local_base_and_new() -> None:
    """HM3 and CM are of a client's images among all base classes; among its own they do not count."""
    found = set_figures(99.0, 90.0, 60.0, 40.0)
    assert found["hm3"] == pytest.approx(3 / (1 / 90 + 1 / 60 + 1 / 40))  # 56.84
    assert found["hm2"] == pytest.approx(48.0)
    assert found["cm"] == pytest.approx((90 + 48) / 2)
    assert harmonic_mean(100.0, 0.0) == 0.0


def test_published_rows_follow_from_their_own_accuracies() -> None:
    """FedMGP's CM of FedTPG from its rounded Local, Base and Novel; pFedMMA's paper averages HM over datasets."""
    assert set_figures(0.0, 71.62, 71.91, 68.32)["cm"] == pytest.approx(70.66, abs=0.3)
    assert set_figures(0.0, 92.53, 16.84, 31.66)["cm"] == pytest.approx(57.10, abs=0.6)


def test_per_image_correctness_is_read_back_as_it_was() -> None:
    hits = Hits(
        np.array([0, -1, 1]),
        np.array([1.0, 0.0, 1.0]),
        np.array([0.0, 0.0, 1.0]),
        np.array([0.5, 1.0, 0.25]),
        np.array([1.0]),
    )
    assert kept(hits).to_dict() == {
        "owner": [0, -1, 1],
        "own": "1-1",
        "local": "0-1",
        "base": [500, 1000, 250],
        "new": [1000],
    }
    whole = Hits(np.array([0, 1]), np.ones(2), np.zeros(2), np.full(2, 0.5), np.full(2, 0.25))
    found = mean_intervals([kept(whole)] * 2)
    assert [tuple(found[name]) for name in ("own", "local", "base", "new")] == [
        (share,) * 2 for share in (100, 0, 50, 25)
    ]


def test_intervals_draw_images_again_and_hold_the_figure() -> None:
    generator = np.random.default_rng(1)
    owner = np.arange(400) % 4
    hits = Hits(owner, *((generator.random(400) < share).astype(float) for share in (0.9, 0.7, 0.6, 0.4)))
    for row in figures_with_intervals(hits, None):
        low, high = row.interval
        assert low < row.accuracy < high
        assert "zero_shot_accuracy" not in row.to_dict()
    own, local, base, new, *_ = figures_with_intervals(hits, None)
    # A share of 400 images has a standard error of about 100 sqrt(p (1 - p) / 400).
    for row, share in ((own, 0.9), (local, 0.7), (base, 0.6), (new, 0.4)):
        width = row.interval[1] - row.interval[0]
        assert width == pytest.approx(2 * 1.96 * 100 * np.sqrt(share * (1 - share) / 400), rel=0.25)


def settings(method: str, **options: Any) -> dict[str, Any]:
    return {
        "method": {"name": method, **options},
        "data": {"clients": 2, "shots": 8, "test_shots": 10},
        "federation": {"rounds": 1},
        "evaluation": {"protocol": "base-to-new"},
    }


@pytest.mark.parametrize("method", ["fedtpg", "fedotp"])
def test_a_run_states_candidates_and_figures(tmp_path: Any, method: str) -> None:
    with RunFolder.create(tmp_path / "run", resolve_experiment(settings(method))) as folder:
        result = complete(folder, Silent(), OPENER)
    sets = result.candidate_sets
    assert sets["base"] == [["airplane", "automobile", "bird", "cat", "deer"]]
    assert sets["new"] == [["dog", "frog", "horse", "ship", "truck"]]
    assert sorted(name for own in sets["own"] for name in own) == sets["base"][0]
    assert [len(own) for own in sets["own"]] == [3, 2]
    rows = {row.name: row for row in result.base_to_new}
    assert result.accuracy == pytest.approx(rows["own"].accuracy)
    assert set_figures(*(rows[name].accuracy for name in ("own", "local", "base", "new"))) == pytest.approx(
        {name: row.accuracy for name, row in rows.items()}
    )
    assert rows["base"].zero_shot_accuracy > 20
    assert sum(map(sum, result.confusion)) == 50
    assert folder.result == result  # as it is read back, checked


def test_a_method_that_knows_its_classes_alone_is_refused() -> None:
    with pytest.raises(FedVLError, match="'linear' cannot name classes that it was not trained on"):
        prepare(settings("linear"))
