"""Intervals and tests of differences, against other implementations, values computed by hand, and their own promises."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from scipy.stats import t as student
from sklearn import metrics
from sklearn.metrics import f1_score, precision_score, recall_score, roc_auc_score

from fedvl.evaluation.statistics import (
    Paired,
    auc,
    bootstrap,
    bootstrap_clients,
    bootstrap_lead,
    bootstrap_lead_of_clients,
    bootstrap_macro,
    bootstrap_mean,
    bootstrap_right,
    bootstrap_seeds,
    correlation,
    delong,
    hits_at,
    holm,
    mcnemar,
    mean_of,
    mean_of_few,
    mean_of_shares,
    near_chance,
    of_correlation,
    paired_difference,
    paired_p,
    proportion,
    share_of,
    wilson,
)

TRUTHS = st.text("01", min_size=1, max_size=60)


@given(st.integers(1, 400), st.data())
def test_wilson_is_that_of_scipy(count, data):
    hits = data.draw(st.integers(0, count))
    expected = binomtest(hits, count).proportion_ci(method="wilson")
    assert wilson(100 * hits / count, count) == pytest.approx((100 * expected.low, 100 * expected.high))


def test_intervals_by_hand():
    """24 of 30 by Wilson; 3 gained and 1 lost of 30 by Bonett and Price: 2 / 32 -+ 1.96 sqrt((6 / 32 - 4 / 1024) / 32)."""
    assert wilson(80.0, 30) == pytest.approx((62.69, 90.49), abs=0.01)
    assert proportion(24, 30) == pytest.approx((0.6269, 0.9049), abs=1e-4)
    half = 196 * math.sqrt((6 / 32 - 4 / 1024) / 32)
    assert paired_difference(3, 1, 30) == pytest.approx((6.25 - half, 6.25 + half), abs=1e-3)
    assert paired_difference(3, 1, 30) == pytest.approx((-8.59, 21.09), abs=0.01)


@pytest.mark.parametrize("trials", [1, 2, 7, 1000])
def test_the_bounds_of_nothing_and_of_everything_are_exact(trials):
    assert (proportion(0, trials).low, proportion(trials, trials).high) == (0, 1)
    assert 0 < proportion(0, trials).high < 1
    assert paired_difference(trials, 0, trials).high <= 100
    assert paired_difference(0, trials, trials).low >= -100


@pytest.mark.parametrize(("gained", "lost"), [(0.1, 0.1), (0.02, 0.05), (0.3, 0.1)])
def test_a_paired_interval_holds_the_true_difference_in_95_of_100_cases(gained, lost):
    draws = np.random.default_rng(0).multinomial(200, [gained, lost, 1 - gained - lost], size=2000)
    intervals = [paired_difference(int(up), int(down), 200) for up, down, _ in draws]
    held = np.mean([low <= 100 * (gained - lost) <= high for low, high in intervals])
    assert 0.93 < held < 0.985


def test_the_same_percentage_of_more_images_is_surer():
    few, many = wilson(28.92, 83), wilson(28.92, 10_000)
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx((10_000 / 83) ** 0.5, rel=0.05)


def both_tested(first: str, second: str) -> Paired:
    found = mcnemar(first, second)
    assert found is not None
    return found


def test_mcnemar_by_hand():
    """Of ten images the second alone has four right, the first alone one: p = 2 (C(5,0) + C(5,1)) / 2^5."""
    found = both_tested("1111100000", "0111111110")
    assert (found.images, found.gained, found.lost, found.difference) == (10, 4, 1, 30.0)
    assert found.p == pytest.approx(12 / 32)
    up, down = 5 / 12, 2 / 12  # Bonett and Price add one to each count and two to the images
    half = 1.959964 * np.sqrt((up + down - (up - down) ** 2) / 12)
    assert found.interval == pytest.approx((100 * (up - down - half), 100 * (up - down + half)), abs=1e-4)


@pytest.mark.parametrize("gained, lost", [(0, 0), (1, 0), (0, 9), (40, 61), (500, 430), (9000, 8800)])
def test_mcnemars_p_is_that_of_scipy(gained, lost):
    found = both_tested("0" * gained + "1" * lost + "1", "1" * gained + "0" * lost + "1")
    expected = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert found.p == pytest.approx(expected, rel=1e-9)


@given(TRUTHS, st.randoms())
def test_mcnemar_has_the_signs_and_the_symmetry_of_a_difference(first, shuffle):
    second = "".join(shuffle.sample(first, len(first)))
    one, other = both_tested(first, second), both_tested(second, first)
    assert one.difference == -other.difference == 0  # a permutation has as many right
    assert one.p == other.p == 1
    assert one.interval.low == pytest.approx(-other.interval.high)
    assert both_tested(first, first).gained == 0


def test_images_that_one_was_not_asked_do_not_count():
    assert mcnemar("01-1", "11-0") == mcnemar("011", "110")
    assert mcnemar("--", "11") is None


def drawn_again(labels, answers, score, count=400):
    generator = np.random.default_rng(1)
    rows = generator.integers(0, len(labels), (count, len(labels)))
    return np.quantile([100 * score(labels[each], answers[each]) for each in rows], (0.025, 0.975))


def test_macro_intervals_are_those_of_drawing_images_again():
    """Resampling the matrix of confusions is resampling images: scikit-learn on resampled images gives the same bounds."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 300)
    answers = np.where(generator.random(300) < 0.7, labels, generator.integers(0, 3, 300))
    confusion = np.zeros((3, 3), np.int64)
    np.add.at(confusion, (labels, answers), 1)
    found = bootstrap_macro(confusion)
    scores = {"macro_precision": precision_score, "macro_recall": recall_score, "macro_f1": f1_score}
    for name, score in scores.items():
        expected = drawn_again(labels, answers, lambda *pair, score=score: score(*pair, average="macro"))
        assert found[name] == pytest.approx(tuple(expected), abs=1.0), name
    assert bootstrap_macro(confusion) == found  # no page changes by itself


def test_a_mean_over_clients_is_as_sure_as_its_standard_error():
    values = np.random.default_rng(0).normal(60, 10, 100)
    found, error = bootstrap_mean(list(values)), values.std() / 10
    assert found == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.4)


def test_a_lead_over_seeds_is_drawn_image_by_image():
    assert bootstrap_lead(["1111", "1111"], ["0000", "0000"]) == (100, 100)
    assert bootstrap_lead(["10", "10"], ["01", "10"]).low <= 0 <= bootstrap_lead(["10", "10"], ["01", "10"]).high
    generator = np.random.default_rng(0)
    ours, theirs = generator.random(900) < 0.8, generator.random(900) < 0.7
    text = ["".join("01"[int(hit)] for hit in hits) for hits in (ours, theirs)]
    lead = 100 * (ours.astype(float) - theirs)
    error = lead.std() / 30
    found = bootstrap_lead([text[0]], [text[1]])
    assert found == pytest.approx((lead.mean() - 1.96 * error, lead.mean() + 1.96 * error), abs=0.5)


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("seeds", [2, 3])
def test_a_lead_of_equal_methods_is_seldom_beyond_chance(seeds, spread):
    """Equal methods whose seeds and images vary: an interval of 95 % leaves 0 out in 5 % of cases or fewer.

    Resampling the images alone would do so in 20 % and 49 % at the larger spreads.
    """
    generator = np.random.default_rng(1)
    difficulty = generator.normal(0, 2, 200)
    beyond, trials = 0, 300
    for _ in range(trials):
        texts = []
        for _ in range(2):
            habit, seed = generator.normal(0, 1, 200), generator.normal(0, spread, (seeds, 1))
            right = difficulty + habit + seed + generator.normal(0, 1, (seeds, 200)) > 0
            texts.append(["".join(map(str, run.astype(int))) for run in right])
        low, high = bootstrap_lead(*texts)
        beyond += not low <= 0 <= high
    assert beyond / trials <= 0.06


def test_a_lead_over_clients_widens_with_seeds():
    """Student's t of two degrees of freedom: 4.30 standard errors of leads 1, 2 and 3 with endless images."""
    ours = [([50.0 + lead, 50.0 + lead], [10**8] * 2) for lead in (1, 2, 3)]
    theirs = [([50.0, 50.0], [10**8] * 2)] * 3
    assert bootstrap_lead_of_clients(ours, theirs) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=0.5)
    one = bootstrap_lead_of_clients([([60.0, 80.0], [100, 100])], [([50.0, 50.0], [100, 100])])
    error = 100 * ((0.6 * 0.4 + 0.8 * 0.2 + 2 * 0.25) / 100 / 4) ** 0.5
    assert one == pytest.approx((20 - 1.96 * error, 20 + 1.96 * error), abs=0.7)


@pytest.mark.parametrize(
    ("percent", "images", "chance", "near"),
    [(15.8, 360, 100 / 9, True), (60.0, 1000, 50.0, False), (52.0, 100, 50.0, True), (30.0, 100, 10.0, False)],
)
def test_near_chance_is_within_the_interval_or_the_margin(percent, images, chance, near):
    assert near_chance(percent, images, chance) is near


def test_seeds_are_drawn_again_and_spread_as_new_ones_would():
    """Without images, against all 4^4 draws of four seeds, whose deviation is made good by sqrt(4 / 3)."""
    values = [50.0, 58.0, 61.0, 71.0]
    told = [{"accuracy": value} for value in values]
    low, high = bootstrap_seeds(told, lambda generator: told, 1)["accuracy"]
    everything = [sum(draw) / 4 for draw in itertools.product(values, repeat=4)]
    expected = [60 + math.sqrt(4 / 3) * (bound - 60) for bound in np.quantile(everything, (0.025, 0.975))]
    assert (low, high) == pytest.approx(expected, abs=0.8)


def test_images_are_drawn_again_where_seeds_agree():
    run = "1" * 320 + "0" * 80
    low, high = bootstrap_right([run] * 3)  # three times the same predictions say no more than one
    assert high - low == pytest.approx(2 * 1.96 * 100 * math.sqrt(0.8 * 0.2 / 400), rel=0.1)
    assert low < 80 < high
    assert bootstrap_right(["1111", "1111"]) == (100, 100)


def test_seeds_that_differ_widen_the_interval_of_the_images():
    generator = np.random.default_rng(0)
    runs = ["".join("01"[int(right)] for right in generator.random(400) < share) for share in (0.6, 0.8, 0.9)]
    wide, narrow = (high - low for low, high in (bootstrap_right(runs), bootstrap_right(runs[1:2] * 3)))
    assert wide > 2 * narrow


def test_a_mean_over_clients_draws_the_images_of_each_client():
    one = ([50.0, 90.0], [100, 400])
    low, high = bootstrap_clients([one, one])
    # The error of the mean of two independent shares; both runs are drawn on their own, and their mean is surer.
    alone = 100 * math.sqrt(0.25 / 100 + 0.09 / 400) / 2
    assert 2 * 1.96 * alone / math.sqrt(2) * 0.85 < high - low < 2 * 1.96 * alone * 1.1
    assert low < 70 < high


def test_the_mean_of_shares_of_different_images():
    assert mean_of_shares([75.0], [40]) == pytest.approx(wilson(75.0, 40))
    low, high = mean_of_shares([50.0, 50.0], [400, 400])
    assert (low, high) == pytest.approx(wilson(50.0, 800), abs=0.02)  # as sure as the pooled share


def test_delong_by_hand():
    """Two images of the class and two others: V10 = (1, 1/2) and (1, 1), V01 = (1, 1/2) and (1, 1)."""
    truth = np.array([True, True, False, False])
    found = delong(truth, np.array([4.0, 2.0, 3.0, 1.0]), np.array([4.0, 3.0, 2.0, 1.0]))
    assert (found.first, found.second) == (0.75, 1.0)
    error = math.sqrt(0.125 / 2 + 0.125 / 2)
    assert found.interval == pytest.approx((0.25 - 1.959964 * error, min(1, 0.25 + 1.959964 * error)), abs=1e-6)
    assert found.p == pytest.approx(2 * (1 - NormalDist().cdf(0.25 / error)))


def test_delongs_areas_are_those_of_scikit_learn_and_its_p_is_uniform_without_a_difference():
    generator, values = np.random.default_rng(0), []
    for _ in range(300):
        truth = generator.random(120) < 0.3
        first, second = (np.round(truth + generator.normal(0, 1, 120), 1) for _ in range(2))  # with ties
        found = delong(truth, first, second)
        values.append(found.p)
        assert found.first == pytest.approx(metrics.roc_auc_score(truth, first))
        assert found.second == pytest.approx(metrics.roc_auc_score(truth, second))
        back = delong(truth, second, first)
        assert (back.p, back.interval.low) == pytest.approx((found.p, -found.interval.high))
    assert 0.02 < np.mean(np.array(values) < 0.05) < 0.09


def test_delong_of_equal_scores():
    truth = np.array([True, True, False, False])
    scores = np.array([0.9, 0.4, 0.5, 0.1])
    assert delong(truth, scores, scores).p == 1.0
    assert delong(truth, scores, 2 * scores).interval == (0.0, 0.0)


# --- measures of attacks


def test_auc_counts_pairs_and_half_of_ties_by_weight():
    inside, outside = np.array([3.0, 1.0]), np.array([2.0, 1.0, 0.0])
    # 3 beats all; 1 beats 0 and ties with 1: (3 + 1.5) of 6 pairs
    assert auc(inside, outside, np.ones(3)) == pytest.approx(4.5 / 6)
    # without the image at 2: (2 + 1.5) of 4
    assert auc(inside, outside, np.array([0.0, 1.0, 1.0])) == pytest.approx(3.5 / 4)


def test_the_threshold_lets_a_hundredth_of_the_outside_pass():
    outside = np.arange(200.0)
    assert hits_at(np.array([197.5, 198.5, 0.0, 199.5]), outside, np.ones(200), 0.01) == 0.5
    assert hits_at(outside, outside, np.ones(200), 0.01) == pytest.approx(0.005)


def test_correlation_is_pearsons_and_nothing_of_a_constant():
    left, right = np.array([1.0, 2.0, 4.0]), np.array([2.0, 1.0, 5.0])
    assert correlation(left, right) == pytest.approx(np.corrcoef(left, right)[0, 1])
    assert correlation(left, np.ones(3)) == 0.0


def test_a_mean_over_images_has_an_interval_of_redrawn_images():
    value, (low, high) = mean_of(np.array([0.0, 1.0] * 50))
    assert value == 0.5
    assert 0.38 < low < 0.45 < 0.55 < high < 0.62
    assert bootstrap(lambda generator: 3.0) == (3.0, 3.0)


def test_a_mean_over_few_clients_has_students_interval():
    # mean 0.3, deviation 0.2, t of two degrees of freedom 4.303: 0.3 +- 4.303 x 0.2 / sqrt(3)
    value, (low, high) = mean_of_few(np.array([0.1, 0.3, 0.5]))
    assert (value, low, high) == pytest.approx((0.3, -0.1968, 0.7968), abs=1e-3)
    assert mean_of_few(np.array([0.9]))[1] == (-1.0, 1.0)  # one client says nothing of others
    low, high = mean_of_few(np.ones(10))[1]
    assert low < 1.0 == high  # no interval has no width
    assert share_of(10, 10)[1] == pytest.approx((0.7225, 1.0), abs=1e-4)  # Wilson: 10 / (10 + 1.96^2)


def test_a_correlation_over_clients_has_fishers_interval():
    # atanh(0.5) = 0.5493, +- 1.96 / sqrt(9)
    assert of_correlation(0.5, 12) == pytest.approx((-0.1039, 0.8339), abs=1e-3)
    assert of_correlation(0.9, 3) == (-1.0, 1.0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_auc_is_that_of_scikit_learn(inside, outside):
    weights = np.arange(1.0, len(outside) + 1)
    expected = roc_auc_score(
        [1] * len(inside) + [0] * len(outside), [*inside, *outside], sample_weight=[*np.ones(len(inside)), *weights]
    )
    assert auc(np.array(inside, float), np.array(outside, float), weights) == pytest.approx(expected)


def test_a_paired_t_test_of_seeds():
    # differences 1, 2, 4: their mean over its standard error, with two degrees of freedom
    ratio = (7 / 3) / (7 / 3 / 3) ** 0.5
    assert paired_p([2.0, 2.0, 5.0], [1.0, 0.0, 1.0]) == pytest.approx(2 * student.sf(ratio, 2))
    assert paired_p([1.0, 2.0], [3.0, 5.0]) is None, "two seeds are too few"
    assert paired_p([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) is None, "all differ alike"


def test_holms_correction_multiplies_the_smallest_most_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3 x 0.01, 2 x 0.03, and no less than before
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
