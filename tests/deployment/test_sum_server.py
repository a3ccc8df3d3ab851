"""Secure aggregation at the server: false shares name their sender, and what is malformed counts as lost."""

from importlib.util import find_spec

import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.sums import MODEL, RUN, STEP, Sum, members_in

from fedvl.deployment.masking import SHARE_BYTES, commitment
from fedvl.deployment.secure_sum import COMMITTED, CONTEXT, FALSE, MASKED, SEALED, SEED, SHARES, SIGNATURES
from fedvl.deployment.sum_server import Collected
from fedvl.federation.checks import SpoiledSumError

CLIENTS, LENGTH = 4, 8
NUMBERS = torch.arange(CLIENTS * LENGTH).reshape(CLIENTS, LENGTH) * 7_000_003


@pytest.fixture
def attempt(tmp_path):
    return Sum(members_in(tmp_path, CLIENTS), NUMBERS)


def to_reveal(attempt, lost=()):
    attempt.share()
    attempt.mask(lost)
    attempt.confirm()
    return attempt.reveal()


def flip(tensor, row):
    changed = tensor.clone()
    changed[row, 0] ^= 1
    return changed


def test_a_flipped_byte_in_a_share_names_its_holder_and_the_sum_opens_without_it(attempt):
    reveals = to_reveal(attempt)
    reveals[2] = {**reveals[2], SHARES: flip(reveals[2][SHARES], 1)}
    opened = attempt.collected.open(reveals)
    assert torch.equal(opened.total, NUMBERS.sum(0))
    assert attempt.collected.cheats == {2}


def test_false_shares_that_leave_too_few_name_their_holders(attempt):
    reveals = to_reveal(attempt)
    for holder in (2, 3):
        reveals[holder] = {**reveals[holder], SHARES: flip(reveals[holder][SHARES], 1)}
    with pytest.raises(SpoiledSumError, match="client 1's mask") as error:
        attempt.collected.open(reveals)
    assert error.value.culprits == (2, 3)


def test_a_dealer_of_false_shares_is_named_by_most_holders(attempt):
    offers = attempt.share()
    dealt = attempt.collected.dealt[1]
    attempt.collected.dealt[1] = {**dealt, COMMITTED: dealt[COMMITTED] ^ 1}  # it committed to other shares
    assert offers.keys() == set(range(CLIENTS))
    attempt.mask()
    attempt.confirm()
    reveals = attempt.reveal()
    assert all(reveal[FALSE].tolist() == [1] for reveal in reveals.values())
    with pytest.raises(SpoiledSumError, match="that client 1 dealt") as error:
        attempt.collected.open(reveals)
    assert error.value.culprits == (1,)


def test_a_dealer_whose_shares_give_another_seed_is_named(attempt):
    attempt.share()
    dealt = attempt.collected.dealt[1]
    attempt.collected.dealt[1] = {**dealt, SEED: dealt[SEED] ^ 1}
    attempt.mask()
    attempt.confirm()
    with pytest.raises(SpoiledSumError, match="that client 1 dealt") as error:
        attempt.collected.open(attempt.reveal())
    assert error.value.culprits == (1,)


def test_a_lost_dealer_whose_shares_give_another_key_is_named(attempt):
    attempt.share()
    attempt.mask(lost=[1])
    attempt.collected.offers[1] = attempt.collected.offers[1].model_copy(update={"key": "09" + "00" * 31})
    attempt.confirm()
    reveals = attempt.reveal()
    with pytest.raises(SpoiledSumError, match="that client 1 dealt"):
        attempt.collected.open(reveals)


def test_one_complaint_that_most_holders_do_not_share_accuses_nobody(attempt):
    reveals = to_reveal(attempt)
    reveals[3] = {**reveals[3], FALSE: torch.tensor([0])}
    assert torch.equal(attempt.collected.open(reveals).total, NUMBERS.sum(0))
    assert attempt.collected.cheats == set()
    del reveals[2]  # now too few true shares of client 0 are left, and it is unknown who lies
    with pytest.raises(SpoiledSumError) as error:
        attempt.collected.open(reveals)
    assert error.value.culprits == ()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: {**answer, MASKED: answer[MASKED].float()},
        lambda answer: {**answer, MASKED: answer[MASKED][:-1]},
        lambda answer: {CONTEXT: answer[CONTEXT]},
        lambda answer: {MASKED: answer[MASKED]},
        lambda answer: {**answer, CONTEXT: answer[CONTEXT] ^ 1},
    ],
)
def test_malformed_numbers_count_as_lost(spoil, attempt):
    attempt.share()
    answers = attempt.mask()
    attempt.collected.masked.clear()
    attempt.collected.take_masked({**answers, 1: spoil(answers[1])}, LENGTH)
    assert attempt.collected.survivors == (0, 2, 3)
    assert [refusal.client for refusal in attempt.collected.refusals] == [1]
    attempt.confirm()
    assert torch.equal(attempt.collected.open(attempt.reveal()).total, NUMBERS[[0, 2, 3]].sum(0))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda offer: {},
        lambda offer: {**offer, SEALED: offer[SEALED][:-1]},
        lambda offer: {**offer, COMMITTED: offer[COMMITTED][:-1]},
        lambda offer: {**offer, SEED: offer[SEED].float()},
        lambda offer: {**offer, "offer": offer["offer"] ^ 1},
    ],
)
def test_malformed_offers_are_refused(spoil, attempt):
    offers = attempt.share()
    collected = Collected(RUN, STEP, attempt.collected.roster, 2 / 3)
    collected.take_offers({**offers, 1: spoil(offers[1])})
    assert list(collected.offers) == [0, 2, 3]
    assert [refusal.client for refusal in collected.refusals] == [1]


def test_an_offer_in_another_clients_name_is_refused(attempt):
    offers = attempt.share()
    collected = Collected(RUN, STEP, attempt.collected.roster, 2 / 3)
    collected.take_offers({**offers, 1: offers[2]})
    assert list(collected.offers) == [0, 2, 3]


def test_a_false_signature_is_refused(attempt):
    attempt.share()
    attempt.mask()
    request = attempt.collected.confirm_request()
    answers = {client: member.confirm(STEP, request) for client, member in attempt.members.items()}
    attempt.collected.take_signatures({**answers, 1: answers[2], 3: {SIGNATURES: torch.zeros(3)}})
    assert list(attempt.collected.signatures) == [0, 2]
    assert [refusal.client for refusal in attempt.collected.refusals] == [1, 3]


@pytest.mark.parametrize("spoil", [{SHARES: torch.zeros(3)}, {FALSE: torch.zeros(1)}, {FALSE: torch.tensor([2, 1])}])
def test_malformed_shares_are_refused(spoil, attempt):
    reveals = to_reveal(attempt)
    reveals[0] = {**reveals[0], **spoil}
    assert torch.equal(attempt.collected.open(reveals).total, NUMBERS.sum(0))
    assert [refusal.client for refusal in attempt.collected.refusals] == [0]


def test_an_attempt_is_restored_after_a_kill(attempt):
    attempt.share()
    answers = attempt.mask(lost=[1])
    attempt.confirm()
    again = Collected.restored(RUN, STEP, 2 / 3, attempt.collected.kept())
    again.work_request(MODEL)
    assert again.context == attempt.collected.context
    again.take_masked(answers, LENGTH)
    attempt.collected = again
    assert torch.equal(again.open(attempt.reveal()).total, NUMBERS[[0, 2, 3]].sum(0))


def test_missing_clients_are_those_who_signed_and_did_not_reveal(attempt):
    reveals = to_reveal(attempt)
    collected = attempt.collected
    assert collected.missing(reveals) == []
    assert collected.missing([0, 1, 2]) == []
    assert collected.missing([0, 1]) == [2, 3]


def test_a_share_is_recognised_by_its_hash():
    assert commitment(bytes(SHARE_BYTES)).hex().startswith("efbb03b7")  # SHA-256 of 66 zeros, by sha256sum
