"""Access control and size limits, checked before the body of a request is read."""

import asyncio
import secrets
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedvl.serve.limits import Limits

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
OPEN = {"/", "/page.css", "/page.js", "/icon.svg", "/health"}  # they reveal nothing about the run
# The page loads nothing from elsewhere, and no other site may frame it.
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Guard:
    """Middleware that admits local requests or, if there is a token, requests that carry it."""

    def __init__(self, app: ASGIApp, token: str | None, limits: Limits) -> None:
        self.app, self.token, self.limits = app, token, limits
        self.held = 0  # bytes of all requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal:
            await refusal(scope, receive, send)
            return
        length = headers.get("content-length", "")
        size = int(length) if length.isdecimal() else 0
        self.held += size
        try:
            await self.app(scope, with_deadline(receive, self.limits.upload_seconds), send)
        finally:
            self.held -= size

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.token is None and hostname(host) not in LOOPBACK:
            return refuse(421, "This service answers on localhost only; start it with --host and --token for others.")
        if origin is not None and urlsplit(origin).netloc != host:
            return refuse(403, "A page of another site may not use this service.")
        if self.token is not None and scope["path"] not in OPEN and not self._knows_token(headers):
            return refuse(401, "Give the service's token: Authorization: Bearer TOKEN.")
        if scope["method"] in ("GET", "HEAD", "DELETE"):
            return None
        return self._too_much(scope["path"], headers.get("content-length"))

    def _knows_token(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and secrets.compare_digest(given.encode(), (self.token or "").encode())

    def _too_much(self, path: str, length: str | None) -> JSONResponse | None:
        if length is None or not length.isdecimal():
            return refuse(411, "Send the length of the request as Content-Length.")
        most = self.limits.request_bytes if path.endswith("/images") else self.limits.text_bytes
        if int(length) > most:
            return refuse(413, f"A request has {most // 1_000_000} MB at most; send fewer files at once.")
        if self.held + int(length) > self.limits.held_bytes:
            return refuse(503, "The service is busy; try again in a moment.", self.limits.retry_seconds)
        return None


def with_deadline(receive: Receive, seconds: float) -> Receive:
    """Raise TimeoutError for a request that arrives too slowly, which would block others."""
    end = asyncio.get_running_loop().time() + seconds
    whole = False

    async def receive_in_time() -> Message:
        nonlocal whole
        if whole:  # only a disconnect can follow
            return await receive()
        async with asyncio.timeout_at(end):
            message = await receive()
        whole = not message.get("more_body", False)
        return message

    return receive_in_time


def hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def refuse(status: int, sentence: str, retry_after: float | None = None) -> JSONResponse:
    headers = {} if retry_after is None else {"retry-after": str(int(retry_after))}
    return JSONResponse({"detail": sentence}, status, headers)
