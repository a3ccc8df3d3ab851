"""An attacker on the network: requests at the SuperLink's door, none of which may reach Flower."""

import asyncio
import base64
import json
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from helpers.lazy import lazily

from fedvl import __version__
from fedvl.deployment import door
from fedvl.deployment.door import Door, Signed
from fedvl.deployment.keys import make_key, public_key_of, write_private
from fedvl.deployment.messages import FORMAT

flower = lazily("fedvl.deployment.flower")
fleet = lazily("flwr.proto.fleet_pb2")
protobuf = lazily("flwr.proto.message_pb2")
node_pb2 = lazily("flwr.proto.node_pb2")

SIGNED = Signed(b"flwr-public-key", b"flwr-timestamp", b"flwr-signature")
SECRET, MOST = "s" * 64, 100_000
NODE = 7


class Inside:
    """What stands behind the door: it notes what comes in."""

    def __init__(self):
        self.bodies = []

    async def __call__(self, scope, receive, send):
        body, more = b"", True
        while more:
            piece = await receive()
            body, more = body + piece.get("body", b""), piece.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})


class Visit:
    """One request at the door: what is sent, how much of its body is read, and what is answered."""

    def __init__(self, keys, path, headers, pieces=(b"",), client="203.0.113.9"):
        self.inside, self.read = Inside(), 0
        self.taken_over: list[bytes] = []
        self.answer: list[dict[str, Any]] = []
        self.door = Door(
            self.inside, SECRET, lambda: keys, MOST, SIGNED, flower.forged, lambda app, key: self.taken_over.append(key)
        )
        self.pieces = list(pieces)
        self.scope = {
            "type": "http",
            "path": path,
            "headers": list(headers.items()),
            "client": (client, 1),
            "app": None,
        }

    async def receive(self):
        if not self.pieces:
            await asyncio.sleep(3600)
        piece = self.pieces.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        self.read += len(piece)
        return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}

    async def send(self, event):
        self.answer.append(event)

    def status(self):
        asyncio.run(self.door(self.scope, self.receive, self.send))
        return self.answer[0]["status"]


class Someone:
    """A holder of a key, as Flower's SuperNode signs with it."""

    def __init__(self):
        self.private = ec.generate_private_key(ec.SECP384R1())
        self.public = self.private.public_key()
        self.key = self.public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # as Flower writes it

    def headers(self, length=0, ahead=0.0, **changed):
        moment = (datetime.now(UTC) + timedelta(seconds=ahead)).isoformat().encode()
        signature = self.private.sign(moment, ec.ECDSA(hashes.SHA256()))
        found = {
            SIGNED.key: base64.b64encode(self.key),
            SIGNED.moment: moment,
            SIGNED.signature: base64.b64encode(signature),
            b"content-length": str(length).encode(),
        }
        found |= {name.replace("_", "-").encode(): value for name, value in changed.items() if value is not None}
        return {
            name: value
            for name, value in found.items()
            if name.decode().replace("-", "_") not in {name for name, value in changed.items() if value is None}
        }


PARTY, STRANGER = Someone(), Someone()
KEYS = {PARTY.key: PARTY.public}
OBJECT, MESSAGE, PULL = door.PUSH_OBJECT, door.PUSH_MESSAGE, f"{door.FLEET}pull-messages"
ACTIVATE = door.ACTIVATE


def pushed(sender=NODE, node=NODE, messages=1, objects=3):
    tree = protobuf.ObjectTree(object_id="0")
    for number in range(1, objects):
        tree.children.append(protobuf.ObjectTree(object_id=str(number)))
    metadata = protobuf.Metadata(src_node_id=sender)
    return fleet.PushMessagesRequest(
        node=node_pb2.Node(node_id=node),
        messages_list=[protobuf.Message(metadata=metadata)] * messages,
        message_object_trees=[tree],
    ).SerializeToString()


def push(**settings):
    body = pushed(**settings)
    return MESSAGE, PARTY.headers(len(body)), [body]


def own(signer, key):
    return {**signer.headers(), SIGNED.key: base64.b64encode(key)}


# what is sent: path, headers, pieces of the body; the status; and the words of the answer
CASES = {
    "no signature": lambda: ((OBJECT, {b"content-length": b"9"}, [b"x" * 9]), 401, "not signed"),
    "a stranger's key": lambda: ((OBJECT, STRANGER.headers(9), [b"x" * 9]), 401, "does not know"),
    "a stranger signs for a party": lambda: ((OBJECT, own(STRANGER, PARTY.key), [b""]), 401, "not signed"),
    "no moment": lambda: ((OBJECT, PARTY.headers(flwr_timestamp=None), [b""]), 401, "not signed"),
    "a moment that is none": lambda: ((OBJECT, PARTY.headers(flwr_timestamp=b"now"), [b""]), 401, "not signed"),
    "a moment without a zone": lambda: (
        (OBJECT, PARTY.headers(flwr_timestamp=b"2026-01-01T00:00:00"), [b""]), 401, "not signed"
    ),
    "another's moment": lambda: (
        (OBJECT, PARTY.headers(flwr_timestamp=STRANGER.headers()[SIGNED.moment]), [b""]), 401, "not signed"
    ),
    "a signature that is no base64": lambda: ((OBJECT, PARTY.headers(flwr_signature=b"%%%"), [b""]), 401, "not signed"),
    "an empty signature": lambda: ((OBJECT, PARTY.headers(flwr_signature=b""), [b""]), 401, "not signed"),
    "a key that is no key": lambda: ((OBJECT, PARTY.headers(flwr_public_key=b"AAAA"), [b""]), 401, "does not know"),
    "a key in another form": lambda: (
        (OBJECT, PARTY.headers(flwr_public_key=base64.b64encode(PARTY.key + b"\n")), [b""]), 401, "does not know"
    ),
    "replayed after ten minutes": lambda: ((PULL, PARTY.headers(ahead=-600), [b""]), 401, "600 seconds behind"),
    "a clock a minute ahead": lambda: ((PULL, PARTY.headers(ahead=61), [b""]), 401, "seconds ahead of"),
    "no length": lambda: ((OBJECT, PARTY.headers(content_length=None), [b"x"]), 411, "states its length"),
    "chunks": lambda: ((OBJECT, PARTY.headers(transfer_encoding=b"chunked"), [b"x"]), 411, "states its length"),
    "a negative length": lambda: ((OBJECT, PARTY.headers(content_length=b"-1"), [b"x"]), 411, "states its length"),
    "a length in words": lambda: ((OBJECT, PARTY.headers(content_length=b"ten"), [b"x"]), 411, "states its length"),
    "1,500 MB": lambda: ((OBJECT, PARTY.headers(1_500_000_000), [b"x" * 1000] * 9), 413, "more than the 100,000"),
    "1,500 MB of a stranger": lambda: ((OBJECT, STRANGER.headers(1_500_000_000), [b"x"] * 9), 401, "does not know"),
    "a large request that carries no tensors": lambda: ((PULL, PARTY.headers(70_000), [b"x"]), 413, "more than the 65,536"),
    "more than was stated": lambda: ((OBJECT, PARTY.headers(4), [b"xxx"] * 9), 413, "longer than it says"),
    "a body that breaks off": lambda: ((OBJECT, PARTY.headers(9), [b"xxx", None]), 400, "broke off"),
    "a message in another's name": lambda: (push(sender=8), 403, "another party's name"),
    "a second message in another's name": lambda: (push(sender=9, messages=2), 403, "another party's name"),
    "a message with more records": lambda: (push(objects=4), 403, "more parts"),
    "no message at all": lambda: ((MESSAGE, PARTY.headers(3), [b"\xff\xff\xff"]), 403, "none of Flower's"),
    "control without the secret": lambda: (("/v1/control/start-run", {}, [b""]), 403, "server's own"),
    "control with a wrong secret": lambda: (
        ("/v1/control/register-node", {b"fedvl-secret": b"t" * 64}, [b""]), 403, "server's own"
    ),
    "control with a party's key": lambda: (("/v1/control/start-run", PARTY.headers(), [b""]), 403, "server's own"),
    "Flower's documentation": lambda: (("/docs", {}, [b""]), 403, "server's own"),
    "a path that is nowhere": lambda: (("/", {}, [b""]), 403, "server's own"),
    "the fleet by another spelling": lambda: (("/v1//fleet/push-object", PARTY.headers(), [b""]), 403, "server's own"),
    "tasks from another machine": lambda: (("/v1/runtime/acquire-task", {}, [b""]), 403, "own machine"),
    "tasks through a proxy of the server's machine": lambda: (("/v1/runtime/acquire-task", {}, [b""], "127.0.0.1"), 403, "own"),
    "the version without a key": lambda: (("/v1/fleet/fedvl", {}, [b""]), 401, "not signed"),
    "the version with a stranger's key": lambda: (("/v1/fleet/fedvl", Someone().headers(0), [b""]), 401, "does not know"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_may_not_come_in_does_not_reach_flower(case):
    request, status, words = CASES[case]()
    visit = Visit(KEYS, *request)
    assert visit.status() == status
    assert visit.inside.bodies == []
    assert visit.taken_over == []
    answer = json.loads(visit.answer[1]["body"])
    assert words in answer["detail"]
    assert (b"connection", b"close") in visit.answer[0]["headers"]
    if status in (401, 411) or "may have" in answer["detail"]:
        assert visit.read == 0  # not a byte of a body before its sender and its length are known


def test_a_party_comes_in_with_a_whole_body_and_in_its_own_name():
    for path, headers, pieces in [
        (OBJECT, PARTY.headers(90_000), [b"x" * 45_000] * 2),
        (PULL, PARTY.headers(0, ahead=3), [b""]),
        (PULL, PARTY.headers(0, ahead=-200), [b""]),
        push(),
    ]:
        visit = Visit(KEYS, path, headers, pieces)
        assert visit.status() == 200
        assert visit.inside.bodies == [b"".join(pieces)]


def test_the_server_comes_in_with_its_secret_and_from_its_own_machine():
    assert Visit({}, "/v1/control/start-run", {b"fedvl-secret": SECRET.encode()}).status() == 200
    secret = {b"fedvl-secret": SECRET.encode()}
    assert Visit({}, "/v1/runtime/acquire-task", secret, client="127.0.0.1").status() == 200
    assert Visit({}, "/v1/runtime/acquire-task", secret).status() == 403
    assert Visit({}, "/health", {}).status() == 200


def test_a_party_learns_the_version_and_nothing_reaches_flower():
    visit = Visit(KEYS, "/v1/fleet/fedvl", PARTY.headers(0))
    assert visit.status() == 200
    assert visit.inside.bodies == []
    assert json.loads(visit.answer[1]["body"]) == {"fedvl": __version__, "messages": FORMAT}


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(door, "SILENT_SECONDS", 0.01)
    visit = Visit(KEYS, OBJECT, PARTY.headers(9), [b"xxx", b"yyy"])
    visit.pieces.append(b"zzz")
    receive = visit.receive

    async def slowly():
        if len(visit.pieces) == 1:
            await asyncio.sleep(3600)
        return await receive()

    monkeypatch.setattr(visit, "receive", slowly)
    assert visit.status() == 408
    assert visit.inside.bodies == []


def test_a_party_whose_supernode_crashed_takes_its_place_over_at_once():
    visit = Visit(KEYS, ACTIVATE, PARTY.headers(0))
    assert visit.status() == 200
    assert visit.taken_over == [PARTY.key]


def test_a_revoked_key_is_refused_from_the_next_request_on(tmp_path):
    write_private(tmp_path / "key", make_key())
    line = public_key_of(tmp_path / "key")
    path = tmp_path / "federation.json"
    path.write_text(json.dumps({"parties": [{"public_key": line}, {"public_key": ""}]}))
    keys = flower.PartyKeys(path)
    assert len(keys()) == 1
    path.write_text(json.dumps({"parties": [{"public_key": ""}, {"public_key": ""}]}))
    assert keys() == {}
