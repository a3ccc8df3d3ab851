"""Processes that decode: their answers, and their end."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvl.data import decoders
from fedvl.data.decoders import Decoders
from fedvl.data.images import decode


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for seed, (name, width, height) in enumerate(
        (("photo.jpg", 500, 375), ("small.png", 64, 64), ("wide.webp", 90, 30))
    ):
        noise = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(folder / name)
    (folder / "cut.jpg").write_bytes((folder / "photo.jpg").read_bytes()[:900])
    return [*(folder / name for name in ("photo.jpg", "small.png", "wide.webp", "cut.jpg")), folder / "missing.jpg"]


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_requests_are_answered_in_their_order_by_processes_in_turn(paths):
    with Decoders(2, 2) as some:
        for _ in range(3):  # each area is used again
            answers = [some.begin([path, path.read_bytes(), path]) for path in paths[:4]]
            found = [answer() for answer in answers]
            for path, decoded in zip(paths[:3], found[:3], strict=True):
                assert all(
                    pixels is not None and np.array_equal(pixels, np.asarray(decode(path))) for pixels in decoded
                )
            assert found[3] == [None, None, None]
        assert some.begin([paths[4], b"", None])() == [None, None, None]


def test_an_image_that_does_not_fit_behind_the_others_is_left_to_the_run(paths):
    photo, small = paths[:2]
    first = 3 * 500 * 375
    area = np.zeros(first + 3 * 64 * 64, np.uint8)
    assert decoders._fill(area, [photo, photo, None, small, small]) == [(375, 500), None, None, (64, 64), None]
    assert np.array_equal(area[:first].reshape(375, 500, 3), np.asarray(decode(photo)))
    assert np.array_equal(area[first:].reshape(64, 64, 3), np.asarray(decode(small)))


def test_a_process_that_was_killed_costs_its_images_no_more_than_time(paths):
    path = paths[0]
    with Decoders(1, 2) as some:
        (pixels,) = some.begin([path])()
        assert pixels is not None
        assert np.array_equal(pixels, np.asarray(decode(path)))
        assert not some.areas[1].any()
        (child,) = children(some.process.pid)
        os.kill(child, signal.SIGKILL)
        assert some.begin([path, path])() == [None, None]
        some.process.wait()
        assert some.begin([path])() == [None]


def test_processes_end_with_the_run_and_hold_no_image_in_a_folder():
    with Decoders(2, 1) as some:
        assert [some.begin([None])() for _ in range(2)] == [[None], [None]]  # both have begun
        process = some.process.pid
        pids = [process, *children(process)]
        assert len(pids) == 3
        assert "memfd:" in os.readlink(f"/proc/self/fd/{some.file}")
        assert os.getsid(pids[1]) == process != os.getsid(0)  # Ctrl-C does not reach them
    assert some.process.returncode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_decoder_loads_no_torch():
    content = Path(decoders.__file__).read_text()
    assert "torch" not in content
