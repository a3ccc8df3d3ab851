"""The search for a client that spoils sums ends at that client."""

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from fedvl.config import FederationConfig
from fedvl.deployment.summing import Search, SecureSums


def searched(clients, culprits, least, rounds):
    """The search after each round, until it names a client."""
    search = Search()
    for _ in range(rounds):
        there = [client for client in range(clients) if client not in search.left_out]
        assert len(there) >= least
        search = search.after(not culprits & set(there), there, clients - least)
        yield search
        if search.found is not None:
            return


def rounds_until_found(clients, culprit, least):
    searches = list(searched(clients, {culprit}, least, 2 * clients))
    return searches[-1].found, len(searches)


@pytest.mark.parametrize(("clients", "least"), [(4, 3), (5, 4), (6, 4), (10, 7), (30, 20)])
def test_every_culprit_is_found(clients, least):
    for culprit in range(clients):
        found, _ = rounds_until_found(clients, culprit, least)
        assert found == culprit


def test_ten_clients_take_few_rounds():
    assert max(rounds_until_found(10, culprit, 5)[1] for culprit in range(10)) <= 6


@pytest.mark.parametrize(("clients", "least"), [(4, 3), (5, 4), (6, 4), (10, 7), (10, 5)])
def test_two_culprits_never_make_it_name_an_honest_client(clients, least):
    for pair in combinations(range(clients), 2):
        found = list(searched(clients, set(pair), least, 3 * clients))[-1].found
        assert found is None or found in pair


def test_a_client_is_named_once_no_other_of_a_spoiled_sum_can_be_the_culprit():
    search = Search().after(False, [0, 1, 2, 3], 2)
    search = search.after(False, [2, 3], 2)
    assert (search.suspects, search.left_out, search.found) == ((2, 3), (2,), None)
    search = search.after(False, [0, 1, 3], 2)  # 0 or 1 may be a second culprit
    assert (search.suspects, search.left_out, search.found) == ((3,), (3,), None)
    assert search.after(True, [0, 1, 2], 2).found == 3
    assert search.after(False, [0, 1, 2], 2).found is None


def test_a_culprit_among_clients_of_sound_sums_is_named():
    search = Search().after(False, [0, 1, 2, 3], 2).after(True, [2, 3], 2)
    assert (search.suspects, search.left_out, search.found) == ((0, 1), (0,), None)
    assert search.after(False, [1, 2, 3], 2).found == 1


def test_false_numbers_now_and_then_begin_the_search_again():
    search = Search().after(False, [0, 1, 2], 1).after(True, [1, 2], 1)
    assert search.found == 0
    search = Search().after(False, [0, 1, 2, 3], 2).after(True, [2, 3], 2)
    assert search.after(False, [2, 3], 2) == Search().after(False, [2, 3], 2)
    assert search.after(True, [0, 1], 2) == Search()


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
    search = Search(suspects=(1,), left_out=(1,), spoiled=(1, 2)).after(False, [0, 2, 3], 1)
    assert search.suspects == (0, 2, 3)


def sums(notes, told):
    config = FederationConfig(secure_sum=True, least_clients=3, sum_threshold=0.6)
    log, refuse = SimpleNamespace(append=None), lambda client, reason: told.append((client, reason))
    nothing: Any = None
    return SecureSums(nothing, nothing, config, "run", "experiment", {}, notes, log, refuse, str)  # type: ignore[arg-type]


def test_attempts_of_a_sum_are_counted_before_anything_is_sent_and_after_a_restart(tmp_path):
    begun = sums(tmp_path / "sums.json", [])
    assert [begun._begin("train", 0).attempt for _ in range(3)] == [1, 2, 3]
    assert begun._begin("report", 0).attempt == 1
    assert begun._begin("report", 1).attempt == 1
    again = sums(tmp_path / "sums.json", [])
    assert again._begin("report", 1) == ("experiment", "report", 1, 2)


def test_a_client_is_left_out_once_and_of_further_sums_for_good(tmp_path):
    told: list[tuple[int, str]] = []
    begun = sums(tmp_path / "sums.json", told)
    for _ in range(2):
        begun._exclude(4, "Its numbers are false")
    assert told == [(4, "Its numbers are false; it is left out of the run's further sums")]
    assert sums(tmp_path / "sums.json", told).note.excluded == (4,)


def test_a_sum_needs_the_clients_that_hide_one_and_those_whose_shares_open_it(tmp_path):
    assert [sums(None, []).least(clients) for clients in (3, 4, 5, 10)] == [3, 3, 3, 6]
