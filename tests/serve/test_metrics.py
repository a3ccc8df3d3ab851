"""Metrics of the service: images by outcome, and a histogram of seconds, in Prometheus format."""

from types import SimpleNamespace
from typing import Any

from fedvl.serve.metrics import SECONDS_BOUNDS, Metrics
from fedvl.serve.model import Line

WORKER: Any = SimpleNamespace(pending=[0] * 3, batches=7, encoded=11, seconds=0.5)
REFUSED: Line = {"number": 0, "refused": "too large."}
ANSWERED: Line = {"number": 1, "ranked": []}


def numbers(metrics: Metrics) -> dict[str, str]:
    lines = metrics.text(5, WORKER).splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_images_are_counted_by_outcome_and_by_seconds():
    metrics = Metrics()
    metrics.busy += 2
    metrics.count([ANSWERED, REFUSED, ANSWERED], 0.1)
    metrics.count([ANSWERED], 0.11)
    metrics.count([REFUSED], 31.0)
    found = numbers(metrics)
    assert found["fedvl_images_answered_total"] == "3"
    assert found["fedvl_images_refused_total"] == "2"
    assert found["fedvl_requests_refused_busy_total"] == "2"
    buckets = [int(found[f'fedvl_answer_seconds_bucket{{le="{bound}"}}']) for bound in (*SECONDS_BOUNDS, "+Inf")]
    assert buckets == [0, 3, 4, 4, 4, 4, 4, 4, 4, 5], "a time that is a bound is within it; buckets add up"
    assert float(found["fedvl_answer_seconds_sum"]) == 0.1 * 3 + 0.11 + 31
    assert found["fedvl_answer_seconds_count"] == "5"


def test_sessions_and_the_worker_are_shown_as_they_are():
    found = numbers(Metrics())
    assert {name: found[f"fedvl_{name}"] for name in ("sessions", "images_pending", "encoder_batches_total")} == {
        "sessions": "5",
        "images_pending": "3",
        "encoder_batches_total": "7",
    }
    assert (found["fedvl_encoder_images_total"], found["fedvl_encoder_seconds_total"]) == ("11", "0.5")
    assert found["fedvl_answer_seconds_count"] == "0"


def test_every_metric_has_help_and_type():
    lines = Metrics().text(0, WORKER).splitlines()
    helped = {line.split()[2] for line in lines if line.startswith("# HELP")}
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert helped == set(kinds)
    assert kinds["fedvl_answer_seconds"] == "histogram"
    assert kinds["fedvl_sessions"] == "gauge"
    assert kinds["fedvl_images_answered_total"] == "counter"
