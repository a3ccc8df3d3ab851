"""Sessions: their room by address, when they expire, and the results of their images in order."""

import asyncio
import json
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from fedvl.data.images import BadImage
from fedvl.serve.askers import BusyError
from fedvl.serve.guard import Limits
from fedvl.serve.model import Line
from fedvl.serve.sessions import Session, Sessions, Upload, answers, as_text

LIMITS = Limits(sessions=4, names_in_all=20, idle_seconds=10.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sessions(clock):
    return Sessions(LIMITS, clock)


def user(names: int = 1, ask: Any = None) -> Any:
    return SimpleNamespace(names=["name"] * names, ask=ask)


def begin(sessions: Sessions, address: str, names: int = 1) -> Session:
    with sessions.room(address, names):
        return sessions.begin(user(names), address, 3, 2)


def test_one_address_has_half_of_the_sessions_and_all_together_the_whole(sessions):
    for address in ("one", "one", "other"):
        begin(sessions, address)
    with pytest.raises(BusyError):
        begin(sessions, "one")
    begin(sessions, "third")
    with pytest.raises(BusyError):
        begin(sessions, "fourth")
    assert len(sessions) == 4


def test_names_are_limited_by_address_and_in_all(sessions):
    begin(sessions, "one", 4)
    with pytest.raises(BusyError):
        begin(sessions, "one", 7)
    begin(sessions, "one", 6)
    begin(sessions, "other", 10)
    with pytest.raises(BusyError):
        begin(sessions, "third", 1)


def test_a_session_that_is_being_created_takes_room_until_it_is_or_fails(sessions):
    with sessions.room("one", 10):
        with pytest.raises(BusyError):
            begin(sessions, "one", 1)
        begin(sessions, "other", 10)
    with pytest.raises(RuntimeError), sessions.room("one", 10):
        raise RuntimeError
    begin(sessions, "one", 10)


def test_a_session_expires_after_idle_seconds_unless_it_is_used_or_at_work(sessions, clock):
    first, second = begin(sessions, "one"), begin(sessions, "other")
    clock.now = 10.0
    assert sessions.find(second.id) is second, "ten seconds are not more than ten"
    clock.now = 10.5
    assert len(sessions) == 1
    assert sessions.find(first.id) is None
    asyncio.run(second.turn.acquire())
    clock.now = 100.0
    assert sessions.find(second.id) is second


def test_room_of_expired_sessions_is_free(sessions, clock):
    begin(sessions, "one", 10)
    clock.now = 11.0
    begin(sessions, "one", 10)


def test_a_session_ends_once_and_is_found_by_its_own_id(sessions):
    session, other = begin(sessions, "one"), begin(sessions, "one")
    assert session.id != other.id
    assert len(session.id) >= 20
    assert sessions.find("guessed") is None
    assert sessions.end(session.id)
    assert not sessions.end(session.id)
    assert sessions.find(other.id) is other
    assert (other.asker.address, other.asker.session) == ("one", other.id)


class Reply(SimpleNamespace):
    def write(self, line: Line) -> None:
        line |= {"ranked": [self.name], "prototype_of": self.example}


class Worker:
    """Runs what it is given at once, and notes for whom."""

    def __init__(self) -> None:
        self.askers: list[Any] = []

    def call(self, asker: Any, function: Any) -> "Future[Any]":
        self.askers.append(asker)
        done: Future[Any] = Future()
        done.set_result(function())
        return done


def encoded(value: Any) -> "Future[Any]":
    done: Future[Any] = Future()
    done.set_result(value)
    return done


def ask(images: list[str], top: int) -> list[Reply]:
    return [Reply(name=f"{image}/{len(images)}/{top}", example="cat" if image in "ad" else None) for image in images]


def collect(session: Session, uploads: list[Upload], worker: Any) -> list[list[Line]]:
    async def run() -> list[list[Line]]:
        return [lines async for lines in answers(session, uploads, worker)]

    return asyncio.run(run())


def test_files_are_answered_in_order_in_batches_and_refused_ones_are_said(sessions):
    session, worker = sessions.begin(user(ask=ask), "one", 3, 2), Worker()
    uploads = [
        Upload("a.png", encoded("a")),
        Upload("bad.png", encoded(BadImage("no image."))),
        Upload("c.png", encoded("c")),
        Upload("large.png", None, "too large."),
        Upload("d.png", encoded("d")),
    ]
    batches = collect(session, uploads, worker)
    assert [[(line["number"], line["image"]) for line in lines] for lines in batches] == [
        [(0, "a.png"), (1, "bad.png"), (2, "c.png")],
        [(3, "large.png"), (4, "d.png")],
    ]
    lines = [line for batch in batches for line in batch]
    assert [line.get("ranked", [line.get("refused")])[0] for line in lines] == [
        "a/2/3",
        "no image.",
        "c/2/3",
        "too large.",
        "d/1/3",
    ]
    assert (session.images, session.refused, session.examples) == (5, 2, {"cat": [0, 4]})
    assert worker.askers == [session.asker] * 2
    (again,) = collect(session, [Upload("e.png", encoded("e"))], worker)
    assert again[0]["number"] == 5, "numbers go on in a session"


def test_a_full_last_batch_is_answered_once(sessions):
    session = sessions.begin(user(ask=ask), "one", 3, 2)
    assert len(collect(session, [Upload(name, encoded(name)) for name in "ab"], Worker())) == 1


def test_what_waits_for_the_encoder_is_cancelled_when_its_client_leaves(sessions):
    session = sessions.begin(user(ask=ask), "one", 3, 1)
    waiting: Future[Any] = Future()

    async def leave() -> None:
        uploads = [Upload("a.png", encoded("a")), Upload("b.png", waiting)]
        worker: Any = Worker()
        results: Any = answers(session, uploads, worker)
        await anext(results)
        await results.aclose()

    asyncio.run(leave())
    assert waiting.cancelled()
    assert not session.turn.locked()


def test_results_are_lines_of_json_in_any_script():
    lines: list[Line] = [{"image": "猫.png"}, {"image": "b.png"}]
    text = as_text(lines).decode()
    assert text.endswith("\n")
    assert [json.loads(line) for line in text.splitlines()] == lines
    assert "猫" in text
