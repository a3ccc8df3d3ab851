"""Access control, size and time limits, checked before and while a request is read."""

import asyncio
import secrets
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedvl.errors import FedVLError
from fedvl.report.loopback import HEADERS, hostname, is_loopback
from fedvl.serve.askers import BusyError, Shares

OPEN = {"/", "/page.css", "/page.js", "/icon.svg", "/health"}  # they reveal nothing about the run
ONE_FILE = {"/preview", "/reports"}  # requests with one image at most
BODILESS = ("GET", "HEAD", "DELETE", "OPTIONS")
SHORTEST_TOKEN = 16  # characters
BUSY = "The service is busy; try again in a moment."
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Limits:
    """Limits of the service; those of decoding an image are in ``data/images.py``.

    One address may have half of the sessions, names, bytes, images, requests and connections.
    """

    names: int = 2_000  # per session
    name_characters: int = 200
    templates: int = 20
    texts: int = 4_000  # names times templates
    names_in_all: int = 100_000  # of all sessions together, since they take memory
    sessions: int = 64
    idle_seconds: float = 1800.0  # after which a session expires
    top: int = 100  # names returned per image
    files: int = 500  # per request
    file_bytes: int = 20 * MEGABYTE
    request_bytes: int = 200 * MEGABYTE  # of images; text_bytes limits other requests
    text_bytes: int = 2 * MEGABYTE
    head_seconds: float = 10.0  # for the head of a request to arrive, and for an answer to be read
    upload_seconds: float = 300.0  # for a request to arrive
    held_bytes: int = 400 * MEGABYTE  # of all requests in progress
    pending_images: int = 4096  # waiting for the encoder
    requests: int = 128  # in progress; more are answered with 503
    connections: int = 1024  # open, if the system allows so many files; one that waits makes room for another
    retry_seconds: int = 2  # sent as Retry-After when the service is busy


LIMITS = Limits()


class Guard:
    """Middleware that admits local requests or, if there is a token, requests that carry it."""

    def __init__(self, app: ASGIApp, token: str | None, limits: Limits) -> None:
        self.app, self.token, self.limits = app, token, limits
        self.held = Shares(limits.held_bytes)  # bytes of all requests in progress
        self.asking = Shares(limits.requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_strictly(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope, Headers(scope=scope))
        if refusal:
            await refusal(scope, receive, send_strictly)
            return
        address = address_of(scope)
        try:
            self.asking.take(address, 1)
        except BusyError:
            await discard(receive, self.limits)
            await refusal_response(503, BUSY, self.limits.retry_seconds)(scope, receive, send_strictly)
            return
        body = Body(receive, self._most(scope["path"]), self.limits, self.held, address)
        try:
            await self.app(scope, body.receive, send_strictly)
        except ClientDisconnect:
            pass  # nobody is left to answer
        finally:
            body.forget()
            self.asking.give_back(address, 1)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        host, closed = headers.get("host", ""), scope["path"] not in OPEN
        if self.token is None and not is_loopback(hostname(host)):
            return refusal_response(
                421, "This service answers on localhost only; start it with --host and --token for others."
            )
        if any(origin_host(origin) != host for origin in headers.getlist("origin")) or (
            closed and headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        ):
            return refusal_response(403, "A page of another site may not use this service.")
        if self.token is not None and closed and not self._knows_token(headers):
            return refusal_response(401, "Give the service's token: Authorization: Bearer TOKEN.")
        lengths = headers.getlist("content-length")
        if len(lengths) > 1 or (lengths and "transfer-encoding" in headers):
            return refusal_response(400, "Send one Content-Length, and no Transfer-Encoding beside it.")
        if not lengths and scope["method"] in BODILESS and "transfer-encoding" not in headers:
            return None
        if not lengths or not lengths[0].isdecimal():
            return refusal_response(411, "Send the length of the request as Content-Length.")
        most = self._most(scope["path"])
        return refusal_response(413, too_large(most)) if len(lengths[0]) > 18 or int(lengths[0]) > most else None

    def _most(self, path: str) -> int:
        if path.endswith("/images"):
            return self.limits.request_bytes
        return self.limits.text_bytes + (self.limits.file_bytes if path in ONE_FILE else 0)

    def _knows_token(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and secrets.compare_digest(given.encode(), (self.token or "").encode())


class Body:
    """The body of a request as it arrives: limited in size and time, whatever its headers claim."""

    def __init__(self, receive: Receive, most: int, limits: Limits, held: Shares, address: str) -> None:
        self._receive, self._most, self._held, self._address = receive, most, held, address
        self._retry = limits.retry_seconds
        self._end = asyncio.get_running_loop().time() + limits.upload_seconds
        self._whole = False
        self._size = 0

    async def receive(self) -> Message:
        if self._whole:  # only a disconnect can follow
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._end):
                message = await self._receive()
        except TimeoutError as error:
            raise HTTPException(408, "The request did not arrive in time; send less at once.") from error
        size = len(message.get("body", b""))
        if self._size + size > self._most:
            raise HTTPException(413, too_large(self._most))
        try:
            self._held.take(self._address, size)
        except BusyError as error:
            raise HTTPException(503, BUSY, {"retry-after": str(self._retry)}) from error
        self._size += size
        self._whole = not message.get("more_body", False)
        return message

    def forget(self) -> None:
        self._held.give_back(self._address, self._size)


async def discard(receive: Receive, limits: Limits) -> None:
    """Read a body and drop it: closed with it unread, a connection would lose the answer."""
    size, more = 0, True
    with suppress(TimeoutError):
        async with asyncio.timeout(limits.head_seconds):
            while more and size <= limits.file_bytes:
                message = await receive()
                size, more = size + len(message.get("body", b"")), message.get("more_body", False)


def check_token(token: str | None) -> None:
    """Refuse a token that can be guessed or that a header cannot carry."""
    if token is None:
        return
    if not (token.strip() == token and token.isascii() and token.isprintable()):
        raise FedVLError("The token is not plain text; give --token letters and digits, or leave it out.")
    if len(token) < SHORTEST_TOKEN:
        raise FedVLError(
            f"The token has {len(token)} characters, fewer than {SHORTEST_TOKEN}, and can be guessed; give --token the "
            "output of `openssl rand -hex 16`, or leave it out."
        )


def address_of(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def origin_host(origin: str) -> str | None:
    """Return the host and port of an origin, or None if it has none."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def too_large(most: int) -> str:
    return f"A request to this address has {most // 1_000_000} MB at most; send less at once."


def refusal_response(status: int, sentence: str, retry_after: float | None = None) -> JSONResponse:
    headers = HEADERS if retry_after is None else {**HEADERS, "retry-after": str(int(retry_after))}
    return JSONResponse({"detail": sentence}, status, headers)
