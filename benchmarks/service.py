"""Load the query service with many sessions at once, and compare it with the bare encoder.

    python -m benchmarks.service [--sessions 32] [--images 50] [--per-request 10] [--json]
    python -m benchmarks.service --soak [--queries 7200] [--json]

The service is a separate process on this machine, as are its clients; it decodes all images from
PNG files. Every session has its own class names, so that a reply meant for another session is
noticed. The bare encoder reads decoded images from memory, 64 at a time. Latency is that of a whole
request, from its first byte to its last line.

``--soak`` sends the queries of two hours at one a second, as fast as they are answered: one image
each, in sessions of twenty, with a bad file now and then and askers that leave. It gives the
memory, descriptors and threads of the service after a tenth of them and in the end.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

from fedvl.data.sources import open_dataset
from fedvl.data.stores import Split
from fedvl.display import Silent
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment
from fedvl.serve.model import TrainedModel

BATCH = 64
PART = b'--x\r\nContent-Disposition: form-data; name="files"; filename="x"\r\n\r\n'
SESSION = 20  # queries of one session under --soak
THINGS = ("cat", "ship", "frog", "horse", "truck")


def make_run(folder: Path) -> None:
    folder.mkdir()
    RunFolder(folder).describe(resolve_experiment({"method": {"name": "fed-mp"}, "data": {"clients": 3}}))
    complete(RunFolder(folder), Silent())


def bare_rate(run: TrainedModel, split: Split, count: int) -> float:
    """Return the images per second of the encoder alone."""
    pixels = torch.stack(
        [run.encoder.preprocess(split.read(row % len(split))) for row in range(min(count, len(split)))]
    )
    with torch.inference_mode():
        run.encoder.encode_image(run.encoder.normalise(pixels[:BATCH]))
        began = time.perf_counter()
        done = 0
        while done < count:
            part = pixels[done % len(pixels) :][: min(BATCH, count - done)]
            run.encoder.encode_image(run.encoder.normalise(part))
            done += len(part)
        return count / (time.perf_counter() - began)


def png(split: Split, row: int) -> bytes:
    content = io.BytesIO()
    split.read(row % len(split)).save(content, "PNG")
    return content.getvalue()


async def query(
    client: httpx.AsyncClient, number: int, files: list[bytes], per_request: int
) -> tuple[list[Any], list[float]]:
    """Query one session; return the top name of each image and the seconds of each request."""
    names = [f"{thing} {number}" for thing in THINGS]
    made = await client.post("/sessions", json={"classes": names})
    made.raise_for_status()
    path = f"/sessions/{made.json()['id']}/images"
    predicted, seconds = [], []
    for first in range(0, len(files), per_request):
        part = [("files", (f"{number}-{first + n}", data)) for n, data in enumerate(files[first : first + per_request])]
        began = time.perf_counter()
        response = await client.post(path, files=part)
        seconds.append(time.perf_counter() - began)
        response.raise_for_status()
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert [line["image"] for line in lines] == [name for _, (name, _) in part], "files were mixed up"
        assert {each["name"] for line in lines for each in line["ranked"]} == set(names), "names were mixed up"
        predicted += [line["ranked"][0]["name"] for line in lines]
    (await client.delete(path.removesuffix("/images"))).raise_for_status()
    return predicted, seconds


async def load(address: str, images: list[list[bytes]], per_request: int) -> tuple[list[list[Any]], list[float], float]:
    """Query all sessions at once; return their predictions, seconds per request and in total."""
    limits = httpx.Limits(max_connections=len(images))
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
        began = time.perf_counter()
        found = await asyncio.gather(*(query(client, n, files, per_request) for n, files in enumerate(images)))
        whole = time.perf_counter() - began
        alone = (await query(client, 0, images[0], per_request))[0]
    assert alone == found[0][0], "a session got different predictions among others than alone"
    return [predicted for predicted, _ in found], [second for _, seconds in found for second in seconds], whole


@contextlib.contextmanager
def service(folder: Path) -> Iterator[tuple[int, str]]:
    """The process and the address of a service of a run."""
    words = [sys.executable, "-m", "fedvl.cli", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.pid, re.findall(r"http://\S+", server.stdout.readline())[0]
        finally:
            server.terminate()


def footprint(process: int) -> dict[str, Any]:
    """Return the memory, descriptors and threads of a process, as Linux tells them."""
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE))
    return {
        "memory_mb": int(status["VmRSS"]) / 1024,
        "peak_memory_mb": int(status["VmHWM"]) / 1024,
        "descriptors": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(status["Threads"]),
    }


def leave(address: str, path: str, content: bytes) -> None:
    """Send half of a request, and leave."""
    with socket.create_connection((httpx.URL(address).host, httpx.URL(address).port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[: len(content) // 2])


def soak(queries: int) -> dict[str, Any]:
    """Send many queries to one service; return what it takes at the beginning and in the end."""
    split = open_dataset("cifar10-mini", None).splits["test"]
    images = [png(split, row) for row in range(100)]
    early: dict[str, Any] = {}
    first_answers, refused, began = set(), 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        make_run(Path(scratch) / "run")
        with (
            service(Path(scratch) / "run") as (process, address),
            httpx.Client(base_url=address, timeout=600) as client,
        ):
            for number in range(queries):
                if number % SESSION == 0:
                    path = f"/sessions/{client.post('/sessions', json={'classes': THINGS}).json()['id']}"
                    first_answers.add(client.post(f"{path}/images", files={"files": ("first", images[0])}).text)
                    leave(address, f"{path}/images", PART + bytes(1_000_000))
                content = b"no image" if number % 10 == 9 else images[number % len(images)]
                answer = client.post(f"{path}/images", files={"files": ("image", content)})
                refused += "refused" in answer.raise_for_status().json()
                if number % SESSION == SESSION - 1:
                    client.delete(path).raise_for_status()
                if number == queries // 10:
                    early = footprint(process)
            late = footprint(process)
            metrics = client.get("/metrics").text
    assert len(first_answers) == 1, "the same query got different answers"
    assert refused == queries // 10, "bad files were not refused one by one"
    assert "fedvl_images_pending 0" in metrics
    return {
        "queries": queries,
        "seconds": time.perf_counter() - began,
        **{f"{name}_after_a_tenth": value for name, value in early.items()},
        **{f"{name}_in_the_end": value for name, value in late.items()},
        "memory_growth_mb": late["memory_mb"] - early["memory_mb"],
    }


def measure(sessions: int, count: int, per_request: int) -> dict[str, Any]:
    split = open_dataset("cifar10-mini", None).splits["test"]
    images = [[png(split, 50 * number + row) for row in range(count)] for number in range(sessions)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        make_run(folder)
        run = TrainedModel(RunFolder(folder))
        bare = bare_rate(run, split, sessions * count)
        with service(folder) as (_, address):
            predicted, seconds, whole = asyncio.run(load(address, images, per_request))
            metrics = dict(re.findall(r"^fedvl_(\w+) (\S+)$", httpx.get(f"{address}metrics").text, re.MULTILINE))
    rate = sum(map(len, predicted)) / whole
    return {
        "sessions": sessions,
        "images": sum(map(len, predicted)),
        "images_per_request": per_request,
        "images_per_second": rate,
        "bare_images_per_second": bare,
        "ratio": rate / bare,
        "p50_seconds": statistics.median(seconds),
        "p95_seconds": statistics.quantiles(seconds, n=20)[-1],
        "images_per_batch": float(metrics["encoder_images_total"]) / float(metrics["encoder_batches_total"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--images", type=int, default=50, help="images per session")
    parser.add_argument("--per-request", type=int, default=10)
    parser.add_argument("--soak", action="store_true", help="many queries to one service")
    parser.add_argument("--queries", type=int, default=7_200, help="of --soak")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load_options = options.sessions, options.images, options.per_request
    figures = soak(options.queries) if options.soak else measure(*load_options)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(
            f"{name.replace('_', ' '):32} {value:>10,}"
            if isinstance(value, int)
            else f"{name.replace('_', ' '):32} {value:10,.2f}"
        )


if __name__ == "__main__":
    main()
