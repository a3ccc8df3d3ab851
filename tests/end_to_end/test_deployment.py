"""A SuperLink, three SuperNodes, servers and clients as real processes, with TLS and keys, on this machine."""

import json
import re
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

import httpx
from helpers.finished import client_of, png
from helpers.machines import LATEST, clients_at_work, ended, fedvl, kill, make_federation, start_client, wait_until
from helpers.prometheus import scraped

from fedvl.cli import app
from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.keys import make_authority
from fedvl.deployment.supervisor import free_port
from fedvl.deployment.verification import verify
from fedvl.display import Silent
from fedvl.evaluation.predict import answer_all
from fedvl.federation.round import Federation
from fedvl.report.status import read_status
from fedvl.runs.experiment import local_engine
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import prepare
from fedvl.seeding import torch_generator
from fedvl.serve.model import TrainedModel
from fedvl.tensors import load

NAMES = ["north", "south", "west"]
COMMON: dict[str, dict[str, Any]] = {
    "data": {"dataset": "cifar10-mini"},
    "federation": {"rounds": 2, "threads": 1, "deadline": 120},
}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "fst-cbdg": {"method": {"name": "fst-cbdg"}, **COMMON},
    "fedpp": {"method": {"name": "fedpp", "visual_prompts": False}, "training": {"local_epochs": 1}, **COMMON},
    "linear": {"method": {"name": "linear"}, **COMMON, "federation": {**COMMON["federation"], "rounds": 4}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A federation whose three clients are at work, each with its share of cifar10-mini."""
    experiments = [resolve_for_parties(settings, len(NAMES)) for settings in EXPERIMENTS.values()]
    folder = make_federation(tmp_path_factory.mktemp("machines") / "clinic", dict.fromkeys(NAMES, experiments))
    with clients_at_work(folder, NAMES) as place:
        yield place


def local(name):
    """The same experiment in this process."""
    prepared = prepare(resolve_for_parties(EXPERIMENTS[name], len(NAMES)), Silent())
    config = prepared.experiment.federation
    torch.set_num_threads(1)
    start = prepared.method.start(torch_generator(0, "start"))
    federation = Federation(prepared.method, local_engine(prepared), config, 0, start)
    federation.run()
    return prepared, federation


def assert_near(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-5)


def finished(place, run):
    """What a client has of a finished run."""
    note = json.loads((run / "federation.json").read_bytes())
    return [
        load(place.folder / "parties" / name / "state" / "runs" / note["run"] / "model.safetensors") for name in NAMES
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_runs_at_once_with_tls_and_keys_equal_the_local_engine_and_strangers_are_refused(place, tmp_path):
    stranger = tmp_path / "stranger"
    names = ("fst-cbdg", "fedpp")
    ports = {name: free_port() for name in names}
    answered = trained(place)
    servers = {
        name: fedvl(
            *("server", place.folder, "--experiment", name, "--out", tmp_path / name, "--metrics", ports[name]),
            log=tmp_path / f"{name}.log",
        )
        for name in names
    }
    with ended(list(servers.values())):
        wait_until((place.folder / "link.json").is_file, *servers.values())
        for port in ports.values():
            wait_until(partial(all_connected, port), *servers.values())
        refuse_strangers(place.folder, stranger)
        for name in names:
            assert servers[name].wait(LATEST) == 0, (tmp_path / f"{name}.log").read_text()
    assert [after - before for before, after in zip(answered, trained(place), strict=True)] == [4, 4, 4]
    for name in names:
        prepared, federation = local(name)
        assert_near(load(tmp_path / name / "model.safetensors"), federation.shared)
        for client, tensors in enumerate(finished(place, tmp_path / name)):
            expected = {**federation.shared, **federation.engine.private[client]}
            assert_near(tensors, expected)
            ours, theirs = (answer_all(prepared.method, one, prepared.test.samples, 256) for one in (tensors, expected))
            assert (ours == theirs).all()
    result = json.loads((tmp_path / "fst-cbdg" / "result.json").read_bytes())
    assert result["refused_updates"] == 0
    assert sum(map(sum, result["partition_counts"])) == 0  # the server knows nothing of what clients hold
    assert all((tmp_path / "fst-cbdg" / file).is_file() for file in ("report.html", "metrics.jsonl", "config.toml"))
    assert result["command"].splitlines()[0] == f"fedvl server {place.folder} --experiment fst-cbdg"
    name_the_parties(tmp_path / "fst-cbdg")
    for name in NAMES:
        use_what_it_has(place.folder / "parties" / name, name, tmp_path)


def name_the_parties(run):
    """The server's report says who took part and when, and the status that they have the model."""
    page = (run / "report.html").read_text()
    assert all(f'<th scope="row">{name}</th>' in page for name in NAMES)
    answers = json.loads((run / "result.json").read_bytes())["answers"]
    assert [(answer["round"], answer["client"]) for answer in answers] == [(r, c) for r in (1, 2) for c in (0, 1, 2)]
    assert all(answer["time"][11:19] in page for answer in answers)
    assert "dirichlet" not in page
    assert {party.state for party in read_status(run).parties} == {"finished"}


def use_what_it_has(party, name, place):
    """A party asks, serves and exports the newest model in its folder, and has a report of it."""
    from fedvl.serve.app import make_app

    image, exported = place / "cat.png", place / f"exported-{name}"
    image.write_bytes(png(0))
    (line,) = json.loads(said("predict", party, image, "--json"))
    run = RunFolder.open(party)
    names = run.result.class_names
    assert {each["name"] for each in line["ranked"]} < set(names)
    with client_of(make_app(TrainedModel(run))) as client:
        session = client.post("/sessions", json={}).json()
        answer = client.post(f"/sessions/{session['id']}/images", files=[("files", ("cat.png", png(0)))])
    assert json.loads(answer.text)["ranked"][0] == pytest.approx(line["ranked"][0])
    said("export", party, exported)
    card = json.loads((exported / "model_card.json").read_bytes())
    assert (card["federation"]["exported_by"], card["federation"]["answered"]) == (name, {name: 2})
    (run.path / "report.html").unlink()
    assert said("report", party).split() == ["Report:", str(run.path / "report.html")]
    page = (run.path / "report.html").read_text()
    assert f"{name}, one of 3 parties" in page
    accuracy, zero_shot = (re.findall(rf'id="{each}">([\d.]+) %', page)[0] for each in ("accuracy", "zero-shot"))
    assert accuracy == f"{run.result.accuracy:.2f}"
    assert zero_shot == f"{run.result.zero_shot_accuracy:.2f}"
    assert 'id="test-images">1,000' in page


def said(*words):
    """What a command prints."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def all_connected(port):
    return scraped(port).get(("fedvl_clients_connected", ())) == len(NAMES)


def trained(place):
    """How often each client has trained, by its metrics."""
    key = ("fedvl_requests_answered_total", (("kind", "train"),))
    for name, port in place.metrics.items():
        wait_until(partial(scraped, port), place.clients[name])
    return [scraped(port).get(key, 0) for port in place.metrics.values()]


def refuse_strangers(folder, elsewhere):
    """Each of these would let someone in who was not invited."""
    from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    elsewhere.mkdir()
    make_authority(elsewhere)
    authority, other = (folder / "ca.crt").read_bytes(), (elsewhere / "ca.crt").read_bytes()
    address = json.loads((folder / "link.json").read_bytes())["address"]
    private, public = generate_key_pairs()
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    signed: list[Any] = [version, NodeAuthHttpInterceptor(private, public)]
    key = public_key_to_bytes(public)
    register = RegisterNodeFleetRequest(public_key=key)
    activate = ActivateNodeRequest(public_key=key, heartbeat_interval=30)
    # no key, a key that nobody registered, another authority, no TLS
    for interceptors, certificates, call in (
        ([version], authority, lambda node: node.RegisterNode(register)),
        (signed, authority, lambda node: node.RegisterNode(register)),
        (signed, authority, lambda node: node.ActivateNode(activate)),
        (signed, other, lambda node: node.ActivateNode(activate)),
        (signed, None, lambda node: node.ActivateNode(activate)),
    ):
        node = FleetHttpClient.from_server_address(address, certificates is None, certificates, interceptors)
        with pytest.raises(httpx.HTTPError):
            call(node)
    # Flower's own doors, which are open to all who reach the port: here a secret is needed
    control = ControlHttpClient.from_server_address(address, False, authority, [version])
    for ask in (
        lambda: control.RegisterNode(RegisterNodeRequest(public_key=key)),
        lambda: control.ListRuns(ListRunsRequest()),
    ):
        with pytest.raises(httpx.HTTPStatusError, match="403"):
            ask()
    tasks = RuntimeHttpClient.from_server_address(address, False, authority, [version])
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        tasks.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_server_and_a_killed_client_go_on_to_the_same_bits(place, tmp_path):
    run = tmp_path / "run"
    server = fedvl("server", place.folder, "--experiment", "linear", "--out", run, log=tmp_path / "server.log")
    with ended([server]):
        wait_until(lambda: len(list(run.glob("journal/*.json"))) >= 1, server)
        kill(server.pid, place.clients["south"].pid)
        server.wait()
        place.clients["south"].wait()
    committed = len(list(run.glob("journal/*.json")))
    assert 1 <= committed < 4
    start_client(place, "south")
    again = fedvl("resume", run, log=tmp_path / "again.log")
    with ended([again, place.clients["south"]]):
        assert again.wait(LATEST) == 0, (tmp_path / "again.log").read_text()
    assert f"Continuing after round {committed} of 4" in (tmp_path / "again.log").read_text()
    for traffic in verify([place.folder, *(place.folder / "parties" / name for name in NAMES)]).traffic:
        assert traffic.matched >= 4
        assert len(traffic.in_flight) <= 2  # a round that the kills cut
    assert_near(load(run / "model.safetensors"), local("linear")[1].shared)
