"""Metrics of a client: what it answered and refused, and what its images have spent."""

from importlib.util import find_spec

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import request
from helpers.prometheus import read_metrics

from fedvl.deployment.messages import Message
from fedvl.deployment.metrics import Answered
from fedvl.federation.records import Budget


def numbers(answered):
    found = read_metrics(answered.text())
    return {name.removeprefix("fedvl_") + "".join(f" {value}" for _, value in of): v for (name, of), v in found.items()}


def test_answers_and_refusals_are_counted_with_their_bytes():
    answered = Answered(600)
    before = numbers(answered)
    assert (before["images"], before["requests_refused_total"], before["received_bytes_total"]) == (600, 0, 0)
    for number in range(2):
        asked = request(round=number)
        answered.count(Message(asked, b"x" * 100), Message(asked, b"y" * 30), 1.5 + number, [])
    refusal = request(round=7)
    answered.count(
        Message(refusal, b"x"), Message(refusal.model_copy(update={"problem": "Its experiment ends."})), 9.0, []
    )
    found = numbers(answered)
    assert (found["requests_answered_total train"], found["requests_refused_total"]) == (2, 1)
    assert (found["received_bytes_total"], found["sent_bytes_total"]) == (201, 60)
    assert (found["answer_seconds"], found["round"]) == (2.5, 2)
    assert not any(name.startswith("epsilon") for name in found)


def test_the_budget_is_that_of_the_run_answered_last():
    asked, answered = request(run="1"), Answered(600)
    spent = [Budget(unit="record", epsilon=epsilon, delta=1e-5, sampling="") for epsilon in (0.5, 0.75)]
    answered.count(Message(asked), Message(asked), 1.0, spent)
    answered.count(Message(asked), Message(asked), 1.0, None)  # the run is over
    assert numbers(answered)["epsilon_spent record"] == 0.75
    answered.count(Message(request(run="2")), Message(request(run="2")), 1.0, [])
    assert "epsilon_spent record" not in numbers(answered)
