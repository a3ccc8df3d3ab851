"""The door of the SuperLink: a signed moment, a stated length, the server's secret, this machine."""

import asyncio
from base64 import b64encode
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedvl.deployment.door import ACTIVATE, FLEET, MAX_PLAIN_BYTES, PUSH_MESSAGE, PUSH_OBJECT, Door, Signed

SECRET, MAX_BYTES = "s" * 64, 10 * MAX_PLAIN_BYTES
NAMES = Signed(b"key", b"moment", b"signature")
PRIVATE = ec.generate_private_key(ec.SECP256R1())
KEY = b"the client's public key"


class Behind:
    """What lies behind the door: counts what comes in, and which SuperNodes are taken over."""

    def __init__(self, forged=None):
        self.bodies: list[bytes] = []
        self.taken: list[bytes] = []
        self.door = Door(
            self, SECRET, lambda: {KEY: PRIVATE.public_key()}, MAX_BYTES, NAMES, lambda body: forged,
            lambda app, key: self.taken.append(key),
        )  # fmt: skip

    async def __call__(self, scope, receive, send):
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def status(self, path, headers, body=b"", client="127.0.0.1", pieces=None):
        """Return the status of the answer to a request."""
        content = [{"type": "http.request", "body": body, "more_body": False}] if pieces is None else list(pieces)
        sent = []

        async def receive():
            return content.pop(0)

        async def send(event):
            sent.append(event)

        scope = {"type": "http", "path": path, "headers": list(headers.items()), "client": (client, 1), "app": None}
        asyncio.run(self.door(scope, receive, send))
        return sent[0]["status"]


def signed(seconds_ago=0.0, key=KEY, private=PRIVATE, length=0):
    moment = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat().encode()
    signature = private.sign(moment, ec.ECDSA(hashes.SHA256()))
    return {
        b"key": b64encode(key),
        b"moment": moment,
        b"signature": b64encode(signature),
        b"content-length": b"%d" % length,
    }


def test_a_client_comes_in_with_its_body_and_takes_over_when_it_starts():
    behind = Behind()
    assert behind.status(f"{FLEET}pull-messages", signed(length=3), b"abc") == 200
    assert (behind.bodies, behind.taken) == ([b"abc"], [])
    assert behind.status(ACTIVATE, signed()) == 200
    assert behind.taken == [KEY]


@pytest.mark.parametrize(("seconds", "status"), [(300.0, 200), (310.0, 401), (-3.0, 200), (-10.0, 401)])
def test_a_signed_moment_counts_for_five_minutes(seconds, status):
    assert Behind().status(f"{FLEET}x", signed(seconds)) == status


@pytest.mark.parametrize(
    "headers",
    [
        {},
        signed(key=b"a key that nobody admitted"),
        signed(private=ec.generate_private_key(ec.SECP256R1())),
        {**signed(), b"moment": datetime.now(UTC).isoformat().encode()},
        {**signed(), b"key": b"not base64 !"},
    ],
    ids=["no key", "unknown key", "another's signature", "another moment", "no base64"],
)
def test_nobody_else_comes_in(headers):
    behind = Behind()
    assert behind.status(f"{FLEET}x", {b"content-length": b"0", **headers}) == 401
    assert behind.bodies == []


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [
        (f"{FLEET}x", MAX_PLAIN_BYTES, 200),
        (f"{FLEET}x", MAX_PLAIN_BYTES + 1, 413),
        (PUSH_OBJECT, MAX_PLAIN_BYTES + 1, 200),
        (PUSH_OBJECT, MAX_BYTES + 1, 413),
    ],
)
def test_only_tensors_may_be_large(path, length, status):
    assert Behind().status(path, signed(length=length), bytes(length)) == status


def test_a_length_is_stated_and_kept():
    piece = {"type": "http.request", "body": b"12345", "more_body": True}
    assert Behind().status(f"{FLEET}x", {**signed(), b"content-length": b"five"}) == 411
    assert Behind().status(f"{FLEET}x", {**signed(), b"transfer-encoding": b"chunked"}) == 411
    assert Behind().status(f"{FLEET}x", signed(length=4), pieces=[piece]) == 413
    assert Behind().status(f"{FLEET}x", signed(length=9), pieces=[piece, {"type": "http.disconnect"}]) == 400


def test_a_message_in_another_clients_name_is_refused():
    assert Behind("another's name").status(PUSH_MESSAGE, signed()) == 403
    assert Behind("another's name").status(f"{FLEET}x", signed()) == 200


@pytest.mark.parametrize(("secret", "status"), [(SECRET.encode(), 200), (b"", 403), (SECRET[:-1].encode(), 403)])
def test_the_control_interface_needs_the_secret(secret, status):
    assert Behind().status("/v1/control/start-run", {b"fedvl-secret": secret}) == status


@pytest.mark.parametrize(("client", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.0.0.7", 403)])
def test_the_tasks_interface_is_for_this_machine(client, status):
    assert Behind().status("/v1/runtime/pull", {b"fedvl-secret": SECRET.encode()}, client=client) == status
    assert Behind().status("/v1/runtime/pull", {}, client=client) == 403
