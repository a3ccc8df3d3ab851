"""Flower between machines; nothing else here imports flwr.

Flower carries messages (``messages.py``) and vouches for who sent them; what is in them, and what
becomes of it, is ours. Both ends run in processes that stay: the rounds in ``fedvl server``, a
client's training in ``fedvl client``, each as the task runner of a SuperLink or SuperNode started
with ``--isolation process``. So no process is started for a message, and a client never runs the
code that Flower bundles with a run.

    python -m fedvl.deployment.flower superlink|supernode PARENT_PID OPTIONS...

is Flower's own command, made to end with its parent. Flower lets anyone who reaches the
SuperLink's port register keys and start code on all nodes; ``door.py`` stands before it.
"""

import hashlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import ConfigRecord, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.cli.build import build_fab_from_files
from flwr.clientapp import ClientApp
from flwr.common.constant import TIMESTAMP_HEADER, ErrorCode, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import Grid
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER as PUBLIC_KEY_HEADER
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER as SIGNATURE_HEADER
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output
from google.protobuf.message import DecodeError

from fedvl.deployment.door import SECRET_HEADER, Door, Signed
from fedvl.deployment.messages import Message, read_header
from fedvl.errors import FedVLError

SECRET_VARIABLE, FOLDER_VARIABLE = "FEDVL_LINK_SECRET", "FEDVL_LINK_FOLDER"
MAX_BYTES_VARIABLE = "FEDVL_LINK_MOST_BYTES"  # of a message
NODE_BYTES, COPIES = 2**30, 4  # what a SuperNode needs, and how often it holds a message
MAX_OBJECTS = 3  # of Flower's in a message of ours: itself, its records, our record
POLL_SECONDS, MAX_POLL_SECONDS = 0.05, 0.5  # between requests for a task: the pause grows while there is none
NODE_PAUSES = (0.2,) * 10 + (0.5,) * 6 + (1.0,) * 5 + (2.0,) * 5  # between a SuperNode's questions, after a message
PULL_SECONDS = 1.0  # for an answer to be pulled, before others are looked at
LINK_SECONDS = 30.0  # without an answer of the SuperLink, which runs on the same machine: it is gone
RECORD = "message"
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
# Flower wants a bundle of code with every run. Ours is empty: nodes run what is installed on them.
BUNDLE = b"""[project]
name = "fedvl"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedvl"
[tool.flwr.app.components]
serverapp = "no:code"
clientapp = "no:code"
"""


# --- our messages in Flower's


def pack(message: Message) -> RecordDict:
    return RecordDict({RECORD: ConfigRecord({"header": message.header.model_dump_json(), "payload": message.payload})})


def unpack(envelope: FlowerMessage) -> Message:
    """Return our message in one of Flower's, which a stranger may have made."""
    if envelope.has_error():
        raise FedVLError(f"its client failed: {str(envelope.error.reason)[:300]}")
    if len(envelope.content) != 1:
        raise FedVLError("its message has an unexpected format")
    record = envelope.content.get(RECORD)
    if not isinstance(record, ConfigRecord) or record.keys() != {"header", "payload"}:
        raise FedVLError("its message has an unexpected format")
    header, payload = record["header"], record["payload"]
    if not isinstance(header, str) or not isinstance(payload, bytes):
        raise FedVLError("its message has an unexpected format")
    return Message(read_header(header), payload)


class Pull(Thread):
    """Pull one answer in a thread of its own.

    Flower waits for minutes for an answer whose sender was killed while sending it, and the answers
    of all other clients would expire meanwhile.
    """

    def __init__(self, grid: Grid, ticket: str) -> None:
        super().__init__(daemon=True)
        self.grid, self.ticket = grid, ticket
        self.pulled: list[FlowerMessage] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.pulled = list(self.grid.pull_messages([self.ticket]))
        except Exception as error:
            self.error = error

    def envelopes(self) -> list[FlowerMessage]:
        if self.error is not None:
            raise self.error
        return self.pulled


class GridTransport:
    """Messages over the Grid of one Flower run; clients are known by their registered keys."""

    def __init__(self, grid: Grid, nodes: Mapping[int, int]) -> None:
        self.grid = grid
        self.nodes = dict(nodes)  # client -> node
        self.clients = {node: client for client, node in nodes.items()}
        self.pulls: dict[str, Pull] = {}  # by ticket, of answers that are still being sent

    def connected(self) -> set[int]:
        with link_errors_explained():
            return {self.clients[node] for node in self.grid.get_node_ids() if node in self.clients}

    def send(self, messages: Mapping[int, Message], seconds: float) -> dict[str, int]:
        """Send each client its message with a deadline; return the tickets of the answers."""
        order = sorted(messages)
        envelopes = [
            FlowerMessage(pack(messages[client]), dst_node_id=self.nodes[client], message_type="train", ttl=seconds)
            for client in order
        ]
        with link_errors_explained():
            tickets = list(self.grid.push_messages(envelopes))
        return {ticket: client for ticket, client in zip(tickets, order, strict=True) if ticket}

    def collect(self, tickets: Collection[str]) -> Iterator[tuple[str, int | None, Message | FedVLError]]:
        """Yield what has come: ticket, sender by its key, and the message or why there is none."""
        for ticket in tickets:  # one at a time, so that what Flower cannot read takes no other's answer along
            pull = self.pulls.pop(ticket, None)
            if pull is None:
                pull = Pull(self.grid, ticket)
                pull.join(PULL_SECONDS)
            if pull.is_alive():
                self.pulls[ticket] = pull
                continue
            try:
                with link_errors_explained():
                    envelopes = pull.envelopes()
            except FedVLError:
                raise
            except Exception as error:
                yield ticket, None, FedVLError(f"its message is none of Flower's ({type(error).__name__})")
                continue
            for envelope in envelopes:
                sender = self.clients.get(envelope.metadata.src_node_id)
                try:
                    yield ticket, sender, unpack(envelope)
                except FedVLError as error:
                    yield ticket, sender, error


@contextmanager
def link_errors_explained() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise FedVLError(
            f"The SuperLink does not answer ({error}); committed rounds are safe: look at superlink.log, then resume."
        ) from error


# --- the server's end


class Secret:
    """Adds the secret that opens the control interface."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers[SECRET_HEADER] = self.secret
        return call_next(context)


def register(address: str, authority: bytes, secret: str, public_keys: list[bytes]) -> list[int]:
    """Make these OpenSSH public keys known to the SuperLink; the node of each."""
    with link_errors_explained():
        control = ControlHttpClient.from_server_address(
            address, False, authority, [RuntimeVersionHttpInterceptor(component_name="flwr CLI"), Secret(secret)]
        )
        keys = [public_key_to_bytes(load_ssh_public_key(key)) for key in public_keys]  # type: ignore[arg-type]
        nodes = [control.RegisterNode(RegisterNodeRequest(public_key=key)).node_id for key in keys]
        control.close()
        return nodes


@contextmanager
def flower_run(address: str, authority: bytes, secret: str, nodes: Mapping[int, int]) -> Iterator[GridTransport]:
    """Start a Flower run with this process as its ServerApp; start one at a time."""
    from flwr.superlink.grid.http_grid import HttpGrid  # with a database, which clients need not load

    with link_errors_explained():
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        control = ControlHttpClient.from_server_address(address, False, authority, [version, Secret(secret)])
        content, _ = build_fab_from_files({"pyproject.toml": BUNDLE})
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        control.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
        control.close()
        end = time.monotonic() + LINK_SECONDS
        tasks = task_client(address, authority, secret)
        token = wait_for_task(tasks, TaskType.SERVER_APP, lambda: time.monotonic() < end)
        tasks.close()  # the SuperLink waits at its end for connections that are left open
        if token is None:
            raise FedVLError("The SuperLink does not begin the run; look at superlink.log, then resume.")
        grid = HttpGrid(address, False, authority, token=token)
        grid._retry_invoker.max_time = LINK_SECONDS
        runtime = grid._runtime_client
        runtime._interceptors += (Secret(secret),)
        given = runtime.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
    TaskIdentity.node_id = given.context.node_id
    grid.set_run(run_from_proto(given.run))
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(runtime))
    heartbeat.start()
    status = SubStatus.FAILED
    try:
        yield GridTransport(grid, nodes)
        status = SubStatus.COMPLETED
    finally:
        heartbeat.stop()
        grid._retry_invoker.max_tries = 1
        with suppress(httpx.HTTPError):
            runtime.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
        grid.close()


def task_client(address: str, authority: bytes | None, secret: str) -> RuntimeHttpClient:
    interceptors: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperExec"),
        SuperExecAuthHttpInterceptor(master_secret=secret.encode(), protected_methods={ACQUIRE}),
        *([] if authority is None else [Secret(secret)]),  # for the door of the SuperLink; a SuperNode has none
    ]
    return RuntimeHttpClient.from_server_address(address, authority is None, authority, interceptors)


def wait_for_task(client: RuntimeHttpClient, kind: TaskType, go_on: Callable[[], bool] = lambda: True) -> str | None:
    """The token of the next task of this kind; None if there is no need to go on."""
    pause = POLL_SECONDS
    while go_on():
        with suppress(httpx.TransportError):  # it may still be starting, or starting again
            answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
            if answer.HasField("task") and answer.token:
                return str(answer.token)
        time.sleep(pause)
        pause = min(1.1 * pause, MAX_POLL_SECONDS)
    return None


# --- a client's end


def signed_headers(key: ec.EllipticCurvePrivateKey) -> dict[str, str]:
    """Return the headers by which a SuperNode's request shows whose it is, and when it was sent."""
    moment = datetime.now(UTC).isoformat()
    parts = {
        PUBLIC_KEY_HEADER: public_key_to_bytes(key.public_key()),
        SIGNATURE_HEADER: sign_message(key, moment.encode()),
    }
    return {TIMESTAMP_HEADER: moment, **{name: b64encode(content).decode() for name, content in parts.items()}}


def answer_messages(
    address: str, secret: str, answer: Callable[[Message], Message], go_on: Callable[[], bool] = lambda: True
) -> None:
    """Answer the messages that the SuperNode at this address of the same machine receives."""
    app = ClientApp()

    @app.train()
    def train(envelope: FlowerMessage, context: Any) -> FlowerMessage:
        return FlowerMessage(pack(answer(unpack(envelope))), reply_to=envelope)

    tasks = task_client(address, None, secret)
    while token := wait_for_task(tasks, TaskType.CLIENT_APP, go_on):
        version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        client = RuntimeHttpClient.from_server_address(
            address, True, None, [version, RuntimeTokenHttpInterceptor(token)]
        )
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        heartbeat.start()
        with suppress(httpx.HTTPError):  # the SuperNode may end meanwhile; the server will ask again
            envelope, context, _, _ = pull_task_input(client)
            try:
                reply = app(envelope, context)
            except Exception as error:  # it ends this answer, never the client; what it says stays here
                traceback.print_exc()
                reply = FlowerMessage(
                    Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, type(error).__name__), reply_to=envelope
                )
            push_message(client, reply, context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        heartbeat.stop()
        client.close()


# --- Flower's own processes


def door_settings(folder: Path, secret: str, most_bytes: int) -> dict[str, str]:
    """Return the variables that tell the SuperLink's process how to keep its door."""
    return {
        SECRET_VARIABLE: secret,
        FOLDER_VARIABLE: str(folder.absolute()),
        MAX_BYTES_VARIABLE: str(most_bytes),
    }


def node_settings(most_bytes: int) -> dict[str, str]:
    """Return the variables that bound what a SuperNode may hold of the messages that it is sent."""
    return {MAX_BYTES_VARIABLE: str(most_bytes)}


class PartyKeys:
    """The keys of a federation's parties as its file has them now, without the revoked."""

    def __init__(self, path: Path) -> None:
        self.path, self.version, self.keys = path, 0, dict[bytes, Any]()

    def __call__(self) -> dict[bytes, Any]:
        version = self.path.stat().st_mtime_ns
        if version != self.version:
            members = json.loads(self.path.read_bytes())["parties"]
            found = [load_ssh_public_key(member["public_key"].encode()) for member in members if member["public_key"]]
            self.keys = {public_key_to_bytes(key): key for key in found}  # type: ignore[arg-type]
            self.version = version
        return self.keys


def forged(body: bytes) -> str | None:
    """Return why a pushed message is in another's name or larger than ours can be, or None."""
    try:
        pushed = PushMessagesRequest.FromString(body)
    except DecodeError:
        return "The request is none of Flower's."
    if any(message.metadata.src_node_id != pushed.node.node_id for message in pushed.messages_list):
        return "The message is in another party's name."
    if sum(objects_in(tree) for tree in pushed.message_object_trees) > MAX_OBJECTS:
        return "The message has more parts than ours have."
    return None


def objects_in(tree: Any) -> int:
    return 1 + sum(objects_in(child) for child in tree.children)


def take_over(app: Any, key: bytes) -> None:
    """Let a party's SuperNode connect again at once after a crash."""
    state = app.state.linkstate_factory.state()
    node = state.get_node_id_by_public_key(key)
    if node is not None:
        state.deactivate_node(node)


class Pace:
    """How often a SuperNode asks for messages: often after a message, then ever more rarely.

    Flower pauses for three seconds. A sum in several steps would wait for most of its time.
    """

    def __init__(self) -> None:
        self.pauses = iter(NODE_PAUSES)

    def sleep(self, seconds: float) -> None:
        time.sleep(
            min(seconds, next(self.pauses, seconds)) if seconds > NODE_PAUSES[0] else min(seconds, NODE_PAUSES[0])
        )

    def after(self, push: Callable[..., None]) -> Callable[..., None]:
        def pushed(*arguments: Any, **named: Any) -> None:
            push(*arguments, **named)
            self.pauses = iter(NODE_PAUSES)

        return pushed


def start_process(command: str, parent: int, options: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the monitor's; a script's background job ignores it
    start_parent_process_monitor(parent)
    sys.argv = [f"flower-{command}", *options]
    if command == "supernode":
        from flwr.supernode import start_client_internal
        from flwr.supernode.cli import flower_supernode

        pace = Pace()
        start_client_internal.time = pace  # type: ignore[assignment, attr-defined]
        start_client_internal._push_messages = pace.after(start_client_internal._push_messages)
        # Flower reads a message of any size; this process ends instead, and is started again
        most = NODE_BYTES + COPIES * int(os.environ[MAX_BYTES_VARIABLE])
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        try:
            flower_supernode()
        finally:  # whatever ended it: a thread of its own would keep the process, and nobody would restart it
            os._exit(1)
    else:
        from flwr.superlink import extensions
        from flwr.superlink.cli.flower_superlink import flower_superlink
        from starlette.middleware import Middleware

        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # silent connections must not use them up soon
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        signed = Signed(*(name.encode() for name in (PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)))
        folder, most = Path(os.environ[FOLDER_VARIABLE]), int(os.environ[MAX_BYTES_VARIABLE])
        keys, secret = PartyKeys(folder / "federation.json"), os.environ[SECRET_VARIABLE]
        extensions.get_middleware = lambda: (Middleware(Door, secret, keys, most, signed, forged, take_over),)
        flower_superlink()


if __name__ == "__main__":
    start_process(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
