"""What flower.py uses of Flower beyond its documented interface, each tried: an upgrade begins here."""

import ast
import importlib
import inspect
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

import fedvl.deployment
from fedvl.errors import FedVLError

SOURCE = Path(fedvl.deployment.__file__).parent / "flower.py"
DOCUMENTED = ("flwr.app", "flwr.clientapp", "flwr.serverapp")

# what it is used for, and the parameters (of a function), members (of a class) or fields (of a message) that must be there
FENCE: dict[str, tuple[str, set[str]]] = {
    "flwr.cli.build.build_fab_from_files": ("make the empty bundle that a run must have", {"files"}),
    "flwr.common.constant.TIMESTAMP_HEADER": ("read who signed a request", set()),
    "flwr.common.constant.ErrorCode": ("say that a client failed", {"CLIENT_APP_RAISED_EXCEPTION"}),
    "flwr.common.constant.SubStatus": ("end a task", {"COMPLETED", "FAILED"}),
    "flwr.common.serde.fab_to_proto": ("send the bundle", {"fab"}),
    "flwr.common.serde.run_from_proto": ("tell the grid which run it is", {"run_proto"}),
    "flwr.proto.control_pb2.RegisterNodeRequest": ("make a party's key known", {"public_key"}),
    "flwr.proto.control_pb2.StartRunRequest": ("start a run", {"fab"}),
    "flwr.proto.fleet_pb2.PushMessagesRequest": (
        "see in whose name a message is",
        {"node", "messages_list", "message_object_trees"},
    ),
    "flwr.proto.runtime_pb2.AcquireTaskRequest": ("take a task", {"supported_task_types"}),
    "flwr.proto.runtime_pb2.PullTaskInputRequest": ("begin a run's task", set()),
    "flwr.proto.runtime_pb2.PushTaskOutputRequest": ("end a run's task", {"sub_status", "details"}),
    "flwr.supercore.app_utils.start_parent_process_monitor": ("end with the parent process", {"parent_pid"}),
    "flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER": ("read who signed a request", set()),
    "flwr.supercore.constant.FLEET_HTTP_SIGNATURE_HEADER": ("read who signed a request", set()),
    "flwr.supercore.constant.TaskType": ("name the kinds of task", {"SERVER_APP", "CLIENT_APP"}),
    "flwr.supercore.control.ControlHttpClient": (
        "start runs and make keys known",
        {"from_server_address", "RegisterNode", "StartRun", "close"},
    ),
    "flwr.supercore.fab.Fab": ("make the empty bundle", {"hash_str", "content", "verifications"}),
    "flwr.supercore.heartbeat.HeartbeatSender": ("keep a task alive", {"start", "stop"}),
    "flwr.supercore.heartbeat.make_task_heartbeat_fn_http": ("keep a task alive", {"client"}),
    "flwr.supercore.interceptors.RuntimeTokenHttpInterceptor": ("work on a task that was taken", {"intercept"}),
    "flwr.supercore.interceptors.RuntimeVersionHttpInterceptor": ("name the version", {"intercept"}),
    "flwr.supercore.interceptors.SuperExecAuthHttpInterceptor": ("take tasks with the secret", {"intercept"}),
    "flwr.supercore.primitives.asymmetric.public_key_to_bytes": ("write keys as Flower does", {"public_key"}),
    "flwr.supercore.primitives.asymmetric.sign_message": (
        "sign a request as a SuperNode does",
        {"private_key", "message"},
    ),
    "flwr.supercore.runtime.RuntimeHttpClient": (
        "take, begin and end tasks",
        {"from_server_address", "AcquireTask", "PullTaskInput", "PushTaskOutput", "close"},
    ),
    "flwr.supercore.task_identity.TaskIdentity": ("make messages in our own process", {"task_id", "run_id", "node_id"}),
    "flwr.superlink.grid.http_grid.HttpGrid": (
        "carry messages",
        {"set_run", "close", "push_messages", "pull_messages", "get_node_ids", "_runtime_client"},
    ),
    "flwr.supernode.runtime.run_clientapp.pull_task_input": ("receive a message", {"client"}),
    "flwr.supernode.runtime.run_clientapp.push_message": ("send an answer", {"client", "message", "context"}),
    "flwr.supernode.runtime.run_clientapp.push_task_output": ("end a message's task", {"client", "context"}),
    "flwr.supernode.cli.flower_supernode": ("start a SuperNode", set()),
    "flwr.supernode.start_client_internal": ("shorten the pauses between messages", {"time", "_push_messages"}),
    "flwr.superlink.extensions": ("put the door before the SuperLink", {"get_middleware"}),
    "flwr.superlink.cli.flower_superlink.flower_superlink": ("start the SuperLink", set()),
}


def find(name):
    """The module, class, function or value of this dotted name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)


def parts(thing):
    """The names by which it can be used: parameters of a function, fields of a message, members of the rest."""
    if hasattr(thing, "DESCRIPTOR"):
        return set(thing.DESCRIPTOR.fields_by_name)
    if inspect.isfunction(thing):
        return set(inspect.signature(thing).parameters)
    own = inspect.get_annotations(thing) if inspect.isclass(thing) else {}
    return {*dir(thing), *dir(type(thing)), *own}


@pytest.mark.parametrize("name", FENCE)
def test_flower_has_what_we_use_of_its_inside(name):
    purpose, needed = FENCE[name]
    sentence = f"Flower {version('flwr')} changed {name}; src/fedvl/deployment/flower.py uses it to {purpose}."
    try:
        thing = find(name)
    except (ImportError, AttributeError):
        pytest.fail(sentence)
    assert needed <= parts(thing), f"{sentence} Missing: {', '.join(sorted(needed - parts(thing)))}."


def test_the_fence_names_everything_that_is_imported_from_flowers_inside():
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(SOURCE.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr") and node.module not in DOCUMENTED
        for alias in node.names
    }
    assert imported == FENCE.keys()


def test_the_link_state_lets_a_node_be_found_by_its_key_and_deactivated():
    """Used on a SuperLink's own object, which no import names."""
    from flwr.server.superlink.linkstate import LinkState

    found = parts(LinkState)
    assert {"get_node_id_by_public_key", "deactivate_node"} <= found, (
        f"Flower {version('flwr')} changed its LinkState; flower.py uses it so that a crashed SuperNode can come back."
    )


def test_a_client_of_flowers_takes_another_interceptor_and_leaves_idle_connections():
    """The server's grid gets the secret of its door; a firewall that forgets idle connections cuts no request."""
    from flwr.supercore.runtime import RuntimeHttpClient

    client: Any = RuntimeHttpClient.from_server_address("127.0.0.1:1", True, None, [])
    assert client._interceptors == ()
    assert client._client._transport._pool._keepalive_expiry <= 5.0  # seconds


def test_another_version_of_flower_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.9")
    with pytest.raises(FedVLError, match=r"Flower 1\.41\.0, and 9\.9\.9 is installed; pip install flwr==1\.41\.0"):
        importlib.reload(fedvl.deployment)
