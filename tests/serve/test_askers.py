"""Fairness between askers: shares counted by hand, and the order of turns."""

import threading
from functools import partial

import pytest

from fedvl.serve.askers import Asker, BusyError, Shares, TurnPool


def test_one_address_gets_half_and_all_together_the_whole():
    shares = Shares(10)
    shares.take("a", 5)
    with pytest.raises(BusyError):
        shares.take("a", 1)
    shares.take("b", 3)
    shares.take("c", 2)
    with pytest.raises(BusyError):
        shares.take("d", 1)
    shares.give_back("a", 2)
    shares.take("d", 2)
    assert len(shares) == 10


def test_what_is_given_back_leaves_nothing_behind():
    shares = Shares(10)
    for number in range(100):
        shares.take(str(number), 1)
        shares.give_back(str(number), 1)
    assert (len(shares), dict(shares._used)) == (0, {})


def test_addresses_take_turns_and_so_do_their_sessions():
    """One address with two sessions and much to do, and one with a single job that came last."""
    pool, begun, go = TurnPool(1, "test"), threading.Event(), threading.Event()
    order: list[str] = []

    def hold():
        begun.set()
        assert go.wait(60)

    held = pool.submit(Asker("x"), hold)
    assert begun.wait(60)
    jobs = [("a", "1")] * 4 + [("a", "2")] * 2 + [("b", "3")]
    done = [pool.submit(Asker(address, session), partial(order.append, session)) for address, session in jobs]
    go.set()
    for each in (held, *done):
        each.result(60)
    pool.stop()
    assert order == ["1", "3", "2", "1", "2", "1", "1"]


def test_a_job_that_fails_or_is_cancelled_does_not_end_the_pool():
    pool, begun, go = TurnPool(1, "test"), threading.Event(), threading.Event()

    def hold():
        begun.set()
        assert go.wait(60)

    pool.submit(Asker("x"), hold)
    assert begun.wait(60)
    failing, cancelled, good = (pool.submit(Asker("x"), job) for job in (lambda: 1 / 0, lambda: 2, lambda: 3))
    assert cancelled.cancel()
    go.set()
    assert good.result(60) == 3
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    pool.stop()


def test_one_address_does_not_take_all_threads():
    pool, begun, go = TurnPool(3, "test"), threading.Semaphore(0), threading.Event()

    def hold():
        begun.release()
        assert go.wait(60)

    held = [pool.submit(Asker("a", str(number)), hold) for number in range(9)]
    assert begun.acquire(timeout=60)
    assert begun.acquire(timeout=60)
    assert pool.submit(Asker("b"), lambda: "answered").result(60) == "answered"
    assert not begun.acquire(blocking=False)
    go.set()
    for each in held:
        each.result(60)
    pool.stop()
