"""Round-robin scheduling by client address; each address is limited to half of each resource."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple


class BusyError(Exception):
    """Raised when there is no room for a request."""


class Asker(NamedTuple):
    """An address and its session: addresses take turns, and so do the sessions of one address."""

    address: str
    session: str = ""


class Shares:
    """Counts of what is in use, by address."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._used.total()

    def take(self, address: str, count: int) -> None:
        with self._lock:
            if len(self) + count > self._most or self._used[address] + count > self._most // 2:
                raise BusyError
            self._used[address] += count

    def give_back(self, address: str, count: int) -> None:
        with self._lock:
            self._used[address] -= count
            if not self._used[address]:
                del self._used[address]  # so that what is kept does not grow with the addresses


class TurnPool:
    """Threads that run jobs in turn; one address never has all of several threads."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = max(1, threads - 1)  # of one address at a time
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, dict[str, deque[tuple[Future[Any], Callable[[], Any]]]]] = {}  # next in turn first
        self._changed = threading.Condition()
        self._stopped = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, asker: Asker, function: Callable[[], Any]) -> "Future[Any]":
        result: Future[Any] = Future()
        with self._changed:
            sessions = self._waiting.setdefault(asker.address, {})
            sessions.setdefault(asker.session, deque()).append((result, function))
            self._changed.notify()
        return result

    def stop(self) -> None:
        """Stop the threads after their current jobs; drop the waiting ones."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while (address := self._next()) is None and not self._stopped:
                    self._changed.wait()
                if address is None or self._stopped:
                    return
                result, function = self._take(address)
                self._running[address] += 1
            settle(result, function)
            with self._changed:
                self._running[address] -= 1
                if not self._running[address]:
                    del self._running[address]
                self._changed.notify()

    def _next(self) -> str | None:
        return next((address for address in self._waiting if self._running[address] < self._most), None)

    def _take(self, address: str) -> "tuple[Future[Any], Callable[[], Any]]":
        """Take the next job of an address, and put the address and its session last."""
        sessions = self._waiting.pop(address)
        session, jobs = next(iter(sessions.items()))
        job = jobs.popleft()
        del sessions[session]
        if jobs:
            sessions[session] = jobs
        if sessions:
            self._waiting[address] = sessions
        return job


def settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    """Set a future's result or exception, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:  # raised where the result is awaited
            future.set_exception(error)
