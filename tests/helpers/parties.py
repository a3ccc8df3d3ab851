"""Every client of the small federation a party of its own, behind a Grid of Flower's that lives in this process."""

import json

import torch
from flwr.app import Error, Message as FlowerMessage
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedvl.deployment.flower import GridTransport, pack, unpack
from fedvl.deployment.messages import Header, Message
from fedvl.deployment.party import Party
from fedvl.deployment.remote import Identity, RemoteEngine
from fedvl.deployment.messages import decode, encode
from fedvl.federation.local import LocalEngine
from fedvl.methods import method_names
from fedvl.tensors import digest
from helpers.small import RAGGED, run_quietly, small_federation, small_method

# Flower's messages can be made within a run only.
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 1

RUN, EXPERIMENT = "a" * 32, "b" * 64
CLIENTS = len(RAGGED)
NODE = 1000  # node = 1000 + client


def takes_part(name):
    method = small_method(name)
    return bool(method.start(torch.Generator()) or method.trained_private) and not method.pools_data


METHODS = [name for name in method_names() if takes_part(name)]


UNREADABLE = object()  # what Flower itself fails on


class FakeGrid(Grid):
    """Parties answer at once, unless ``faults[client, round, kind]`` (round from 0) does something else with request and party."""

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
        message = unpack(envelope)
        header = json.loads(message.header)
        self.headers.append(header)
        fault = self.faults.pop((client, header["round"], header["kind"]), None)
        answers = fault(message, self.parties[client]) if fault else [self.parties[client].answer(message)]
        self.waiting[ticket] = [self.as_message(answer, envelope) for answer in answers]
        return ticket

    def as_message(self, answer, envelope):
        if answer is UNREADABLE:
            return answer
        if isinstance(answer, Message):
            answer = pack(answer)
        reply = FlowerMessage(answer, reply_to=envelope)
        reply.metadata.__dict__["_src_node_id"] = envelope.metadata.dst_node_id
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


def party_of(method, client, folder, template):
    rows = [rows if number == client else rows[:0] for number, rows in enumerate(template.rows)]
    engine = LocalEngine(method, template.data, rows, template.training, template.federation, 0)
    return Party(client, engine, folder / str(client))


def remote_federation(name, folder, faults=None, options=None, training=None, **settings):
    """The small federation with every client a party of its own, behind a Grid."""
    federation = local_federation(name, options, training, **settings)
    template, method = federation.engine, federation.method
    grid = FakeGrid([party_of(method, client, folder, template) for client in range(CLIENTS)], faults)
    nodes = {client: NODE + client for client in range(CLIENTS)}
    federation.engine = RemoteEngine(
        GridTransport(grid, nodes), method, federation.config, CLIENTS, Identity(RUN, EXPERIMENT)
    )
    return federation, grid


def local_federation(name, options=None, training=None, **settings):
    return small_federation(small_method(name, **(options or {})), training, chunk=1, **settings)


def request(**changes):
    header = {"run": RUN, "experiment": EXPERIMENT, "round": 9, "attempt": 0, "kind": "train", "client": 3}
    return Header(**{**header, **changes})


class Absent(LocalEngine):
    """These clients do not answer in these rounds (client, round)."""

    missing = ()

    def train(self, round_index, cohort, shared, own=None):
        return super().train(round_index, [c for c in cohort if (c, round_index) not in self.missing], shared, own)


def without(name, *missing, **settings):
    federation = local_federation(name, **settings)
    engine = federation.engine
    federation.engine = Absent(engine.method, engine.data, engine.rows, engine.training, engine.federation, 0)
    federation.engine.missing = missing
    return run_quietly(federation)


def same(left, right):
    return digest(left.shared) == digest(right.shared) and left.kept.keys() == right.kept.keys()


# --- what a client may do instead of answering


def silent(message, party):
    return []


def failed(message, party):
    return [Error(code=0, reason="it ran out of memory")]


def altered(**changes):
    def fault(message, party):
        reply = party.answer(message)
        return [reply._replace(header=json.dumps({**json.loads(reply.header), **changes}))]

    return fault


def with_payload(change):
    def fault(message, party):
        reply = party.answer(message)
        return [reply._replace(payload=change(reply.payload))]

    return fault


def tensors_changed(change):
    return with_payload(lambda payload: encode(change(decode(payload, 2**28))))


def twice(message, party):
    reply = party.answer(message)
    return [reply, reply]
