"""The theft of private tensors, tried by a server of real processes, with TLS and keys, on every method.

A server that lies names every tensor that a method has, asks for what was not agreed and asks twice. It holds the key of its own
certificate, so it reads each byte that its clients send: these are compared with what the methods declare, and searched for what
is the clients' own.
"""

import time
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.kills import draw_images
from helpers.machines import LATEST, Request, Wire, clients_at_work, make_federation, wait_until

from fedvl.deployment.audit_log import LOG_FILE, NO_HEAD, AuditLog, read_log
from fedvl.deployment.files import FederationFile, experiment_id, read_model, resolve_for_parties
from fedvl.deployment.link import flower, opened_link
from fedvl.deployment.messages import Header, Message, pack_tensors, unpack_tensors
from fedvl.deployment.state import state_folder
from fedvl.deployment.supervisor import free_port
from fedvl.deployment.verification import verify
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.checks import fits_shape
from fedvl.federation.local import LocalEngine
from fedvl.federation.stacks import SampleRows
from fedvl.methods import load_method, method_names
from fedvl.methods.base import Method
from fedvl.methods.roles import Shape, Shapes, Shared
from fedvl.runs.experiment import local_engine
from fedvl.runs.preparation import prepare
from fedvl.tensors import Tensors, count_bytes, load

NAMES = ["north", "south", "west"]  # each is a victim of some of the methods, for they are asked one by one
ROUNDS = 2
# Methods that need others' data in one place, and what a federation of machines says to them.
AT_HOME = {
    name: "pools all data in one place"
    if load_method(name).scope == "pooled"
    else f"{load_method(name).presets['paper']['evaluation']['protocol']} protocol"
    for name in method_names()
    if load_method(name).scope == "pooled" or load_method(name).uses_target
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fed-prime": {"intra": "local"},  # so that it has a tensor of its own
    "fedavg-nn": {"width": 4},
    "fedprox-nn": {"width": 4},
}
LIMIT = 2**28
ENVELOPE = 6_000  # bytes of Flower's around an answer: four requests with signatures, and the names of three objects
QUESTION = 2_000  # bytes of a request that carries no answer
LINE = 200  # bytes of a tensor's line in the header of safetensors, at most
NEEDLE = 32  # bytes that are searched for
HEADLESS = "it has no head of a log"
LOGGED = 4  # messages that the server writes down


class Victim(NamedTuple):
    """A method, and the client that it is tried on as a copy of it in this process."""

    name: str
    client: int
    engine: LocalEngine
    experiment: str

    @property
    def method(self) -> Method:
        return self.engine.method

    @property
    def handed(self) -> Tensors:
        """What an honest server hands out in the first round."""
        return self.method.hand_out(self.engine.start, {}, self.client)

    @property
    def run(self) -> str:
        return self.name.encode().hex()

    def declared(self, kind: str) -> dict[str, tuple[torch.dtype, Shape]]:
        """The types and shapes of what an answer of this kind may hold."""
        consultation, start = self.method.consultation(), self.engine.start
        if kind == "report" and consultation:
            return typed(consultation.report_shapes)
        if kind != "train":
            return {}
        if sums := self.method.role.statistics_shapes:
            return {name: (torch.float64, shape) for name, shape in sums.items()}
        shared = {name: (t.dtype, self.method.role.shared(name).shape or tuple(t.shape)) for name, t in start.items()}
        return {**shared, **typed(self.method.role.sent_shapes)}


class Question(NamedTuple):
    what: str
    victim: Victim
    request: Header
    tensors: Tensors


def typed(shapes: Shapes) -> dict[str, tuple[torch.dtype, Shape]]:
    return {name: (torch.float32, shape) for name, shape in shapes.items()}


def settings(name: str, images: Path) -> dict[str, Any]:
    protocol = load_method(name).presets.get("paper", {}).get("evaluation", {}).get("protocol", "open")
    return {
        "device": "cpu",
        "method": {"name": name, **OPTIONS.get(name, {})},
        "data": {"dataset": str(images), "partition": "iid"},
        "training": {"local_epochs": 1},
        "federation": {"rounds": ROUNDS, "threads": 1},
        "evaluation": {"protocol": protocol if name in AT_HOME else "closed"},
    }


def question(what: str, victim: Victim, tensors: Tensors, **changes: Any) -> Question:
    header: dict[str, Any] = {"run": victim.run, "experiment": victim.experiment, "round": 0, "attempt": 0}
    header |= {"kind": "train", "client": victim.client, **changes}
    return Question(what, victim, Header(**header), tensors)


def everything(victim: Victim) -> Tensors:
    """All that a client has besides the shared tensors, and all that its method has names for."""
    samples = victim.engine.data.take(victim.engine.rows[victim.client])
    roles = victim.method.role.declared.items()
    declared = {name: torch.zeros(1) for name, role in roles if not isinstance(role, Shared)}
    own = {**samples.inputs, "labels": samples.labels, "spy": torch.zeros(4), **declared}
    own |= victim.engine.private_of(victim.client)
    return {name: torch.zeros_like(tensor) for name, tensor in own.items() if name not in victim.handed}


def lies(victim: Victim) -> Iterator[Question]:
    """What a client refuses before it has trained."""
    start, names = victim.handed, everything(victim)
    yield question(HEADLESS, victim, start)
    single = victim.engine.private_of(victim.client).keys() | victim.method.role.declared.keys()
    for name in sorted(single & names.keys()):
        yield question(f"it names {name}", victim, {**start, name: names[name]})
    yield question("it names everything", victim, {**start, **names})
    for some in sorted(start)[:1]:
        yield question("another shape", victim, {**start, some: start[some][None]})
    for kind in ("report", "adopt") if victim.method.consultation() else ("report",):
        yield question(f"it names everything in its {kind}", victim, {**start, **names}, kind=kind)
    yield question("it names everything in the end", victim, {**start, **names}, kind="finish", round=ROUNDS)
    yield question("a round too many", victim, start, round=ROUNDS)


class Server:
    """A server that sends what it likes, reads what it gets, and writes down its first messages alone."""

    def __init__(self, transport: Any, log: AuditLog) -> None:
        self.transport, self.log, self.sent = transport, log, 0
        self.answers: list[tuple[Question, Message | FedVLError]] = []

    def message(self, asked: Question) -> Message:
        message = Message(asked.request, pack_tensors(asked.tensors))
        if asked.what == HEADLESS:
            return message
        self.sent += 1
        if self.sent <= LOGGED:
            return self.log.send(message)
        return Message(asked.request.model_copy(update={"log": self.log.head}), message.payload)

    def ask(self, questions: list[Question]) -> list[Message | FedVLError]:
        """Ask all at once; a client answers one after the other, in order."""
        tickets = []
        for asked in questions:
            [ticket] = self.transport.send({asked.victim.client: self.message(asked)}, LATEST)
            tickets.append(ticket)
        came: dict[str, Message | FedVLError] = {}
        while waiting := set(tickets) - came.keys():
            time.sleep(0.5)
            came |= {ticket: message for ticket, _, message in self.transport.collect(waiting)}
        answers = [came[ticket] for ticket in tickets]
        self.answers += zip(questions, answers, strict=True)
        return answers


def check(question: Question, answer: Message | FedVLError) -> None:
    """What came is the declared tensors or a reason, and belongs to what was asked."""
    what = f"{question.victim.name}: {question.what}"
    assert isinstance(answer, Message), what
    header = answer.header
    assert header.answers(question.request), what
    if not answer.payload:
        return
    assert header.problem == "", what
    sent, declared = unpack_tensors(answer.payload, LIMIT), question.victim.declared(question.request.kind)
    assert sent.keys() == declared.keys(), what
    for name, (dtype, shape) in declared.items():
        assert sent[name].dtype == dtype, what
        assert fits_shape(sent[name], shape), what
    assert len(answer.payload) <= count_bytes(sent) + LINE * (1 + len(sent)), what


def refused(questions: list[Question], answers: list[Message | FedVLError]) -> None:
    for question, answer in zip(questions, answers, strict=True):
        check(question, answer)
        assert isinstance(answer, Message)
        assert answer.header.problem, (question.victim.name, question.what)
        assert answer.payload == b"", (question.victim.name, question.what)


def near(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.allclose(left[n], right[n], rtol=0, atol=1e-5) for n in left)


def steal(server: Server, victims: list[Victim]) -> None:
    """Lie to every client, then be honest, then lie again; honest answers are what the method's own code makes."""
    false = [lie for victim in victims for lie in lies(victim)]
    refused(false, server.ask(false))
    states = consult(server, [victim for victim in victims if victim.method.consultation()])
    working = [victim for victim in victims if victim.engine.start]
    honest = [question("honest", v, v.handed, state=states.get(v.name, "")) for v in working]
    first = server.ask(honest)
    for asked, answer in zip(honest, first, strict=True):
        check(asked, answer)
        assert isinstance(answer, Message)
        victim = asked.victim
        assert near(unpack_tensors(answer.payload, LIMIT), made_by(victim)), victim.name
        states[victim.name] = answer.header.state
    moved = [
        question("other tensors", v, {name: t + t.dtype.is_floating_point for name, t in v.handed.items()}, attempt=1)
        for v in working
    ]
    for asked, before, answer in zip(moved, first, server.ask(moved), strict=True):
        check(asked, answer)
        assert isinstance(answer, Message)
        assert isinstance(before, Message)
        assert answer.payload == before.payload, asked.victim.name
    again = [question("everything", v, {**v.handed, **everything(v)}, round=1, state=states[v.name]) for v in working]
    refused(again, server.ask(again))


def made_by(victim: Victim) -> Tensors:
    """What the method's own code makes of an honest request."""
    if victim.method.role.statistics:
        return victim.engine.statistics_of(0, victim.client, victim.handed)
    [trained] = victim.engine.train(0, [victim.client], victim.handed)
    victim.engine.keep([trained])
    return trained.update.tensors


def consult(server: Server, victims: list[Victim]) -> dict[str, str]:
    """Hold the exchange before the first round with the methods that have one; the states that result."""
    reports = [question("honest", victim, victim.engine.start, kind="report") for victim in victims]
    adoptions = []
    for asked, answer in zip(reports, server.ask(reports), strict=True):
        check(asked, answer)
        assert isinstance(answer, Message)
        engine, consultation = asked.victim.engine, asked.victim.method.consultation()
        assert consultation is not None
        sent = unpack_tensors(answer.payload, LIMIT)
        [report], _ = engine.report(0, engine.start)
        assert near(sent, report.tensors), asked.victim.name
        settled = consultation.settle(0, sent, None if consultation.summed else sent)
        engine.adopt({None: settled})
        state = answer.header.state
        adoptions.append(question("honest", asked.victim, settled, kind="adopt", state=state))
    states = {}
    for asked, answer in zip(adoptions, server.ask(adoptions), strict=True):
        check(asked, answer)
        assert isinstance(answer, Message)
        assert answer.payload == b""
        states[asked.victim.name] = answer.header.state
    return states


# --- on the wire


def compare(requests: list[Request], answers: list[Message]) -> None:
    """Every byte that clients sent is an answer that was asked for, within an envelope of bounded size."""
    from flwr.common.serde import message_from_proto
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import PushObjectRequest
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    pushed = [(request, PushObjectRequest.FromString(request.body)) for request in of_path(requests, "push-object")]
    contents = {push.object_id: push.object_content for _, push in pushed}
    sizes = Counter[str]()
    for request, push in pushed:
        sizes[push.object_id] += request.size
    found, used = [], set[str]()
    for request in of_path(requests, "push-messages"):
        envelope = PushMessagesRequest.FromString(request.body)
        [outside], [tree] = envelope.messages_list, envelope.message_object_trees
        assert not len(message_from_proto(outside).content)
        objects = {node.object_id for node in iterate_object_tree(tree)}
        message = flower().unpack(inflate_object_from_contents(tree.object_id, {o: contents[o] for o in objects}))
        found.append(message)
        used |= objects
        envelope_size = (
            request.size + sum(sizes[o] for o in objects) - len(message.header.model_dump_json()) - len(message.payload)
        )
        assert envelope_size <= ENVELOPE
    assert used == contents.keys()
    assert Counter(found) == Counter(answers)
    others = [request for request in requests if not request.path.endswith(("/push-object", "/push-messages"))]
    assert len(found) + len(pushed) + len(others) == len(requests)
    assert all(request.path.startswith("/v1/fleet/") for request in requests)
    assert max(request.size for request in others) <= QUESTION


def of_path(requests: list[Request], name: str) -> list[Request]:
    return [request for request in requests if request.path == f"/v1/fleet/{name}"]


def needles(tensors: Tensors) -> set[bytes]:
    """Bytes from the middle of each row; those that say little, such as zeros, would be found anywhere."""
    found = set()
    for tensor in tensors.values():
        for row in (tensor.flatten()[None] if tensor.dim() < 2 else tensor.flatten(1)).contiguous():
            raw = row.numpy().tobytes()
            middle = max(len(raw) - NEEDLE, 0) // 2 // row.element_size() * row.element_size()
            needle = raw[middle : middle + NEEDLE]
            found |= {needle} if len(needle) == NEEDLE and len(set(needle)) >= 6 else set()
    return found


def found_in(said: bytes, wanted: set[bytes]) -> set[bytes]:
    """Those of these needles that are anywhere in what was said."""
    first = np.frombuffer(b"".join(needle[:8] for needle in wanted), np.uint64)
    found = set()
    for shift in range(8):
        words = np.frombuffer(said, np.uint64, (len(said) - shift) // 8, shift)
        for hit in np.flatnonzero(np.isin(words, first)):
            found |= {said[shift + 8 * hit : shift + 8 * hit + NEEDLE]} & wanted
    return found


def made_at_the_end(victim: Victim) -> list[str]:
    """Patterns of the private tensors that follow from what a client sends, such as SCAFFOLD's own variate."""
    return [name for name, role in victim.method.role.declared.items() if getattr(role, "end", None) is not None]


def without_copies(tensors: Tensors, made: list[str]) -> Tensors:
    return {name: t for name, t in tensors.items() if not any(fnmatchcase(name, pattern) for pattern in made)}


def own_tensors(victim: Victim) -> Tensors:
    """What is a client's alone: its samples, and private tensors that are no copies of what it sends."""
    samples = victim.engine.data.take(victim.engine.rows[victim.client])
    private = without_copies(victim.engine.private_of(victim.client), made_at_the_end(victim))
    return {**samples.inputs, "labels": samples.labels, **private}


@pytest.mark.parametrize("name", AT_HOME)
def test_a_method_that_needs_the_data_of_others_takes_no_part(name, tmp_path):
    with pytest.raises(FedVLError, match=AT_HOME[name]):
        resolve_for_parties(settings(name, tmp_path), len(NAMES))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_method_gives_a_lying_server_more_than_it_declares(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    images = draw_images(tmp_path)
    tried = one_of_each_kind([name for name in method_names() if name not in AT_HOME])
    experiments = {name: resolve_for_parties(settings(name, images), len(NAMES)) for name in tried}
    agreed = dict(zip(tried, cycle(range(len(NAMES))), strict=False))
    federated = {
        name: [experiments[method] for method, client in agreed.items() if client == number]
        for number, name in enumerate(NAMES)
    }
    port = free_port()
    folder = make_federation(tmp_path / "clinic", federated, port)
    for party in NAMES:  # statistics of one client leave, so that they are searched
        let_statistics_leave(folder / "parties" / party)
    known = read_model(folder / "federation.json", FederationFile, "").model_copy(update={"port": free_port()})
    victims = [victim_of(name, agreed[name], experiments[name]) for name in tried]
    with Wire(port, known.port, folder) as wire, opened_link(folder, known) as link:
        with clients_at_work(folder, NAMES) as place:
            authority, nodes = (folder / "ca.crt").read_bytes(), link.nodes
            with flower().flower_run(link.address, authority, link.secret, nodes) as transport:
                wait_until(lambda: len(transport.connected()) == len(NAMES), *place.clients.values())
                server = Server(transport, AuditLog(folder / LOG_FILE))
                steal(server, victims)
        requests = wire.requests()
    answers = [answer for _, answer in server.answers if isinstance(answer, Message)]
    assert len(answers) == len(server.answers) >= 8 * len(tried)
    compare(requests, answers)
    assert {a.header.problem for q, a in server.answers if q.what == HEADLESS and isinstance(a, Message)} == {NO_HEAD}
    told = read_log(folder).chain.entries
    for client, name in enumerate(NAMES):
        received = sum(question.victim.client == client for question, _ in server.answers)
        logged = sum(entry["kind"] == "sent" and entry["client"] == client for entry in told)
        assert logged < received
        with pytest.raises(FedVLError, match=f"{received} were received and {logged} logged"):
            verify([folder, folder / "parties" / name])
    own: dict[bytes, str] = {}  # what must not be found, and whose it is
    for victim in victims:
        hidden = needles(own_tensors(victim))
        assert len(hidden) >= len(victim.engine.rows[victim.client]), victim.name
        own |= dict.fromkeys(hidden, victim.name)
    made = {victim.run: made_at_the_end(victim) for victim in victims}
    for path in (folder / "parties").glob("*/state/runs/*/*.safetensors"):
        run = path.parts[-2]
        own |= dict.fromkeys(needles(without_copies(load(path), made.get(run, []))), run)
    sent = set[bytes]().union(*(needles(unpack_tensors(a.payload, LIMIT)) for a in answers if a.payload))
    found = found_in(b"".join(request.body for request in requests), sent | own.keys())
    assert sent <= found  # what was sent is found, if one looks for it
    assert {own[needle] for needle in found & own.keys()} == set()


def let_statistics_leave(party: Path) -> None:
    policy = state_folder(party) / "policy.toml"
    text = policy.read_text()
    assert "single_statistics = false" in text
    policy.write_text(text.replace("single_statistics = false", "single_statistics = true"))


def one_of_each_kind(names):
    """Of methods whose tensors are made and named by the very same code, as fedprox's by linear's, the first."""
    kinds: dict[Any, str] = {}
    for name in names:
        made = load_method(name)
        code = (made.start, made.join, made.roles, made.hand_out, made.consultation, made.inputs, made.statistics)
        kinds.setdefault((code, str(OPTIONS.get(name))), name)
    return list(kinds.values())


def victim_of(name, client, experiment):
    prepared = prepare(experiment, Silent())
    engine = local_engine(prepared)
    engine.rows = SampleRows.of([rows if number == client else rows[:0] for number, rows in enumerate(engine.rows)])
    return Victim(name, client, engine, experiment_id(experiment, prepared.method.task.encoder))
