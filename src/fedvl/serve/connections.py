"""The server of the service: few connections, and none for one who neither asks nor reads."""

import asyncio
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedvl.serve.guard import HEADERS
from fedvl.serve.limits import Limits

BACKLOG = 64  # connections that are accepted at once, before the limit is applied to them


class Connection(H11Protocol):
    """A connection of uvicorn that is closed if it is idle, too slow, or in the way of another."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        app: Any = self.config.app
        self._limits: Limits = app.state.limits
        self._timer: asyncio.TimerHandle | None = None
        self.since = self.loop.time()  # when it began to wait for a request

    @property
    def idle(self) -> bool:
        """Whether no request has begun that is not yet answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        everyone = [other for other in self.connections if isinstance(other, Connection)]
        neighbours = [other for other in everyone if (other.client or "")[:1] == (self.client or "")[:1]]
        make_room(neighbours, self._limits.connections // 2)
        make_room(everyone, self._limits.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since = self.loop.time()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, with the headers of every other answer."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of an answer
            self.transport.abort()
            return
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close"), *HEADERS.items()]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=msg.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self.loop.call_later(self._limits.head_seconds, self._end_if_stuck)

    def _end_if_stuck(self) -> None:
        """End a connection whose next request has not begun, or whose answer is not read."""
        if self.idle or self.flow.write_paused:
            self.transport.abort()


def make_room(connections: list[Connection], most: int) -> None:
    """If these are too many, end the one that has kept the service waiting longest."""
    held = [each for each in connections if not each.transport.is_closing()]
    if len(held) > most:
        waiting = [each for each in held if each.idle or each.cycle.more_body]
        min(waiting, key=lambda each: each.since).transport.abort()


def make_server(app: FastAPI) -> uvicorn.Server:
    """Return a server of an app of `make_app`, with its limits.

    h11 reads the requests even where httptools is installed: it limits the size of their heads.
    Only a service with a token may be behind a proxy, which tells the addresses of the askers.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http=Connection,
            ws="none",
            backlog=BACKLOG,
            log_level="error",
            access_log=False,
            proxy_headers=app.state.token is not None,
            server_header=False,
        )
    )
