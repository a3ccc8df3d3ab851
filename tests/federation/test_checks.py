import math

import pytest
import torch
from helpers.small import small_task
from hypothesis import given
from hypothesis import strategies as st

from fedvl.config import FederationConfig
from fedvl.federation.checks import Refusal, Report, compare_moves, diverged, mean_loss, sort_out, sound_reports
from fedvl.federation.stacks import Updates
from fedvl.methods.base import Method, Options, Update
from fedvl.methods.roles import Sent

SHARED = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
HANDED = dict.fromkeys(range(3), SHARED)
LIMITS = FederationConfig(max_update_norm=100.0)
PLAIN = Method(Options(), small_task())


class Equal(Method):
    weighting = "clients"


class WithText(Method):
    def roles(self):
        return {"text": Sent(lambda name, tensors, received, samples: None, (range(1, 8), 5))}


def good(client=0, weight=1.0, **changes):
    return Update(client, {**{name: tensor + 1 for name, tensor in SHARED.items()}, **changes}, weight)


def with_value(value):
    tensor = torch.ones(2, 3)
    tensor[1, 2] = value
    return tensor


BAD = {
    "one NaN": Update(1, {**good().tensors, "weight": with_value(math.nan)}, 1.0),
    "infinity": Update(1, {**good().tensors, "weight": with_value(math.inf)}, 1.0),
    "minus infinity": Update(1, {**good().tensors, "weight": with_value(-math.inf)}, 1.0),
    "huge value": Update(1, {**good().tensors, "weight": with_value(1e38)}, 1.0),
    "huge norm": Update(1, {**good().tensors, "weight": torch.full((2, 3), 50.0)}, 1.0),
    "wrong shape": Update(1, {**good().tensors, "weight": torch.ones(3, 2)}, 1.0),
    "broadcastable shape": Update(1, {**good().tensors, "weight": torch.ones(1)}, 1.0),
    "empty": Update(1, {**good().tensors, "weight": torch.ones(0, 3)}, 1.0),
    "wrong dtype": Update(1, {**good().tensors, "weight": torch.ones(2, 3, dtype=torch.int64)}, 1.0),
    "double": Update(1, {**good().tensors, "weight": torch.ones(2, 3, dtype=torch.float64)}, 1.0),
    "complex": Update(1, {**good().tensors, "weight": torch.ones(2, 3, dtype=torch.complex64)}, 1.0),
    "missing name": Update(1, {"weight": torch.ones(2, 3)}, 1.0),
    "extra name": Update(1, {**good().tensors, "extra": torch.ones(1)}, 1.0),
    "weight 0": Update(1, good().tensors, 0.0),
    "negative weight": Update(1, good().tensors, -3.0),
    "NaN weight": Update(1, good().tensors, math.nan),
    "infinite weight": Update(1, good().tensors, math.inf),
    "absurd weight": Update(1, good().tensors, 1e15),
    "a stranger": good(client=7),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_update_is_refused_and_named_and_the_good_ones_stay(kind):
    accepted, refusals = sort_out([good(2), BAD[kind], good(0)], dict.fromkeys([0, 1, 2], 9), HANDED, PLAIN, LIMITS)
    assert [update.client for update in accepted] == [0, 2]
    assert [refusal.client for refusal in refusals] == [BAD[kind].client]
    assert refusals[0].reason


def test_a_second_answer_is_refused_and_the_first_stays():
    first = good(0, weight=2.0)
    accepted, refusals = sort_out([first, good(0, weight=9.0)], {0: 9}, HANDED, PLAIN, LIMITS)
    assert [update.weight for update in accepted] == [2.0]
    assert refusals[0].reason == "answered twice"


def test_the_norm_limit_is_on_the_move_not_on_the_value():
    shared = {"weight": torch.full((2, 3), 1e6), "bias": torch.zeros(2)}
    near = Update(0, {"weight": torch.full((2, 3), 1e6 + 1), "bias": torch.zeros(2)}, 1.0)
    accepted, refusals = sort_out([near], {0: 9}, {0: shared}, PLAIN, LIMITS)
    assert (len(accepted), refusals) == (1, [])


@pytest.mark.parametrize(
    "sent, reason",
    [
        (torch.ones(1, 5), None),
        (torch.ones(7, 5), None),
        (torch.ones(0, 5), "has shape"),
        (torch.ones(8, 5), "has shape"),
        (torch.ones(3, 4), "has shape"),
        (torch.ones(5), "has shape"),
        (torch.full((3, 5), math.nan), "not finite"),
        (torch.ones(3, 5, dtype=torch.float64), "is torch.float64"),
        (None, "missing"),
    ],
)
def test_extras_are_checked_too(sent, reason):
    update = Update(0, {**good().tensors, **({} if sent is None else {"text": sent})}, 1.0)
    accepted, refusals = sort_out([update], {0: 9}, HANDED, WithText(Options(), small_task()), LIMITS)
    assert len(accepted) == (reason is None)
    assert all(reason in refusal.reason for refusal in refusals)


@pytest.mark.parametrize("weight, examples, accepted", [(9.0, 9, 1), (9.5, 9, 0), (1.0, 0, 0), (2e6, 2_000_000, 0)])
def test_a_weight_is_at_most_what_was_declared(weight, examples, accepted):
    assert len(sort_out([good(weight=weight)], {0: examples}, HANDED, PLAIN, LIMITS)[0]) == accepted


def test_where_all_clients_count_equally_no_weight_is_above_one():
    equal = Equal(Options(), small_task())
    assert len(sort_out([good(weight=1.0)], {0: 9}, HANDED, equal, LIMITS)[0]) == 1
    assert len(sort_out([good(weight=1.5)], {0: 9}, HANDED, equal, LIMITS)[0]) == 0


WEIGHTS = st.sampled_from([0.0, -1.0, 0.5, 1.0, 2.0, 7.0, math.nan, math.inf])


@given(st.lists(st.tuples(WEIGHTS, st.sampled_from([0, 1, 7, 10**7])), min_size=1, max_size=6), st.booleans())
def test_updates_in_a_stack_are_judged_as_one_by_one(declared, misshapen):
    changes = {"bias": torch.zeros(3)} if misshapen else {}
    updates = [good(client, weight, **changes) for client, (weight, _) in enumerate(declared)]
    asked, handed = dict(enumerate(count for _, count in declared)), dict.fromkeys(range(len(declared)), SHARED)
    for method in (PLAIN, Equal(Options(), small_task())):
        stacked, single = (sort_out(found, asked, handed, method, LIMITS) for found in (Updates.of(updates), updates))
        assert [update.client for update in stacked[0]] == [update.client for update in single[0]]
        assert stacked[1] == single[1]


@pytest.mark.parametrize("stack", [list, Updates.of])
def test_updates_of_a_stack_are_refused_client_by_client_where_forms_differ(stack):
    """One of another shape, one that was handed nothing in this round, and two of whom nothing is wrong."""
    updates = [good(0), good(1, bias=torch.zeros(3)), good(2), good(3)]
    handed = {0: SHARED, 1: SHARED, 3: dict(SHARED)}
    accepted, refusals = sort_out(stack(updates), dict.fromkeys(range(4), 9), handed, PLAIN, LIMITS)
    assert accepted.clients == [0, 3]
    assert [(refusal.client, refusal.reason.split()[0]) for refusal in refusals] == [(1, "'bias'"), (2, "was")]


def test_a_sound_update_after_a_refused_one_of_the_same_client_counts_and_a_third_does_not():
    updates = [good(0, weight=99.0), good(0, weight=2.0), good(0, weight=3.0)]
    accepted, refusals = sort_out(updates, {0: 9}, {0: SHARED}, PLAIN, LIMITS)
    assert accepted.weights == [2.0]
    assert [refusal.reason.split()[0] for refusal in refusals] == ["weight", "answered"]


def refused(moves, examples=None, before=0.0):
    """The clients that are refused when clients move by so much."""
    examples = dict(enumerate(examples or [10] * len(moves)))
    start = {"weight": torch.zeros(1)}
    updates = [Update(client, {"weight": torch.tensor([float(move)])}, 1.0) for client, move in enumerate(moves)]
    compared = compare_moves(updates, examples, dict.fromkeys(examples, start), PLAIN.role, 6.0, before)
    far = [refusal.client for refusal in compared.refusals]
    assert [update.client for update in compared.good] == [client for client in examples if client not in far]
    return far


@pytest.mark.parametrize(
    "moves, expected",
    [
        ([1] * 9 + [10], [9]),
        ([1] * 9 + [-10], [9]),
        ([1] * 9 + [5.9], []),
        ([1] * 9 + [6.1], [9]),
        ([1, 1, 1, 1, 47], []),  # of five clients less is known: 6 x 2^3 times is allowed
        ([1, 1, 1, 1, 49], [4]),
        ([1, 1, 1000], [2]),
        ([1, 1000], []),  # of two nobody can say which is right
        ([0, 0, 1], []),  # those who stand still say nothing
        ([0, 0, 0, 1, 1.1, 500], [5]),
        ([0.001] + [1] * 9, []),  # who sends next to nothing does not make the others suspect
        ([1] * 8 + [100] * 2, [8, 9]),  # a fifth of liars
    ],
)
def test_a_move_far_beyond_the_others_is_refused(moves, expected):
    assert refused(moves) == expected


def test_a_client_of_many_examples_may_move_farther():
    assert refused([1] * 9 + [50], [10] * 9 + [100]) == []
    assert refused([1] * 9 + [61], [10] * 9 + [100]) == [9]
    assert refused([1] * 9 + [7], [100] * 9 + [10]) == [9]


def test_where_two_of_three_have_nothing_to_learn_the_third_may():
    start = {"weight": torch.full((1,), 2.0)}

    def far(move, clients):
        moves = [*[0.001] * (clients - 1), move]
        updates = [Update(client, {"weight": start["weight"] + own}, 1.0) for client, own in enumerate(moves)]
        examples = dict.fromkeys(range(clients), 10)
        return [
            r.client
            for r in compare_moves(updates, examples, dict.fromkeys(examples, start), PLAIN.role, 6.0, 0.0).refusals
        ]

    assert far(1.9, 3) == []
    assert far(2.1, 3) == [2]
    assert far(1.9, 5) == [4]


def test_what_was_usual_stays_usual_when_most_have_learned_all():
    learned = [0.01] * 9 + [1]
    assert refused(learned) == [9]
    assert refused(learned, before=0.5) == []
    assert refused([0.01] * 9 + [10], before=0.5) == [9]


def test_the_mean_loss_leaves_out_what_is_far_beyond_the_others():
    assert mean_loss([1.0, 2.0, 6.0]) == 3.0
    assert mean_loss([1.0, 2.0, 1e6]) == 1.5
    assert mean_loss([1.0, 2.0, -1e6]) == 1.5
    assert mean_loss([0.0, 0.0, 9.0]) == 3.0
    assert mean_loss([300.0, 200.0, 100.0]) == 200.0
    assert mean_loss([1.0, 5.0]) == 3.0
    assert math.isnan(mean_loss([1.0, math.nan, 2.0]))


def test_a_report_of_more_than_can_be_counted_is_refused():
    reports = [Report(0, {"counts": torch.tensor([3e38, 1.0])}), Report(1, {"counts": torch.tensor([3.0, 1.0])})]
    accepted, refusals = sound_reports(reports, {"counts": (2,)})
    assert [report.client for report in accepted] == [1]
    assert "values above 1e+09" in refusals[0].reason


def test_training_has_diverged_if_all_that_trained_left_the_range_of_numbers():
    gone = [Refusal(0, "'weight' holds values that are not finite"), Refusal(1, "it moves by 3e+10, more than 10000")]
    assert diverged(gone, 2)
    assert not diverged(gone, 3)  # another client's update was sound
    assert not diverged([*gone, Refusal(2, "answered twice")], 3)
    assert not diverged([], 0)  # nobody answered


def test_an_update_is_compared_with_what_its_client_was_handed():
    """Clients may begin from different values, and with tensors of different shapes."""
    handed = {0: {"weight": torch.zeros(2)}, 1: {"weight": torch.full((5,), 1e6)}, 2: {"weight": torch.zeros(5)}}
    updates = [Update(client, {"weight": tensors["weight"] + 1}, 1.0) for client, tensors in handed.items()]
    examples = dict.fromkeys(handed, 9)
    accepted, refusals = sort_out(updates, examples, handed, PLAIN, LIMITS)
    assert (accepted.clients, refusals) == ([0, 1, 2], [])
    assert compare_moves(updates, examples, handed, PLAIN.role, 6.0, 0.0).refusals == []
    wrong = Update(0, {"weight": torch.zeros(5)}, 1.0)
    assert "has shape (5,), not (2,)" in sort_out([wrong], examples, handed, PLAIN, LIMITS)[1][0].reason
