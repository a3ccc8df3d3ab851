"""What the service takes at most: every cap in one place, and the sentences that say so."""

from dataclasses import dataclass

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Limits:
    """Pixels and proportions of an image are limited where it is decoded (``data/images.py``), here as everywhere."""

    names: int = 10_000  # of one session
    name_characters: int = 200
    templates: int = 20
    texts: int = 20_000  # names times templates
    names_in_all: int = 200_000  # of all sessions together: they take memory
    sessions: int = 64
    idle_seconds: float = 1800.0  # after which a session is forgotten
    top: int = 100  # names told of each image
    files: int = 500  # of one request
    file_bytes: int = 20 * MEGABYTE
    request_bytes: int = 200 * MEGABYTE  # of images; that of a session's names is text_bytes
    text_bytes: int = 16 * MEGABYTE
    upload_seconds: float = 300.0  # in which a request must have arrived
    held_bytes: int = 400 * MEGABYTE  # of all requests in progress
    pending_images: int = 4096  # that wait for the encoder
    retry_seconds: int = 2  # what a client is told to wait if the service is busy


LIMITS = Limits()
