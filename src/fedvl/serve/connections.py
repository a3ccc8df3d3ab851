"""The HTTP server: a limit on connections, with timeouts for idle clients and slow readers."""

import asyncio
import ssl
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedvl.errors import FedVLError
from fedvl.report.loopback import HEADERS
from fedvl.serve.guard import Limits

BACKLOG = 256  # connections that are accepted at once, before the limit is applied to them
SPARE_FILES = 128  # open beside the connections, at most
MIN_CONNECTIONS = 16  # connections, however few files the system allows
PROXIES = ["127.0.0.1", "::1"]  # where a proxy may be, which says whose requests it passes on


class Connection(H11Protocol):
    """A connection of uvicorn that is closed if it is idle, too slow, or in the way of another."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        app: Any = self.config.app
        self._limits: Limits = app.state.limits
        self._tls: ssl.SSLContext | None = app.state.tls
        self._early: list[bytes] | None = [] if self._tls else None  # what came together with the end of a handshake
        self._timer: asyncio.TimerHandle | None = None
        self.since = self.loop.time()  # when it began to wait for a request

    @property
    def idle(self) -> bool:
        """Whether no request has begun that is not yet answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._tls is None:
            super().connection_made(transport)
        else:  # it counts, and its time runs, before its handshake has begun
            transport.pause_reading()
            self.transport, self.client = transport, transport.get_extra_info("peername")
            self.connections.add(self)
            self._handshake = self.loop.create_task(self._shake_hands(self._tls))
        self._watch()
        everyone = [other for other in self.connections if isinstance(other, Connection)]
        if not self._of_proxy:
            neighbours = [other for other in everyone if (other.client or "")[:1] == (self.client or "")[:1]]
            make_room(neighbours, self._limits.connections // 2)
        make_room(everyone, self._limits.connections)

    @property
    def _of_proxy(self) -> bool:
        """Whether the connection may carry many users, whose requests are counted separately."""
        return self.config.proxy_headers and (self.client or ("",))[0] in PROXIES

    async def _shake_hands(self, tls: ssl.SSLContext) -> None:
        """Go on over TLS; end a connection that does not speak it."""
        try:
            secured = await self.loop.start_tls(self.transport, self, tls, server_side=True)
        except OSError:  # that of ssl too
            secured = None
        if secured is None or secured.is_closing():
            self.transport.abort()
            self.connections.discard(self)
            self._end_watch()
            return
        super().connection_made(secured)
        self._watch()
        early, self._early = self._early or [], None
        for data in early:
            super().data_received(data)

    def data_received(self, data: bytes) -> None:
        if self._early is None:
            super().data_received(data)
        else:
            self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_watch()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since = self.loop.time()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed HTTP request, with the headers of every other response."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of an answer
            self.transport.abort()
            return
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close"), *HEADERS.items()]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=msg.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _end_watch(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _watch(self) -> None:
        self._end_watch()
        self._timer = self.loop.call_later(self._limits.head_seconds, self._end_if_stuck)

    def _end_if_stuck(self) -> None:
        """Close a connection that is idle, or whose response is not read."""
        if self.idle or self.flow.write_paused:
            self.transport.abort()


def make_room(connections: list[Connection], most: int) -> None:
    """If these are too many, end the one that has kept the service waiting longest."""
    held = [each for each in connections if not each.transport.is_closing()]
    if len(held) > most:
        waiting = [each for each in held if each.idle or each.cycle.more_body]
        min(waiting, key=lambda each: each.since).transport.abort()


def may_open(files: int) -> int:
    """Raise the limit of open files to this number if possible; return the limit."""
    try:
        import resource
    except ImportError:  # on Windows, which has no such limit
        return files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)


def read_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return the TLS context of a certificate and its key, or None without a certificate."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise FedVLError("TLS needs both files: --certificate FILE and --key FILE.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # rather than ask in the terminal
    except OSError as error:
        reason = error.strerror or error
        raise FedVLError(
            f"{certificate} and {key} are not a PEM certificate and its key without a password ({reason})."
        ) from error
    return context


def make_query_server(app: FastAPI, tls: ssl.SSLContext | None = None) -> uvicorn.Server:
    """Return a server of an app of `make_app`, with its limits.

    h11 reads the requests even where httptools is installed: it limits the size of their heads.
    Only a service with a token may be behind a proxy, which forwards the addresses of its clients.
    """
    app.state.tls, limits = tls, app.state.limits
    room = max(may_open(limits.connections + SPARE_FILES) - SPARE_FILES, MIN_CONNECTIONS)
    app.state.limits = replace(limits, connections=min(limits.connections, room))
    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http=Connection,
            ws="none",
            backlog=BACKLOG,
            log_config=None,  # it would close the handlers of the process it runs in, and absl's closes the stream too
            log_level="error",
            access_log=False,
            proxy_headers=app.state.token is not None,
            forwarded_allow_ips=PROXIES,
            server_header=False,
        )
    )
