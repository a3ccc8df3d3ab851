"""Runs that follow from the sums of others equal runs on exactly the images that remain."""

import numpy as np
import pytest
import torch
from helpers.closed_form import finished, largest_difference, settings
from PIL import Image

from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.statistics import statistics_over
from fedvl.runs.preparation import prepare
from fedvl.runs.settings import resolve_experiment
from fedvl.runs.update import added, by_sums, grown, subtracted, with_addition
from fedvl.runs.withdrawal import without_client
from fedvl.seeding import torch_generator
from fedvl.tensors import load

LEAVING = 1


@pytest.fixture
def more(tmp_path):
    """Images of two known classes and of one that is new."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 4), ("test", 1)):
        for name in ("cat", "ship", "teapot"):
            place = tmp_path / "more" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return str(tmp_path / "more")


@pytest.mark.parametrize("client", [None, 3])
def test_an_update_equals_a_run_on_all_images(tmp_path, more, client):
    old = finished(tmp_path / "old", resolve_experiment(settings()))
    experiment = with_addition(old.experiment, more, client)
    new = finished(tmp_path / "new", experiment, added(old))
    everything = finished(tmp_path / "all", experiment)
    assert largest_difference(new, everything) < 1e-10
    assert new.result.class_names[-1] == "teapot"
    assert new.result.accuracy == everything.result.accuracy
    assert new.result.clients == (6 if client is None else 5)


def test_two_updates_in_turn_equal_a_run_on_all_images(tmp_path, more):
    old = finished(tmp_path / "old", resolve_experiment(settings()))
    once = finished(tmp_path / "once", with_addition(old.experiment, more, None), added(old))
    experiment = with_addition(once.experiment, "emoji-mini", 0)
    twice = finished(tmp_path / "twice", experiment, added(once))
    assert largest_difference(twice, finished(tmp_path / "all", experiment)) < 1e-10


def test_a_withdrawal_equals_a_run_without_the_client(tmp_path):
    old = finished(tmp_path / "old", resolve_experiment(settings()))
    experiment = without_client(old.experiment, LEAVING)
    new = finished(tmp_path / "new", experiment, subtracted(old, LEAVING))
    assert largest_difference(new, finished(tmp_path / "again", experiment)) < 1e-10
    assert largest_difference(new, old) > 1e-3


def test_what_was_added_can_be_withdrawn(tmp_path, more):
    old = finished(tmp_path / "old", resolve_experiment(settings()))
    new = finished(tmp_path / "new", with_addition(old.experiment, more, None), added(old))
    back = finished(tmp_path / "back", without_client(new.experiment, 5), subtracted(new, 5))
    first, last = (load(folder.file("model.safetensors"))["server/gram"] for folder in (old, back))
    assert float((first - last).abs().max()) < 1e-10


def test_under_secure_aggregation_the_difference_is_that_of_whole_numbers(tmp_path):
    old = finished(tmp_path / "old", resolve_experiment(settings(secure_sum=True)))
    experiment = without_client(old.experiment, LEAVING)
    new = finished(tmp_path / "new", experiment, subtracted(old, LEAVING))
    assert largest_difference(new, finished(tmp_path / "again", experiment)) < 1e-6


def test_the_server_learns_the_total_of_all_changes_between_two_sums(tmp_path, more):
    """Of a client that leaves alone its own sums; if another adds images in the same exchange, not."""
    old = finished(tmp_path / "old", resolve_experiment(settings(secure_sum=True)))
    remaining = without_client(old.experiment, LEAVING)
    alone = finished(tmp_path / "alone", remaining)
    with_others = finished(tmp_path / "with-others", with_addition(remaining, more, 3))
    prepared = prepare(old.experiment, Silent())
    start = prepared.method.start(torch_generator(0, "start"))
    own = statistics_over(prepared.method, prepared.training.samples, prepared.training.rows[LEAVING], start)["gram"]
    sums = [load(folder.file("model.safetensors"))["server/gram"] for folder in (old, alone, with_others)]
    torch.testing.assert_close(sums[0] - sums[1], own, rtol=0, atol=1e-6)
    assert float((sums[0] - sums[2] - own).norm()) > 0.1 * float(own.norm())


def test_only_one_exchange_without_noise_follows_from_sums():
    assert by_sums(resolve_experiment(settings()))
    assert not by_sums(resolve_experiment({"method": {"name": "linear"}}))
    assert not by_sums(resolve_experiment({**settings(), "privacy": {"unit": "record", "epsilon": 3}}))


@pytest.mark.parametrize(
    "drawn",
    [{"evaluation": {"validation": 0.2}}, {"data": {"label_noise": "pair:0.2"}}],
)
def test_settings_that_would_be_drawn_anew_are_refused(drawn):
    with pytest.raises(FedVLError, match="drawn anew"):
        with_addition(resolve_experiment({**settings(), **drawn}), "more/", None)


def test_sums_grow_by_zeros_and_never_shrink():
    grows = grown({"cross": torch.ones(2, 3).double()}, {"cross": (2, 4)})
    assert grows["cross"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    for wrong in ({"cross": torch.ones(2, 5)}, {"cross": torch.ones(2)}, {}):
        with pytest.raises(FedVLError, match="not of its method"):
            grown(wrong, {"cross": (2, 4)})
