"""What an observer sees of a message: every tensor and number of it, by hand."""

from types import SimpleNamespace

import torch

from fedvl.audit.messages import (
    EXAMPLES,
    LOSS,
    WEIGHT,
    Message,
    Recorder,
    Round,
    low_bits,
    seen_in,
    seen_in_sum,
    subtract,
)
from fedvl.federation.fixed_point import SumOfUpdates
from fedvl.federation.stacks import Trained
from fedvl.methods.base import Update

BEFORE = {"weight": torch.tensor([1.0, 2.0])}
SENT = {"weight": torch.tensor([1.5, 1.0]), "gist": torch.tensor([[3.0]])}
MESSAGE = Message(4, 2, BEFORE, Update(4, SENT, 7.0), 0.25, {"counts": torch.tensor([5.0, 6.0])}, 9)


def test_a_server_sees_the_change_of_shared_tensors_and_everything_else_as_it_is():
    seen = seen_in(MESSAGE)
    assert (seen.client, seen.round_index) == (4, 2)
    assert seen.change.keys() == {"weight"}
    assert seen.change["weight"].tolist() == [0.5, -1.0]
    assert seen.beside["gist"].tolist() == [[3.0]]
    assert seen.beside["report of counts"].tolist() == [5.0, 6.0]
    assert [float(seen.beside[name]) for name in (WEIGHT, LOSS, EXAMPLES)] == [7.0, 0.25, 9.0]
    assert {"low bits of weight", "low bits of gist"} < seen.beside.keys()
    assert seen.items.keys() == seen.change.keys() | seen.beside.keys()


def test_a_tensor_of_another_shape_is_no_change():
    assert subtract({"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(3), "b": torch.zeros(1)}).keys() == {"b"}


def test_the_lowest_eight_bits_of_a_number_are_an_item():
    one = torch.tensor([0x3F800000], dtype=torch.int32)  # 1.0
    assert low_bits((one + 0xA7).view(torch.float32)).tolist() == [0xA7]
    assert low_bits((one + 0x1A7).view(torch.float32)).tolist() == [0xA7]
    assert low_bits(torch.tensor([1.0])).tolist() == [0.0]


def test_of_a_secure_sum_nothing_of_the_client_alone_is_seen():
    total = SumOfUpdates({}, 70.0, 2.5, 10.0)
    after = {"weight": torch.tensor([2.0, 2.0])}
    happened = Round(BEFORE, after, 70.0, False, total, {"counts": torch.tensor([50.0, 60.0])})
    seen = seen_in_sum(MESSAGE, happened)
    assert seen.change["weight"].tolist() == [1.0, 0.0]
    assert seen.beside["report of counts"].tolist() == [50.0, 60.0]
    assert [float(seen.beside[name]) for name in (WEIGHT, LOSS, EXAMPLES)] == [70.0, 2.5, 10.0]
    assert seen.beside.keys() == {"report of counts", WEIGHT, LOSS, EXAMPLES}


def engine(trained):
    """An engine as a recorder knows it: clients send what is given, by round and client."""

    def train(round_index, cohort, shared, own=None):
        return [Trained(Update(client, trained[round_index, client], 2.0 + client), {}, 0.5, 3) for client in cohort]

    names = ("sum_updates", "sum_statistics", "reports", "adopt")
    return SimpleNamespace(federation=SimpleNamespace(sequential=False), train=train, **dict.fromkeys(names))


def test_a_recorder_keeps_the_messages_of_the_first_clients_and_what_each_began_with():
    sent = {(index, client): {"w": torch.tensor([10.0 * index + client])} for index in (1, 2) for client in range(3)}
    watched = engine(sent)
    recorder, shared = Recorder(watched, 2), {"w": torch.zeros(1)}
    watched.train(1, [0, 1, 2], shared)
    first = recorder.end_round(shared, {"w": torch.ones(1)})
    assert (first.weight, first.tailored) == (2.0 + 3.0 + 4.0, False)
    own = {client: {"w": torch.tensor([client - 5.0])} for client in range(3)}
    watched.train(2, [1, 2], {"w": torch.ones(1)}, own)
    watched.train(2, [1], {"w": torch.ones(1)}, own)  # asked again: the latest answer counts
    assert recorder.end_round(shared, shared).tailored
    assert recorder.messages.keys() == {0, 1}, "two clients are kept"
    assert [message.round_index for message in recorder.messages[1]] == [1, 2]
    assert [message.before["w"].item() for message in recorder.messages[1]] == [0.0, -4.0]
    assert [message.update.tensors["w"].item() for message in recorder.messages[1]] == [11.0, 21.0]
    assert (recorder.messages[0][0].loss, recorder.messages[0][0].examples) == (0.5, 3)
