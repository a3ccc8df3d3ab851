"""Names of classes in a message: what is sent arrives, and what a stranger made is refused or made visible."""

import json

import pytest
import torch

from fedvl.deployment.class_lists import MAX_CLASS_NAME, MAX_NAMED_CLASSES, names_as_tensors, names_of_tensors
from fedvl.errors import FedVLError


def sent(content):
    return {"names": torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)}


def test_names_arrive_as_they_were_sent():
    names = ["Melanoma", "Fußpilz 🔬", "naevus, benign"]
    assert names_of_tensors(names_as_tensors(names)) == names
    assert names_of_tensors(names_as_tensors([])) == []
    assert names_of_tensors(names_as_tensors(["x" * 500])) == ["x" * MAX_CLASS_NAME]


def test_what_cannot_be_seen_is_written_out():
    assert names_of_tensors(sent(["a\x1b[2J", "b\u202ec"])) == ["a\\x1b[2J", "b\\u202ec"]


@pytest.mark.parametrize(
    "tensors, problem",
    [
        ({}, "unexpected format"),
        ({"names": torch.zeros(3)}, "unexpected format"),
        ({"names": torch.zeros(1, 3, dtype=torch.uint8)}, "unexpected format"),
        ({**sent(["a"]), "more": torch.zeros(1)}, "unexpected format"),
        (sent({"a": 1}), "not a list of short texts"),
        (sent([1]), "not a list of short texts"),
        (sent([""]), "not a list of short texts"),
        (sent(["x" * (MAX_CLASS_NAME + 1)]), "not a list of short texts"),
        (sent(["x"] * (MAX_NAMED_CLASSES + 1)), "not a list of short texts"),
        ({"names": torch.full((9,), 255, dtype=torch.uint8)}, "not a list of short texts"),
    ],
)
def test_what_is_no_list_of_names_is_refused(tensors, problem):
    with pytest.raises(FedVLError, match=problem):
        names_of_tensors(tensors)
