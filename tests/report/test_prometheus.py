"""Metrics as text, read back by a reader of its own."""

from helpers.prometheus import read_metrics

from fedvl.report.prometheus import Metric, exposition
from fedvl.version import __version__


def test_what_is_written_can_be_read():
    odd = 'a "b" \\ c\nd'
    text = exposition(
        [
            Metric("things_total", "counter", "Things so far.", 3),
            Metric("share", "gauge", "Share of it.", {odd: 0.25, "é": 1e-7}, "party"),
        ]
    )
    assert read_metrics(text) == {
        ("fedvl_build_info", (("version", __version__),)): 1,
        ("fedvl_things_total", ()): 3,
        ("fedvl_share", (("party", odd),)): 0.25,
        ("fedvl_share", (("party", "é"),)): 1e-7,
    }
