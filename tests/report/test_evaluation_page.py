"""The page of an evaluation says what is known, how well, and what a site withheld."""

from evaluation.test_counts import drawn

from fedvl.evaluation.counts import add_counts, count, withheld
from fedvl.evaluation.figures import Evaluation, NetBenefit, choose_thresholds, figures_of_counts
from fedvl.report.evaluation_page import (
    benefit_series,
    calibration_series,
    evaluation_lines,
    rarest,
    roc_series,
    write_evaluation_page,
)

NAMES = ["benign nevus", "melanoma", "keratosis", "a class with a rather long name"]


def made_up_evaluation(secure=False, skill=2.0):
    parts = {site: drawn(300, seed=seed, skill=skill) for seed, site in enumerate(("hospital-a", "hospital-b"))}
    tables = {
        site: count(labels, shares) if secure else withheld(labels, shares, 5)
        for site, (labels, shares) in parts.items()
    }
    total = add_counts(list(tables.values()))
    thresholds = choose_thresholds(total)
    return Evaluation(
        fedvl_version="0.2.0",
        run="clinic",
        method="linear",
        model="fedvl-tiny",
        images_from="the sites' own test images",
        thresholds_from="chosen on the server's test images, by Youden's index",
        secure_sum=secure,
        evaluated="2026-11-19T08:00:00+00:00",
        class_names=NAMES,
        sites=list(parts),
        missing=["hospital-c"],
        refused=[],
        pooled=figures_of_counts(total, NAMES, thresholds),
        by_site={} if secure else {site: figures_of_counts(table, NAMES, thresholds) for site, table in tables.items()},
    )


def test_a_page_of_a_secure_sum_has_no_figures_of_a_site(tmp_path):
    text = write_evaluation_page(made_up_evaluation(secure=True), tmp_path / "evaluation.html").read_text()
    assert "nothing of a single site" in text
    assert 'id="sites"' not in text
    assert "melanoma" in text
    assert 'id="calibration"' in text
    assert 'id="roc"' in text


def test_a_page_says_what_a_site_withheld(tmp_path):
    found = made_up_evaluation(skill=4.0)
    text = write_evaluation_page(found, tmp_path / "evaluation.html").read_text()
    assert "withheld" in text
    assert "Missing: hospital-c" in text
    assert 'id="sites"' in text
    lines = evaluation_lines(found)
    assert "Accuracy, %: withheld" in lines
    assert "Missing: hospital-c." in lines


def test_names_of_classes_are_escaped(tmp_path):
    found = made_up_evaluation()
    hostile = found.pooled.classes[0].model_copy(update={"name": "<script>alert(1)</script>"})
    pooled = found.pooled.model_copy(update={"classes": [hostile]})
    text = write_evaluation_page(found.model_copy(update={"pooled": pooled}), tmp_path / "e.html").read_text()
    assert "<script>alert" not in text


def test_curves_are_in_percent_and_the_net_benefit_is_that_of_the_rarest_class_above_minus_five():
    pooled = made_up_evaluation(secure=True).pooled
    benefits = [NetBenefit(threshold=0.1, model=0.02, all=-0.01), NetBenefit(threshold=0.5, model=-0.2, all=-0.6)]
    classes = [
        each.model_copy(update={"images": images, "net_benefit": benefits if shown else []})
        for each, images, shown in zip(pooled.classes, (40, 7, 3, 90), (True, True, False, True), strict=True)
    ]
    found = pooled.model_copy(update={"classes": classes})
    rare = rarest(found)
    assert rare is not None
    assert (rare.name, rare.images) == (NAMES[1], 7)
    assert [(series.name, series.points) for series in benefit_series(found)] == [
        ("model", [(10.0, 2.0), (50.0, -5.0)]),
        ("act for all", [(10.0, -1.0), (50.0, -5.0)]),
    ]
    measured, ideal = calibration_series(found)
    assert measured.points == [(100 * part.share, part.right) for part in found.calibration]
    assert all(0 <= number <= 100 for point in measured.points for number in point)
    assert ideal.points == [(0.0, 0.0), (100.0, 100.0)]
    assert calibration_series(found.model_copy(update={"calibration": []})) == []
    assert benefit_series(found.model_copy(update={"classes": []})) == []


def test_the_page_states_noise_and_what_it_does(tmp_path):
    found = made_up_evaluation(secure=True)
    accuracy = found.pooled.accuracy
    assert accuracy is not None
    pooled = found.pooled.model_copy(update={"accuracy": accuracy.model_copy(update={"noise": 2.5})})
    noisy = found.model_copy(update={"pooled": pooled, "epsilon": 4.0, "delta": 1e-5})
    text = write_evaluation_page(noisy, tmp_path / "evaluation.html").read_text()
    assert "epsilon 4.0 at delta 1e-05" in text
    assert "±2.5 by noise" in text
    assert "Noise hides each image in the counts: epsilon 4 at delta 1e-05." in evaluation_lines(noisy)
    assert 'id="noise"' not in write_evaluation_page(found, tmp_path / "plain.html").read_text()


def test_roc_curves_of_the_classes_with_the_smallest_areas_are_drawn():
    found = made_up_evaluation(secure=True).pooled
    *curves, chance = roc_series(found)
    areas = {each.name: each.auroc.value for each in found.classes if each.auroc}
    assert [curve.name for curve in curves] == sorted(areas, key=areas.__getitem__)
    assert [curve.points[0] for curve in curves] == [(0, 0)] * 4
    assert chance.points == [(0.0, 0.0), (100.0, 100.0)]
    many = found.model_copy(update={"classes": found.classes * 2})
    assert len(roc_series(many)) == 6
    assert roc_series(found.model_copy(update={"classes": []})) == []
