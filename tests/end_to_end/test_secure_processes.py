"""Secure sums between real processes, with TLS and keys: the model of one process, and nothing of one client on the wire."""

import re
import subprocess
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.kills import draw_images
from helpers.machines import (
    LATEST,
    Wire,
    alone,
    clients_at_work,
    committed,
    dropped,
    ended,
    kill,
    make_federation,
    redirect,
    start_client,
    start_server,
    wait_until,
)

from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.masking import masked
from fedvl.deployment.messages import pack_tensors
from fedvl.deployment.supervisor import free_port
from fedvl.display import Silent
from fedvl.federation.fixed_point import encode_update
from fedvl.federation.journal import read_state
from fedvl.runs.experiment import local_engine
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import prepare
from fedvl.seeding import torch_generator
from fedvl.tensors import load

NAMES = ["east", "north", "south", "west"]
SLICE = 12  # bytes in a row that would not be there by chance
FEDERATION = {"threads": 1, "chunk": 1, "deadline": 120, "secure_sum": True}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "fst-cbdg": {"federation": {**FEDERATION, "rounds": 2}},
    "cachefl": {"federation": {**FEDERATION, "rounds": 1}},
    "fedpp": {"federation": {**FEDERATION, "rounds": 1}, "method": {"visual_prompts": False}},
    "linear": {"federation": {**FEDERATION, "rounds": 60}},  # more than any test waits for
}


def resolve(name, settings, images):
    common = {"device": "cpu", "data": {"dataset": str(images), "partition": "iid"}, "training": {"local_epochs": 1}}
    method = {"name": name, **settings.get("method", {})}
    return resolve_for_parties({**common, **settings, "method": method}, len(NAMES))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A federation of four clients, at work; what the first of them sends is read on its way."""
    root = tmp_path_factory.mktemp("secure")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVL_CACHE", str(root / "cache"))
        images = draw_images(root)
        experiments = {name: resolve(name, settings, images) for name, settings in EXPERIMENTS.items()}
        folder = make_federation(root / "clinic", {name: list(experiments.values()) for name in NAMES})
        port = free_port()
        with Wire(port, redirect(folder, NAMES[0], port), folder) as wire, clients_at_work(folder, NAMES) as place:
            place.wire, place.experiments = wire, experiments
            yield place


def log_of(path):
    return path.with_suffix(".log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_runs_at_once_end_with_the_model_of_one_process_and_say_nothing_of_a_client(place, tmp_path):
    names = ("fst-cbdg", "cachefl", "fedpp")
    servers = {name: start_server(place, name, tmp_path / name) for name in names}
    with ended(list(servers.values())):
        for name, server in servers.items():
            assert server.wait(LATEST) == 0, log_of(tmp_path / name)
    for name in names:
        assert dropped(tmp_path / name) == []
        assert_alike(load(tmp_path / name / "model.safetensors"), alone(place.experiments[name]).shared)
    sent = b"".join(request.body for request in place.wire.requests())
    for name in names:
        assert_absent(sent, place.experiments[name], name)


def assert_alike(between_machines, in_one_process):
    """One process pads all clients to the rows of the largest, and a product's last bit may depend on its rows."""
    torch.testing.assert_close(between_machines, in_one_process, rtol=0, atol=1e-7)


def assert_absent(sent, experiment, name):
    """Nothing of what the first client would have sent in the open, nor of its whole numbers, is in these bytes."""
    prepared = prepare(experiment, Silent())
    engine = local_engine(prepared)
    shared = prepared.method.start(torch_generator(experiment.seed, "start"))
    if (consultation := prepared.method.consultation()) is not None:
        reports, _ = engine.reports(0, shared)
        total = engine.report(0, shared)[0][0].tensors
        engine.adopt({None: consultation.settle(0, total, None)})
        assert reports
    [trained, *_] = engine.train(0, [0], shared)
    numbers = engine.part_of_sum(0, 0, shared, trained)
    assert torch.equal(numbers, encode_update(trained.update.tensors, shared, trained.update.weight, trained.loss, 4))
    contents = [tensor.cpu().contiguous().numpy().tobytes() for tensor in trained.update.tensors.values()]
    contents.append(numbers.numpy().tobytes())
    for content in contents:
        found = pieces_of(content, sent)
        assert not found, f"{len(found)} pieces of {name} are on the wire"


def pieces_of(content, sent):
    """The pieces of a content that are among the bytes that were sent; runs of zeros say nothing."""
    slices = [content[first : first + SLICE] for first in range(0, len(content) - SLICE, 4 * SLICE)]
    return [piece for piece in slices if len(set(piece)) > SLICE // 2 and piece in sent]


@contextmanager
def its_log_shown(run):
    """Say what the server said where a test of it fails."""
    try:
        yield
    except (AssertionError, subprocess.TimeoutExpired) as error:
        raise AssertionError(log_of(run)) from error


def rounds_of(log, kind):
    """The rounds (from 0) in which a client was asked for something of this kind, as its log has them."""
    return [int(number) - 1 for number in re.findall(rf"round (\d+): {kind}", log.read_text())]


def asked_again(log, kind, before):
    return len(rounds_of(log, kind)) > before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_killed_at_each_step_costs_its_own_rounds_at_most(place, tmp_path):
    """One while keys are sent, one in training, one while a sum is opened; each is back before the next is killed.

    Nobody else is dropped. A client that is back in time takes part in the round in which it was killed.
    The server is ended once the last of them is in a sum again: however slow the machine is, no wait is for a clock.
    """
    run = tmp_path / "run"
    killed, back = {}, {}
    logs = {name: place.logs / f"{name}.log" for name in NAMES}
    asked = {name: len(rounds_of(logs[name], "keys")) for name in NAMES}
    server = start_server(place, "linear", run)
    with ended([server]), its_log_shown(run):
        for name, kind in (("south", "keys"), ("west", "train"), ("north", "reveal_train")):
            before = asked[name] if kind == "keys" else len(rounds_of(logs[name], kind))
            wait_until(partial(asked_again, logs[name], kind, before), server)
            kill(place.clients[name].pid)
            place.clients[name].wait()
            killed[name] = rounds_of(logs[name], kind)[-1]
            answers = len(rounds_of(logs[name], "train"))
            start_client(place, name)
            wait_until(partial(asked_again, logs[name], "train", answers), server, place.clients[name])
            back[name] = rounds_of(logs[name], "train")[-1]
        wait_until(lambda: committed(run) > max(back.values()), server)
    gone = [(NAMES[client], number) for client, number in dropped(run)]
    assert {name for name, _ in gone} <= killed.keys()  # who was not killed is in every sum
    missed = {name: [number for who, number in gone if who == name] for name in killed}
    # killed before its numbers were sent: it misses every round until it trains again, which may be the same one
    assert missed["south"] == list(range(killed["south"], back["south"]))
    # killed after: its numbers are in the sum
    assert missed["north"] == list(range(killed["north"] + 1, back["north"]))
    # killed while it trained: either of the two
    assert missed["west"] in [list(range(first, back["west"])) for first in (killed["west"], killed["west"] + 1)]
    latest = RunFolder.open(run).journal.latest()
    assert latest is not None
    tensors, records = latest
    experiment = place.experiments["linear"]
    federation = experiment.federation.model_copy(update={"rounds": len(records)})  # its learning rate is constant
    first = experiment.model_copy(update={"federation": federation})
    assert_alike(read_state(tensors, "cpu").shared, alone(first, dropped(run)).shared)


def test_the_search_finds_an_update_that_is_sent_in_the_open():
    update = {"weight": torch.randn(10, 40, generator=torch.Generator().manual_seed(0))}
    content = update["weight"].numpy().tobytes()
    assert len(pieces_of(content, b"head" + pack_tensors(update) + b"tail")) > 20
    hidden = masked(torch.frombuffer(bytearray(content), dtype=torch.int64), 0, {}, bytes(32))
    assert pieces_of(content, hidden.numpy().tobytes()) == []
