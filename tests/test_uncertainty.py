"""Intervals and tests of differences, against other implementations, values computed by hand, and their own promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import f1_score, precision_score, recall_score

from fedvl.uncertainty import Paired, bootstrap_lead, bootstrap_macro, bootstrap_mean, mcnemar, wilson

TRUTHS = st.text("01", min_size=1, max_size=60)


@given(st.integers(1, 400), st.data())
def test_wilson_is_that_of_scipy(count, data):
    hits = data.draw(st.integers(0, count))
    expected = binomtest(hits, count).proportion_ci(method="wilson")
    assert wilson(100 * hits / count, count) == pytest.approx((100 * expected.low, 100 * expected.high))


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
