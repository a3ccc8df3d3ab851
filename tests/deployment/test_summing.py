"""The search for a client that spoils sums ends at that client."""

import pytest

from fedvl.deployment.summing import Search


def rounds_until_found(clients, culprit, least):
    search, rounds = Search(), 0
    while search.found is None:
        rounds += 1
        assert rounds <= 2 * clients
        there = [client for client in range(clients) if client not in search.left_out]
        assert len(there) >= least
        search = search.after(culprit not in there, there, clients - least)
    return search.found, rounds


@pytest.mark.parametrize(("clients", "least"), [(4, 3), (5, 4), (6, 4), (10, 7), (30, 20)])
def test_every_culprit_is_found(clients, least):
    for culprit in range(clients):
        found, _ = rounds_until_found(clients, culprit, least)
        assert found == culprit


def test_ten_clients_take_few_rounds():
    assert max(rounds_until_found(10, culprit, 5)[1] for culprit in range(10)) <= 6


def test_a_sound_sum_begins_no_search():
    assert Search().after(True, [0, 1, 2], 1) == Search()


def test_without_room_nobody_is_left_out():
    search = Search().after(False, [0, 1, 2], 0)
    assert (search.left_out, search.found) == ((), None)


def test_by_hand():
    search = Search().after(False, [0, 1, 2, 3], 1)
    assert (search.suspects, search.left_out) == ((0, 1, 2, 3), (0,))
    search = search.after(False, [1, 2, 3], 1)  # not client 0
    assert (search.suspects, search.left_out) == ((1, 2, 3), (1,))
    search = search.after(True, [0, 2, 3], 1)  # the sum without client 1 is sound
    assert search.found == 1


def test_a_search_that_ran_out_of_suspects_begins_again():
    search = Search(suspects=(1,), left_out=(1,)).after(False, [0, 2, 3], 1)
    assert search.suspects == (0, 2, 3)
