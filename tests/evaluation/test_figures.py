"""Figures from counts: those of scikit-learn on the scores, within the stated binning error."""

from typing import Any

import numpy as np
import pytest
from evaluation.test_counts import drawn
from sklearn import metrics

from fedvl.evaluation import figures as module
from fedvl.evaluation.calibration import calibration_error
from fedvl.evaluation.counts import BINS, LIMIT, STEP, add_counts, bin_edges, count, empty, withheld
from fedvl.evaluation.figures import calibration_curve, choose_thresholds, half

NAMES = ["a", "b", "c", "d"]
HALF = [half()] * 4
ROUNDING = 1e-12
figures: Any = module.figures_of_counts  # whose figures may be absent


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("least", [0, 5])
def test_areas_are_those_of_scikit_learn_within_the_binning_error(seed, least):
    labels, shares = drawn(seed=seed)
    found = figures(withheld(labels, shares, least) if least else count(labels, shares), NAMES, HALF)
    for number, each in enumerate(found.classes):
        truth = labels == number
        area, precision = each.auroc, each.average_precision
        assert abs(area.value - metrics.roc_auc_score(truth, shares[:, number])) <= area.binning + ROUNDING
        wanted = metrics.average_precision_score(truth, shares[:, number])
        assert abs(precision.value - wanted) <= precision.binning + ROUNDING
        assert area.low < area.value < area.high
        assert precision.low < precision.value < precision.high
        if not least:
            assert area.binning < 0.01
            assert precision.binning < 0.05
    if not least:
        macro = metrics.roc_auc_score(labels, shares, multi_class="ovr")
        assert abs(found.auroc.value - macro) <= found.auroc.binning + ROUNDING


def test_roc_curves_are_those_of_scikit_learn_at_the_bins():
    labels, shares = drawn()
    binned = np.clip(np.floor((np.log(shares) - np.log1p(-shares) + LIMIT) / STEP), 0, BINS - 1)
    for number, each in enumerate(figures(count(labels, shares), NAMES, HALF).classes):
        alarms, hits, _ = metrics.roc_curve(labels == number, binned[:, number], drop_intermediate=False)
        points = np.array([(point.alarms, point.hits) for point in each.roc])
        assert (points[0] == 0).all()
        assert (points[-1] == 100).all()
        area = np.trapezoid(points[:, 1], points[:, 0]) / 1e4
        assert area == pytest.approx(metrics.auc(alarms, hits), abs=1e-9)
        kept = {tuple(np.round(point, 6)) for point in points}
        assert kept <= {tuple(np.round((100 * x, 100 * y), 6)) for x, y in zip(alarms, hits, strict=True)}
        assert len(points) < len(alarms)


def test_accuracy_and_calibration_are_those_of_the_scores():
    labels, shares = drawn()
    found, answers = figures(count(labels, shares), NAMES, HALF), shares.argmax(1)
    assert found.accuracy.value == pytest.approx(100 * metrics.accuracy_score(labels, answers))
    assert found.balanced_accuracy.value == pytest.approx(100 * metrics.balanced_accuracy_score(labels, answers))
    wanted = calibration_error(shares.max(1), answers == labels)
    assert abs(found.ece.value - wanted) <= found.ece.binning + ROUNDING
    assert found.ece.binning == pytest.approx(100 / 600)
    assert sum(each.images for each in found.calibration) == 400


def test_rates_at_a_threshold_are_those_of_the_scores():
    labels, shares = drawn()
    thresholds = choose_thresholds(count(labels, shares))
    for number, each in enumerate(figures(count(labels, shares), NAMES, thresholds).classes):
        said, truth = shares[:, number] >= each.threshold, labels == number
        (true_negative, false_positive), (false_negative, true_positive) = metrics.confusion_matrix(truth, said)
        assert each.threshold == bin_edges()[thresholds[number]]
        assert each.sensitivity.value == pytest.approx(100 * true_positive / (true_positive + false_negative))
        assert each.specificity.value == pytest.approx(100 * true_negative / (true_negative + false_positive))
        assert each.ppv.value == pytest.approx(100 * true_positive / (true_positive + false_positive))
        assert each.npv.value == pytest.approx(100 * true_negative / (true_negative + false_negative))
        for benefit in each.net_benefit:
            said = shares[:, number] >= benefit.threshold
            weight = benefit.threshold / (1 - benefit.threshold)
            assert benefit.model == pytest.approx(((said & truth).sum() - weight * (said & ~truth).sum()) / 400)


def test_a_threshold_has_the_largest_index_of_youden():
    labels, shares = drawn()
    for number, bin_ in enumerate(choose_thresholds(count(labels, shares))):
        alarms, hits, cuts = metrics.roc_curve(labels == number, shares[:, number])
        said, truth = shares[:, number] >= bin_edges()[bin_], labels == number
        chosen = said[truth].mean() - said[~truth].mean()
        assert chosen == pytest.approx((hits - alarms).max(), abs=0.02)
        assert len(cuts)


def test_the_interval_of_an_area_covers_it_in_nineteen_of_twenty_samples():
    wanted = metrics.roc_auc_score(*truth_of(drawn(200_000, seed=1000)))
    covered = 0
    for seed in range(200):
        each = figures(count(*drawn(150, seed=seed)), NAMES, HALF).classes[0].auroc
        covered += each.low <= wanted <= each.high
    assert 180 <= covered <= 199


def truth_of(sample):
    labels, shares = sample
    return labels == 0, shares[:, 0]


def test_what_is_withheld_is_not_known():
    labels, shares = drawn(60, skill=4.0)
    found = figures(withheld(labels, shares, 5), NAMES, HALF)
    assert found.accuracy is None
    assert found.balanced_accuracy is None
    assert found.ece is None
    assert found.calibration == []


def test_a_site_that_withholds_leaves_the_areas_of_all():
    parts = [drawn(300, seed=seed) for seed in range(3)]
    tables = [count(*parts[0]), *(withheld(labels, shares, 5) for labels, shares in parts[1:])]
    labels, shares = (np.concatenate(part) for part in zip(*parts, strict=True))
    found = figures(add_counts(tables), NAMES, HALF)
    for number, each in enumerate(found.classes):
        wanted = metrics.roc_auc_score(labels == number, shares[:, number])
        assert abs(each.auroc.value - wanted) <= each.auroc.binning + ROUNDING


def test_classes_without_images_have_no_figures():
    labels, shares = np.zeros(20, int), drawn(20)[1]
    found = figures(count(labels, shares), NAMES, HALF)
    assert found.auroc is None
    assert all(each.auroc is None for each in found.classes)
    assert figures(empty(4), NAMES, HALF).accuracy is None
    assert choose_thresholds(empty(4)) == [BINS // 2] * 4


def test_the_bins_of_a_calibration_curve_by_hand():
    """In the first bin three images in parts 0 and 1 of 300, one of them right; in the last one image, which is right."""
    calibration = np.zeros((2, 300), np.int64)  # wrong and right images, by the part of their share
    calibration[0, 0], calibration[1, 1], calibration[1, 299] = 2, 1, 1
    first, last = calibration_curve(calibration)
    assert first.share == pytest.approx((0.5 + 0.5 + 1.5) / 3 / 300)
    assert first.right == pytest.approx(100 / 3)
    assert last.share == pytest.approx(299.5 / 300)
    assert (first.images, last.right, last.images) == (3, 100.0, 1)
