"""The threads of the model, with a made-up model that tells what it was given."""

import threading
from concurrent.futures import wait

import pytest
import torch

from fedvl.data.images import BadImage
from fedvl.serve.askers import Asker, BusyError
from fedvl.serve.worker import MAX_IMAGES_AT_ONCE, Worker


class Made:
    """Reads b"slow" only when let go; encodes an image as its own bytes."""

    def __init__(self):
        self.go, self.slow, self.read_in, self.largest = threading.Event(), threading.Event(), [], 0

    def read(self, data):
        if data == b"slow":
            self.slow.set()
            assert self.go.wait(60)
        if data == b"bad":
            raise BadImage("bad.")
        if data == b"broken":
            raise RuntimeError("no memory")
        self.read_in.append(data)
        return torch.tensor(list(data))

    def encode(self, pixels):
        self.largest = max(self.largest, len(pixels))
        return [{"features": each} for each in pixels]


@pytest.fixture
def made():
    return Made()


@pytest.fixture
def worker(made):
    started = Worker(made, 1000)
    yield started
    made.go.set()
    started.stop()


def test_a_slow_image_keeps_no_other_waiting(worker, made):
    (slow,) = worker.encode([b"slow"], Asker("one", "a"))
    assert made.slow.wait(60)
    other = worker.encode([b"1", b"2"], Asker("other", "b"))
    assert [future.result(60)["features"].tolist() for future in other] == [[49], [50]]
    assert not slow.done()
    made.go.set()
    assert slow.result(60)["features"].tolist() == list(b"slow")
    assert len(worker.pending) == 0


def test_each_image_gets_its_own_result_or_reason(worker):
    good, bad, broken = worker.encode([b"good", b"bad", b"broken"], Asker("one"))
    assert good.result(60)["features"].tolist() == list(b"good")
    assert (bad.result(60).reason, broken.result(60).reason) == (
        "bad.",
        "the service failed to read it; see its log.",
    )
    assert len(worker.pending) == 0


def test_images_are_encoded_in_batches_and_one_address_has_half_of_the_room(worker, made):
    sent = [b"slow", b"slow", *(b"%d" % number for number in range(498))]
    futures = worker.encode(sent, Asker("one"))
    with pytest.raises(BusyError):
        worker.encode([b"more"], Asker("one"))
    futures += worker.encode([b"other"], Asker("other"))
    made.go.set()
    assert not wait(futures, 60).not_done
    assert 1 < made.largest <= MAX_IMAGES_AT_ONCE
    assert [bytes(each.result()["features"].tolist()) for each in futures] == [*sent, b"other"]


def test_what_was_cancelled_is_not_read(worker, made):
    held = worker.encode([b"slow", b"slow"], Asker("one"))  # both readers of an address are held up
    assert made.slow.wait(60)
    left = worker.encode([b"left"] * 20, Asker("one"))
    assert all(future.cancel() for future in left)
    made.go.set()
    assert not wait(held, 60).not_done
    (last,) = worker.encode([b"last"], Asker("one"))
    last.result(60)
    assert b"left" not in made.read_in
    assert len(worker.pending) == 0
