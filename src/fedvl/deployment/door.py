"""The door of the SuperLink: who may speak, how much, and in whose name, before Flower reads it.

Flower reads a request's body before it looks at the signature, and does not compare the sender of a
message with the key that signed the request. So this layer stands before it: it knows the keys of
the federation's parties, and reads a body only for them, of a stated length, in bounded time.
"""

import asyncio
import json
from base64 import b64decode
from binascii import Error as NotBase64
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedvl.deployment.messages import FORMAT
from fedvl.version import __version__

SECRET_HEADER = "fedvl-secret"
FLEET, RUNTIME, HEALTH = "/v1/fleet/", "/v1/runtime/", "/health"
ACTIVATE, PUSH_MESSAGE, PUSH_OBJECT = f"{FLEET}activate-node", f"{FLEET}push-messages", f"{FLEET}push-object"
HELLO = f"{FLEET}fedvl"  # returns the version to a signed request
MAX_PLAIN_BYTES = 2**16  # of a client's request that carries no tensors; Flower's have a few hundred
SILENT_SECONDS = 30.0  # between two pieces of a body
SECONDS_AHEAD, SECONDS_BEHIND = 5.0, 305.0  # of a party's clock, as Flower has it
LOOPBACK_ADDRESSES = ("127.0.0.1", "::1")

Scope = Any  # of a request, as ASGI has it
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
PublicKey = ec.EllipticCurvePublicKey


class RefusedError(Exception):
    """A request that does not come in: its status, and a sentence for the log of who sent it."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class Signed(NamedTuple):
    """The names of the headers in which Flower sends a key and a signed moment."""

    key: bytes
    moment: bytes
    signature: bytes


class Door:
    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        secret: str,
        keys: Callable[[], Mapping[bytes, PublicKey]],
        most_bytes: int,
        signed: Signed,
        forged: Callable[[bytes], str | None],
        take_over: Callable[[Any, bytes], None],
    ) -> None:
        self.app, self.secret, self.keys, self.most_bytes = app, secret.encode(), keys, most_bytes
        self.signed, self.forged, self.take_over = signed, forged, take_over
        self.pushing: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            path, headers = scope["path"], dict(scope["headers"])
            if path.startswith(FLEET):
                await self._let_party_in(path, headers, scope, receive, send)
                return
            if path.startswith(RUNTIME):
                self._check_this_machine(scope)
            if not path.startswith(HEALTH):  # a reverse proxy on this machine passes on requests from others
                self._check_secret(headers)
            await self.app(scope, receive, send)
        except RefusedError as refused:
            await refuse_request(send, refused)

    async def _let_party_in(
        self, path: str, headers: Mapping[bytes, bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        key = self._check_signature(headers)
        if path == HELLO:
            await answer(send, 200, {"fedvl": __version__, "messages": FORMAT})
            return
        most = self.most_bytes if path == PUSH_OBJECT else MAX_PLAIN_BYTES
        length = stated_length(headers, most)
        # a party has one message in memory at a time; its small requests need not wait
        async with self.pushing[key] if path == PUSH_OBJECT else nullcontext():
            body = await read_body(receive, length)
            if path == PUSH_MESSAGE and (reason := self.forged(body)):
                raise RefusedError(403, reason)
            if path == ACTIVATE:  # its SuperNode starts again: do not wait until the old one is given up
                await asyncio.to_thread(self.take_over, scope["app"], key)
            await self.app(scope, replayed_body(body, receive), send)

    def _check_signature(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the key that signed a recent moment, if it is a party's."""
        try:
            key, signature = (
                b64decode(headers[name], validate=True) for name in (self.signed.key, self.signed.signature)
            )
            moment = headers[self.signed.moment]
            known = self.keys().get(key)
            if known is None:
                raise RefusedError(401, "The server does not know this party's key.")
            known.verify(signature, moment, ec.ECDSA(hashes.SHA256()))
            behind = (datetime.now(UTC) - datetime.fromisoformat(moment.decode("ascii"))).total_seconds()
        except (KeyError, ValueError, TypeError, NotBase64, InvalidSignature) as error:
            raise RefusedError(401, "The request is not signed with a party's key.") from error
        if not -SECONDS_AHEAD < behind < SECONDS_BEHIND:
            way = "behind" if behind > 0 else "ahead of"
            raise RefusedError(401, f"This party's clock is {abs(behind):.0f} seconds {way} the server's.")
        return key

    def _check_secret(self, headers: Mapping[bytes, bytes]) -> None:
        if not compare_digest(headers.get(SECRET_HEADER.encode(), b""), self.secret):
            raise RefusedError(403, "The control interface is the server's own.")

    def _check_this_machine(self, scope: Scope) -> None:
        """Refuse the tasks' interface to other machines; on this one Flower asks for a token."""
        if (scope.get("client") or [""])[0] not in LOOPBACK_ADDRESSES:
            raise RefusedError(403, "The tasks' interface is for the server's own machine.")


def stated_length(headers: Mapping[bytes, bytes], most: int) -> int:
    length = headers.get(b"content-length", b"")
    if b"transfer-encoding" in headers or not length.isdigit():
        raise RefusedError(411, "A request states its length.")
    if int(length) > most:
        raise RefusedError(413, f"The request has {int(length):,} bytes, more than the {most:,} that it may have.")
    return int(length)


async def read_body(receive: Receive, length: int) -> bytes:
    """Return a body of the stated length; refuse one that is longer, or comes too slowly."""
    body, more = bytearray(), True
    while more:
        try:
            piece = await asyncio.wait_for(receive(), SILENT_SECONDS)
        except TimeoutError as error:
            raise RefusedError(408, "The request did not arrive in time.") from error
        if piece["type"] == "http.disconnect":
            raise RefusedError(400, "The request broke off.")
        body += piece.get("body", b"")
        more = piece.get("more_body", False)
        if len(body) > length:
            raise RefusedError(413, "The request is longer than it says.")
    return bytes(body)


def replayed_body(body: bytes, receive: Receive) -> Receive:
    """Hand a body that was read to the next layer."""
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return pieces.pop() if pieces else await receive()

    return again


async def refuse_request(send: Send, refused: RefusedError) -> None:
    """Answer in the form that Flower writes into its logs, and end the connection."""
    await answer(send, refused.status, {"code": refused.status, "detail": refused.sentence})


async def answer(send: Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
