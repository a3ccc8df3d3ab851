"""Load the query service with many sessions at once, and compare it with the bare encoder.

    python -m benchmarks.service [--sessions 32] [--images 50] [--per-request 10] [--json]

The service is a separate process on this machine, as are its clients; it decodes all images from
PNG files. Every session has its own class names, so that a reply meant for another session is
noticed. The bare encoder reads decoded images from memory, 64 at a time. Latency is that of a whole
request, from its first byte to its last line.
"""

import argparse
import asyncio
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from fedvl.data.sources import open_dataset
from fedvl.data.stores import Split
from fedvl.display import Silent
from fedvl.experiment import complete
from fedvl.run_folder import RunFolder
from fedvl.serve.model import TrainedModel
from fedvl.settings import resolve_experiment

BATCH = 64
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


def measure(sessions: int, count: int, per_request: int) -> dict[str, Any]:
    split = open_dataset("cifar10-mini", None).splits["test"]
    images = [[png(split, 50 * number + row) for row in range(count)] for number in range(sessions)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        make_run(folder)
        run = TrainedModel(RunFolder(folder))
        bare = bare_rate(run, split, sessions * count)
        words = [sys.executable, "-m", "fedvl.cli", "serve", str(folder), "--port", "0"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = re.findall(r"http://\S+", server.stdout.readline())[0]
                predicted, seconds, whole = asyncio.run(load(address, images, per_request))
                metrics = dict(re.findall(r"^fedvl_(\w+) (\S+)$", httpx.get(f"{address}metrics").text, re.MULTILINE))
            finally:
                server.terminate()
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
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.sessions, options.images, options.per_request)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):24} {value:10.3f}" if isinstance(value, float) else f"{name:24} {value:10}")


if __name__ == "__main__":
    main()
