"""Secure aggregation at a client: what a server that lies asks for is refused, and nothing of one client is opened."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.sums import MODEL, RUN, STEP, Sum, credentials, entries_of, members_in

from fedvl.deployment.secure_sum import (
    MASKED,
    SEALED,
    SHARES,
    SIGNATURES,
    SIGNERS,
    SURVIVORS,
    Entry,
    Offer,
    SumMember,
    as_tensor,
    read_items,
)
from fedvl.deployment.sum_server import Collected
from fedvl.errors import FedVLError

CLIENTS, LENGTH = 6, 12
NUMBERS = torch.arange(CLIENTS * LENGTH).reshape(CLIENTS, LENGTH) * 1_000_003


@pytest.fixture
def members(tmp_path):
    return members_in(tmp_path, CLIENTS)


NOBODY = ()


@pytest.mark.parametrize("lost_share", [NOBODY, (2,)])
@pytest.mark.parametrize("lost_train", [NOBODY, (0,), (5,)])
@pytest.mark.parametrize("lost_confirm", [NOBODY, (4,)])
@pytest.mark.parametrize("lost_reveal", [NOBODY, (1,), (3,)])
def test_the_sum_of_the_survivors_comes_out_whoever_is_lost_at_which_step(
    lost_share, lost_train, lost_confirm, lost_reveal, members
):
    """Also where one client is lost before the sum and another after it."""
    if len(lost_share + lost_train + lost_confirm + lost_reveal) > 2:  # fewer than the threshold of 4 are left
        with pytest.raises(FedVLError, match=r"too few|necessary clients"):
            Sum(members, NUMBERS).run(lost_share, lost_train, lost_confirm, lost_reveal)
        return
    attempt = Sum(members, NUMBERS)
    opened = attempt.run(lost_share, lost_train, lost_confirm, lost_reveal)
    survivors = [client for client in range(CLIENTS) if client not in (*lost_share, *lost_train)]
    assert list(opened.clients) == survivors
    assert torch.equal(opened.total, NUMBERS[survivors].sum(0))


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_losses_that_leave_a_threshold_leave_the_sum(data, tmp_path_factory):
    clients = data.draw(st.integers(3, 9))
    spare = clients - max(3, -(-2 * clients // 3))
    lost = data.draw(st.lists(st.sampled_from(range(clients)), max_size=spare, unique=True))
    before = data.draw(st.integers(0, len(lost)))
    numbers = torch.randint(-(2**40), 2**40, (clients, 5))
    attempt = Sum(members_in(tmp_path_factory.mktemp("members"), clients), numbers)
    opened = attempt.run(lost_train=lost[:before], lost_reveal=lost[before:])
    assert torch.equal(opened.total, numbers[list(opened.clients)].sum(0))
    assert set(opened.clients) == set(range(clients)) - set(lost[:before])


def test_what_the_server_has_of_one_client_says_nothing(members):
    attempt = Sum(members, NUMBERS)
    attempt.share()
    for client, answer in attempt.mask().items():
        assert not set(answer[MASKED].tolist()) & set(NUMBERS[client].tolist())
        assert answer.keys() == {MASKED, "context"}


def test_two_attempts_have_other_masks(members):
    first, second = (Sum(members, NUMBERS, STEP._replace(attempt=attempt)) for attempt in (1, 2))
    first.share()
    one = first.mask()
    second.share()
    two = second.mask()
    assert all(not torch.equal(one[client][MASKED], two[client][MASKED]) for client in one)


# --- a server that lies about who survived


def survivors_are(survivors):
    return {SURVIVORS: torch.tensor(survivors)}


def test_split_survivor_lists_open_nothing(members):
    """The attack on a protocol without signatures: each client hears another list in one round."""
    attempt = Sum(members, NUMBERS)
    attempt.share()
    attempt.mask()
    collected = attempt.collected
    told = {
        0: [0, 1, 2, 3],  # the victim hears that 4 and 5 were lost
        **{client: [1, 2, 3, 4, 5] for client in (1, 2)},  # these hear that the victim was lost
        **{client: [0, 1, 2, 3, 4, 5] for client in (3, 4, 5)},  # and these that nobody was
    }
    signatures = {
        client: members[client].confirm(STEP, survivors_are(survivors))[SIGNATURES][0].numpy().tobytes()
        for client, survivors in told.items()
    }
    for client, survivors in told.items():
        collected.survivors = tuple(survivors)
        collected.signatures = {client: signatures[client]} | {other: signatures[other] for other in survivors}
        with pytest.raises(FedVLError, match=r"of 4 necessary clients signed this survivor list"):
            members[client].reveal(STEP, collected.reveal_requests()[client])


def test_a_client_signs_one_list_and_opens_no_other(members):
    attempt = Sum(members, NUMBERS)
    attempt.share()
    attempt.mask()
    attempt.confirm()
    with pytest.raises(FedVLError, match="has signed another survivor list"):
        members[0].confirm(STEP, survivors_are([0, 1, 2, 3]))
    attempt.collected.survivors = (0, 1, 2, 3)
    with pytest.raises(FedVLError, match="did not sign that survivor list"):
        members[0].reveal(STEP, attempt.collected.reveal_requests()[0])


def test_nothing_is_opened_before_a_list_is_signed(members):
    attempt = Sum(members, NUMBERS)
    attempt.share()
    attempt.mask()
    attempt.collected.signatures = dict.fromkeys(range(CLIENTS), bytes(64))
    with pytest.raises(FedVLError, match="did not sign"):
        members[0].reveal(STEP, attempt.collected.reveal_requests()[0])


def test_a_client_that_has_opened_a_sum_takes_part_in_no_other_of_the_round(members):
    """Else the difference of two sums would be one client's numbers."""
    attempt = Sum(members, NUMBERS)
    attempt.run()
    with pytest.raises(FedVLError, match="has opened the sum of round 1"):
        Sum(members[1:], NUMBERS, STEP._replace(attempt=2)).share()


def test_an_earlier_attempt_opens_nothing(members):
    first = Sum(members, NUMBERS)
    first.share()
    first.mask()
    first.confirm()
    Sum(members, NUMBERS, STEP._replace(attempt=2)).share()
    with pytest.raises(FedVLError, match="is not in attempt 1"):
        first.reveal()
    with pytest.raises(FedVLError, match="Attempt 1 at round 1 is over"):
        Sum(members, NUMBERS).share()


@pytest.mark.parametrize("forge", ["too few", "one twice", "of a stranger", "of another list"])
def test_signatures_that_are_not_enough_open_nothing(forge, members):
    attempt = Sum(members, NUMBERS)
    attempt.share()
    attempt.mask()
    attempt.confirm()
    asked = attempt.collected.reveal_requests()[0]
    three = slice(0, 3)
    changes = {
        "too few": {SIGNERS: asked[SIGNERS][three], SIGNATURES: asked[SIGNATURES][three]},
        "one twice": {SIGNERS: torch.tensor([0, 1, 2, 2]), SIGNATURES: asked[SIGNATURES][[0, 1, 2, 2]]},
        "of a stranger": {SIGNERS: torch.tensor([0, 1, 2, 9]), SIGNATURES: asked[SIGNATURES][[0, 1, 2, 3]]},
        "of another list": {SIGNATURES: asked[SIGNATURES].roll(1, 0)},
    }
    with pytest.raises(FedVLError, match=r"necessary clients signed|names one twice"):
        members[0].reveal(STEP, {**asked, **changes[forge]})


def test_the_signature_of_a_client_that_is_not_on_the_list_does_not_count(members):
    """Three survivors signed, and a lost client that works with the server: four are necessary."""
    attempt = Sum(members, NUMBERS)
    attempt.share()
    attempt.mask(lost=(5,))
    attempt.confirm()
    asked = attempt.collected.reveal_requests()[0]
    colluding = members[5].signing.sign(attempt.collected.signed_part)
    fourth = torch.frombuffer(bytearray(colluding), dtype=torch.uint8)[None]
    forged = {SIGNERS: torch.tensor([0, 1, 2, 5]), SIGNATURES: torch.cat([asked[SIGNATURES][:3], fourth])}
    with pytest.raises(FedVLError, match="3 of 4 necessary clients signed"):
        members[0].reveal(STEP, {**asked, **forged})
    assert members[0].reveal(STEP, asked)


# --- a server that sends clients different models, rosters or keys


def test_inconsistent_models_leave_noise_and_nothing_is_opened(members):
    """The victim gets the model, all others one that gives no gradient: the sum would be the victim's own."""
    numbers = torch.zeros_like(NUMBERS)
    numbers[0] = NUMBERS[0]
    attempt = Sum(members, numbers)
    attempt.share()
    answers = attempt.mask(models={client: {"weight": torch.zeros(6)} for client in range(1, CLIENTS)})
    assert attempt.collected.survivors == (0,)  # an honest server sees that the others are bound to other tensors
    collected = attempt.collected
    collected.refusals.clear()
    collected.masked = {client: answer[MASKED] for client, answer in answers.items()}
    collected.survivors = tuple(range(CLIENTS))
    signed = {
        c: members[c].confirm(STEP, collected.confirm_request())[SIGNATURES][0].numpy().tobytes() for c in range(6)
    }
    collected.signatures = signed
    with pytest.raises(FedVLError, match=r"1 of 4 necessary clients signed .* another model"):
        members[0].reveal(STEP, collected.reveal_requests()[0])
    reveals = {
        client: members[client].reveal(STEP, collected.reveal_requests()[client]) for client in range(1, CLIENTS)
    }
    total = collected.open(reveals).total.double()  # five of six helped, and the masks with the victim do not cancel
    honest = numbers[0].double()
    assert not torch.equal(total, honest)
    assert float(total.abs().max()) > 2.0**55


def test_masks_are_bound_to_settings_round_and_attempt(members):
    for changed in (
        STEP._replace(experiment="c" * 64),
        STEP._replace(round=1),
        STEP._replace(kind="report"),
        STEP._replace(attempt=2),
    ):
        one, other = Sum(members, NUMBERS, STEP), Sum(members, NUMBERS, changed)
        assert one.collected.work_request(MODEL).keys() == other.collected.work_request(MODEL).keys()
        assert one.collected.context != other.collected.context


def test_numbers_are_masked_once_in_an_attempt(members):
    attempt = Sum(members, NUMBERS)
    attempt.share()
    attempt.mask()
    with pytest.raises(FedVLError, match="masked its numbers for other tensors"):
        attempt.mask(models={0: {"weight": torch.zeros(6)}})


def test_a_client_that_adopted_another_answer_is_noticed(members):
    attempt = Sum(members, NUMBERS)
    attempt.share()
    odd = members[1].offer(STEP._replace(attempt=2), attempt.collected.share_request()["roster"], "d" * 64)
    second = Sum(members, NUMBERS, STEP._replace(attempt=2))
    offers = {
        c: members[c].offer(second.step, second.collected.share_request()["roster"], "")
        for c in range(CLIENTS)
        if c != 1
    }
    second.collected.take_offers({**offers, 1: odd})
    assert 1 not in second.collected.offers  # an honest server leaves it out
    assert "missed the exchange" in second.collected.refusals[0].reason
    (offer,) = read_items(odd["offer"], Offer)
    second.collected.offers[1] = offer
    second.collected.offers = dict(sorted(second.collected.offers.items()))
    with pytest.raises(FedVLError, match="Client 1 got another answer"):
        members[0].mask(second.step, second.collected.work_request(MODEL), lambda: NUMBERS[0])


def forged_roster(members, kind):
    found = entries_of(members)
    stranger = Entry(client=9, key="ab" * 32, verify="cd" * 32, signature="no", certificate="certificate")
    return {
        "too few": found[:2],
        "empty": [],
        "without this client": found[1:],
        "this client's key replaced": [found[0].model_copy(update={"key": "ab" * 32}), *found[1:]],
        "this client's verification key replaced": [found[0].model_copy(update={"verify": "ab" * 32}), *found[1:]],
        "another's key replaced": [found[0], found[1].model_copy(update={"key": "ab" * 32}), *found[2:]],
        "another's verification key replaced": [
            found[0],
            found[1].model_copy(update={"verify": "ab" * 32}),
            *found[2:],
        ],
        "a stranger": [*found, stranger],
        "twice": [*found, found[1]],
        "one key for two": [*found, found[1].model_copy(update={"client": 9})],
        "another's number": [found[0], *found[2:], found[1].model_copy(update={"client": 7})],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("too few", "A sum of 2 clients is too few"),
        ("empty", "does not list this client"),
        ("without this client", "does not list this client"),
        ("this client's key replaced", "does not list this client"),
        ("this client's verification key replaced", "does not list this client"),
        ("another's key replaced", "not signed by its party"),
        ("another's verification key replaced", "not signed by its party"),
        ("a stranger", "not signed by its party"),
        ("twice", "does not list this client"),
        ("one key for two", "the same key"),
        ("another's number", "not signed by its party"),
    ],
)
def test_a_forged_roster_is_refused(kind, sentence, members):
    with pytest.raises(FedVLError, match=sentence):
        members[0].offer(STEP, as_tensor(forged_roster(members, kind)), "")


@pytest.mark.parametrize(
    ("forge", "sentence"),
    [
        (lambda offers: offers[:3], "A sum of 3 clients is too few"),
        (lambda offers: offers[1:], "do not list this client"),
        (lambda offers: [offers[0].model_copy(update={"key": "ab" * 32}), *offers[1:]], "do not list this client"),
        (
            lambda offers: [offers[0], offers[1].model_copy(update={"key": "ab" * 32}), *offers[2:]],
            "client 1 is not signed",
        ),
        (lambda offers: [*offers, offers[1].model_copy(update={"client": 9})], "the same mask key"),
        (lambda offers: [*offers[:5], offers[5].model_copy(update={"client": 9})], "client 9 is not signed"),
    ],
)
def test_forged_mask_keys_are_refused(forge, sentence, members):
    attempt = Sum(members, NUMBERS)
    attempt.share()
    offers = list(attempt.collected.offers.values())
    with pytest.raises(FedVLError, match=sentence):
        members[0].mask(STEP, {**MODEL, "offers": as_tensor(forge(offers))}, lambda: NUMBERS[0])


def test_a_mask_key_of_another_round_is_refused(members):
    first = Sum(members, NUMBERS)
    first.share()
    old = first.collected.offers[1]
    second = Sum(members, NUMBERS, STEP._replace(round=1))
    second.share()
    second.collected.offers[1] = old
    with pytest.raises(FedVLError, match="client 1 is not signed by that client for this round"):
        members[0].mask(second.step, second.collected.work_request(MODEL), lambda: NUMBERS[0])


@pytest.mark.parametrize("content", [b"", b"{", b"[[]]", b'[{"client": -1}]', b'[{"client": 0, "key": "zz"}]'])
def test_a_malformed_roster_is_refused(content):
    with pytest.raises(FedVLError, match="Malformed list of entry records"):
        read_items(torch.tensor(list(content), dtype=torch.uint8), Entry)


@pytest.mark.parametrize(
    ("survivors", "sentence"),
    [
        ([0, 1, 2], "A sum of 3 clients is too few; this client takes part in sums of 4"),
        ([1, 2, 3, 4], "not one of the clients"),
        ([0, 1, 2, 9], "not one of the clients"),
        ([0, 0, 1, 2], "names one twice"),
        ([1, 0, 2, 3], "not in order"),
    ],
)
def test_a_survivor_list_that_is_too_short_or_false_is_not_signed(survivors, sentence, members):
    attempt = Sum(members, NUMBERS)
    attempt.share()
    attempt.mask()
    with pytest.raises(FedVLError, match=sentence):
        members[0].confirm(STEP, survivors_are(survivors))


def test_a_policy_of_more_clients_counts(tmp_path):
    members = members_in(tmp_path, CLIENTS, least=6)
    attempt = Sum(members, NUMBERS)
    attempt.share()
    attempt.mask(lost=[5])
    with pytest.raises(FedVLError, match="sums of 6 or more"):
        attempt.confirm()


def test_a_restarted_client_has_its_keys_and_goes_on_in_its_attempt(members, tmp_path):
    attempt = Sum(members, NUMBERS)
    attempt.share()
    again = SumMember(RUN, 0, tmp_path / "0", credentials(), 3)
    assert (again.public, again.verify) == (members[0].public, members[0].verify)
    attempt.members[0] = again
    attempt.mask()
    attempt.members[0] = SumMember(RUN, 0, tmp_path / "0", credentials(), 3)
    attempt.confirm()
    assert torch.equal(attempt.collected.open(attempt.reveal()).total, NUMBERS.sum(0))
    for name in ("sum.key", "000000-train.sum"):
        assert (tmp_path / "0" / name).stat().st_mode & 0o777 == 0o600


def test_shares_of_a_survivors_key_stay_closed(members):
    """The opened shares restore no survivor's mask key and no lost client's seed."""
    from fedvl.deployment.masking import commitment, join_shares

    attempt = Sum(members, NUMBERS)
    attempt.share()
    attempt.mask(lost=[5])
    attempt.confirm()
    reveals = attempt.reveal()
    for place, client in enumerate(attempt.collected.offers):
        shares = {holder: reveal[SHARES][place].numpy().tobytes() for holder, reveal in reveals.items()}
        secret = join_shares(shares, 4)
        assert secret is not None
        state = attempt.members[client]._read(STEP)
        assert state is not None
        assert secret.hex() == (state.key if client == 5 else state.seed)
        other = state.seed if client == 5 else state.key
        assert commitment(bytes.fromhex(other)) != commitment(secret)


def test_sealed_shares_of_another_holder_do_not_open(members):
    attempt = Sum(members, NUMBERS)
    attempt.share()
    attempt.mask()
    attempt.confirm()
    requests = attempt.collected.reveal_requests()
    answer = members[0].reveal(STEP, {**requests[0], SEALED: requests[1][SEALED]})
    assert answer["false"].tolist() == list(range(CLIENTS))
    assert not answer[SHARES].any()


def test_collected_without_offers_has_no_survivors(members):
    assert Collected(RUN, STEP, entries_of(members), 2 / 3).survivors == ()
