"""Commands of fedvl at the pace of tests, where a dozen processes share two cores.

A SuperNode waits three seconds between two looks for messages, and up to twenty before it connects again: most of the time
of a federation on one machine. Here it waits a fraction of that. A client looks for tasks twenty times a second, and a
server ten times for answers: most of the work of such a federation. Here they look less often. All else is as users have it.
"""

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

FLOWER = "fedvl.deployment.flower"
FASTER = 6  # a SuperNode's waits
LOOK_SECONDS = 0.25  # between a client's looks, and a server's


def command(**constants: float) -> None:
    """Be a command; constants of Flower's module may be other than they are for users."""
    from fedvl.cli import main
    from fedvl.deployment import link, remote

    for name, value in {"POLL_SECONDS": LOOK_SECONDS, **constants}.items():
        setattr(link.flower(), name, value)
    remote.PAUSE_SECONDS = LOOK_SECONDS
    changed: Any = link
    changed.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start_swiftly})
    main()


def start_swiftly(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    changed = [__name__ if word == FLOWER else word for word in words] if "supernode" in words else words
    return subprocess.Popen(changed, **options)


def supernode(parent: int, options: list[str]) -> None:
    from flwr.supercore.retry import http_retry
    from flwr.supernode import start_client_internal

    from fedvl.deployment.flower import start

    changed: Any = start_client_internal
    changed.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(seconds / FASTER)})
    retry: Any = http_retry
    retry.MAX_RETRY_DELAY //= FASTER
    start("supernode", parent, options)


if __name__ == "__main__":
    supernode(int(sys.argv[2]), sys.argv[3:])
