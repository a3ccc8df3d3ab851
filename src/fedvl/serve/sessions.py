"""Sessions of users, which expire when idle, and the results of their images."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from fedvl.data.images import BadImage
from fedvl.serve.askers import Asker, BusyError
from fedvl.serve.guard import Limits
from fedvl.serve.model import Line, QueryBatch, User
from fedvl.serve.worker import EncodedImage, Worker


@dataclass
class Session:
    user: User
    address: str  # of whoever began it
    top: int
    batch_size: int
    used: float  # time of the last request
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    images: int = 0  # so far, refused ones included
    refused: int = 0
    examples: dict[str, list[int]] = field(default_factory=dict)  # numbers of the prototype images, by class
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # requests of one session are processed in turn

    @property
    def asker(self) -> Asker:
        return Asker(self.address, self.id)


class Sessions:
    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._sessions: dict[str, Session] = {}
        self._made: list[tuple[str, int]] = []  # addresses and numbers of names of the sessions being created

    def __len__(self) -> int:
        self._forget()
        return len(self._sessions)

    @contextmanager
    def room(self, address: str, names: int) -> Iterator[None]:
        """Reserve room for a session while it is being created; half of all is for one address."""
        self._forget()
        held = [(session.address, len(session.user.names)) for session in self._sessions.values()] + self._made
        own = [size for owner, size in held if owner == address]
        for sizes, part in ((own, 2), ([size for _, size in held], 1)):
            many = len(sizes) >= self._limits.sessions // part
            if many or sum(sizes) + names > self._limits.names_in_all // part:
                raise BusyError
        self._made.append((address, names))
        try:
            yield
        finally:
            self._made.remove((address, names))

    def begin(self, user: User, address: str, top: int, batch_size: int) -> Session:
        session = Session(user, address, top, batch_size, self._clock())
        self._sessions[session.id] = session
        return session

    def find(self, identifier: str) -> Session | None:
        self._forget()
        session = self._sessions.get(identifier)
        if session:
            self.touch(session)
        return session

    def end(self, identifier: str) -> bool:
        return self._sessions.pop(identifier, None) is not None

    def touch(self, session: Session) -> None:
        session.used = self._clock()

    def _forget(self) -> None:
        oldest = self._clock() - self._limits.idle_seconds
        for session in list(self._sessions.values()):
            if session.used < oldest and not session.turn.locked():
                del self._sessions[session.id]


class Upload(NamedTuple):
    name: str
    encoded: "Future[EncodedImage] | None"
    refused: str = ""  # why the file was not given to the encoder


async def answers(session: Session, uploads: Sequence[Upload], worker: Worker) -> AsyncIterator[list[Line]]:
    """Yield the results of the files in order, in the batches of the run's evaluation."""
    waiting = [asyncio.wrap_future(upload.encoded) if upload.encoded else None for upload in uploads]
    try:
        async with session.turn:
            batch = QueryBatch(session.user, session.batch_size, session.top)
            for upload, encoding in zip(uploads, waiting, strict=True):
                encoded = await encoding if encoding else BadImage(upload.refused)
                session.refused += isinstance(encoded, BadImage)
                full = batch.add({"number": session.images, "image": upload.name}, encoded)
                session.images += 1
                if full:
                    yield await predict_batch(session, batch, worker)
            if batch.lines:
                yield await predict_batch(session, batch, worker)
    finally:
        for encoding in waiting:  # of an asker who left, so that nothing is read in vain
            if encoding:
                encoding.cancel()


async def predict_batch(session: Session, batch: QueryBatch, worker: Worker) -> list[Line]:
    """Predict a batch on the model's own thread, and note which images became examples."""
    lines: list[Line] = await asyncio.wrap_future(worker.call(session.asker, batch.predict))
    for line in lines:
        if (name := line.get("prototype_of")) is not None:
            session.examples.setdefault(name, []).append(line["number"])
    return lines


def as_text(lines: Sequence[Line]) -> bytes:
    """Format results as NDJSON, one JSON object per line."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
