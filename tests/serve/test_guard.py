"""What the guard says of origins, tokens and bodies."""

import asyncio
from dataclasses import replace

import pytest
from starlette.exceptions import HTTPException

from fedvl.errors import FedVLError
from fedvl.serve.askers import BusyError, Shares
from fedvl.serve.guard import LIMITS, Body, Guard, check_token, origin_host


def test_places_of_origins():
    assert origin_host("https://a.example:8443") == "a.example:8443"
    assert [origin_host(origin) for origin in ("null", "", "http://[", "file://", "localhost:80")] == [None] * 5


def test_a_token_that_protects_nothing_is_refused():
    for token in (None, "a-secret-of-16-c", "sixteen letters and blanks"):
        check_token(token)
    for token in (
        " ",
        "a secret of many letters ",
        "a sécret of many letters",
        "of many letters\na",
        "many letters \x00",
    ):
        with pytest.raises(FedVLError, match="give --token letters and digits, or leave it out"):
            check_token(token)
    for token in ("", "abc", "fifteen letters"):
        with pytest.raises(FedVLError, match=f"has {len(token)} characters, fewer than 16, and can be guessed"):
            check_token(token)


def answered(guard, path, *headers):
    """The status with which a request is answered; 200 if it gets through."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    named = [(b"host", b"localhost"), *((name.encode(), value.encode()) for name, value in headers)]
    scope = {"type": "http", "method": "GET", "path": path, "headers": named, "client": ("127.0.0.1", 1)}
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"]


async def admits(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(
    "given",
    [None, "", "secret", "Bearer", "Bearer ", "Bearer secre", "Bearer secret2", "Bearer SECRET", "Basic secret"],
)
def test_a_request_without_the_token_is_refused(given):
    guard = Guard(admits, "secret", LIMITS)
    headers = [] if given is None else [("authorization", given)]
    assert answered(guard, "/images", *headers) == 401
    assert answered(guard, "/health", *headers) == 200  # it reveals nothing
    assert answered(Guard(admits, None, LIMITS), "/images", *headers) == 200  # where there is no token


@pytest.mark.parametrize("given", ["Bearer secret", "bearer secret"])
def test_a_request_with_the_token_gets_through(given):
    assert answered(Guard(admits, "secret", LIMITS), "/images", ("authorization", given)) == 200


def body_of(parts, most=100, held=1000, **limits):
    """A body that arrives in these parts, of a request whose headers claimed anything."""
    coming = iter(parts)

    async def receive():
        part = next(coming)
        if part is None:
            await asyncio.Event().wait()  # nothing more ever comes
        return {"type": "http.request", "body": part, "more_body": True}

    shares = Shares(held)
    return Body(receive, most, replace(LIMITS, **limits), shares, "one"), shares


async def read_all(body):
    for _ in range(1000):
        await body.receive()


@pytest.mark.parametrize(
    "status, parts, options",
    [
        (413, [b"x" * 60, b"x" * 60], {}),
        (413, [b"x"] * 200, {}),
        (503, [b"x" * 60, b"x" * 60], {"most": 1000, "held": 200}),
        (408, [b"x", None], {"upload_seconds": 0.05}),
    ],
    ids=["large", "endless", "more than its share", "slow"],
)
def test_a_body_is_counted_while_it_arrives_and_forgotten_in_the_end(status, parts, options):
    async def go():
        body, held = body_of(parts, **options)
        with pytest.raises(HTTPException) as refusal:
            await read_all(body)
        assert refusal.value.status_code == status
        assert 0 < len(held) <= 120
        body.forget()
        assert len(held) == 0

    asyncio.run(go())


def test_two_addresses_can_each_send_one_largest_request_and_not_a_byte_more():
    held = Guard(admits, None, LIMITS).held
    for address in ("one", "two"):
        held.take(address, LIMITS.request_bytes)
    with pytest.raises(BusyError):
        held.take("three", 1)
    held.give_back("two", LIMITS.request_bytes)
    with pytest.raises(BusyError):
        held.take("one", 1)  # of its half
