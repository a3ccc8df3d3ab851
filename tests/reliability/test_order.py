"""The same run gives the same bits, in whatever order updates arrive and however clients are grouped."""

import random
from types import SimpleNamespace

import pytest
import torch
from helpers.small import PAPERS, run_quietly, small_federation, small_method

from fedvl.tensors import digest

ONE_EPOCH = {"local_epochs": 1}


def everything(federation):
    found = SimpleNamespace(merged=federation.shared, server=federation.server, last=federation.last)
    return federation._everything(found, None)


@pytest.mark.parametrize("name", PAPERS)
def test_the_order_of_arrival_cannot_be_seen(name, monkeypatch):
    """Twenty shuffles of every round's updates and reports, for each of five methods."""
    expected = digest(everything(run_quietly(small_federation(small_method(name), ONE_EPOCH))))
    orders = set()
    for seed in range(20):
        generator = random.Random(seed)
        federation = small_federation(small_method(name), ONE_EPOCH)
        train, report = federation.engine.train, federation.engine.report

        def shuffled(*arguments, train=train, generator=generator):
            trained = list(train(*arguments))
            generator.shuffle(trained)
            orders.add(tuple(result.update.client for result in trained))
            return trained

        def shuffled_reports(*arguments, report=report, generator=generator):
            reports, refusals = report(*arguments)
            generator.shuffle(reports)
            return reports, refusals

        monkeypatch.setattr(federation.engine, "train", shuffled)
        monkeypatch.setattr(federation.engine, "report", shuffled_reports)
        assert digest(everything(run_quietly(federation))) == expected
    assert len(orders) > 5


@pytest.mark.parametrize("name", PAPERS)
def test_chunks_and_threads_give_the_same_bits_again_and_the_same_numbers_throughout(name):
    results = {}
    for chunk in (1, 2, 4, 8):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results[chunk, threads] = [
                everything(run_quietly(small_federation(small_method(name), ONE_EPOCH, chunk=chunk))) for _ in range(2)
            ]
    for first, second in results.values():
        assert digest(first) == digest(second)
        for key, tensor in results[1, 1][0].items():
            torch.testing.assert_close(first[key], tensor, rtol=1e-5, atol=1e-5)
