"""Finished runs on the embedded images, and a service of one: what tests of answering, serving and exporting share."""

import contextlib
import io
import socket
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from PIL import Image

from fedvl.data.protocols import PROTOCOLS, Labels
from fedvl.data.sources import open_dataset
from fedvl.data.stores import Split
from fedvl.display import Silent
from fedvl.runs.contents import Result
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment
from fedvl.serve.connections import make_query_server

ROUND = {"federation": {"rounds": 1, "threads": 1}}
RUNS: dict[str, dict[str, Any]] = {
    "fed-mp": {"method": {"name": "fed-mp"}, "data": {"clients": 3, "shots": 10}, **ROUND},
    "linear": {"method": {"name": "linear"}, "data": {"shots": 10}, **ROUND},
    "fedpp": {
        "method": {"name": "fedpp", "visual_prompts": False, "context": 4},
        "data": {"clients": 3, "shots": 10, "minimum": 0},
        "training": {"local_epochs": 1},
        **ROUND,
    },
}


def finish(folder: Path, settings: dict[str, Any]) -> Result:
    """Run an experiment into a folder; its result."""
    folder.mkdir()
    RunFolder(folder).describe(resolve_experiment(settings))
    return complete(RunFolder(folder), Silent())


def asked_rows(result: Result) -> list[int]:
    """The images of a run in the order in which it was asked about them, as ``picture`` takes them."""
    experiment = resolve_experiment(result.config)
    dataset = open_dataset(experiment.data.dataset, None)
    train, test = (dataset.splits[name].labels for name in ("train", "test"))
    protocol = PROTOCOLS[experiment.evaluation.protocol]
    return protocol(Labels(train, test, len(dataset.class_names)), experiment.data, experiment.seed).queried.tolist()


@cache
def embedded_splits() -> Mapping[str, Split]:
    """Of cifar10-mini, opened once: it has one file of all images."""
    return open_dataset("cifar10-mini", None).splits


def picture(row: int) -> Image.Image:
    """A test image of cifar10-mini or, after its last, a training image: rows as queries count them."""
    splits = embedded_splits()
    count = len(splits["test"])
    return splits["test"].read(row) if row < count else splits["train"].read(row - count)


def png(row: int) -> bytes:
    """The picture of a row as a file."""
    content = io.BytesIO()
    picture(row).save(content, "PNG")
    return content.getvalue()


@contextlib.contextmanager
def running(server: uvicorn.Server) -> Iterator[int]:
    """The port of a server in this process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # whoever comes before the server is up waits
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)
            server.force_exit = True  # a browser may have left a request that it began
            thread.join()


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of a service in this process."""
    with running(make_query_server(app)) as port:
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def client_of(app: Any, **headers: str) -> Iterator[httpx.Client]:
    with serving(app) as address, httpx.Client(base_url=address, headers=headers, timeout=60) as client:
        yield client
