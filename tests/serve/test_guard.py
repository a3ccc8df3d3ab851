"""What the guard says of origins, tokens and bodies."""

import asyncio
from dataclasses import replace

import pytest
from starlette.exceptions import HTTPException

from fedvl.errors import FedVLError
from fedvl.serve.askers import Shares
from fedvl.serve.guard import Body, check_token, place
from fedvl.serve.limits import LIMITS


def test_places_of_origins():
    assert place("https://a.example:8443") == "a.example:8443"
    assert [place(origin) for origin in ("null", "", "http://[", "file://", "localhost:80")] == [None] * 5


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
