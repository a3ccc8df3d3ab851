"""All limits of the service in one place."""

from dataclasses import dataclass

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
