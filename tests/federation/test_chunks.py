"""Clients are shared out to chunks by the shapes of their tensors, and chunks are written to one whole."""

from typing import Any

import numpy as np
import torch

from fedvl.federation.chunks import LABELS, add_columns, places_of, same_form, share_out_to_chunks, stacked_private
from fedvl.federation.stacks import Folded, SampleRows, Stack
from fedvl.methods.roles import Private, Roles

ROLES = Roles({"memory": Private(per_sample=True), LABELS: Private(per_sample=True)})
SHARED = {"w": torch.zeros(2)}


def rows_of_sizes(*sizes):
    ends = np.cumsum(sizes).tolist()
    return SampleRows.of([torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)])


def stack(clients, **tensors):
    return Stack(list(clients), tensors)


def test_clients_are_sorted_by_samples_then_number_and_those_without_are_left_out():
    rows = rows_of_sizes(3, 0, 5, 3, 1)
    chunks = share_out_to_chunks([stack(range(5))], rows, ROLES, 2, SHARED, None)
    assert [chunk.clients for chunk in chunks] == [[2, 0], [3, 4]]
    assert [chunk.used for chunk in chunks] == [[5, 3], [3, 1]]
    assert all(chunk.begins == [SHARED] for chunk in chunks)


def test_clients_with_private_tensors_of_different_shapes_are_in_different_chunks():
    rows = rows_of_sizes(2, 2, 2)
    narrow, wide = stack([0, 2], own=torch.tensor([[1.0], [2.0]])), stack([1], own=torch.tensor([[3.0, 4.0]]))
    chunks = share_out_to_chunks([narrow, wide], rows, ROLES, 10, SHARED, None)
    assert [chunk.clients for chunk in chunks] == [[0, 2], [1]]
    assert chunks[0].private["own"].tolist() == [[1.0], [2.0]]
    assert chunks[1].private["own"].tolist() == [[3.0, 4.0]]


def test_a_tensor_with_a_row_per_sample_is_padded_to_one_more_than_the_largest_client():
    """Stacks differ in how many rows they have, and are stacked all the same."""
    rows = rows_of_sizes(1, 3)
    one, three = stack([0], memory=torch.tensor([[[7.0]]])), stack([1], memory=torch.tensor([[[1.0], [2.0], [3.0]]]))
    (chunk,) = share_out_to_chunks([one, three], rows, ROLES, 10, SHARED, None)
    assert chunk.clients == [1, 0]
    assert chunk.private["memory"].squeeze(-1).tolist() == [[1.0, 2.0, 3.0, 0.0], [7.0, 0.0, 0.0, 0.0]]


def test_samples_labelled_minus_one_are_not_counted():
    rows = rows_of_sizes(3, 2, 2)
    labels = torch.tensor([[-1, 4, -1], [0, 1, -1], [-1, -1, -1]])
    chunks = share_out_to_chunks([stack(range(3), **{LABELS: labels})], rows, ROLES, 10, SHARED, None)
    assert [(chunk.clients, chunk.used) for chunk in chunks] == [([1, 0], [2, 1])]


def test_clients_that_begin_with_states_of_their_own_shapes_get_them():
    rows = rows_of_sizes(1, 2, 3)
    own = {0: {"w": torch.zeros(2)}, 1: {"w": torch.zeros(3)}, 2: {"w": torch.ones(2)}}
    chunks = share_out_to_chunks([stack(range(3))], rows, ROLES, 10, SHARED, own)
    begun = {tuple(chunk.clients): [tensors["w"].tolist() for tensors in chunk.begins] for chunk in chunks}
    assert begun == {(2, 0): [[1.0, 1.0], [0.0, 0.0]], (1,): [[0.0, 0.0, 0.0]]}


def test_places_have_client_samples_stack_and_row():
    (found,) = places_of(7, stack([4, 1, 2]), rows_of_sizes(0, 5, 0, 0, 6), ROLES, None)
    assert found[1].tolist() == [[4, 1], [6, 5], [7, 7], [0, 1]]
    assert list(places_of(0, stack([0]), rows_of_sizes(0), ROLES, None)) == []


def test_rows_are_stacked_in_the_order_that_is_asked_for():
    stacks = [stack([0, 1], a=torch.tensor([[0.0], [1.0]])), stack([2, 3], a=torch.tensor([[2.0], [3.0]]))]
    found = stacked_private(np.array([1, 0, 1]), np.array([1, 0, 0]), stacks, (), 9)
    assert found["a"].tolist() == [[3.0], [0.0], [2.0]]


def test_tensors_are_alike_in_shape_after_the_first_dimension_and_in_type():
    assert same_form(torch.zeros(2, 3), torch.zeros(5, 3))
    assert not same_form(torch.zeros(2, 3), torch.zeros(2, 4))
    assert not same_form(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64))


def test_chunks_are_written_to_their_rows_whether_or_not_these_follow_each_other():
    whole: Any = {}
    add_columns(whole, {"w": torch.tensor([[1.0], [2.0]])}, torch.tensor([1, 2]), torch.ones(2), 5)
    add_columns(whole, {"w": torch.tensor([[3.0], [4.0], [5.0]])}, torch.tensor([0, 4, 3]), torch.ones(3), 5)
    assert whole["w"].tolist() == [[3.0], [1.0], [2.0], [5.0], [4.0]]


def test_rows_with_ends_as_far_apart_as_their_number_need_not_follow_each_other():
    whole: Any = {"w": torch.zeros(4, 1)}
    add_columns(whole, {"w": torch.tensor([[1.0], [2.0], [3.0]])}, torch.tensor([1, 0, 3]), torch.ones(3), 4)
    assert whole["w"].tolist() == [[2.0], [1.0], [0.0], [3.0]]


def test_a_column_of_another_shape_turns_the_whole_into_a_list():
    whole: Any = {}
    add_columns(whole, {"w": torch.tensor([[1.0], [2.0]])}, torch.tensor([0, 2]), torch.ones(2), 3)
    add_columns(whole, {"w": torch.tensor([[3.0, 4.0]])}, torch.tensor([1]), torch.ones(1), 3)
    assert isinstance(whole["w"], list)
    assert [tensor.tolist() for tensor in whole["w"]] == [[1.0], [3.0, 4.0], [2.0]]
    unequal = [torch.tensor([5.0]), torch.tensor([6.0, 7.0])]
    add_columns(whole, {"v": unequal}, torch.tensor([2, 0]), torch.ones(2), 3)
    assert [tensor.tolist() for tensor in whole["v"]] == [[6.0, 7.0], [], [5.0]]


def test_a_folded_tensor_is_summed_with_its_weights():
    whole: Any = {"w": Folded(torch.tensor([1.0, 1.0]), 3)}
    add_columns(whole, {"w": torch.tensor([[1.0, 3.0], [4.0, 5.0]])}, torch.tensor([2, 0]), torch.tensor([1.0, 3.0]), 3)
    assert whole["w"].mean.finish().tolist() == [(1 + 12) / 4, (3 + 15) / 4]
    assert whole["w"].distances.tolist() == [5.0, 0.0, 2.0]
