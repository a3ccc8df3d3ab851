"""What a function of the user's sees of a round, and that it changes nothing."""

from pathlib import Path

import pytest
import torch

from fedvl.errors import FedVLError
from fedvl.federation.records import Record
from fedvl.runs.looking import look


def watch(on_round, shared=None, private=None):
    look(on_round, Record(round=3, cohort=[0, 2]), shared or {}, private or {}, Path("runs/mine"))


def test_it_sees_the_record_and_copies_and_no_client_without_private_tensors():
    seen = []
    shared, private = {"w": torch.tensor([1.0])}, {0: {"own": torch.tensor([2.0])}, 2: {}}

    def change(record, tensors, own):
        seen.append((record.round, dict(tensors), {client: dict(each) for client, each in own.items()}))
        record.cohort.append(9)
        tensors["w"].zero_()
        own[0]["own"].zero_()

    record = Record(round=3, cohort=[0, 2])
    look(change, record, shared, private, Path("runs/mine"))
    assert [found[0] for found in seen] == [3]
    assert set(seen[0][2]) == {0}
    assert (shared["w"].item(), private[0]["own"].item(), record.cohort) == (1.0, 2.0, [0, 2])


def test_what_it_sets_in_torch_is_put_back():
    before = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    state = torch.get_rng_state()

    def disturb(*seen):
        torch.set_num_threads(before[0] + 1)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.set_grad_enabled(False)
        torch.manual_seed(7)

    watch(disturb)
    assert (torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()) == before
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failure_names_the_function_the_round_and_the_way_on():
    def count(*seen):
        raise KeyError("weights\nand more")

    with pytest.raises(FedVLError) as error:
        watch(count)
    assert str(error.value) == (
        "on_round=count failed after round 3 with KeyError: 'weights\\nand more'; the round is committed, so mend the "
        'function and go on by fedvl.resume("runs/mine", on_round=count).'
    )


def test_ctrl_c_in_it_is_not_an_error_of_it():
    def stop(*seen):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(stop)
