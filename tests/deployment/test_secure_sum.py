"""The protocol of secure sums: the sum comes out, whoever is lost when; what is asked beyond it is refused."""

from importlib.util import find_spec

import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from fedvl.deployment.secure_sum import (
    COHORT,
    MASKED,
    ROSTER,
    SHARES,
    SURVIVORS,
    Collected,
    Credentials,
    Entry,
    Member,
    as_tensor,
    read_roster,
)
from fedvl.errors import FedVLError

CLIENTS, LENGTH = 5, 12
RUN, PURPOSE = "a" * 32, "train 0"


def vouched(entry, content):
    """In place of a party's signature: what it signed, as text."""
    if entry.signature != content.hex()[:200]:
        raise FedVLError("It is not signed by its party.")


def credentials():
    return Credentials(lambda content: content.hex()[:200], vouched)


@pytest.fixture
def members(tmp_path):
    for client in range(CLIENTS):
        (tmp_path / str(client)).mkdir()
    return [Member(RUN, client, tmp_path / str(client), credentials(), 3) for client in range(CLIENTS)]


def roster_of(members):
    return as_tensor([entry for member in members for entry in read_roster(member.entry()[ROSTER])])


NUMBERS = torch.arange(CLIENTS * LENGTH).reshape(CLIENTS, LENGTH) * 1_000_003


def answers_of(members, numbers=NUMBERS):
    roster = roster_of(members)
    return {m.client: m.mask(PURPOSE, m.read(roster), numbers[m.client]) for m in members}, members[0].read(roster)


@pytest.mark.parametrize("lost", [[], [0], [4], [1, 3]])
def test_the_sum_comes_out_without_those_who_were_lost_before_it(lost, members):
    answers, keys = answers_of(members)
    collected = Collected({client: answer for client, answer in answers.items() if client not in lost}, LENGTH)
    assert collected.lost == lost
    reveals = {client: members[client].reveal(PURPOSE, keys, asked) for client, asked in collected.requests().items()}
    opened = collected.open(reveals)
    assert list(opened.clients) == collected.survivors
    assert torch.equal(opened.total, NUMBERS[collected.survivors].sum(0))


@pytest.mark.parametrize("silent", [[0], [4], [1, 3]])
def test_the_sum_comes_out_though_some_are_lost_after_it(silent, members):
    answers, keys = answers_of(members)
    collected = Collected(answers, LENGTH)
    reveals = {
        client: members[client].reveal(PURPOSE, keys, asked)
        for client, asked in collected.requests().items()
        if client not in silent
    }
    assert torch.equal(collected.open(reveals).total, NUMBERS.sum(0))


def test_one_share_too_few_opens_nothing(members):
    answers, keys = answers_of(members)
    collected = Collected(answers, LENGTH)
    reveals = {c: members[c].reveal(PURPOSE, keys, asked) for c, asked in collected.requests().items()}
    three = {client: reveals[client] for client in (0, 1)}
    with pytest.raises(FedVLError, match="2 shares do not open a mask that needs 3"):
        collected.open(three)


def test_losses_before_and_after_the_sum_leave_nothing_to_read(members):
    answers, keys = answers_of(members)
    collected = Collected({client: answers[client] for client in (0, 1, 2, 3)}, LENGTH)
    reveals = {c: members[c].reveal(PURPOSE, keys, asked) for c, asked in collected.requests().items() if c != 2}
    with pytest.raises(FedVLError, match="Clients 4 were lost before the sum and 2 before it could be opened"):
        collected.open(reveals)


def test_what_the_server_has_of_one_client_says_nothing(members):
    """Its masked numbers differ with every run, and share no number with what is masked."""
    answers, _ = answers_of(members)
    for client, answer in answers.items():
        assert not set(answer[MASKED].tolist()) & set(NUMBERS[client].tolist())
        assert set(answer) == {COHORT, MASKED, SHARES}


def test_a_client_that_answers_again_for_an_earlier_cohort_is_left_out_not_mixed_in(members):
    answers, keys = answers_of(members)
    other, _ = answers_of(members[:3])
    answers[2] = other[2]
    collected = Collected(answers, LENGTH)
    assert (collected.survivors, collected.lost) == ([0, 1, 3, 4], [2])
    reveals = {c: members[c].reveal(PURPOSE, keys, asked) for c, asked in collected.requests().items()}
    assert torch.equal(collected.open(reveals).total, NUMBERS[[0, 1, 3, 4]].sum(0))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: {**answer, MASKED: answer[MASKED].float()},
        lambda answer: {**answer, MASKED: answer[MASKED][:-1]},
        lambda answer: {**answer, SHARES: answer[SHARES][:-1]},
        lambda answer: {**answer, "more": answer[SHARES]},
        lambda answer: {COHORT: answer[COHORT], MASKED: answer[MASKED]},
    ],
)
def test_a_malformed_answer_counts_as_lost(spoil, members):
    answers, keys = answers_of(members)
    collected = Collected({**answers, 1: spoil(answers[1])}, LENGTH)
    assert collected.lost == [1]
    reveals = {c: members[c].reveal(PURPOSE, keys, asked) for c, asked in collected.requests().items()}
    assert torch.equal(collected.open(reveals).total, NUMBERS[[0, 2, 3, 4]].sum(0))


# --- a server that lies


def entries(members):
    return list(read_roster(roster_of(members)))


def forged(members, kind):
    found = entries(members)
    stranger = Entry(client=9, key="ab" * 32, signature="no", certificate="certificate")
    swapped = found[1].model_copy(update={"key": "ab" * 32})
    return {
        "too few": found[:2],
        "none": [],
        "without this client": found[1:],
        "this client's key replaced": [found[0].model_copy(update={"key": "ab" * 32}), *found[1:]],
        "another's key replaced": [found[0], swapped, *found[2:]],
        "a stranger": [*found, stranger],
        "twice": [*found, found[1]],
        "one key for two": [*found, found[1].model_copy(update={"client": 9})],
        "another's number": [found[0], found[1].model_copy(update={"client": 7}), *found[2:]],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("too few", "A sum of 2 clients is too few"),
        ("none", "not one with this client"),
        ("without this client", "not one with this client"),
        ("this client's key replaced", "not one with this client"),
        ("another's key replaced", "not signed by its party"),
        ("a stranger", "not signed by its party"),
        ("twice", "not one with this client"),
        ("one key for two", "the same key"),
        ("another's number", "not signed by its party"),
    ],
)
def test_a_list_of_clients_that_is_not_theirs_is_refused(kind, sentence, members):
    with pytest.raises(FedVLError, match=sentence):
        members[0].read(as_tensor(forged(members, kind)))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[[]]", b'[{"client": -1}]', b'[{"client": 0, "key": "zz", "signature": "", "certificate": ""}]'],
)
def test_a_list_that_is_none_is_refused(content):
    with pytest.raises(FedVLError, match="is none"):
        read_roster(torch.tensor(list(content), dtype=torch.uint8))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({SURVIVORS: torch.tensor([0, 1])}, "A sum of 2 clients is too few"),
        ({SURVIVORS: torch.tensor([1, 2, 3])}, "not those that it was masked for"),
        ({SURVIVORS: torch.tensor([0, 1, 2, 9])}, "not those that it was masked for"),
        ({SURVIVORS: torch.tensor([0, 0, 1, 2])}, "not those that it was masked for"),
        ({SURVIVORS: torch.tensor([0, 1, 2])}, "not one of each client"),
        ({SHARES: torch.zeros(5, 82, dtype=torch.uint8)}, "changed on its way"),
    ],
)
def test_a_reveal_beyond_the_sum_is_refused(change, sentence, members):
    answers, keys = answers_of(members)
    asked = Collected(answers, LENGTH).requests()[0]
    with pytest.raises(FedVLError, match=sentence):
        members[0].reveal(PURPOSE, keys, {**asked, **change})


def test_the_shares_of_one_purpose_do_not_open_in_another(members):
    """A server cannot present the shares of round 1 in round 2."""
    answers, keys = answers_of(members)
    asked = Collected(answers, LENGTH).requests()[0]
    with pytest.raises(FedVLError, match="changed on its way"):
        members[0].reveal("train 1", keys, asked)


def test_a_restarted_client_has_its_key_and_nobody_else_can_read_it(members, tmp_path):
    again = Member(RUN, 0, tmp_path / "0", credentials(), 3)
    assert again.public == members[0].public
    assert (tmp_path / "0" / "sum.key").stat().st_mode & 0o777 == 0o600
