"""Every client of the small federation a party of its own, behind a Grid of Flower's that lives in this process."""

import json
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from fedvl.deployment.audit_log import AuditLog
from fedvl.deployment.client import Client, Ready
from fedvl.deployment.messages import Header, Message, pack_tensors, unpack_tensors
from fedvl.deployment.party import Party
from fedvl.deployment.policy import approve, write_policy
from fedvl.deployment.remote import Identity, RemoteEngine
from fedvl.deployment.secure_sum import Credentials, SumMember
from fedvl.deployment.state import state_folder
from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine
from fedvl.methods import method_names
from fedvl.runs.settings import resolve_experiment
from fedvl.tensors import digest
from helpers.lazy import lazily
from helpers.small import RAGGED, run_quietly, small_federation, small_method

flower, flower_app = lazily("fedvl.deployment.flower"), lazily("flwr.app")

RUN, EXPERIMENT = "a" * 32, "b" * 64
HEAD = "e" * 64  # of the server's log
CLIENTS = len(RAGGED)
NODE = 1000  # node = 1000 + client
# Methods that are nothing between machines: one trains nothing, one wants all data in one place.
STAY_AT_HOME = {"zero-shot", "centralised"}
METHODS = [name for name in method_names() if name not in STAY_AT_HOME]
NO_WATCH: Any = None  # on a server that is not connected to
UNREADABLE = object()  # what Flower itself fails on
AT_ONCE = 0.001  # seconds: a deadline for parties that have answered, or never will, when the requests are sent


class FakeGrid:
    """Of a Grid of Flower's what is our own (:func:`fake_grid`).

    Parties answer at once, unless ``faults[client, round, kind]`` (round from 0) does something else with request and party;
    an answer may be a pair of the client that really sends it (None: a stranger) and the message.
    """

    def __init__(self, parties, faults=None):
        self.parties, self.faults = parties, faults or {}
        self.waiting, self.online, self.headers = {}, set(range(len(parties))), []
        self.number = 0

    def get_node_ids(self):
        return [NODE + client for client in self.online]

    def push_messages(self, envelopes):
        return [self.push(envelope) for envelope in envelopes]

    def push(self, envelope):
        self.number += 1
        ticket = f"ticket {self.number}"
        envelope.metadata.__dict__["_message_id"] = ticket
        client = envelope.metadata.dst_node_id - NODE
        message = flower.unpack(envelope)
        header = message.header.model_dump()
        self.headers.append(header)
        fault = self.faults.pop((client, header["round"], header["kind"]), None)
        answers = fault(message, self.parties[client]) if fault else [self.parties[client].answer(message)]
        self.waiting[ticket] = [self.as_message(answer, envelope) for answer in answers]
        return ticket

    def as_message(self, answer, envelope):
        if answer is UNREADABLE:
            return answer
        node = envelope.metadata.dst_node_id
        if type(answer) is tuple:
            sender, answer = answer
            node = 1 if sender is None else NODE + sender
        if isinstance(answer, Message | Raw):
            answer = flower.pack(answer) if isinstance(answer, Message) else answer.pack()
        reply = flower_app.Message(answer, reply_to=envelope)
        reply.metadata.__dict__["_src_node_id"] = node
        return reply

    def pull_messages(self, tickets):
        found = [envelope for ticket in tickets for envelope in self.waiting.pop(ticket, [])]
        if UNREADABLE in found:
            raise ValueError("Flower cannot inflate it")
        return found

    def set_run(self, run): ...
    def run(self): ...
    def create_message(self, *arguments): ...
    def send_and_receive(self, envelopes, *, timeout=None): ...


@cache
def grid_type():
    """Flower is loaded when the first grid is made."""
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    # Flower's envelopes can be made within a run only.
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 1
    return type("FlowersGrid", (FakeGrid, Grid), {})


def fake_grid(parties, faults=None):
    return grid_type()(parties, faults)


def party_of(method, client, folder, template):
    rows = [rows if number == client else rows[:0] for number, rows in enumerate(template.rows)]
    engine = LocalEngine(method, template.data, rows, template.training, template.federation, 0, template.privacy)
    sums = partial(member_of, client, engine.federation.least_clients)
    return Party(client, engine, folder / str(client), rehearsal=True, sums=sums)


def member_of(client, least, folder, run=RUN):
    """A member of secure sums whose party's signature is what it signs, as text."""
    return SumMember(run, client, folder, Credentials(lambda content: content.hex()[:200], vouched), least)


def vouched(entry, content):
    if entry.signature != content.hex()[:200]:
        raise FedVLError("It is not signed by its party.")


class SmallClient(Client):
    """A client of the small federation as fedvl client has it: with a policy, approvals and a log in its folder."""

    def __init__(self, client, folder, name="linear", experiments=(EXPERIMENT,), privacy=None, **settings):
        federation = local_federation(name, privacy=privacy, **settings)
        engine = federation.engine
        self.folder, self.state, self.rehearsal, self.stay = folder, state_folder(folder), True, True
        self.said: list[str] = []
        self.say = self.said.append
        self.file = SimpleNamespace(name=str(client), number=client, on_this_machine=True)  # type: ignore[assignment]
        self.log, self.policy_hash, self.roster = AuditLog(self.state / "audit.jsonl"), "", ""
        self.parties, self.finished, self.surveyed = {}, False, None
        sections = {"federation": engine.federation, "training": engine.training, "privacy": engine.privacy}
        given = {section: values.model_dump(exclude_none=True) for section, values in sections.items()}
        rows = [rows if number == client else rows[:0] for number, rows in enumerate(engine.rows)]
        prepared: Any = SimpleNamespace(
            experiment=resolve_experiment({"method": {"name": name}, **given}),
            method=federation.method,
            training=SimpleNamespace(samples=engine.data, rows=rows),
        )
        self.ready = {experiment: Ready("small", prepared) for experiment in experiments}
        self.start = pack_tensors(engine.start)

    @classmethod
    def joined(cls, client, folder, *words, **settings):
        """One whose person has joined and approved all experiments."""
        state_folder(folder).mkdir(parents=True, exist_ok=True)
        found = cls(client, folder, *words, **settings)
        write_policy(found.state)
        for experiment in found.ready:
            approve(found.log, experiment)
        return found

    def _roster(self, experiment):
        return ""  # its keys are not real

    def _member(self, run, least, folder):
        return member_of(self.file.number, least, folder, run)

    def ask(self, payload=None, **changes):
        header = request(**{"round": 0, "client": self.file.number, **changes})
        return self.answer(Message(header, self.start if payload is None else payload))

    def problem(self, **changes):
        return self.ask(**changes).header.problem


def remote_federation(name, folder, faults=None, options=None, training=None, **settings):
    """The small federation with every client a party of its own, behind a Grid."""
    federation = local_federation(name, options, training, **settings)
    template, method = federation.engine, federation.method
    grid = fake_grid([party_of(method, client, folder, template) for client in range(CLIENTS)], faults)
    nodes = {client: NODE + client for client in range(CLIENTS)}
    federation.engine = RemoteEngine(
        flower.GridTransport(grid, nodes), method, federation.config, CLIENTS, Identity(RUN, EXPERIMENT)
    )
    return federation, grid


def local_federation(name, options=None, training=None, **settings):
    return small_federation(small_method(name, **(options or {})), training, chunk=1, **settings)


def request(**changes):
    header = {"run": RUN, "experiment": EXPERIMENT, "round": 9, "attempt": 0, "kind": "train", "client": 3, "log": HEAD}
    return Header(**{**header, **changes})


class Absent(LocalEngine):
    """These clients do not answer in these rounds (client, round)."""

    missing = ()

    def train(self, round_index, cohort, shared, own=None):
        return super().train(round_index, self.answering(round_index, cohort), shared, own)

    def sum_statistics(self, round_index, cohort, shared):
        return super().sum_statistics(round_index, self.answering(round_index, cohort), shared)

    def answering(self, round_index, cohort):
        return [client for client in cohort if (client, round_index) not in self.missing]


@cache
def without(name, *missing, epochs=None, **settings):
    """The small federation without these answers (client, round), run once for all that are compared with it."""
    alone = bool(small_method(name).role.statistics)  # sums over all samples together have other bits
    training = {"local_epochs": epochs} if epochs else None
    federation = local_federation(name, training=training, one_by_one=alone, **settings)
    engine = federation.engine
    federation.engine = Absent(engine.method, engine.data, engine.rows, engine.training, engine.federation, 0)
    federation.engine.missing = missing
    return run_quietly(federation)


def same(left, right):
    kept = (
        bool(left.method.role.statistics) or left.last.keys() == right.last.keys()
    )  # a server keeps sums, a simulation none
    return digest(left.shared) == digest(right.shared) and kept


# --- what a client may do instead of answering


class Raw(NamedTuple):
    """A message whose header is any text."""

    header: str
    payload: bytes = b""

    def pack(self):
        record = flower_app.ConfigRecord({"header": self.header, "payload": self.payload})
        return flower_app.RecordDict({"message": record})


def silent(message, party):
    return []


def failed(message, party):
    return [flower_app.Error(code=0, reason="it ran out of memory")]


def altered(**changes):
    def fault(message, party):
        reply = party.answer(message)
        return [Raw(json.dumps({**reply.header.model_dump(), **changes}), reply.payload)]

    return fault


def with_payload(change):
    def fault(message, party):
        reply = party.answer(message)
        return [reply._replace(payload=change(reply.payload))]

    return fault


def tensors_changed(change):
    return with_payload(lambda payload: pack_tensors(change(unpack_tensors(payload, 2**28))))


def twice(message, party):
    reply = party.answer(message)
    return [reply, reply]
