"""Private tensors in stores: a dictionary of clients, whatever shapes they have."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvl.federation.private_tensors import PrivateTensors
from fedvl.federation.stacks import Stack
from fedvl.tensors import digest


class Model:
    """A dictionary that a store is compared with."""

    def __init__(self):
        self.store, self.plain = PrivateTensors(), {}

    def put(self, clients, size, value):
        tensors = {"t": torch.full((len(clients), size), float(value)), "n": torch.arange(len(clients)) + value}
        self.store.put(Stack(clients, tensors))
        self.plain |= {
            c: {name: tensor[row].clone() for name, tensor in tensors.items()} for row, c in enumerate(clients)
        }


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True), st.integers(0, 3)),
            st.integers(0, 6),
        ),
        max_size=12,
    )
)
def test_private_tensors_are_a_dictionary(actions):
    model = Model()
    for number, action in enumerate(actions):
        if isinstance(action, int):
            model.store.pop(action, None)
            model.plain.pop(action, None)
        else:
            clients, size = action
            model.put(clients, size, number)
    assert set(model.store) == set(model.plain)
    assert {c: digest(own) for c, own in model.store.items()} == {c: digest(own) for c, own in model.plain.items()}
    found = {
        c: {n: t[row] for n, t in s.tensors.items()}
        for s in model.store.stacks(range(7))
        for row, c in enumerate(s.clients)
    }
    assert {c: digest(own) for c, own in found.items()} == {c: digest(own) for c, own in model.plain.items()}


def test_what_is_read_of_a_store_does_not_change_with_it():
    store = PrivateTensors()
    store[3] = {"t": torch.zeros(2)}
    before = store[3]
    store[3] = {"t": torch.ones(2)}
    assert before["t"].tolist() == [0, 0]


def test_all_are_looked_at_again_after_one_is_gone():
    store = PrivateTensors()
    store[1] = {"t": torch.zeros(2)}
    store[3] = {"t": torch.zeros(2)}
    assert store.changed() is None  # the first look is at all
    store[3] = {"t": torch.ones(2)}
    assert store.changed() == {3}
    assert store.changed() == set()
    store[1] = {"t": torch.ones(2)}
    del store[3]
    assert store.changed() is None
    assert store.changed() == set()
    store.clear()
    assert store.changed() is None
