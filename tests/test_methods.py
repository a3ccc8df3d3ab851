"""The list of methods."""

from fedvl.methods import method_names, method_summaries


def test_every_method_says_what_it_is():
    assert set(method_summaries()) == set(method_names())
    assert all(len(summary) > 20 for summary in method_summaries().values())
