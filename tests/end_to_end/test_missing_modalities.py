"""The missing-modality protocol from dataset to result."""

import json
from typing import Any

import pytest
import torch
from helpers.runs import prepare, run_experiment

from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment

SMALL: dict[str, Any] = {"device": "cpu", "data": {"shots": 4, "clients": 3}, "method": {"name": "fed-prime"}}


@pytest.fixture(scope="module")
def prepared():
    return prepare(SMALL)


def test_training_samples_lack_the_share_and_their_text_is_the_empty_one(prepared):
    inputs, encoder = prepared.training.samples.inputs, prepared.method.task.fused
    share = 1 - inputs["present"].float().mean(0)
    torch.testing.assert_close(share, torch.tensor([0.35, 0.35]), atol=1 / len(inputs["present"]), rtol=0)
    without = ~inputs["present"][:, 0]
    nothing = encoder.tokenise([""])
    assert (inputs["tokens"][without][:, : nothing.shape[1]] == nothing).all()
    assert (encoder.text_mask(inputs["tokens"]).sum(1) == nothing.shape[1]).equal(without)


def test_the_test_is_asked_under_seven_conditions_of_the_same_samples(prepared):
    conditions = prepared.test.conditions
    present = {name: samples.inputs["present"] for name, samples in conditions.items()}
    assert list(present) == ["as trained", "miss-text", "miss-image", "miss-both", "full", "text-only", "image-only"]
    assert present["as trained"].equal(present["miss-both"])
    assert present["full"].all()
    assert present["text-only"].all(0).tolist() == [True, False]
    assert not present["text-only"][:, 1].any()
    assert not present["image-only"][:, 0].any()
    for samples in conditions.values():
        assert samples.labels.equal(prepared.test.samples.labels)
        assert samples.inputs["pixels"].equal(prepared.test.samples.inputs["pixels"])


def test_by_client_every_client_lacks_the_share():
    training = prepare({**SMALL, "data": {**SMALL["data"], "missing": "text:0.5", "missing_by": "client"}}).training
    for rows in training.rows:
        lacking = int((~training.samples.inputs["present"][rows, 0]).sum())
        assert lacking == round(0.5 * len(rows))


@pytest.mark.slow
def test_a_run_tells_all_conditions_and_no_zero_shot_accuracy(tmp_path):
    from fedvl.display import TerminalDisplay

    settings = {**SMALL, "data": {**SMALL["data"], "test_shots": 3}, "federation": {"rounds": 1}}
    with TerminalDisplay(quiet=True) as display:
        run_experiment(resolve_experiment(settings), tmp_path, display)
    result = json.loads((tmp_path / "result.json").read_text())
    figures = {row["condition"]: row["accuracy"] for row in result["conditions"]}
    assert len(figures) == 7
    assert figures["as trained"] == figures["miss-both"] == result["accuracy"]
    assert result["zero_shot_accuracy"] is None
    points = result["embedding"]
    assert len(points["x"]) == len(points["label"]) == sum(map(sum, result["confusion"]))
    assert set(points["present"]) <= {"both", "text", "image"}


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"method": {"name": "fed-prime"}, "model": {"name": "fedvl-tiny"}}, "needs a fused model"),
        ({"method": {"name": "linear"}, "model": {"name": "fedvl-tiny-vilt"}}, "needs a CLIP-like model"),
        ({"method": {"name": "linear"}, "data": {"missing": "both:0.7"}}, "reads images alone"),
        ({"method": {"name": "linear"}, "evaluation": {"protocol": "missing"}}, "reads images alone"),
        ({"method": {"name": "fed-prime"}, "data": {"labels": "cps"}}, "Pseudo-labels need a CLIP-like model"),
        ({"method": {"name": "fed-prime"}, "data": {"dataset": "cifar10-mini"}}, "needs a text with each image"),
        ({"method": {"name": "fed-prime"}, "data": {"missing": "sound:0.7"}}, "for example both:0.7"),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(settings, sentence):
    with pytest.raises(FedVLError, match=sentence):
        prepare({"device": "cpu", **settings})
